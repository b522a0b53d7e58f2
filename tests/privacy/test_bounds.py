"""Lower bounds on epsilon from guesses: known values, what perfect guesses show, and how often a bound is too large."""

import numpy as np
import pytest

from flwr_replay.errors import ConfigError
from flwr_replay.privacy.bounds import Guesses, auc, by_mahloujifar, by_steinke, guessed, lower_bounds


@pytest.mark.parametrize(("right", "steinke", "mahloujifar"), [(366, 0.8349, 1.6380), (456, 2.0728, 4.0237)])
def test_the_bounds_are_those_of_jax_privacy_2_0(right, steinke, mahloujifar):
    found = Guesses(500, 500, right)
    assert by_steinke(found, 1e-5) == pytest.approx(steinke, abs=6e-5)
    assert by_mahloujifar(found, 1e-5) == pytest.approx(mahloujifar, abs=6e-5)


@pytest.mark.parametrize(("canaries", "most"), [(100, 3.5), (500, 5.1), (10_000, 7.8)])
def test_what_perfect_guesses_show(canaries, most):
    assert by_steinke(Guesses(canaries, canaries, canaries), 1e-5) == pytest.approx(most, abs=0.05)


def test_at_one_over_the_examples_steinke_s_test_has_no_power():
    found = Guesses(500, 500, 456)
    assert by_steinke(found, 1e-3) < by_steinke(found, 1e-4) < by_steinke(found, 0)
    assert by_steinke(found, 1e-2) < 0.3


@pytest.mark.parametrize("bound", [by_steinke, by_mahloujifar])
def test_a_bound_grows_with_what_is_right_and_shrinks_with_the_significance(bound):
    found = [bound(Guesses(200, 100, right), 1e-5) for right in (50, 60, 80, 100)]
    assert found[0] == 0
    assert found == sorted(found)
    assert bound(Guesses(200, 100, 80), 1e-5, 0.005) < found[2]


def test_audits_of_randomised_response_are_rarely_above_its_epsilon():
    epsilon, m, rng = 1.0, 200, np.random.default_rng(0)
    above = {"steinke": 0, "mahloujifar": 0}
    bounds = []
    for _ in range(400):
        was_in = rng.random(m) < 0.5
        truthful = rng.random(m) < np.exp(epsilon) / (1 + np.exp(epsilon))
        answers = np.where(truthful, was_in, ~was_in).astype(float)
        tried = [guessed(answers, was_in, guesses) for guesses in (20, 100, 200)]
        found = lower_bounds(tried, 1e-5)
        bounds.append(found["steinke"][0])
        above = {name: count + (found[name][0] > epsilon) for name, count in above.items()}
    assert above["steinke"] <= 0.05 * 400
    assert np.median(bounds) > 0.4  # it does find something


def test_audits_of_a_gaussian_mechanism_are_rarely_above_its_epsilon():
    mu, m, rng = 1.0, 200, np.random.default_rng(1)
    epsilon = 4.3772  # at delta 1e-5, from the analytic Gaussian mechanism (Balle and Wang 2018)
    found = []
    for _ in range(400):
        was_in = rng.random(m) < 0.5
        scores = mu * was_in + rng.standard_normal(m)
        tried = [guessed(scores, was_in, guesses) for guesses in (20, 100, 200)]
        found.append(lower_bounds(tried, 1e-5)["mahloujifar"][0])
    assert np.mean(np.array(found) > epsilon) <= 0.05
    assert np.median(found) > 1


def test_trying_more_thresholds_costs():
    one = Guesses(500, 500, 400)
    assert lower_bounds([one] * 10, 1e-5)["steinke"][0] < lower_bounds([one], 1e-5)["steinke"][0]
    found = lower_bounds([one] * 7, 1e-5)  # the 5 % are divided by fourteen, as docs/audit-epsilon.md says
    assert found["steinke"][0] == by_steinke(one, 1e-5, 0.05 / 14)
    assert found["mahloujifar"][0] == by_mahloujifar(one, 1e-5, 0.05 / 14)


def test_guesses_take_both_ends_and_abstain_between():
    scores, was_in = np.array([3.0, -2.0, 0.1, 0.0, -5.0, 9.0]), np.array([1, 1, 0, 0, 0, 1], bool)
    assert guessed(scores, was_in, 4) == Guesses(6, 4, 3)
    assert guessed(scores, was_in, 2) == Guesses(6, 2, 2)
    assert auc(scores, was_in) == pytest.approx(7 / 9)


def test_scores_that_know_nothing_have_half_the_area():
    was_in = np.random.default_rng(0).random(60) < 0.5
    assert auc(np.zeros(60), was_in) == 0.5
    assert auc(np.zeros(60), np.ones(60, bool)) == 0.5


@pytest.mark.parametrize("numbers", [(10, 5, 6), (10, 11, 3), (10, 0, 0), (10, 5, -1)])
def test_impossible_guesses_are_refused(numbers):
    with pytest.raises(ConfigError, match="some are guessed"):
        Guesses(*numbers)
