"""One institution answers what it likes: the run ends with the others' result, or with one line.

FLWR_REPLAY_FUZZ is the number of mutated answers of each type; each test is one type of one method.
"""

import contextlib
import os
import random
import shlex

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from grid import Grid

from flwr_replay.client_app import app
from flwr_replay.config.catalogue import choices
from flwr_replay.config.compose import compose
from flwr_replay.errors import FlwrReplayError
from flwr_replay.payloads.common import Failure
from flwr_replay.report.progress import Display
from flwr_replay.runs.execute import execute

MUTANTS = int(os.environ.get("FLWR_REPLAY_FUZZ", "1"))
ROUNDS = min(MUTANTS, 25)
NAMES = {2: "institution-1", 3: "institution-2", 4: "institution-3"}
ONCE = ("roll-call", "train-generator", "encode-images", "train-prior")  # are asked once in a run
JOB = ["task=digits", "partition=iid", "partition.size=20", "model=mlp", "model.width=4", "batch_size=10", "device=cpu"]
GENERATOR = ["generator.epochs=1", "generator.width=4", "prior.epochs=1", "prior.width=4", "prior.layers=1"]
SMALL = ["replay.missing=say", *GENERATOR, "model=cnn"]
OPTIONS = {
    "fedreplay": [["strategy.encoder_epochs=1", "chunk_mb=0.004"]],
    "splitnn": [[], ["share_labels=false"]],
    "cwt": [[], ["replay=vqvae2", *SMALL], ["replay=pixelcnn", *SMALL]],
    "feder": [["buffer=12", *GENERATOR]],
    "syncentral": [["buffer=12", *GENERATOR]],
}
NUMBERS = [0, -1, 1, 3, 10**6, 10**12, 2**62, 0.5, -0.0, 1e18, 1e200, 1e308, float("nan"), float("inf"), -float("inf")]
TEXTS = ["", " ", "a\nb", "../../x", "institution-1", "\x1b[31m", "x" * 5000, "nan", "DivergedError"]


class Liar:
    """Changes one institution's answers of one stage; notes which stages there are."""

    def __init__(self, node, stage, seed):
        self.node, self.stage, self.draw, self.mutants = node, stage, random.Random(seed), 0
        self.stages, self.others = {}, []

    def __call__(self, grid, message, reply):
        node, stage = message.metadata.dst_node_id, grid.asked[-1].stage
        self.stages.setdefault(stage, set()).add(node)
        self.others.append(reply)
        if (node, stage) != (self.node, self.stage) or not reply.has_content():
            return reply
        self.mutants += 1
        return mutated(reply, message, self.draw, self.others)


def mutated(reply, message, draw, others):
    """Return the reply with one to three things changed, or another in its place."""
    kind = draw.random()
    if kind < 0.05:
        reason = draw.choice([*TEXTS, "Traceback\n  x\n"])
        return Message(Error(draw.choice([0, 1, 2, 3, 99]), reason), reply_to=message)
    if kind < 0.12:
        failure = Failure(failure=draw.choice(TEXTS), error=draw.choice(TEXTS), name=draw.choice(TEXTS)).encode()
        if draw.random() < 0.5:
            failure.config_records.setdefault("config", ConfigRecord())[draw.choice(["more", "failure", "name"])] = (
                draw.choice([*TEXTS, 5, [1, 2], 0.5, b"x"])
            )
        return Message(failure, reply_to=message)
    if kind < 0.18:
        other = draw.choice([sent for sent in others if sent.has_content()])
        return Message(other.content, reply_to=message)
    content = RecordDict({name: copied_record(record) for name, record in reply.content.items()})
    for _ in range(draw.randint(1, 3)):
        with contextlib.suppress(ValueError, TypeError):  # what is spoiled already, or Flower's records refuse
            change_content(content, draw)
    return Message(content, reply_to=message)


def copied_record(record):
    return type(record)(dict(record.items()))


def change_content(content, draw):
    names = list(content)
    kind = draw.random()
    if not names or kind < 0.06:
        content[draw.choice(["arrays", "metrics", "config", "else"])] = draw.choice(
            [MetricRecord({"x": 1.0}), ConfigRecord({"stage": "train", "x": "y"}), ArrayRecord([np.zeros(2)])]
        )
        return
    name = draw.choice(names)
    record = content[name]
    if kind < 0.1:
        del content[name]
    elif not len(record) or kind < 0.2:
        add_entry(record, draw)
    else:
        key = draw.choice(list(record))
        how = draw.random()
        if how < 0.1:
            del record[key]
        elif how < 0.2:
            record[draw.choice(["x", key + "x", "num-examples", "epsilon", "delta"])] = record.pop(key)
        elif isinstance(record, ArrayRecord):
            record[key] = spoiled(record[key], draw)
        elif isinstance(record, MetricRecord):
            record[key] = number(record[key], draw)
        else:
            record[key] = draw.choice([*TEXTS, *NUMBERS, b"\xff", [1, 2], ["a"], True])


def add_entry(record, draw):
    key = draw.choice(["more", "epsilon", "delta", "failure", "name", "num-examples", "raw-bytes"])
    if isinstance(record, ArrayRecord):
        record[key] = Array(np.zeros(3, np.float32))
    elif isinstance(record, MetricRecord):
        record[key] = draw.choice(NUMBERS)
    else:
        record[key] = draw.choice(TEXTS)


def number(value, draw):
    if isinstance(value, list):
        values = list(value) or [0]
        how = draw.random()
        if how < 0.3:
            return values[: draw.randrange(len(values))] or [draw.choice([0, 5])]
        if how < 0.5:
            return values * 2
        if how < 0.7:
            return [draw.choice([n for n in NUMBERS if isinstance(n, type(values[0]))]) for _ in values]
        values[draw.randrange(len(values))] += draw.choice([1, -1, 10**12])
        return values
    if draw.random() < 0.2:
        return [draw.choice([1, 2]), 3]
    return draw.choice([*NUMBERS, value + 1, value - 1, -value, value * 1.5, float(value)])


def spoiled(array, draw):
    values = array.numpy().copy()
    how = draw.randrange(11)
    if how == 0:
        return Array(array.dtype, array.shape, array.stype, array.data[: draw.randrange(len(array.data))])
    if how == 1:
        return Array(array.dtype, array.shape, array.stype, array.data + b"more")
    if how == 2:
        return Array(draw.choice(["float64", "nonsense", "object", ""]), array.shape, array.stype, array.data)
    if how == 3:
        shape = draw.choice([(), (-1,), (10**13,), (2, 0), tuple(array.shape)[::-1]])
        return Array(array.dtype, shape, draw.choice([array.stype, "pickle", ""]), array.data)
    if how == 4:
        return Array(values.astype(draw.choice(["float64", "int64", "uint8", "float16", "complex64", "bool", "U3"])))
    if how == 5:
        return Array(
            draw.choice([values.ravel()[:0], values[..., None], values.ravel(), np.repeat(values[None], 2, 0)])
        )
    if how == 6 and values.ndim:
        return Array(np.concatenate([values, values]))
    if values.size:
        wild = [0, 1, -1, 9, 255, 1e10, 3e38, float("nan"), float("inf"), -float("inf")]
        with np.errstate(all="ignore"):
            values.flat[draw.randrange(values.size) if how < 9 else slice(None)] = np.array(
                draw.choice(wild if values.dtype.kind == "f" else wild[:5])
            ).astype(values.dtype)
    return Array(values)


def run(folder, job, seed, stage, liar, rounds=ROUNDS):
    """Run once; return the liar, and whether the run ended with a result."""
    overrides = [*JOB, *job, f"rounds={rounds}", "nodes=3", f"runs_dir={folder}/runs"]
    grid = Grid.simulated(app, {"overrides": shlex.join(overrides)}, 3, state=f"{folder}/state")
    grid.after = Liar(liar, stage, seed)
    try:
        result, _ = execute(grid, compose(overrides), Display())
    except FlwrReplayError as error:
        [_] = str(error).splitlines()
        return grid.after, False
    final = result["final"]["institutions"]
    robbed = [
        int(failure["institution"]) for failure in result["failures"] if "two SuperNodes answer" in failure["reason"]
    ]
    assert {name for node, name in NAMES.items() if node not in (liar, *robbed)} <= final.keys()
    assert all(np.isfinite(value) for metrics in final.values() for value in metrics.values())
    return grid.after, True


METHODS = [(name, options) for name in choices("strategy") for options in OPTIONS.get(name, [[]])]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "options"), METHODS, ids=[" ".join([name, *more[:1]]) for name, more in METHODS])
def test_whatever_one_answers_the_run_ends_with_the_others_result_or_one_line(tmp_path, monkeypatch, name, options):
    monkeypatch.setattr(os, "fsync", lambda file: None)  # the machine is not switched off meanwhile
    job = [f"strategy={name}", *options]
    honest, ended = run(tmp_path, job, 0, "", 0, rounds=1)
    assert ended
    for stage, nodes in sorted(honest.stages.items()):
        liar, rounds = 3 if 3 in nodes else min(nodes), 1 if stage in ONCE else ROUNDS
        count, seed, ends = 0, 0, 0
        while count < MUTANTS:
            lies, ended = run(tmp_path, job, f"{name} {stage} {seed}", stage, liar, rounds)
            assert lies.mutants
            assert ended or name == "central"  # where nobody else trains
            count, seed, ends = count + lies.mutants, seed + 1, ends + ended
        print(f"{' '.join(job[:2])}, {stage}: {count} mutated answers in {seed} runs, {ends} with the others' result")
