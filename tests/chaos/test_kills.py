"""Runs that are killed at random moments and go on end as undisturbed ones, and have charged all that they spent."""

from random import Random

import pytest
from chaos_runs import STEPS, check, jobs, killed, whole
from chaos_runs import Place as Killed

JOBS = jobs()
SHORT = ("cwt", "fedreplay", "local dp=classifier", "splitnn")  # the others by hand: tests/chaos/long.py


@pytest.mark.parametrize("name", SHORT)
def test_a_killed_run_ends_as_an_undisturbed_one(name, tmp_path):
    once, ended = whole(tmp_path / "once", JOBS[name])
    place = Killed(tmp_path / "killed", JOBS[name])
    died_of = list(killed(place, Random(name), once.shared[STEPS], ended.seconds, 3))
    check(once, place, len(died_of))
