"""A hospital with a small cell: 60 training and 60 test examples, 3 of class 0, 20 of class 1, 37 of class 2."""

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from harness import SHARDS
from hostile_server import HostileServer

from flwr_replay.engines.inline import InlineGrid
from flwr_replay.institution.guard import guard
from flwr_replay.memory import forget
from flwr_replay.payloads.common import Evaluate

COUNTS = (3, 20, 37)
FLOOR = "min-count: 10\n"
TASK = [*SHARDS, "classes=3", "model=mlp", "model.width=6", "batch_size=16", "device=cpu", "rounds=1"]
HEAD = "head.fc"


def write_cells(folder, name="a", counts=COUNTS, tests=COUNTS, labels=(0, 1, 2), size=8):
    """Write a hospital with so many training and test images of each class; of class c they are bright by c."""
    rng, arrays = np.random.default_rng(0), {}
    for split, of_each in (("train", counts), ("test", tests)):
        y = np.repeat(labels, of_each)
        noise = rng.integers(0, 60, (len(y), size, size), np.uint8)
        arrays[f"{split}_images"] = noise + (80 * y % 200).astype(np.uint8)[:, None, None]
        arrays[f"{split}_labels"] = y
    np.savez(folder / f"{name}.npz", **arrays)
    forget()


def server_of(folder, *options, policy=FLOOR, task=TASK, **more):
    return HostileServer(folder, *task, *(options or ["strategy=fedavg"]), policy=policy, **more)


def constant_weights(server, scores):
    """Return weights whose answer is the same for every image: the class with the largest score."""
    blank = {name: np.zeros_like(array) for name, array in server.weights.items()}
    return {**blank, f"{HEAD}.bias": np.array(scores, np.float32)}


def ask_evaluation(server, arrays, run="r", exchange=1, **more):
    return server.send(Evaluate(arrays=arrays, run=run, exchange=exchange, **more))


def answered_by(folder, numbers, **more):
    """Return a server of an institution that answers by an app of its own, perhaps with a record more."""
    own, server = ClientApp(mods=[guard]), server_of(folder)
    [here] = server.grid.contexts.values()

    @own.train()
    @own.evaluate()
    def answer(message, context):
        further = {name: ConfigRecord(record) for name, record in more.items()}
        return Message(RecordDict({"metrics": MetricRecord(numbers(context)), **further}), reply_to=message)

    server.grid = InlineGrid(own, here.run_config, [here.node_config])
    return server
