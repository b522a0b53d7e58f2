"""The MaskGIT prior: the tokens' form, what is masked, that the whole grid is seen, drawing, learning."""

from itertools import pairwise
from math import cos, pi

import pytest
import torch

from flwr_replay.generators.autoencoder import VQVAE2Config, build_generator
from flwr_replay.generators.base import by_level
from flwr_replay.generators.maskgit import LOGITS, MaskGITConfig
from flwr_replay.generators.priors import build_prior
from flwr_replay.learning.training import torch_rng
from flwr_replay.models.layers import step

TINY = {"name": "maskgit", "width": 8, "layers": 2, "heads": 2}


def tiny_maskgit(codes=4, size=16, classes=3, **options):
    images = build_generator(VQVAE2Config(name="vqvae2", codes=codes, dim=2, width=4), 1, size, 0)
    return build_prior(MaskGITConfig(**TINY | options), images, classes, 0)


def randint(high, *shape):
    return torch.randint(high, shape, generator=torch_rng("codes"))


def test_a_position_has_a_top_code_and_the_four_beneath_it():
    prior = tiny_maskgit(size=24)
    codes = torch.arange(45)[None]
    top, bottom = (grid[0] for grid in by_level(codes, prior.grids))
    joined = prior._joined(codes)[0].view(3, 3, 5)
    for i in range(3):
        for j in range(3):
            below = bottom[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].flatten().tolist()
            assert joined[i, j].tolist() == [int(top[i, j]), *below]
    assert torch.equal(prior._apart(prior._joined(codes)), codes)


def seen_by(prior, codes, draws):
    """Return what the network is shown in a loss, (B, P, 5)."""
    shown, own = [], prior._features
    prior._features = lambda tokens, labels: shown.append(tokens) or own(tokens, labels)
    prior.loss(codes, torch.zeros(len(codes), dtype=torch.int64), draws)
    del prior._features
    return shown[0]


@pytest.mark.parametrize("u", [0.0, 0.4, 0.9, 0.9999])
def test_a_share_of_one_level_is_masked_and_nothing_above_it(u):
    prior, codes = tiny_maskgit(), randint(4, 2, 20)
    draws = prior.uniform(2, torch_rng("draws"))
    draws[:, 0], draws[:, 1] = torch.tensor([0.2, 0.7]), u
    below, above = (seen == prior.codebook_size for seen in seen_by(prior, codes, draws))
    assert not below[:, 0].any()
    assert below[:, 1:].sum() == max(1, -(-16 * cos(pi / 2 * u) // 1))
    assert above[:, 1:].all()
    assert above[:, 0].sum() == max(1, -(-4 * cos(pi / 2 * u) // 1))


def test_a_loss_is_the_mean_surprise_of_the_masked_codes():
    prior, codes, labels = tiny_maskgit(), randint(4, 1, 20), torch.tensor([1])
    draws = prior.uniform(1, torch_rng("draws"))
    draws[0, 0] = 0.1  # bottom codes
    shown, tokens = seen_by(prior, codes, draws), prior._joined(codes)
    logits = prior._logits(prior._features(shown, labels), 1)[0].log_softmax(-1)
    masked = [(p, s) for p in range(4) for s in range(1, 5) if shown[0, p, s] == prior.codebook_size]
    nats = [-logits[p, s - 1, tokens[0, p, s]] for p, s in masked]
    torch.testing.assert_close(prior.loss(codes, labels, draws), torch.stack(nats).mean())


def test_every_position_sees_the_whole_grid_and_the_label():
    prior, tokens, label = tiny_maskgit(size=24), randint(4, 1, 9, 5), torch.tensor([0])
    before = prior._features(tokens, label)
    assert (prior._features(tokens, torch.tensor([1])) != before).any(2).all()
    for position in range(9):
        for slot in range(5):
            changed = tokens.clone()
            changed[0, position, slot] = prior.codebook_size
            assert (prior._features(changed, label) != before).any(2).all()


def test_drawing_takes_tens_of_passes_and_keeps_what_is_drawn():
    prior = tiny_maskgit(size=64, steps=6)
    shown, own = [], prior._features
    prior._features = lambda tokens, labels: shown.append(tokens.clone()) or own(tokens, labels)
    prior.sample(torch.tensor([0, 1]), torch_rng("draws"))
    assert len(shown) == 12  # for 320 codes
    hidden = [(tokens == prior.codebook_size).flatten(1).sum(1) for tokens in shown]
    of_top = [64, *(int(64 * cos(pi / 2 * t / 6)) for t in range(1, 6))]
    of_bottom = [256, *(int(256 * cos(pi / 2 * t / 6)) for t in range(1, 6))]
    assert [codes_at.tolist() for codes_at in hidden] == [[n, n] for n in [*(256 + n for n in of_top), *of_bottom]]
    for before, after in pairwise(shown):
        known = before != prior.codebook_size
        assert torch.equal(before[known], after[known])


def test_memory_is_bounded_by_blocks(monkeypatch):
    prior = tiny_maskgit(size=16)
    monkeypatch.setattr("flwr_replay.generators.maskgit.LOGITS", 3 * 16 * 4)  # three images at once
    sizes, own = [], prior._drawn
    monkeypatch.setattr(prior, "_drawn", lambda labels, rng: sizes.append(len(labels)) or own(labels, rng))
    assert len(prior.sample(torch.zeros(8, dtype=torch.int64), torch_rng("draws"))) == 8
    assert sizes == [3, 3, 2]
    assert LOGITS // (4 * 32 * 32 * 512) == 8  # images of 256 pixels with the codebook of the paper


def test_a_toy_distribution_is_learned():
    """Class 0: all codes are 0. Class 1: all are 2. Class 2: top codes 1 or 3 evenly, bottom codes as the one above."""
    prior, n = tiny_maskgit(size=8, width=16), 600
    labels = torch.arange(n) % 3
    value = torch.where(labels == 2, 1 + 2 * randint(2, n), 2 * labels)
    codes = value[:, None].expand(n, 5)
    draws, optimizer, losses = torch_rng("draws"), torch.optim.Adam(prior.parameters(), 1e-2), []
    for _ in range(200):
        rows = torch.randperm(n, generator=draws)[:64]
        losses.append(step(prior, optimizer, prior.loss(codes[rows], labels[rows], prior.uniform(64, draws))))
    assert losses[0] > 1
    # The only surprise is class 2's coin, ln 2 nats: in a third of the examples, half of which mask the top code.
    assert torch.stack(losses[-20:]).mean() < torch.tensor(2.0).log() / 6 + 0.08
    drawn = prior.sample(torch.arange(3).repeat_interleave(300), torch_rng("samples")).view(3, 300, 5)
    assert (drawn[0] == 0).float().mean() > 0.95
    assert (drawn[1] == 2).float().mean() > 0.95
    tops, bottoms = drawn[2, :, :1], drawn[2, :, 1:]
    assert 0.35 < (tops == 1).float().mean() < 0.65
    assert ((tops == 1) | (tops == 3)).float().mean() > 0.95
    assert (bottoms == tops).float().mean() > 0.95
