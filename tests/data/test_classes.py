"""From a label to a class: by name and however it is spelled, never by position."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flwr_replay.config.sections import TaskConfig
from flwr_replay.data.classes import Classes
from flwr_replay.data.manifest import ManifestRow, words_of
from flwr_replay.errors import ConfigError, DataError

Task = Callable[..., TaskConfig]


@pytest.mark.parametrize(
    ("names", "label", "number"),
    [
        (("1", "2"), "1", 0),
        (("1", "2"), " 2 ", 1),
        (("1", "2"), "02", 1),
        (("1", "2"), "2.0", 1),
        (("1.0", "2.0"), "+1", 0),
        (("10", "2"), "2", 1),
        (("-1", "1"), "-1.0", 0),
        (("ill", "well"), "well", 1),
        (("caf\u00e9", "well"), "cafe\u0301", 0),
        ((), "1.", 1),
        ((), "-0", 0),
    ],
)
def test_a_label_is_a_class_however_it_is_spelled(task: Task, names: tuple[str, ...], label: str, number: int) -> None:
    assert Classes(task("folder", classes=2, class_names=names)).number(label, "line 7") == number


@pytest.mark.parametrize(
    ("names", "label", "message"),
    [
        (("1", "2"), "0", r"unknown class '0' \(line 7\): known: 1, 2"),
        (("ill", "well"), "0", "unknown class '0'"),
        (("ill", "well"), "Ill", "did you mean ill"),
        (("ill", "well"), "", "unknown class ''"),
        ((), "2", r"must lie in 0..1; got '2' \(line 7\)"),
        ((), "-1", "got '-1'"),
        ((), "0.5", "got '0.5'"),
        ((), "nan", "got 'nan'"),
        ((), "\u0661", "must lie in 0..1"),  # an Arabic digit
        ((), "9" * 5000, "must lie in 0..1"),
    ],
)
def test_another_label_is_refused_and_is_no_position(
    task: Task, names: tuple[str, ...], label: str, message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        Classes(task("folder", classes=2, class_names=names)).number(label, "line 7")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("twice", [("1", "01"), ("2.0", "2"), ("caf\u00e9", "cafe\u0301"), ("a", " a")])
def test_one_class_has_no_two_names(task: Task, twice: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="differ by more than spelling"):
        task("folder", classes=2, class_names=twice)


def test_words_are_each_once_and_not_mixed_with_numbers() -> None:
    rows = [
        ManifestRow(Path("x"), label, f"line {n}") for n, label in enumerate(("ill", "caf\u00e9", "cafe\u0301", "ill"))
    ]
    assert words_of(rows) == ["caf\u00e9", "ill"]
    assert words_of([ManifestRow(Path("x"), "01", ""), ManifestRow(Path("x"), "2.0", "")]) == []
    with pytest.raises(DataError, match=r"all numbers or all names; got 'café' and '3' \(here\)"):
        words_of([*rows, ManifestRow(Path("x"), "3", "here")])
