"""Damage to files of a run and its institutions: the same bits all the same, or one line that names the file.

Each kind of file in each way, of more methods, by hand: `python tests/chaos/damage.py`.
"""

import pytest
from chaos_damage import SECRET, Broken, drawn_damage
from chaos_runs import jobs, moments

JOBS = jobs()
KEPT = sorted(name for name in JOBS if name in ("proxyfl", "feder") or "sealed" in name)  # much state at institutions
ONE = moments("kept").choice(KEPT)  # for a commit


@pytest.mark.parametrize(("name", "more"), [("fedreplay", ()), ("fedavg dp=classifier", (SECRET,)), (ONE, ())])
def test_damage_is_repaired_or_reported(name, more, tmp_path):
    broken, rng = Broken(tmp_path / "broken", [*JOBS[name], *more], 0.8), moments(name)
    for path, way in drawn_damage(broken, rng, 5 if name != ONE else 3):
        broken.resumed(path, way)
    run = broken.place.run.relative_to(broken.place.folder)
    assert broken.resumed(run / "config.yaml", "one byte flipped")
    assert not broken.resumed(run / "environment.json", "removed")
