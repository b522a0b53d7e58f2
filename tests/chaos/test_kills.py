"""Runs that are killed, or whose disk fails, at random moments and go on end as undisturbed ones.

All that they spent is charged.
"""

from random import Random

import pytest
from chaos_faults import OF_DISKS, TAKEN
from chaos_runs import Place, check, jobs, struck, whole

JOBS = jobs()
SHORT = ("cwt", "fedreplay", "local dp=classifier", "splitnn")  # the others by hand: tests/chaos/long.py


@pytest.fixture(scope="module", params=SHORT)
def undisturbed(request, tmp_path_factory):
    return request.param, *whole(tmp_path_factory.mktemp("once") / "once", JOBS[request.param])


@pytest.mark.parametrize("kinds", [("kill",), tuple(OF_DISKS)], ids=["killed", "disk"])
def test_a_run_that_faults_strike_ends_as_an_undisturbed_one(undisturbed, kinds, tmp_path):
    name, once, ended = undisturbed
    place = Place(tmp_path / "struck", JOBS[name])
    found = list(struck(place, Random(f"{name} {kinds}"), ended, once.shared[TAKEN], 3, kinds))
    check(once, place, len(found))
