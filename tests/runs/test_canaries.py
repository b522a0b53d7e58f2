"""Canaries that are gradients: an honest DP-SGD is not refuted, each sabotage of it is."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from flwr_replay.errors import ConfigError
from flwr_replay.institution import budget
from flwr_replay.institution.owner import Shard
from flwr_replay.models.staged import StagedModel
from flwr_replay.privacy import dpsgd
from flwr_replay.privacy.accounting import SampledGaussian, epsilon, noise_for
from flwr_replay.privacy.bounds import auc, guessed, lower_bounds
from flwr_replay.privacy.dpsgd import noisy_step
from flwr_replay.privacy.secret import Stream
from flwr_replay.runs.canaries import Canaries, Directions, GradientCanaries

DELTA, M, EXAMPLES, RATE, STEPS = 1e-5, 300, 600, 0.05, 100


def mlp(seed=0):
    torch.manual_seed(seed)
    stages = {"hidden": nn.Sequential(nn.Linear(16, 40), nn.ReLU()), "head": nn.Linear(40, 3)}
    return StagedModel(OrderedDict(stages))


def audited(target, seed=0, examples=EXAMPLES):
    """Train a small network by DP-SGD with canaries; return Steinke's and Mahloujifar's bounds, the AUC, the claim."""
    sigma = noise_for(target, DELTA, [(RATE, STEPS)])
    cost = SampledGaussian(RATE, sigma, STEPS)
    canaries = Canaries.tossed(M, examples, seed)
    audit = GradientCanaries(canaries, seed)
    training = audit.training(1.0, cost, Stream(bytes([seed] * 32)))
    rng = torch.Generator().manual_seed(seed)
    data = Shard(torch.randn((examples, 16), generator=rng), torch.randint(0, 3, (examples,), generator=rng), 0)
    model = mlp(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x_B, y_B in training.batches(data):
        training.step(
            model,
            optimizer,
            lambda x, y: functional.cross_entropy(model(x), y, reduction="none"),
            (x_B, y_B),
            int(RATE * examples),
        )
    tried = [guessed(audit.scores_m, canaries.was_in_m, guesses) for guesses in (15, 60, 150, 300)]
    found = lower_bounds(tried, DELTA)
    return *(found[name][0] for name in found), auc(audit.scores_m, canaries.was_in_m), epsilon([cost], DELTA)


def test_an_honest_dp_sgd_is_not_refuted_and_its_bound_is_above_0():
    steinke, mahloujifar, area, claim = audited(8)
    assert 0 < steinke < claim
    assert 0 < mahloujifar < claim
    assert area > 0.6
    assert claim == pytest.approx(8, abs=0.01)


def test_with_much_noise_nothing_is_found():
    steinke, mahloujifar, area, _ = audited(0.3, seed=2)
    assert steinke == mahloujifar == 0
    assert abs(area - 0.5) < 0.1


def test_a_tenth_of_the_noise_is_refuted(monkeypatch):
    def quieter(*args, sigma, **rest):
        return noisy_step(*args, sigma=sigma / 10, **rest)

    monkeypatch.setattr(budget, "noisy_step", quieter)
    steinke, mahloujifar, _, claim = audited(2)
    assert max(steinke, mahloujifar) > claim


def test_steps_that_sample_nothing_are_refuted(monkeypatch):
    def everyone(examples, cost, stream):
        return (torch.arange(examples) for _ in range(cost.steps))

    monkeypatch.setattr(budget, "poisson_batches", everyone)
    steinke, mahloujifar, _, claim = audited(2)
    assert max(steinke, mahloujifar) > claim


def test_gradients_that_are_not_clipped_are_refuted(monkeypatch):
    def unclipped(clip, examples, dtype, norms_B):
        return torch.ones(examples, dtype=dtype), norms_B.isfinite()

    monkeypatch.setattr(dpsgd, "_scales", unclipped)
    steinke, mahloujifar, _, claim = audited(2)
    assert max(steinke, mahloujifar) > claim


def test_a_canary_adds_exactly_c_where_its_row_is_drawn_and_its_coin_says_in():
    canaries = Canaries.tossed(4, 10, 0)
    audit = GradientCanaries(canaries, 0)
    training = audit.training(0.5, SampledGaussian(1.0, 1.0, 1), Stream(bytes(32)))
    model = mlp()
    [rows] = training.rows(10)
    assert set(rows.tolist()) == set(range(10)) - set(canaries.rows_m.tolist())
    x, y = torch.randn(0, 16), torch.empty(0, dtype=torch.int64)
    sums, _ = training.sums(model, lambda x, y: pytest.fail("no real example is left"), (x, y), 0.5)
    products = audit.directions(sums).products(sums)
    assert np.allclose(products, np.where(canaries.was_in_m, 0.5, 0.0), atol=1e-4)
    assert all((real == 0).all() for real in training.real)


def test_directions_are_unit_vectors_without_common_coordinates():
    shapes = [torch.zeros(7, 3), torch.zeros(5)]
    directions = Directions(shapes, 6, seed=1)
    vectors = torch.cat([part.flatten(1) for part in directions.gradients(torch.arange(6))], dim=1)
    assert torch.allclose(vectors @ vectors.T, torch.eye(6), atol=1e-6)
    other = Directions(shapes, 6, seed=2)
    assert not torch.equal(other.owner_d, directions.owner_d)


def test_coins_are_fair_and_rows_are_the_examples():
    tossed = [Canaries.tossed(300, 600, seed) for seed in range(20)]
    share = np.mean([one.was_in_m.mean() for one in tossed])
    assert 0.47 < share < 0.53
    one = tossed[0]
    assert np.array_equal(one.number_D[torch.from_numpy(one.rows_m)], np.arange(300))
    assert (one.number_D >= 0).sum() == 300


@pytest.mark.parametrize("canaries", [1, 10, 11])
def test_canaries_that_do_not_fit_are_refused(canaries):
    with pytest.raises(ConfigError, match="fewer than there are, 10 here"):
        Canaries.tossed(canaries, 10, 0)


def test_a_module_with_fewer_parameters_than_canaries_is_refused():
    with pytest.raises(ConfigError, match="a parameter each"):
        Directions([torch.zeros(3)], 4, seed=0)
