"""Codebooks: rounding, straight-through gradients, revival, and the gradient codebook beside the library's."""

import pytest
import torch
from torch.nn import functional as F

from flwr_replay.generators.codebooks import EMACodebook, GradientCodebook, perplexity
from flwr_replay.models.seeding import seeded

K, D = 12, 3


def book(kind, size=K):
    with seeded(0):
        return GradientCodebook(size, D) if kind == "gradient" else EMACodebook(size, D, decay=0.99, even_share=4.0)


def features(n=4, side=5, scale=1.0):
    return scale * torch.randn(n, D, side, side, generator=torch.Generator().manual_seed(1))


def nearest_slowly(h, vectors):
    """Codes by a loop over positions."""
    flat = h.movedim(1, -1).reshape(-1, D)
    return torch.stack([((vectors - point) ** 2).sum(1).argmin() for point in flat]).view(len(h), *h.shape[2:])


@pytest.mark.parametrize("kind", ["ema", "gradient"])
@pytest.mark.parametrize("training", [True, False])
def test_features_become_their_nearest_vectors_and_gradients_pass_through(kind, training):
    codebook = book(kind).train(training)
    h = features(scale=0.1).requires_grad_()
    own = codebook.lookup(torch.arange(K).view(1, 1, K))[0, :, 0].T.detach().clone()
    vectors, codes, loss = codebook(h, learn=False)
    assert torch.equal(codes, nearest_slowly(h, own))
    torch.testing.assert_close(vectors, codebook.lookup(codes))
    assert torch.equal(codebook.lookup(codes), own[codes].movedim(-1, 1))
    if training:
        weights = torch.rand_like(h)
        (at_features,) = torch.autograd.grad((vectors * weights).sum() + loss, h)
        assert torch.equal(at_features, weights)


def test_the_gradient_codebook_learns_as_the_librarys_learnable_one_does():
    from vector_quantize_pytorch import VectorQuantize

    ours = book("gradient")
    theirs = VectorQuantize(
        D, K, ema_update=False, learnable_codebook=True, rotation_trick=False, accept_image_fmap=True
    )
    with torch.no_grad():
        theirs._codebook.embed.copy_(ours.vectors.weight[None])
    h = features(scale=0.1)
    _, codes, loss = ours(h, learn=True)
    _, their_codes, their_loss = theirs(h)
    assert torch.equal(codes, their_codes)
    loss.backward()
    their_loss.backward()
    torch.testing.assert_close(loss, their_loss)
    torch.testing.assert_close(ours.vectors.weight.grad, theirs._codebook.embed.grad[0])
    assert dict(ours.named_buffers()) == {}


def test_running_means_follow_the_published_rule():
    codebook, h, decay = book("ema"), features(scale=0.1), 0.99
    inside = codebook.quantiser._codebook
    inside.has_dead_code_replacement = False
    inside.cluster_size.fill_(1.0)
    before, counts, sums = (getattr(inside, name)[0].clone() for name in ("embed", "cluster_size", "embed_avg"))
    _, codes, loss = codebook(h, learn=True)
    assert loss == 0
    points = h.movedim(1, -1).reshape(-1, D)
    for k in range(K):
        own = points[codes.flatten() == k]
        counts[k] = decay * counts[k] + (1 - decay) * len(own)
        sums[k] = decay * sums[k] + (1 - decay) * own.sum(0)
    torch.testing.assert_close(inside.cluster_size[0], counts)
    torch.testing.assert_close(inside.embed_avg[0], sums)
    torch.testing.assert_close(inside.embed[0], sums / counts[:, None], rtol=1e-3, atol=1e-5)  # smoothed counts
    assert not torch.equal(inside.embed[0], before)


def test_dead_codes_become_features_of_the_batch_and_live_codes_stay():
    codebook = book("ema", size=8)
    inside = codebook.quantiser._codebook
    with torch.no_grad():
        inside.embed[0] = torch.tensor([[50.0, 0, 0]] * 7 + [[0, 0, 0]])
        inside.embed_avg.copy_(inside.embed * 4)
        inside.cluster_size.fill_(4.0)
        inside.cluster_size[0, :3] = 0.3  # a tenth of an even share is 0.4
    h = features(side=2)
    with seeded(3):
        codebook(h, learn=True)
    points = h.movedim(1, -1).reshape(-1, D)
    revived = inside.embed[0, :3]
    assert all(any(torch.equal(vector, point) for point in points) for vector in revived)
    assert inside.cluster_size[0, :3].tolist() == [4.0, 4.0, 4.0]
    torch.testing.assert_close(inside.embed[0, 3:7], torch.tensor([[50.0, 0, 0]] * 4), rtol=1e-3, atol=0)
    kept = inside.embed.clone()
    codebook(h, learn=False)
    codebook.eval()(h, learn=True)
    assert torch.equal(inside.embed, kept)


def test_a_collapsed_codebook_comes_into_use():
    codebook, h = book("ema"), features()
    before = perplexity(codebook(h + 9, learn=False)[1], K)
    with seeded(0):
        for _ in range(20):
            codes = codebook(h + 9, learn=True)[1]
    assert before == 1
    assert perplexity(codes, K) > 0.7 * K


@pytest.mark.parametrize(("codes", "expected"), [([3, 3, 3], 1.0), ([0, 1, 2, 3], 4.0), ([0, 0, 1, 1], 2.0)])
def test_perplexity_of_known_uses(codes, expected):
    torch.testing.assert_close(perplexity(torch.tensor(codes), K), torch.tensor(expected))


def test_perplexity_lies_between_one_and_the_codebooks_size():
    draws = torch.Generator().manual_seed(0)
    for sharpness in (0.1, 1.0, 5.0):
        use = F.softmax(sharpness * torch.randn(K, generator=draws), 0)
        codes = torch.multinomial(use, 500, replacement=True, generator=draws)
        assert 1 <= perplexity(codes, K) <= K
