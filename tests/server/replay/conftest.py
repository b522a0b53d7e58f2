"""What the tests of replay share."""

import pytest
from harness import write_shards
from replay_runs import SIZES


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """Make a folder with small hospitals, as large as the test's module says, if it says so."""
    folder = tmp_path_factory.mktemp("hospitals")
    write_shards(folder, getattr(request.module, "SIZES", SIZES))
    return folder
