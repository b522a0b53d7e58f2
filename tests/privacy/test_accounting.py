"""Epsilon and its inverse beside other implementations, numerical integration, and the numbers of Qu et al. 2022."""

import itertools
import logging
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from math import inf, log

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from flwr_replay.errors import ConfigError
from flwr_replay.privacy.accounting import ORDERS, SampledGaussian, epsilon, noise_for

POINTS = [(0.028, 0.7, 7875), (0.0032, 0.7, 93600), (0.1, 1.0, 100), (0.25, 2.0, 400), (0.99, 5.0, 10), (0.9, 4.0, 30)]
costs = st.builds(
    SampledGaussian,
    rate=st.sampled_from([0.001, 0.03, 0.25, 1.0]),
    sigma=st.sampled_from([0.5, 0.7, 2.0]),
    steps=st.integers(0, 3000),
)


def event(cost):
    """Return dp-accounting's description of the same steps."""
    once = dp_accounting.PoissonSampledDpEvent(cost.rate, dp_accounting.GaussianDpEvent(cost.sigma))
    return dp_accounting.SelfComposedDpEvent(once, cost.steps)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("examples", "epochs", "delta", "steps", "rdp", "prv"),
    [
        (1144, 225, 8.7e-4, 7875, 39.06, 35.62),
        (10_000, 300, 1e-5, 93_600, 14.78, 13.69),
        (10_000, 300, 1e-4, 93_600, 13.29, 12.17),
    ],
)
def test_figure_7_of_qu_et_al(examples, epochs, delta, steps, rdp, prv):
    cost = SampledGaussian.of_epochs(examples=examples, batch=32, sigma=0.7, epochs=epochs)
    assert (cost.rate, cost.steps) == (32 / examples, steps)
    assert epsilon([cost], delta) == pytest.approx(rdp, abs=0.01)
    assert epsilon([cost], delta, "prv") == pytest.approx(prv, rel=0.011)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("rate", "sigma", "steps"), POINTS)
def test_rdp_is_dp_accountings_at_equal_orders(rate, sigma, steps):
    orders = [order for order in ORDERS if float(order).is_integer()]  # at others its bound is loose, see below
    cost, other = SampledGaussian(rate, sigma, steps), RdpAccountant(orders)
    other.compose(event(cost))
    assert epsilon([cost], 1e-5, orders=orders) == pytest.approx(other.get_epsilon(1e-5), rel=1e-3)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("order", [1.1, 1.5, 2.6, 5.5])
@pytest.mark.parametrize(("rate", "sigma"), [(0.028, 0.7), (0.25, 2.0), (0.6, 1.0)])
def test_rdp_at_fractional_orders_is_the_integral(rate, sigma, order, caplog):
    """Mironov et al. 2019: A = E_z~N(0, sigma²) [((1 - q) + q exp((2z - 1) / (2 sigma²)))^order]."""
    shift = 8 * sigma

    def density(z):
        ratio = 1 - rate + rate * np.exp((2 * z - 1) / (2 * sigma**2))
        return norm.pdf(z, 0, sigma) * ratio**order

    moment = quad(density, -shift, order + shift, points=[0, 1, order], limit=400, epsabs=1e-14, epsrel=1e-12)[0]
    slow = log(moment) / (order - 1) + log(1 - 1 / order) - (log(1e-5) + log(order)) / (order - 1)
    assert epsilon([SampledGaussian(rate, sigma, 1)], 1e-5, orders=[order]) == pytest.approx(slow, rel=1e-6)
    caplog.set_level(logging.ERROR)  # dp-accounting says where its series does not converge
    other = RdpAccountant([order])
    other.compose(event(SampledGaussian(rate, sigma, 1)))
    assert slow <= other.get_epsilon(1e-5) + 1e-9


@pytest.mark.sampled(1)
@pytest.mark.parametrize("delta", [1e-5, 1e-3])
@pytest.mark.parametrize(
    "gaussians",
    [
        *([gaussian] for gaussian in itertools.product((0.001, 0.01, 0.1, 0.3, 0.99), (0.7, 2.0, 12.0), (1, 30, 1000))),
        *([gaussian] for gaussian in POINTS[:1]),
        [POINTS[2], POINTS[3]],
        [(0.028, 0.7, 500), (1.0, 9.0, 1)],
        [(0.05, 1.5, 300), (0.5, 8.0, 30), (1.0, 20.0, 5)],
        [(0.1, 1.0, 60), (0.1, 1.0, 40)],
    ],
)
def test_prv_is_never_below_dp_accountings_privacy_loss_distribution(gaussians, delta):
    """Nor above it by more than the error that it adds."""
    mechanisms, other = [SampledGaussian(*gaussian) for gaussian in gaussians], PLDAccountant()
    for mechanism in mechanisms:
        other.compose(event(mechanism))
    ours, by_rdp, least = epsilon(mechanisms, delta, "prv"), epsilon(mechanisms, delta), other.get_epsilon(delta)
    assert least <= ours <= by_rdp
    assert ours == by_rdp or ours <= least + 0.011 * max(0.25, by_rdp)


@pytest.mark.parametrize("released", [SampledGaussian(0.1, 1.0, 1), SampledGaussian(0.02, 0.8, 1)])
def test_prv_grows_with_every_step(released):
    """An account that states less than before is refused: also where Opacus' grid changes, by powers of two."""
    bounds = [epsilon([replace(released, steps=steps)], 1e-5, "prv") for steps in (*range(1, 70), 127, 128, 129, 130)]
    assert all(below <= above for below, above in pairwise(bounds))
    assert bounds[-1] < 0.97 * epsilon([replace(released, steps=130)], 1e-5)


@pytest.mark.parametrize("steps", [[(3.5, 30)], [(15.7, 15)], [(2.0, 1), (20.0, 40)], [(0.6, 1)]])
@pytest.mark.parametrize("delta", [1e-5, 1e-3])
def test_where_every_step_takes_all_examples_epsilon_is_exact(steps, delta):
    mechanisms, other = [SampledGaussian(1.0, *these) for these in steps], PLDAccountant()
    for mechanism in mechanisms:
        other.compose(event(mechanism))
    ours, theirs = epsilon(mechanisms, delta), other.get_epsilon(delta)  # theirs is rounded up to its grid
    assert ours == epsilon(mechanisms, delta, "prv")
    assert ours <= theirs <= ours + 0.01 * max(1.0, ours)
    below = [from_gaussian_mechanism(sigma, pessimistic_estimate=False).self_compose(n) for sigma, n in steps]
    assert reduce(lambda left, right: left.compose(right), below).get_epsilon_for_delta(delta) <= ours
    almost = [SampledGaussian(1 - 1e-9, *these) for these in steps]
    assert 0.85 * epsilon(almost, delta) < ours < epsilon(almost, delta)


@settings(max_examples=40)
@given(st.lists(costs, max_size=4), costs)
def test_a_release_more_never_costs_less(released, more):
    before, after = epsilon(released, 1e-5), epsilon([*released, more], 1e-5)
    assert before <= after
    assert epsilon([more], 1e-5) <= after
    assert after == pytest.approx(epsilon([more, *reversed(released)], 1e-5))


@settings(max_examples=30)
@given(costs, st.integers(1, 3000))
def test_epsilon_grows_with_steps_and_falls_with_noise(cost, steps):
    longer = SampledGaussian(cost.rate, cost.sigma, cost.steps + steps)
    quieter = SampledGaussian(cost.rate, cost.sigma / 1.5, cost.steps + steps)
    assert epsilon([cost], 1e-5) < epsilon([longer], 1e-5) < epsilon([quieter], 1e-5)
    assert epsilon([cost, SampledGaussian(cost.rate, cost.sigma, steps)], 1e-5) == epsilon([longer], 1e-5)


def test_nothing_costs_nothing_and_no_noise_costs_everything():
    assert epsilon([], 1e-5) == epsilon([SampledGaussian(0.1, 0.7, 0)], 1e-5) == 0
    assert epsilon([SampledGaussian(0.1, 0.7, 3), SampledGaussian(0.1, 0, 1)], 1e-5) == inf


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("target", "accountant"), [(0.5, "rdp"), (8.0, "rdp"), (0.5, "prv")])
def test_the_noise_for_an_epsilon_is_the_least(target, accountant):
    samplings = [(0.1, 100), (0.02, 400)]
    sigma = noise_for(target, 1e-5, samplings, accountant)

    def at(noise):
        return epsilon([SampledGaussian(rate, noise, steps) for rate, steps in samplings], 1e-5, accountant)

    assert at(sigma) <= target < at(sigma * 0.998)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: SampledGaussian(0, 1, 1), "sampling rate"),
        (lambda: SampledGaussian(0.1, -1, 1), "noise multiplier"),
        (lambda: SampledGaussian(0.1, 1, -1), "steps"),
        (lambda: SampledGaussian.of_epochs(examples=9, batch=32, sigma=1, epochs=1), "9 examples and a batch of 32"),
        (lambda: epsilon([], 0), "delta"),
        (lambda: epsilon([], 1e-5, "gdp"), "rdp, prv"),
        (lambda: noise_for(0, 1e-5, [(0.1, 1)]), "target epsilon"),
        (lambda: noise_for(1e-9, 1e-5, [(1.0, 10**9)]), "more noise"),
    ],
)
def test_a_mistake_is_one_line(wrong, says):
    with pytest.raises(ConfigError, match=says) as caught:
        wrong()
    assert "\n" not in str(caught.value)
