"""Data of the user's own: labels, masks and images are checked first, and then cast without loss, or refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Message

from flwr_replay.client_app import app_with
from flwr_replay.config.compose import compose
from flwr_replay.config.own_code import VARIABLE
from flwr_replay.data import Examples, examples_of, load
from flwr_replay.engines.inline import InlineGrid
from flwr_replay.errors import DataError
from flwr_replay.payloads.common import RollCall
from flwr_replay.server.asking import failure_of

X = np.random.default_rng(0).integers(0, 256, (6, 8, 8), np.uint8)
Y = np.array([0, 1, 1, 0, 1, 0])
MASKS = (X > 100).astype(np.uint8)
Read = Callable[..., Examples]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """Read what a function of the user's own returns, as a run would."""
    module: Any = ModuleType("handed")
    monkeypatch.setitem(sys.modules, "handed", module)
    monkeypatch.setenv(VARIABLE, "handed:load")

    def train(x: Any, y: Any, *options: str, kind: str = "classification") -> Examples:
        module.load = lambda data_dir: {"train": (x, y), "test": (x, y)}
        classes = 2 if kind == "classification" else 1
        given = [f"task.kind={kind}", f"classes={classes}", "task.size=8", "split=test", *options]
        return load(compose(["task=handed:load", *given]).task).train

    return train


@pytest.mark.parametrize(
    ("labels", "options"),
    [
        (Y.astype(float), ()),
        (Y.astype(bool), ()),
        (Y.astype(np.uint64), ()),
        (Y[:, None], ()),
        (Y.tolist(), ()),
        (Y.astype(str), ()),
        (pd.Series(Y, dtype="Int64"), ()),
        (torch.tensor(Y, dtype=torch.float16), ()),
        (np.array(["no", "yes"])[Y], ("class-names=[no,yes]",)),
        (pd.Categorical.from_codes(Y.tolist(), ["no", "yes"]), ("class-names=[no,yes]",)),
        (Y, ("class-names=[no,yes]",)),
        (Y.astype(bool), ("class-names=['False','True']",)),
        (Y == 0, ("class-names=['TRUE','FALSE']",)),  # once the other way round, without a word
        ([bool(y) for y in Y], ("class-names=['False','True']",)),
        (Y + 1, ("class-names=[1,2]",)),
        (Y + 1.0, ("class-names=[1,2]",)),
        (1 - Y, ("class-names=[1,0]",)),
        (np.ma.masked_array(Y, mask=False), ()),
    ],
)
def test_labels_are_classes_whatever_their_dtype(read: Read, labels: Any, options: tuple[str, ...]) -> None:
    read_y = read(X, labels, *options).y
    assert (read_y.dtype, read_y.tolist()) == (np.int64, Y.tolist())


def changed(y: Any, value: Any, dtype: Any = float) -> Any:
    array = np.array(y, dtype)
    array.flat[3] = value
    return array


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (changed(Y, np.nan), r"got 'nan' \(example 3 of task=handed:load, train\)"),
        (changed(Y, 0.9), "got '0.9'"),
        (changed(Y, -1), "got '-1.0'"),
        (changed(Y, -1, np.int8), "got '-1'"),
        (changed(Y, -100, np.int64), "got '-100'"),
        (changed(Y, np.inf), "got 'inf'"),
        (changed(Y, 2**63, np.uint64), "got '9223372036854775808'"),
        (changed(Y, 2, np.int64), "got '2'"),
        (changed(Y, None, object), "got 'None'"),
        (pd.Series([0, 1, None, 0, 1, 0], dtype="Int64"), "got 'nan'"),
        (np.array(["no", "yes"])[Y], r"must lie in 0..1; got 'no' .* by task.class-names"),
        (np.array([b"0", b"1"])[Y], "got "),
        (Y + 1j, "got "),
        (np.array(["2020-01-01"] * 6, "datetime64[D]"), "got "),
        (np.eye(2)[Y], r"must have the shape \(6,\); got \(6, 2\) .* of one-hot rows the argmax"),
        (Y[:5], "one label"),
        (np.ma.masked_array(Y, mask=Y == 1), "some values are masked"),
        ([[0], [1, 0], 1, 0, 1, 0], "no images with labels"),
    ],
)
def test_other_labels_are_refused_in_one_line(read: Read, labels: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(X, labels)
    assert "\n" not in str(caught.value)
    assert "label" in str(caught.value)


@pytest.mark.parametrize(
    ("labels", "names", "message"),
    [
        (Y, "[1,2]", "unknown class '0'"),  # once a class was missing, without a word
        (Y + 2, "[1,2]", "unknown class '3'"),
        (Y.astype(str), "[no,yes]", "unknown class '0'"),
        (np.array(["no", "Yes"])[Y], "[no,yes]", "did you mean yes"),
        (Y.astype(bool), "[yes,no]", "boolean labels are for classes true and false; got 'yes, no' .task=handed:load"),
    ],
)
def test_a_label_is_no_position_among_names_that_could_be_it(read: Read, labels: Any, names: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(X, labels, f"class-names={names}")


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64, np.float32, np.float64])
def test_masks_of_0_and_1_are_taken_whatever_their_dtype(read: Read, dtype: Any) -> None:
    for masks in (MASKS.astype(dtype), MASKS.astype(dtype)[:, None]):
        y = read(X, masks, kind="segmentation").y
        assert (y.dtype, y.tolist()) == (np.uint8, MASKS.tolist())


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        (changed(MASKS, -1, np.int64), r"masks of 0 and 1; got -1 \(example 0, row 0, column 3, of task=handed:load"),
        (MASKS * 255, "got 255"),
        (changed(MASKS, 256, np.int64), "got 256"),
        (changed(MASKS, 0.3), "got 0.3"),
        (changed(MASKS, np.nan), "got nan"),
        (MASKS.astype(str), "got . as <U"),
        (MASKS.astype(object), "got . as object"),
        (MASKS[:, :4], r"must have the shape \(6, 8, 8\); got \(6, 4, 8\)"),
        (Y, r"must have the shape \(6, 8, 8\); got \(6,\)"),
        (np.stack([MASKS, 1 - MASKS], 1), r"got \(6, 2, 8, 8\)"),
    ],
)
def test_other_masks_are_refused(read: Read, masks: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(X, masks, kind="segmentation")


def test_targets_of_a_regression_are_finite_numbers(read: Read) -> None:
    assert read(X, Y[:, None] + 0.5, kind="regression").y.tolist() == (Y + 0.5).tolist()
    for value, message in ((np.nan, "nan"), (-np.inf, "-inf"), (1e300, "1e.300")):  # the last has no float32
        with pytest.raises(DataError, match=f"must be finite numbers; got {message} .example 3 of"):
            read(X, changed(Y, value), kind="regression")
    with pytest.raises(DataError, match="must be finite numbers; got old"):
        read(X, np.array(["old"] * 6), kind="regression")


@pytest.mark.parametrize("dtype", [np.uint16, np.int64, np.int8, bool, complex, object, str])
def test_images_whose_scale_is_not_known_are_refused(read: Read, dtype: Any) -> None:
    with pytest.raises(DataError, match="images must be uint8 or floats"):
        read(X.astype(dtype), Y)
    assert read(X / 255, Y).x.dtype == np.float32


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (changed(Y, np.nan, np.float32), "finite numbers; got nan"),
        (changed(Y, -100, np.int64), "got -100"),  # which PyTorch's loss would leave out
        (MASKS * 255, "masks of 0 and 1; got 255"),
        (np.array(["no", "yes"])[Y], "got no"),
    ],
)
def test_an_own_apps_labels_are_checked_too(labels: Any, message: str) -> None:
    x = X[:, None]
    for given in ((x, labels), list(zip(x, labels, strict=True))):
        with pytest.raises(DataError, match=message):
            examples_of(given)


@pytest.mark.parametrize(("last", "private"), [(2, True), (7, True), (7, False)])
def test_under_dp_an_app_with_own_data_does_not_tell_a_label_above_the_classes(
    tmp_path: Path, last: int, private: bool
) -> None:
    """The server chooses classes, and could ask by it whether anybody has a rare class."""
    own = np.zeros((20, 8, 8), np.uint8), np.append(np.arange(19) % 3, last)
    options = "dp=gradient target-epsilon=8 delta=0.01" if private else ""
    options = f"strategy=fedsgd task=folder channels=1 task.size=8 classes=3 model=mlp split=test {options}"
    node = {"partition-id": 0, "num-partitions": 4, "state": str(tmp_path)}
    grid = InlineGrid(app_with(lambda _: {"train": own, "test": own}), {"overrides": options}, [node])
    request = RollCall(strategy="fedsgd", run="r")
    reply = grid.answer(Message(request.encode(), next(iter(grid.get_node_ids())), request.message_type))
    if private:
        assert reply.content["metrics"]["num-examples"] == 20
    else:
        assert "must lie in 0..2" in failure_of(reply).failure


def test_an_app_with_own_data_that_cannot_be_handed_over_answers_with_no_other_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr("flwr_replay.client_app.take_data", full)
    node = {"partition-id": 0, "num-partitions": 4, "state": str(tmp_path)}
    grid = InlineGrid(app_with(lambda _: {}), {"overrides": "strategy=fedavg task=digits"}, [node])
    request = RollCall(strategy="fedavg", run="r")
    reply = grid.answer(Message(request.encode(), next(iter(grid.get_node_ids())), request.message_type))
    assert failure_of(reply)
    assert "num-examples" not in reply.content.get("metrics", {})
