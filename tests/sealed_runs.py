"""Sealed runs of small hospitals: their keys, and parcels that a test seals and spoils."""

from peers import NAMES

from flwr_replay.institution.seal import KEY, Seal, make_key, read_pins
from flwr_replay.wire.sealed import SEALED_NAME

SEALED = "sealed=true"


def pinned(folder, names=NAMES):
    """Make keys for hospitals, and a file that pins them; return what their node configs have, by name."""
    file = folder / f"peers-{names}.txt"
    for name in names:
        (folder / "state" / name).mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{n} {make_key(folder / 'state' / n / KEY)[1]}\n" for n in names))
    return {name: {"seal-peers": str(file)} for name in names}


def seal_of(folder, name, names=NAMES):
    """Return a hospital's seal."""
    return Seal(name, make_key(folder / "state" / name / KEY)[0], read_pins(folder / f"peers-{names}.txt"))


def parcels_in(messages):
    """Return all arrays in messages, by name."""
    return [(name, array) for m in messages for name, array in m.content.get("arrays", {}).items()]


def all_sealed(grid):
    """Say whether all arrays that travelled, in either direction, were sealed parcels."""
    messages = [one for _, asked, reply in grid.log for one in (asked, reply) if one.has_content()]
    found = parcels_in(messages)
    return bool(found) and all(name.rpartition(".")[2] == SEALED_NAME for name, _ in found)
