"""The prior: causality, samples beside their enumerated probabilities, learning, no mixing of examples."""

import itertools

import pytest
import torch

from flwr_replay.generators.autoencoder import VQVAE2Config, build_generator
from flwr_replay.generators.base import by_level
from flwr_replay.generators.pixelcnn import PixelCNN, PixelCNNConfig
from flwr_replay.generators.priors import build_prior
from flwr_replay.learning.training import torch_rng
from flwr_replay.models.layers import step

TINY = {"name": "pixelcnn", "width": 8, "layers": 2}


def tiny_pixelcnn(codes=4, size=8, classes=3, seed=0, **options):
    images = build_generator(VQVAE2Config(name="vqvae2", codes=codes, dim=2, width=4), 1, size, 0)
    return build_prior(PixelCNNConfig(**TINY | options), images, classes, seed)


def randint(high, *shape, seed=0):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("side", "layers"), [(5, 3), (2, 1), (1, 2), (4, 6)])
def test_a_codes_logits_depend_on_the_codes_before_it_alone(side, layers):
    torch.manual_seed(0)
    model, codes, labels = PixelCNN(4, 2, 8, layers), randint(4, 1, side, side), torch.tensor([1])
    before = model(codes, labels)
    for at in range(side * side):
        changed = codes.clone()
        changed.view(-1)[at] = (changed.view(-1)[at] + 1) % 4
        moved = (model(changed, labels) != before).any(1).flatten()
        assert not moved[: at + 1].any()
        if at + 1 < side * side and (at + 1) % side:
            assert moved[at + 1]  # the next code of the row


def test_enough_layers_see_every_code_before():
    torch.manual_seed(0)
    model, labels = PixelCNN(4, 2, 8, layers=4), torch.tensor([0])
    codes = randint(4, 1, 4, 4)
    last = model(codes, labels)[..., -1, -1]
    for at in range(15):
        changed = codes.clone()
        changed.view(-1)[at] = (changed.view(-1)[at] + 1) % 4
        assert (model(changed, labels)[..., -1, -1] != last).any(), at


def test_bottom_codes_depend_on_the_top_code_above_them_and_on_the_label():
    model = tiny_pixelcnn(size=16).bottom
    top, bottom, labels = randint(4, 1, 2, 2), randint(4, 1, 4, 4), torch.tensor([0])
    before = model(bottom, labels, top)
    assert (model(bottom, torch.tensor([1]), top) != before).any(1).all()
    other = top.clone()
    other[0, 1, 1] = (other[0, 1, 1] + 1) % 4
    moved = (model(bottom, labels, other) != before).any(1)[0]
    assert moved[2:, 2:].all()
    assert not moved[:2, :2].any()


def test_samples_come_as_often_as_the_likelihood_says():
    """2^5 possible images of one top and four bottom codes, all of them enumerated."""
    prior, n = tiny_pixelcnn(codes=2, classes=2), 4000
    with torch.no_grad():
        for parameter in prior.parameters():
            parameter.mul_(3)  # away from even odds
    for label in (0, 1):
        every = torch.tensor(list(itertools.product(range(2), repeat=5)))
        odds = torch.stack([(-5 * loss(prior, codes[None], torch.tensor([label]))).exp() for codes in every]).detach()
        torch.testing.assert_close(odds.sum(), torch.tensor(1.0))
        drawn = prior.sample(torch.full((n,), label), torch_rng("draws", label))
        place = (drawn * 2 ** torch.arange(4, -1, -1)).sum(1)
        seen = torch.bincount(place, minlength=32) / n
        assert (seen - odds).abs().max() < 4 * (odds.max() / n) ** 0.5
        assert odds.max() > 2 / 32


def test_samples_are_those_of_drawing_code_by_code_with_whole_passes():
    prior = tiny_pixelcnn(codes=6, size=16)
    labels = torch.tensor([0, 2, 1, 2])
    codes = prior.sample(labels, torch_rng("draws"))
    draws = torch_rng("draws")
    top, bottom = (torch.zeros(4, side, side, dtype=torch.int64) for side in (2, 4))
    with torch.no_grad():
        for network, grid, above in ((prior.top, top, ()), (prior.bottom, bottom, (top,))):
            for i, j in itertools.product(range(grid.shape[1]), repeat=2):
                odds = network(grid, labels, *above)[:, :, i, j].softmax(1)
                grid[:, i, j] = torch.multinomial(odds, 1, generator=draws)[:, 0]
    assert torch.equal(codes, torch.cat([top.flatten(1), bottom.flatten(1)], 1))
    assert torch.equal(prior.sample(labels, torch_rng("draws")), codes)
    assert not torch.equal(prior.sample(labels, torch_rng("others")), codes)


def loss(prior, codes, labels):
    return prior.loss(codes, labels, torch.rand(len(codes), 0))


def fitted(prior, codes, labels, steps, lr=1e-2):
    draws, optimizer, losses = torch_rng("draws"), torch.optim.Adam(prior.parameters(), lr), []
    for _ in range(steps):
        rows = torch.randperm(len(labels), generator=draws)[:64]
        losses.append(step(prior, optimizer, loss(prior, codes[rows], labels[rows])))
    return losses


@pytest.mark.sampled(2, of="slow learning")
def test_a_toy_distribution_is_learned():
    """Class 0: all codes are 0. Class 1: all are 2. Class 2: top codes 1 or 3 evenly, bottom codes as the one above."""
    prior, n = tiny_pixelcnn(classes=3), 600
    labels = torch.arange(n) % 3
    coin = 1 + 2 * randint(2, n)
    value = torch.where(labels == 2, coin, 2 * labels)
    codes = value[:, None].expand(n, 5)
    losses = fitted(prior, codes, labels, steps=150)
    # The only surprise is class 2's coin: ln 2 nats in one code of five, in a third of the images.
    floor = torch.tensor(2.0).log() / 15
    assert losses[0] > 1
    assert floor - 0.02 < torch.stack(losses[-20:]).mean() < floor + 0.05
    drawn = prior.sample(torch.arange(3).repeat_interleave(300), torch_rng("samples")).view(3, 300, 5)
    assert (drawn[0] == 0).float().mean() > 0.95
    assert (drawn[1] == 2).float().mean() > 0.95
    tops, bottoms = drawn[2, :, :1], drawn[2, :, 1:]
    assert 0.35 < (tops == 1).float().mean() < 0.65
    assert ((tops == 1) | (tops == 3)).float().mean() > 0.95
    assert (bottoms == tops).float().mean() > 0.95


def test_no_example_depends_on_another():
    prior, codes, labels = tiny_pixelcnn(size=16), randint(4, 3, 20), torch.tensor([2, 0, 1])
    assert dict(prior.named_buffers()) == {}

    def gradients(rows):
        prior.zero_grad()
        loss(prior, codes[rows], labels[rows]).backward()
        return [parameter.grad.clone() for parameter in prior.parameters()]

    single = [gradients(slice(i, i + 1)) for i in range(3)]
    for whole, *each in zip(gradients(slice(None)), *single, strict=True):
        torch.testing.assert_close(whole, torch.stack(each).mean(0), rtol=1e-4, atol=1e-7)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [8, 16])
def test_opacus_takes_its_per_example_gradients(size):
    opacus = pytest.importorskip("opacus.grad_sample")
    prior, labels = tiny_pixelcnn(size=size), torch.tensor([2, 0, 1])
    codes = randint(4, 3, 5 * (size // 8) ** 2)
    single = []
    for i in range(3):
        prior.zero_grad()
        loss(prior, codes[i : i + 1], labels[i : i + 1]).backward()
        single.append([parameter.grad.clone() for parameter in prior.parameters()])
    hooked = opacus.GradSampleModule(prior)
    loss(prior, codes, labels).backward()
    for parameter, *expected in zip(prior.parameters(), *single, strict=True):
        torch.testing.assert_close(parameter.grad_sample, torch.stack(expected), rtol=1e-4, atol=1e-6)
    hooked.remove_hooks()


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = tiny_pixelcnn(seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert all(torch.equal(value, first[name]) for name, value in tiny_pixelcnn(seed=3).state_dict().items())
    assert any(not torch.equal(value, first[name]) for name, value in tiny_pixelcnn(seed=4).state_dict().items())


def test_levels_are_cut_in_reading_order():
    top, bottom = by_level(torch.arange(10).view(2, 5), ((1, 1), (2, 2)))
    assert top.tolist() == [[[0]], [[5]]]
    assert bottom.tolist() == [[[1, 2], [3, 4]], [[6, 7], [8, 9]]]
