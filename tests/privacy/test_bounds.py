"""A lower bound on epsilon from guesses: known values, what perfect guesses show, and how often it is too large."""

import numpy as np
import pytest

from flwr_replay.attacks.membership import auc
from flwr_replay.errors import ConfigError
from flwr_replay.privacy.bounds import Guesses, by_steinke, guessed, lower_bound


@pytest.mark.parametrize(("right", "steinke"), [(366, 0.8349), (456, 2.0728)])
def test_the_bound_is_that_of_jax_privacy_2_0(right, steinke):
    assert by_steinke(Guesses(500, 500, right), 1e-5, 0.05) == pytest.approx(steinke, abs=6e-5)


@pytest.mark.parametrize(("canaries", "most"), [(100, 3.5), (500, 5.1), (10_000, 7.8)])
def test_what_perfect_guesses_show(canaries, most):
    assert by_steinke(Guesses(canaries, canaries, canaries), 1e-5, 0.05) == pytest.approx(most, abs=0.05)


def test_at_one_over_the_examples_steinke_s_test_has_no_power():
    guesses = Guesses(500, 500, 456)
    bounds = [by_steinke(guesses, delta, 0.05) for delta in (1e-2, 1e-3, 1e-4, 0)]
    assert bounds == sorted(bounds)
    assert bounds[0] < 0.3


def test_the_bound_grows_with_what_is_right_and_shrinks_with_the_significance():
    bounds = [by_steinke(Guesses(200, 100, right), 1e-5) for right in (50, 60, 80, 100)]
    assert bounds[0] == 0
    assert bounds == sorted(bounds)
    assert by_steinke(Guesses(200, 100, 80), 1e-5, 0.001) < bounds[2]


@pytest.mark.sampled(2, of="slow learning")
def test_audits_of_randomised_response_are_rarely_above_its_epsilon():
    epsilon, m, rng, bounds = 1.0, 200, np.random.default_rng(0), []
    for _ in range(400):
        was_in = rng.random(m) < 0.5
        truthful = rng.random(m) < np.exp(epsilon) / (1 + np.exp(epsilon))
        answers = np.where(truthful, was_in, ~was_in).astype(float)
        bounds.append(lower_bound([guessed(answers, was_in, guesses) for guesses in (20, 100, 200)], 1e-5)[0])
    assert np.mean(np.array(bounds) > epsilon) <= 0.01
    assert np.median(bounds) > 0.3  # it does find something


def test_trying_more_thresholds_costs():
    guesses = Guesses(500, 500, 400)
    assert lower_bound([guesses] * 10, 1e-5)[0] < lower_bound([guesses], 1e-5)[0]
    bound, _ = lower_bound([guesses] * 7, 1e-5)
    assert bound == by_steinke(guesses, 1e-5, 0.01 / 7)


def test_guesses_take_both_ends_and_abstain_between():
    scores, was_in = np.array([3.0, -2.0, 0.1, 0.0, -5.0, 9.0]), np.array([1, 1, 0, 0, 0, 1], bool)
    assert guessed(scores, was_in, 4) == Guesses(6, 4, 3)
    assert guessed(scores, was_in, 2) == Guesses(6, 2, 2)
    assert auc(scores[was_in], scores[~was_in]) == pytest.approx(7 / 9)


def test_scores_that_know_nothing_have_half_the_area():
    was_in = np.random.default_rng(0).random(60) < 0.5
    assert auc(np.zeros(60)[was_in], np.zeros(60)[~was_in]) == 0.5
    assert auc(np.zeros(60), np.zeros(0)) == 0.5


@pytest.mark.parametrize("numbers", [(10, 5, 6), (10, 11, 3), (10, 0, 0), (10, 5, -1)])
def test_impossible_guesses_are_refused(numbers):
    with pytest.raises(ConfigError, match="some are guessed"):
        Guesses(*numbers)
