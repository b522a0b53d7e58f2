"""Runs that are killed, or whose disk fails, at random moments and go on end as undisturbed ones.

All that they spent is charged.
"""

import signal

import pytest
from chaos_faults import OF_DISKS, TAKEN, Fault
from chaos_runs import Place, check, check_stated, drawn_names, jobs, moments, secretly, struck, undisturbed_run

JOBS = jobs()
MORE = ("cwt", "fedreplay", "local dp=classifier", "splitnn")  # struck more often
SOME = sorted({*MORE, *drawn_names("kills", JOBS, 2)})  # of a commit; of all: FLWR_REPLAY_MOMENTS=all


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory):
    """Run before all the job that imports most: what only a process's first run does would count as steps of a run."""
    undisturbed_run(tmp_path_factory.mktemp("warm") / "once", JOBS["fedavg replay=statistics"])


@pytest.mark.parametrize("name", SOME)
def test_a_run_that_is_killed_ends_as_an_undisturbed_one(name, tmp_path):
    once, ended = undisturbed_run(tmp_path / "once", JOBS[name])
    place, rng, steps = Place(tmp_path / "struck", JOBS[name]), moments(name), once.shared[TAKEN]
    assert place.attempt(Fault("kill", at=rng.randint(1, steps))).code == -signal.SIGKILL
    further = list(struck(place, rng, ended, steps, 2 * (name in MORE), ("kill",)))
    check(once, place, 1 + len(further))


@pytest.mark.parametrize("name", [name for name in MORE if "dp=" in name])
def test_a_run_that_is_killed_states_no_smaller_epsilon(name, tmp_path):
    options = secretly(JOBS[name])
    once, ended = undisturbed_run(tmp_path / "once", options)
    place = Place(tmp_path / "struck", options)
    strikes = list(struck(place, moments(name), ended, once.shared[TAKEN], 3, ("kill",)))
    assert all(account["epsilon"] for account in once.result["privacy"].values())
    check_stated(once, place, len(strikes))


@pytest.mark.parametrize("name", drawn_names("disks", JOBS, 2))
def test_a_run_whose_disk_fails_ends_as_an_undisturbed_one(name, tmp_path):
    once, ended = undisturbed_run(tmp_path / "once", JOBS[name])
    place = Place(tmp_path / "struck", JOBS[name])
    strikes = list(struck(place, moments(name), ended, once.shared[TAKEN], 3, tuple(OF_DISKS)))
    check(once, place, len(strikes))
