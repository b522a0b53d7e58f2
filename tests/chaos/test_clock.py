"""A clock that jumps by hours at every look changes no result, no waiting time and no duration."""

import pytest
from chaos_faults import TAKEN, Fault
from chaos_runs import Place, check, drawn_names, jobs, undisturbed_run

from flwr_replay.files.lines import read_lines

JOBS = jobs()
TIMEOUT = "timeout=600"  # seconds; less than the jumps


@pytest.mark.parametrize("name", drawn_names("clocks", JOBS, 2))
def test_a_clock_that_jumps(name, tmp_path):
    options = [*JOBS[name], TIMEOUT]
    once, _ = undisturbed_run(tmp_path / "once", options)
    place = Place(tmp_path / "jumping", options)
    place.attempt(Fault("kill", at=once.shared[TAKEN] * 2 // 3, clock=1))
    ended = place.attempt(Fault(clock=2))
    assert ended.code == 0, ended.output
    check(once, place, 1)
    seconds = [row["seconds"] for row in read_lines(place.run / "timings.jsonl")]
    assert all(0 <= second < 600 for second in seconds)
    assert seconds == sorted(seconds) or len(seconds) > len(read_lines(once.run / "timings.jsonl"))
    assert 0 < place.result["wall-seconds"] < 600
