"""Real disks, without any patch: full, and read-only. A run goes on once there is room again.

Without the right to mount, files of a limited size: tests/files/test_atomic.py.
"""

import os
import subprocess
from contextlib import suppress
from random import Random

import pytest
from chaos_faults import TAKEN, Fault
from chaos_runs import Place, check, jobs, undisturbed_run
from harness import SHARDS, node_configs, run, write_shards

from flwr_replay.errors import RunError

JOB = jobs()["cwt"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return undisturbed_run(tmp_path_factory.mktemp("once") / "once", JOB)[0]


@pytest.fixture
def disk(tmp_path):
    """Mount a small file system; return its folder and a function that mounts it again with other options."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mounted(options):
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")

    yield folder, mounted
    if os.path.ismount(folder):
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_a_full_disk(undisturbed, disk, share):
    folder, mounted = disk
    used = sum(path.stat().st_blocks * 512 for path in undisturbed.folder.rglob("*"))
    mounted(f"size={round(share * used)}")
    place = Place(folder / "place", JOB)
    error = place.attempt().error
    assert str(folder) in error
    assert "No space left on device: make room on its disk" in error
    mounted(f"remount,size={4 * used}")
    assert place.attempt().code == 0
    check(undisturbed, place, 1)


def test_a_disk_that_becomes_read_only(undisturbed, disk):
    folder, mounted = disk
    mounted("size=100m")
    place = Place(folder / "place", JOB)
    place.attempt(Fault("kill", at=Random(0).randint(undisturbed.shared[TAKEN] // 2, undisturbed.shared[TAKEN])))
    (folder / "place" / "said").unlink()
    (folder / "place" / "said").symlink_to(folder.parent / "said")  # a terminal is on no disk
    mounted("remount,ro")
    error = place.attempt().error
    assert str(place.run) in error
    assert "Read-only file system" in error
    mounted("remount,rw")
    (folder / "place" / "said").unlink()
    assert place.attempt().code == 0
    check(undisturbed, place, 2)


@pytest.mark.parametrize("full", ["b", "abc"])
def test_institutions_whose_disk_is_full_at_their_upload_are_asked_again(disk, tmp_path, full):
    folder, mounted = disk
    mounted("size=4m")
    write_shards(tmp_path, {"a": 40, "b": 33, "c": 20})
    nodes = [own | {"state": str(folder if own["name"] in full else tmp_path)} for own in node_configs(tmp_path, "")]
    local = ["dp=latents", "latent_clip=10", "latent_epsilon=50", "label_epsilon=5"]  # what leaves is on the disk first
    job = [
        "strategy=fedreplay",
        "encoder=random",
        *local,
        *SHARDS,
        "classes=3",
        "model=cnn",
        "model.width=4",
        "rounds=2",
    ]

    def before(grid, message):
        if grid.asked[-1].stage == "extract" and not (folder / "filler").exists():
            with suppress(OSError), open(folder / "filler", "wb", buffering=0) as filler:
                while True:
                    filler.write(bytes(4096))

    with suppress(RunError):
        ran = run(tmp_path, job, nodes, name="full", before=before)
        assert len(full) == 1
        assert ran.grid.times("extract", "b") == 2  # in each round
        assert {failure["institution"] for failure in ran.result["failures"]} == {"b"}
    (folder / "filler").unlink()
    ran = run(tmp_path, [*job, f"rounds={3 if len(full) == 1 else 2}"], nodes, resume=str(tmp_path / "runs" / "full"))
    assert sorted(ran.grid.who("extract")) == list(full)
    assert ran.result["final"]["institutions"].keys() == {"a", "b", "c"}
