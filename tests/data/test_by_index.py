"""Who owns which example, as a file says; indices of the data's own training examples, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from flwr_replay.config.sections import PartitionConfig
from flwr_replay.data import Dataset, Examples, Partition, partition
from flwr_replay.data.dealt import dealt, loaded
from flwr_replay.errors import ConfigError, DataError, FlwrReplayError
from flwr_replay.runs.options import resolve


def data(n: int, patients: list[str] | None = None) -> Dataset:
    y = np.arange(n) % 2
    x = np.arange(n, dtype=np.float32).reshape(-1, 1, 1, 1)
    named = None if patients is None else np.asarray(patients, np.str_)
    return Dataset("made", Examples(x, y, patients=named), Examples(x[:6], y[:6]))


def written(path: Path, content: object) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return path


def dealt_by_file(file: Path, dataset: Dataset, nodes: int = 2) -> Partition:
    return partition(dataset, PartitionConfig(name="index", file=str(file)), nodes, 0)


@pytest.mark.parametrize("form", ["csv", "semicolons", "json", "lists"])
def test_each_has_what_the_file_says_under_its_name(tmp_path: Path, form: str) -> None:
    rows = "".join(f"{index},{name}\n" for name, own in (("St. B", (7, 0)), ("A", (3, 4, 2))) for index in own)
    table = f"\ufeffindex,institution\n{rows}"
    content = {
        "csv": table,
        "semicolons": table.replace(",", ";").replace("\n", "\r\n"),
        "json": {"St. B": [7, 0], "A": [3, 4, 2]},
        "lists": [[7, 0], [3, 4, 2]],
    }[form]
    dealing = dealt_by_file(written(tmp_path / f"p.{'json' if form in ('json', 'lists') else 'csv'}", content), data(9))
    assert dealing.names == (("institution-1", "institution-2") if form == "lists" else ("St. B", "A"))
    assert [shard.tolist() for shard in dealing.train] == [[0, 7], [2, 3, 4]]
    assert (dealing.dropped, sum(map(len, dealing.test))) == (4, 6)


def test_held_out_examples_shift_no_index(tmp_path: Path) -> None:
    plain = loaded(resolve(["task=digits", "split=test"], "", "")[1].task)
    file = written(tmp_path / "p.json", {"b": list(range(0, 400)), "a": list(range(700, 1100)), "c": [1437]})
    _, config = resolve(["task=digits", "partition=index", f"partition.file={file}"], "", "")
    assert config.nodes == 3  # as the file says
    dealing, held = dealt(config.task, config.partition, config.nodes, 0), loaded(config.task)
    assert dealing.names == ("b", "a", "c")
    assert dealing.val is not None
    assert held.val is not None
    for k, own in enumerate((slice(0, 400), slice(700, 1100), slice(1437, 1438))):
        mine = [*held.train.x[dealing.train[k]], *held.val.x[dealing.val[k]]]
        assert sorted(x.tobytes() for x in mine) == sorted(x.tobytes() for x in plain.train.x[own])
    assert dealing.dropped == len(held.train) - sum(map(len, dealing.train)) > 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("idx,institution\n1,a\n", "must have a column 'index'.*did you mean idx"),
        ("index,institution\n1.0,a\n2,b\n", r"whole number from 0; got '1\.0' \(.*line 2\)"),
        ("index,institution\n1,a\n,b\n", r"whole number from 0; got '' \(.*line 3\)"),
        ("index,institution\n1,a\n2,\n", "must name its institution; got an empty name"),
        ("index,institution\n", "must name its institution; got none"),
        ("index,institution\n-1,a\n2,b\n", "count the 9 training examples of made from 0; got -1: correct it"),
        ("index,institution\n9,a\n2,b\n", "got 9, as if counted from 1"),
        ("index,institution\n1,a\n1,b\n", "one owner; index 1 is in .* twice"),
        ({"a": [1, 2.0], "b": [3]}, r"got '2\.0' \(a in"),
        ({"a": [1, True], "b": [3]}, "got 'true'"),
        ({"a": [1, [2]], "b": [3]}, r"got '\[2\]'"),
        ({"a": [1], "b": []}, "every institution must hold train examples; b of 2 got none"),
        ({"a": [10**30], "b": [1]}, "got 1,000,000"),
        ({"../a": [1], "b": [3]}, "an institution's name must be"),
        ('{"a": [1], "a": [2]}', "each institution once; .*is there twice"),
        ("[[1], [2],", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ({"train": {"a": [1]}}, "or a list of such lists"),
        ({"a": [1], "b": [2], "c": [3]}, "has 3 institutions; got nodes=2: set nodes=3"),
    ],
)
def test_what_deals_no_examples_is_one_line(tmp_path: Path, content: object, said: str) -> None:
    suffix = "csv" if isinstance(content, str) and content.startswith("i") else "json"
    with pytest.raises(FlwrReplayError, match=said) as caught:
        dealt_by_file(written(tmp_path / f"p.{suffix}", content), data(9))
    assert len(caught.value.args) == 1
    assert "\n" not in str(caught.value)


def test_all_faults_are_told_at_once_and_a_patient_is_at_one_institution(tmp_path: Path) -> None:
    file = written(tmp_path / "p.json", {"a": [0, 1, 9, 0], "b": [2, 3, -1]})
    with pytest.raises(DataError) as caught:
        dealt_by_file(file, data(9, ["p", "p", "p", "q", "r", "r", "s", "t", "u"]))
    assert len(caught.value.args) == 3  # of a rule, the first
    assert caught.value.args[0].endswith("got 9: correct it (the first of 2)")
    assert "those of p are at several" in caught.value.args[2]


def test_images_in_files_have_a_manifest_and_no_file_is_no_partition(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="column site, and choose partition=natural"):
        resolve(["task=folder", "channels=1", "classes=2", "class-names=[a,b]", "partition=index"], "", "")
    with pytest.raises(ConfigError, match=r"needs partition.file, a table \.csv or a \.json"):
        resolve(["task=digits", "partition=index"], "", "")
    with pytest.raises(DataError, match=r"nope\.json must be JSON, .*No such file"):
        dealt_by_file(tmp_path / "nope.json", data(9))
