"""Sealed runs of small hospitals: their keys, and parcels that a test seals, spoils and sends."""

from flwr.app import ArrayRecord
from harness import SHARDS
from hostile_server import refusal
from peers import NAMES

from flwr_replay.ciphers.seal import KEY, Seal, make_key, read_pins
from flwr_replay.config.binding import shared_digest
from flwr_replay.payloads.avgpush import Push
from flwr_replay.payloads.common import Train
from flwr_replay.payloads.relay import Deliver
from flwr_replay.wire.records import array_record
from flwr_replay.wire.sealed import SEALED_NAME

SEALED = "sealed=true"
ABC = "abc"
SMALL = [*SHARDS, "classes=3", "model=mlp", "model.width=6", "batch_size=16", "device=cpu"]
PUSH, CWT = [*SMALL, "strategy=avgpush", SEALED], [*SMALL, "strategy=cwt", SEALED]
MODEL = {"run": "r", "kind": "model", "weight": 1.0}


def pinned_keys(folder, names=NAMES):
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
    messages = [message for _, asked, reply in grid.log for message in (asked, reply) if message.has_content()]
    parcels = parcels_in(messages)
    return bool(parcels) and all(name.rpartition(".")[2] == SEALED_NAME for name, _ in parcels)


def parcel(server, sender, exchange=1, scale=1.0, **other):
    """Seal a model as an institution does; return the parcel's array."""
    arrays = array_record({name: (scale * array).astype(array.dtype) for name, array in server.weights.items()})
    told = MODEL | {"options": shared_digest(server.config), "exchange": exchange} | other
    record = seal_of(server.state.parent.parent, sender, ABC).close(arrays, **told)
    return record[SEALED_NAME]


def deliver(server, *parcels, exchange=1, **other):
    """Deliver parcels, with equal shares; return the refusal."""
    arrays = ArrayRecord({f"{i:05d}.{SEALED_NAME}": array for i, array in enumerate(parcels)})
    n = len(parcels)
    asked = {"run": "r", "released_in": exchange, "exchange": exchange, "kept": 1 / (n + 1), "weights": [1.0] * n}
    asked |= {"shares": [1 / (n + 1)] * n, "parcels": list(range(1, n + 1))}
    return refusal(server.send(Deliver(arrays=arrays, **asked | other)))


def train(server, exchange, arrays=None):
    sent = {} if arrays is None else ArrayRecord({SEALED_NAME: arrays})
    return server.send(Train(arrays=sent, run="r", exchange=exchange, lr=0.1))


def push_again(exchange):
    return Push(run="r", exchange=exchange, lr=0.1, init_seed=1, committed=0)
