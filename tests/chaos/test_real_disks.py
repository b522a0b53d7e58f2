"""Real disks, without any patch: full, and read-only. A run goes on once there is room again.

Without the right to mount, files of a limited size: tests/files/test_atomic.py.
"""

import os
import subprocess
from random import Random

import pytest
from chaos_faults import TAKEN, Fault
from chaos_runs import Place, check, jobs, whole

JOB = jobs()["cwt"]


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    return whole(tmp_path_factory.mktemp("once") / "once", JOB)[0]


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
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_a_full_disk(once, disk, share):
    folder, mounted = disk
    used = sum(path.stat().st_blocks * 512 for path in once.folder.rglob("*"))
    mounted(f"size={round(share * used)}")
    place = Place(folder / "place", JOB)
    error = place.attempt().error
    assert str(folder) in error
    assert "No space left on device: make room on its disk" in error
    mounted(f"remount,size={4 * used}")
    assert place.attempt().code == 0
    check(once, place, 1)


def test_a_disk_that_becomes_read_only(once, disk):
    folder, mounted = disk
    mounted("size=100m")
    place = Place(folder / "place", JOB)
    place.attempt(Fault("kill", at=Random(0).randint(once.shared[TAKEN] // 2, once.shared[TAKEN])))
    (folder / "place" / "said").unlink()
    (folder / "place" / "said").symlink_to(folder.parent / "said")  # a terminal is on no disk
    mounted("remount,ro")
    error = place.attempt().error
    assert str(place.run) in error
    assert "Read-only file system" in error
    mounted("remount,rw")
    (folder / "place" / "said").unlink()
    assert place.attempt().code == 0
    check(once, place, 2)
