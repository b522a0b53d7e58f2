"""Canaries that are gradients, and recorded steps: in an honest DP-SGD nothing is found, each sabotage of it is."""

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from flwr_replay.attacks.membership import auc
from flwr_replay.errors import ConfigError
from flwr_replay.institution import budget
from flwr_replay.institution.owner import Shard
from flwr_replay.lab.canaries import Canaries, Directions, GradientCanaries, flat
from flwr_replay.lab.seen_steps import FINDINGS, SeenSteps, judged
from flwr_replay.models.staged import StagedModel
from flwr_replay.privacy import dpsgd
from flwr_replay.privacy.accounting import SampledGaussian, epsilon, noise_for
from flwr_replay.privacy.bounds import guessed, lower_bound
from flwr_replay.privacy.dpsgd import noisy_step
from flwr_replay.privacy.secret import Stream

DELTA, M, EXAMPLES, RATE, STEPS = 1e-5, 300, 600, 0.05, 100


def mlp(seed=0):
    torch.manual_seed(seed)
    stages = {"hidden": nn.Sequential(nn.Linear(16, 40), nn.ReLU()), "head": nn.Linear(40, 3)}
    return StagedModel(OrderedDict(stages))


def audited(target=2.0, seed=0, charged=None, after=lambda model, optimizer: None):
    """Train a small network by DP-SGD with canaries; return what its steps show, the guesses' bound, AUC, the claim.

    `charged` changes what the account has; `after` is called after each step.
    """
    cost = SampledGaussian(RATE, noise_for(target, DELTA, [(RATE, STEPS)]), STEPS)
    canaries = Canaries.tossed(M, EXAMPLES, seed)
    audit = GradientCanaries(canaries, seed)
    training = audit.training(1.0, cost, Stream(bytes([seed] * 32)))
    rng = torch.Generator().manual_seed(seed)
    data = Shard(torch.randn((EXAMPLES, 16), generator=rng), torch.randint(0, 3, (EXAMPLES,), generator=rng), 0)
    model = mlp(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with audit.message():
        for x_B, y_B in training.batches(data):
            training.step(
                model,
                optimizer,
                lambda x, y: functional.cross_entropy(model(x), y, reduction="none"),
                (x_B, y_B),
                int(RATE * EXAMPLES),
            )
            after(model, optimizer)
    tried = [guessed(audit.scores_m, canaries.was_in_m, guesses) for guesses in (15, 60, 150, 300)]
    finding = judged(audit.seen, [charged(cost) if charged else cost], audit.stray, DELTA, 0.005)
    bound, _ = lower_bound(tried, DELTA, 0.005)
    return (
        finding,
        bound,
        auc(audit.scores_m[canaries.was_in_m], audit.scores_m[~canaries.was_in_m]),
        epsilon([cost], DELTA),
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", [0.5, 40])
def test_in_an_honest_dp_sgd_nothing_is_found(target):
    finding, bound, area, claim = audited(target)
    assert finding["found"] == []
    assert finding["steps"] == finding["charged"] == STEPS
    [kind] = finding["kinds"]
    assert kind["most"] == pytest.approx(1, abs=1e-4)
    assert kind["sigma"]["seen"] == pytest.approx(kind["sigma"]["charged"], rel=0.02)
    assert claim < finding["detectable"] < 1.35 * claim
    assert bound < claim
    assert area > 0.5


@pytest.mark.sampled(2, of="slow audits")
def test_guesses_show_something_where_there_is_little_noise():
    _, bound, area, claim = audited(8)
    assert 0 < bound < claim
    assert area > 0.6


class Noise:
    """DP-SGD whose noise is changed; `change` maps the noise of a parameter, its number and the step's to another."""

    def __init__(self, change):
        self.change, self.steps = change, 0

    def __call__(self, *args, stream, **rest):
        self.steps += 1
        honest, places = stream.normal, iter(range(9))

        class Changed:
            normal = staticmethod(lambda shape: self.change(honest(shape), next(places), self.steps))

        return noisy_step(*args, stream=Changed, **rest)


def test_what_is_left_of_a_move_is_the_noise_that_was_drawn(monkeypatch):
    drawn, whole, rounding = [], SeenSteps.saw, []

    def saw(self, rows_B, taken, moved_d, sums_d, most):
        noise_d = self.cost.sigma * flat(drawn)
        rounding.append(float((moved_d - sums_d - noise_d).abs().max() / moved_d.abs().max()))
        drawn.clear()
        whole(self, rows_B, taken, moved_d, sums_d, most)

    monkeypatch.setattr(budget, "noisy_step", Noise(lambda noise, place, step: drawn.append(noise) or noise))
    monkeypatch.setattr(SeenSteps, "saw", saw)
    assert audited(8)[0]["found"] == []
    assert len(rounding) == STEPS
    assert max(rounding) < 6 * 2**-24


KEPT = {}
NOISES = {
    "half": (lambda noise, place, step: noise / 2, "noise"),
    "nearly all": (lambda noise, place, step: noise * 0.97, "noise"),
    "none": (lambda noise, place, step: noise * 0, "noise"),
    "not in one step": (lambda noise, place, step: noise * (step != 7), "noise of a step"),
    "not in one layer": (lambda noise, place, step: noise * (place != 3), "noise of a layer"),
    "not of one parameter": (
        lambda noise, place, step: noise * (torch.arange(len(noise)) > 0) if place == 3 else noise,
        "noise of a parameter",
    ),
    "one number for a layer": (lambda noise, place, step: noise * 0 + noise.flatten()[0], "noise"),
    "taken back": (
        lambda noise, place, step: KEPT.update({place: noise}) or noise if step % 2 else -KEPT[place],
        "noise of all steps",
    ),
    "the same each time": (lambda noise, place, step: KEPT.setdefault(("same", place), noise), "repeated noise"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("change", "finding"), NOISES.values(), ids=NOISES)
def test_noise_that_is_less_than_charged_is_found(monkeypatch, change, finding):
    monkeypatch.setattr(budget, "noisy_step", Noise(change))
    assert FINDINGS[finding] in audited()[0]["found"]


def looser_scales(clip, *rest):
    return SCALES(1.1 * clip, *rest)


def unclipped(clip, examples, dtype, norms_B):
    return torch.ones(examples, dtype=dtype), norms_B.isfinite()


def unclipped_by_ghost(self, sums, losses, batch, scales):
    return GHOST(self, sums, losses, batch, lambda norms_B: unclipped(0, len(norms_B), torch.float32, norms_B))


def to_more(*args, clip, sigma, **rest):
    return noisy_step(*args, clip=1.1 * clip, sigma=sigma / 1.1, **rest)


SCALES, GHOST = dpsgd.scales, dpsgd.Ghost.add
CLIPPINGS = {
    "to more": (dpsgd, "scales", looser_scales),
    "to more, with the same noise": (budget, "noisy_step", to_more),
    "not at all": (dpsgd, "scales", unclipped),
    "not of real examples": (dpsgd.Ghost, "add", unclipped_by_ghost),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", CLIPPINGS.values(), ids=CLIPPINGS)
def test_gradients_that_are_not_clipped_are_found(monkeypatch, where):
    monkeypatch.setattr(*where)
    finding = audited()[0]
    assert finding["found"] == [FINDINGS["noise"]]
    assert finding["kinds"][0]["most"] > 1.05


def test_sums_that_grow_after_clipping_are_found(monkeypatch):
    def after_clipping(*args, sums_of, **rest):
        def grown(*batch):
            sums, loss = sums_of(*batch)
            return [1.2 * summed for summed in sums], loss

        return noisy_step(*args, sums_of=grown, **rest)

    monkeypatch.setattr(budget, "noisy_step", after_clipping)
    assert FINDINGS["clipping"] in audited()[0]["found"]


def test_a_clip_and_noise_that_are_both_larger_give_the_same_epsilon(monkeypatch):
    def both(*args, clip, **rest):
        return noisy_step(*args, clip=4 * clip, **rest)

    monkeypatch.setattr(budget, "noisy_step", both)
    assert audited()[0]["found"] == []


def everyone(examples, cost, stream):
    return (torch.arange(examples) for _ in range(cost.steps))


def more_often(examples, cost, stream):
    return POISSON(examples, replace(cost, rate=1.2 * cost.rate), stream)


def shuffled(examples, cost, stream):
    order = torch.cat([stream.uniform(examples).argsort() for _ in range(int(cost.steps * cost.rate))])
    return iter(order.chunk(cost.steps))


def the_same(examples, cost, stream):
    return iter([next(POISSON(examples, cost, stream))] * cost.steps)


POISSON = dpsgd.poisson_batches
SAMPLINGS = [(everyone, "rate"), (more_often, "rate"), (shuffled, "batches"), (shuffled, "rows"), (the_same, "rows")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("sampling", "finding"), SAMPLINGS)
def test_batches_that_are_not_as_charged_are_found(monkeypatch, sampling, finding):
    monkeypatch.setattr(budget, "poisson_batches", sampling)
    assert FINDINGS[finding] in audited()[0]["found"]


def test_batches_with_rows_that_were_not_drawn_are_found(monkeypatch):
    def all_rows(self, data):
        return ((data.x, data.y) for _ in self.rows(len(data)))

    monkeypatch.setattr(budget.DPTraining, "batches", all_rows)
    assert FINDINGS["rate"] in audited()[0]["found"]


CHARGES = {
    "half of the steps": (lambda cost: replace(cost, steps=cost.steps // 2), "50 steps that were not charged"),
    "a step less": (lambda cost: replace(cost, steps=cost.steps - 1), "1 steps that were not charged"),
    "more noise": (lambda cost: replace(cost, sigma=2 * cost.sigma), "100 steps that were not charged"),
}


@pytest.mark.parametrize(("charged", "message"), CHARGES.values(), ids=CHARGES)
def test_steps_that_were_not_charged_are_found(charged, message):
    assert audited(charged=charged)[0]["found"] == [message]


def test_steps_past_dp_sgd_are_found():
    def once_more(model, optimizer):
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()

    finding = audited(after=once_more)[0]
    assert finding["found"] == ["100 steps without DP-SGD on weights that it trains"]
    other = mlp(5)
    own = torch.optim.SGD(other.parameters(), lr=0.1)  # such as that of a private model
    assert audited(after=lambda *_: own.step())[0]["found"] == []


def recorded(rng, cost, noise=1.0, growth=0.0, rate=1.0, examples=200):
    """Return a record of drawn steps: 40 numbers. Sums follow the noise of earlier steps, as those of training do."""
    seen = SeenSteps(cost, examples, [30, 10])
    for _ in range(cost.steps):
        rows_B = torch.from_numpy(np.flatnonzero(rng.random(examples) < rate * cost.rate))
        sums_d = torch.from_numpy(np.where(seen.total_d < 0, 1.0, -1.0))
        moved_d = (1 + growth) * sums_d + noise * cost.sigma * torch.from_numpy(rng.standard_normal(40))
        seen.saw(rows_B, len(rows_B), moved_d, sums_d, 1.0)
    return seen


@pytest.mark.sampled(2, of="slow audits")
def test_false_alarms_are_rarer_than_stated_and_what_is_stated_as_detectable_is_found():
    rng, cost, share = np.random.default_rng(0), SampledGaussian(0.1, 1.5, 20), 0.005 / len(FINDINGS)
    least = recorded(rng, cost).undetected(share)
    alarms = {
        name: sum(min(recorded(rng, cost, **fault).p_values().values()) <= share for _ in range(100))
        for name, fault in {
            "honest": {},
            "noise": {"noise": least["noise"]},
            "growth": {"growth": least["growth"]},
            "rate": {"rate": least["rate"] / cost.rate},
        }.items()
    }
    assert alarms["honest"] <= 3
    assert alarms["noise"] >= 88
    assert alarms["growth"] >= 88
    assert alarms["rate"] >= 88


@pytest.mark.parametrize(("examples", "q", "steps"), [(200, 0.1, 20), (20, 0.1, 1), (20, 0.5, 1)])
def test_each_test_is_wrong_no_more_often_than_its_p_value_says(examples, q, steps):
    rng, cost = np.random.default_rng(1), SampledGaussian(q, 1.5, steps)
    tried = [recorded(rng, cost, examples=examples).p_values() for _ in range(200)]
    wrong = {name: sum(p_values[name] <= 0.05 for p_values in tried) for name in FINDINGS}
    assert max(wrong.values()) <= 22, wrong  # 10 are expected; more than 22 have a chance of 1 in 7,000


def test_a_canary_adds_exactly_c_where_its_row_is_drawn_and_its_coin_says_in():
    canaries = Canaries.tossed(4, 10, 0)
    audit = GradientCanaries(canaries, 0)
    training = audit.training(0.5, SampledGaussian(1.0, 1.0, 1), Stream(bytes(32)))
    model = mlp()
    [rows] = training.rows(10)
    assert set(rows.tolist()) == set(range(10)) - set(canaries.rows_m.tolist())
    x, y = torch.randn(0, 16), torch.empty(0, dtype=torch.int64)
    sums, _ = training.sums(model, lambda x, y: pytest.fail("no real example is left"), (x, y), 0.5)
    products = audit.directions(sums).products(flat(sums))
    assert np.allclose(products, np.where(canaries.was_in_m, 0.5, 0.0), atol=1e-4)
    assert not training.real_d.any()
    assert training.most == pytest.approx(0.5, abs=1e-4)


def test_directions_are_unit_vectors_without_common_coordinates():
    shapes = [torch.zeros(7, 3), torch.zeros(5)]
    directions = Directions(shapes, 6, seed=1)
    vectors = torch.cat([vector.flatten(1) for vector in directions.gradients(torch.arange(6))], dim=1)
    assert torch.allclose(vectors @ vectors.T, torch.eye(6), atol=1e-6)
    other = Directions(shapes, 6, seed=2)
    assert not torch.equal(other.owner_d, directions.owner_d)


def test_coins_are_fair_and_rows_are_the_examples():
    tossed = [Canaries.tossed(300, 600, seed) for seed in range(20)]
    share = np.mean([toss.was_in_m.mean() for toss in tossed])
    assert 0.47 < share < 0.53
    toss = tossed[0]
    assert np.array_equal(toss.number_D[torch.from_numpy(toss.rows_m)], np.arange(300))
    assert (toss.number_D >= 0).sum() == 300


@pytest.mark.parametrize("canaries", [1, 10, 11])
def test_canaries_that_do_not_fit_are_refused(canaries):
    with pytest.raises(ConfigError, match="fewer than there are, 10 here"):
        Canaries.tossed(canaries, 10, 0)


def test_a_module_with_fewer_parameters_than_canaries_is_refused():
    with pytest.raises(ConfigError, match="a parameter each"):
        Directions([torch.zeros(3)], 4, seed=0)
