"""An institution that answers what cannot be is named and left out; the others go on, and no weights are spoiled."""

import shlex

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from grid import Grid
from harness import SHARDS, fresh, node_configs, write_shards

from flwr_replay.client_app import app
from flwr_replay.config.compose import compose
from flwr_replay.config.halves import load_strategy
from flwr_replay.errors import DivergedError
from flwr_replay.learning.tasks import make_task
from flwr_replay.models.zoo import backbone
from flwr_replay.movements.base import Settings
from flwr_replay.server.recorder import Recorder
from flwr_replay.wire.records import opened

JOB = [*SHARDS, "classes=3", "model=cnn", "model.width=4", "batch_size=16", "rounds=2"]
SIZES = {"a": 40, "b": 33, "c": 20}
FIRST = "conv1.conv.weight"


def start(folder, strategy, lie, lies_in="train", sizes=SIZES, liars="b"):
    write_shards(folder, sizes)
    overrides = [f"strategy={strategy}", *JOB]
    config, recorder = compose(overrides), Recorder()
    grid = Grid(app, {"overrides": shlex.join(overrides)}, node_configs(folder, folder / "state"))

    def after(grid, message, reply):
        if grid.asked[-1].name in liars and message.metadata.message_type == lies_in:
            lie(reply.content)

    grid.after = after
    settings = Settings(
        roll_call=True,
        training=config.training,
        nodes=3,
        task=make_task(config.task),
        model=backbone(config.model, config.task),
        input_shape=(1, 8, 8),
    )
    method = load_strategy(strategy)[0](config.strategy, settings, recorder)
    final = opened(method.start(grid, fresh(config), config.rounds).arrays)
    return final, recorder


def changed(**arrays):
    """Replace arrays of a reply; None takes one away."""

    def lie(content):
        record = ArrayRecord({name: array for name, array in content["arrays"].items() if name != FIRST})
        if arrays["first"] is not None:
            record[FIRST] = Array(arrays["first"])
        content["arrays"] = record

    return lie


def number(name, value, record="metrics"):
    def lie(content):
        content[record][name] = value

    return lie


LIES = {
    "a shape of its own": (changed(first=np.zeros((1,), np.float32)), "weights must come back as they were sent"),
    "whole numbers": (changed(first=np.zeros((4, 1, 3, 3), np.int64)), "weights must come back as they were sent"),
    "a weight is missing": (changed(first=None), f"{FIRST!r} is missing"),
    "a list for a count": (number("num-examples", [1, 2]), "num_examples must be int"),
    "all the weight": (number("num-examples", 10**12), "num_examples must be 33, by the roll call; got"),
    "some of the weight": (number("num-examples", 34), "num_examples must be 33, by the roll call; got 34"),
    "more passes than there are": (number("examples-seen", 10**15), "examples_seen must be at most"),
    "more steps than examples": (number("num-steps", 33), "num_steps must be at most examples_seen, here 32; got"),
    "steps below none": (number("num-steps", -1), "num_steps must be int"),
    "steps that are no number": (number("num-steps", float("nan")), "num_steps must be int"),
    "no steps said": (lambda content: content["metrics"].pop("num-steps"), "num_steps"),
    "fewer than none": (number("num-examples", -5), "num_examples must be int"),
    "a loss that is no number": (number("train-loss", float("nan")), "train_loss must be float"),
}


@pytest.mark.sampled(1, "lie")
@pytest.mark.parametrize("strategy", ["fedavg", "fedavgm", "cwt"])
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_reported_and_changes_nothing(tmp_path, strategy, lie):
    spoil, reported = LIES[lie]
    final, recorder = start(tmp_path, strategy, spoil)
    assert {failure["institution"] for failure in recorder.failures} == {"b"}
    assert all(reported in failure["reason"] for failure in recorder.failures)
    assert final[FIRST].shape == (4, 1, 3, 3)
    assert all(np.isfinite(array).all() for array in final.values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["fedavg", "cwt"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_weights_that_are_not_finite_are_left_out_and_their_sender_named(tmp_path, strategy, value):
    final, recorder = start(tmp_path, strategy, changed(first=np.full((4, 1, 3, 3), value, np.float32)))
    assert {(failure["institution"], failure["reason"]) for failure in recorder.failures} == {
        ("b", f"weights must be finite and at most 1e+06 in size; {FIRST!r} is not: lower training.lr")
    }
    assert all(np.isfinite(array).all() for array in final.values())


@pytest.mark.parametrize(
    ("first", "more", "message"),
    [
        (None, (), f"{FIRST!r} is missing"),
        (np.zeros((1,), np.float32), (), "weights must come back as they were sent"),
        (np.zeros((4, 1, 3, 3), np.float32), ("conv1.norm.weight",), "'conv1.norm.weight' is"),
    ],
)
@pytest.mark.parametrize("liars", ["a", "b"])
def test_of_batch_norm_that_stays_nothing_may_come_and_of_the_rest_all_must(tmp_path, first, more, message, liars):
    def lie(content):
        changed(first=first)(content)
        for name in more:
            content["arrays"][name] = Array(np.zeros(4, np.float32))

    final, recorder = start(tmp_path, "fedbn", lie, liars=liars)
    assert {failure["institution"] for failure in recorder.failures} == {liars}
    assert all(message in failure["reason"] for failure in recorder.failures)
    assert all(np.isfinite(array).all() for array in final.values())


@pytest.mark.parametrize("strategy", ["fedavg", "cwt"])
def test_a_run_in_which_all_diverge_stops_and_names_the_first(tmp_path, strategy):
    spoil = changed(first=np.full((4, 1, 3, 3), np.nan, np.float32))
    with pytest.raises(DivergedError, match=r"^[abc]: weights must be finite .* lower training.lr"):
        start(tmp_path, strategy, spoil, liars="abc")


@pytest.mark.parametrize(
    ("name", "value", "reported"),
    [
        ("confusion", 5, "confusion must be a list of int"),
        ("confusion", [0] * 9, "confusion must count 9 of 9 examples; got 0"),
        ("confusion", [10**9, *[0] * 8], "confusion must count 9 of 9 examples"),
        ("num-examples", 10**12, "num_examples must be 1 to 1000000000"),
        ("loss", 1e308, "loss must be float, finite"),
        ("confusion", [1, 2], "must hold 9 counts"),
        ("num-examples", 0, "num_examples must be 1 to 1000000000; got 0"),
        ("loss", float("inf"), "loss must be float"),
    ],
)
def test_an_evaluation_that_cannot_be_is_left_out(tmp_path, name, value, reported):
    _, recorder = start(tmp_path, "fedavg", number(name, value), lies_in="evaluate")
    assert {failure["institution"] for failure in recorder.failures} == {"b"}
    assert all(reported in failure["reason"] for failure in recorder.failures)


def test_an_encoder_that_is_not_whole_is_not_used(tmp_path):
    def lie(content):
        if "validation-loss" in content["metrics"]:
            changed(first=None)(content)

    final, recorder = start(tmp_path, "fedreplay", lie, sizes={"a": 40, "b": 99, "c": 20})
    assert [failure["institution"] for failure in recorder.failures] == ["b"]
    assert "they differ at" in recorder.failures[0]["reason"]
    assert FIRST in final
