"""The recipe for containers that `deploy init` writes: what it says, and that its scripts work under it.

No image is built here. The start commands run with what a container would give them: the Containerfile's environment
and nothing of this one, no capabilities, no new privileges, and a folder to which nothing can be written but where
compose.yaml mounts a place to write.
"""

import subprocess

import pytest
from deployed import CLINICS, COORDINATOR, deployed

from flwr_replay.deploy.clinic import supernode
from flwr_replay.deploy.coordinator import examine_coordinator
from flwr_replay.files.atomic import read_json

BRIEF = ("strategy=fedreplay", "rounds=2", "encoder_epochs=1", "evaluate_every=100", "split=test")


def files_of(folder):
    """Return a folder's files but those below the places to write."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).parts[0] not in ("state", "runs", "data")
    }


@pytest.mark.deployment
@pytest.mark.xdist_group("deployment")
@pytest.mark.sampled(1, of="deployments that end")
def test_superlink_and_supernodes_run_where_only_the_mounts_can_be_written(tmp_path):
    with deployed(tmp_path, refusing=False, contained=True) as place:
        before = {name: files_of(place.place / name) for name in (COORDINATOR, *CLINICS)}
        place.run("first", *BRIEF)
        assert set(read_json(place.runs / "first" / "result.json")["final"]["institutions"]) == set(CLINICS)
        for clinic in CLINICS:
            command = place.words_of(clinic, "flwr-replay", "doctor", "--clinic", str(place.place / clinic))
            doctor = subprocess.run(**command, capture_output=True, text=True, check=False)
            assert doctor.returncode == 0, doctor.stdout + doctor.stderr
            assert "its SuperNode runs, as process" in doctor.stdout
            assert supernode(place.place / clinic) == place.started[clinic].pid
            assert place.own_ledger(clinic)
        healthy, findings = examine_coordinator(place.coordinator)
        assert healthy, findings
        assert "superlink.db" in findings
        assert before == {name: files_of(place.place / name) for name in before}
        with pytest.raises(subprocess.CalledProcessError):  # the folder is shut indeed
            subprocess.run(**place.words_of(CLINICS[0], "touch", str(place.place / CLINICS[0] / "x")), check=True)
