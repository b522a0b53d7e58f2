"""Sealed runs: the same bits as unsealed ones, with a server that has nothing to read."""

import numpy as np
import pytest
from harness import same
from peers import NAMES, hospitals, run

from flwr_replay.wire.records import arrays_in

SEALED = "sealed=true"


def pinned(folder, names=NAMES):
    """Return what single institutions' node configs have: the file of pinned keys, made on this machine."""
    from flwr_replay.institution.seal import make_key

    file = folder / "peers.txt"
    for name in names:
        (folder / "state" / name).mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{n} {make_key(folder / 'state' / n / 'seal.key')[1]}\n" for n in names))
    return {name: {"seal-peers": str(file)} for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    hospitals(folder)
    return folder


def test_a_sealed_avgpush_ends_with_the_same_bits(folder):
    plain = run(folder, "strategy=avgpush", "rounds=3", "topology=exponential-half")
    ran = run(folder, "strategy=avgpush", "rounds=3", "topology=exponential-half", SEALED, own=pinned(folder))
    assert ran.result["final"] == plain.result["final"]
    for name in NAMES:
        assert same(ran.model(name, 3)[0], plain.model(name, 3)[0])
        assert ran.model(name, 3)[1] == plain.model(name, 3)[1]
    for asked, reply in ran.grid.of("push") + ran.grid.of("deliver"):
        for message in (asked, reply):
            found = arrays_in(message.content).state_dict()
            assert all(array.dtype == np.uint8 and name.endswith("sealed") for name, array in found.items())
