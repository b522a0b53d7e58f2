"""Shared noise: whole numbers with the distribution that was charged for."""

import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError, DivergedError
from flwr_replay.privacy import discrete
from flwr_replay.privacy.discrete import BITS, discrete_gaussian
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.privacy.secret import Stream
from flwr_replay.privacy.shares import MARGIN, beside, check_sums, shared, step_of


@pytest.mark.parametrize("bits", [0, 1, 3])
def test_small_ones_have_exactly_the_probabilities_of_the_definition(monkeypatch, bits):
    monkeypatch.setattr(discrete, "BITS", bits)
    drawn, sigma = discrete_gaussian(200_000, Stream(bytes([bits]) * 32)), 2**bits
    numbers = np.arange(-3 * sigma, 3 * sigma + 1)
    weights = np.exp(-(np.arange(-40 * sigma, 40 * sigma + 1) ** 2) / (2 * sigma**2))
    expected = np.exp(-(numbers**2) / (2 * sigma**2)) / weights.sum() * len(drawn)
    counts = Counter(drawn.tolist())
    seen = np.array([counts[int(n)] for n in numbers])
    assert chisquare([*seen, len(drawn) - seen.sum()], [*expected, len(drawn) - expected.sum()]).pvalue > 1e-3


def test_large_ones_are_those_of_a_gaussian():
    drawn = discrete_gaussian(200_000, Stream(bytes(32)))
    assert drawn.dtype == np.int64
    assert kstest(drawn / 2**BITS, "norm").pvalue > 1e-3
    assert set((drawn % 2).tolist()) == {0, 1}  # the last bits, too, are random
    assert abs((drawn % 2**8).mean() - 127.5) < 1


def test_many_take_little_more_memory_than_themselves():
    tracemalloc.start()
    drawn = discrete_gaussian(2**20, Stream(bytes(32)))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3 * drawn.nbytes


@given(st.integers(0, 40), st.integers(1, 50), st.floats(0.05, 50), st.integers(1, 10**6))
def test_the_noise_of_honest_shares_covers_the_sum_and_all_rounding(seed, honest, sigma, numbers):
    g = step_of(sigma, honest, numbers)
    assert math.sqrt(honest) * 2**BITS == pytest.approx(sigma * MARGIN * (1 / g + math.sqrt(numbers)), rel=1e-12)
    rng, d = np.random.default_rng(seed), min(numbers, 1000)
    others, own = rng.normal(size=d) * 10.0 ** rng.integers(-9, 3), rng.normal(size=d)
    own /= np.linalg.norm(own)
    moved = np.rint((others + own) / g) - np.rint(others / g)
    assert np.linalg.norm(moved) <= 1 / g + math.sqrt(d)


def test_a_share_is_of_the_sums_that_were_given():
    sums = torch.linspace(-5, 5, 1000, dtype=torch.float64).view(10, 100)
    g = step_of(2.0, 3, sums.numel())
    noise = shared(sums, g, Stream(bytes(32))).double() * g - sums
    assert noise.std() == pytest.approx(2 / math.sqrt(3), rel=0.1)


def test_noise_that_leaves_no_room_is_refused():
    with pytest.raises(ConfigError, match="leaves no room for 1,000,000 numbers"):
        step_of(1e5, 2, 10**6)


def test_beside_shares_nothing_else_travels():
    sent = {"a": np.ones(2, np.float32), "b": np.ones(3, np.float32)}
    made = beside(sent, {"b": np.arange(3)})
    assert {name: array.tolist() for name, array in made.items()} == {"a": [0, 0], "b": [0, 1, 2]}
    assert {array.dtype for array in made.values()} == {np.dtype(np.int64)}
    plain = beside(sent, {"b": np.zeros(3, np.float32)})
    assert (plain["a"].tolist(), plain["b"].tolist()) == ([1, 1], [0, 0, 0])


def test_sums_of_honest_institutions_are_never_too_large():
    for numbers in (1, 10, 10**5):
        noise = [discrete_gaussian(numbers, Stream(bytes([k]) * 32)) for k in range(3)]
        check_sums({"x": sum(noise) + int(40 / numbers**0.5)}, 40, 3)
        for wrong in (np.full(numbers, 2**40), np.full(numbers, -(2**63))):
            with pytest.raises(DivergedError, match="too large numbers"):
                check_sums({"x": wrong}, 40, 3)


def test_where_the_sum_costs_nothing_one_alone_still_may():
    options = ["strategy=fedstats", "masked=true", "nodes=9", "dp=statistics", "privacy.noise=shared", "delta=0.001"]
    plan = PrivacyPlan.of(compose([*options, "privacy.sigma=500"]))
    assert plan.planned(40)[0] == 0
    assert plan.alone(0.0, 0.001) > 0
