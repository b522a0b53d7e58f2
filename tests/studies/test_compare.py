"""A comparison: cells that go on where they stopped, pairs that begin alike, intervals, pictures, wrong lines."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import older
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import gamma

from flwr_replay.errors import ConfigError, DivergedError, RunError
from flwr_replay.files.atomic import alone
from flwr_replay.report.comparison import interval, paired_difference, summarise
from flwr_replay.report.pages import write_compare_page
from flwr_replay.report.run_files import read_result, write_result
from flwr_replay.report.texts import table
from flwr_replay.studies import cells as cells_module
from flwr_replay.studies.compare import compare_strategies

SMALL = ["model=mlp", "width=8", "rounds=2", "nodes=3", "partition.size=60", "ks=0.6", "device=cpu"]


def compare(runs: Path, names: str, *options: str, **more: Any) -> tuple[str, dict[str, Any]]:
    arguments = {"against": "", "jobs": 1, "runs_dir": runs, **more}
    given = {option.partition("=")[0] for option in options}
    small = [option for option in SMALL if option.partition("=")[0] not in given]
    return compare_strategies(names.split(","), [*small, *options], **arguments)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def compared(runs: Path) -> tuple[str, dict[str, Any]]:
    return compare(runs, "local,fedavg,fedreplay,fedreplay:cut=hidden1:patience=1", "seeds=2", "fedreplay.cut=hidden2")


def cell_of(report: dict[str, Any], label: str, seed: int) -> dict[str, Any]:
    return next(c for c in report["cells"] if c["label"] == label and c["seed"] == seed)


def fail_if_run(cell: cells_module.Cell, display: Any) -> dict[str, Any]:
    raise AssertionError(f"{cell.folder.name} is run again")


# --- cells ------------------------------------------------------------------------------------------------------------


def test_a_comparison_leaves_its_data_and_pictures(compared: tuple[str, dict[str, Any]]) -> None:
    text, report = compared
    folder = Path(report["folder"])
    assert json.loads((folder / "compare.json").read_text())["cells"] == report["cells"]
    for name in ("compare.png", "curves.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert report["against"] == "fedreplay:cut=hidden1:patience=1"
    assert {c["result"]["versions"]["flwr-replay"] for c in report["cells"]} == {"0.1.0"}
    assert "\x1b" not in text
    assert all(label in text for label in report["strategies"])
    assert "worst institution" in text


def test_finished_cells_are_not_repeated(
    runs: Path, compared: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells_module, "_run", fail_if_run)
    _, again = compare(runs, "fedavg,local", "seeds=2", against="local", metric="loss")
    assert cell_of(again, "fedavg", 1)["result"] == cell_of(compared[1], "fedavg", 1)["result"]
    assert not again["higher-is-better"]
    own = (
        cell_of(again, "fedavg", 0)["result"]["final"]["institutions"],
        cell_of(again, "fedavg", 1)["result"]["final"]["institutions"],
    )
    worst = np.mean([max(metrics["loss"] for metrics in institutions.values()) for institutions in own])
    assert again["strategies"]["fedavg"]["worst-institution"] == pytest.approx(worst)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lost", ["page", "result", "checkpoints"])
def test_only_the_broken_cell_is_run_again_and_ends_alike(
    lost: str, runs: Path, compared: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(compared[1]["folder"]).parent / "local-seed1"
    if lost == "page":  # killed before all was added to the result
        (folder / "report.html").unlink()
        write_result(folder, {key: value for key, value in read_result(folder).items() if key != "skew"})
    else:
        (folder / "result.json").unlink()
    if lost == "checkpoints":
        shutil.rmtree(folder / "checkpoints")
    ran, run = [], cells_module._run

    def noted(cell: cells_module.Cell, display: Any) -> dict[str, Any]:
        ran.append((cell.folder.name, cell.begun))
        return run(cell, display)

    monkeypatch.setattr(cells_module, "_run", noted)
    _, again = compare(runs, "local,fedavg", "seeds=2")
    assert ran == [("local-seed1", lost != "checkpoints")]
    for key in ("final", "examples-seen", "rounds", "skew"):
        assert cell_of(again, "local", 1)["result"][key] == cell_of(compared[1], "local", 1)["result"][key]


def test_a_users_file_in_a_cell_without_checkpoint_stops_that_cell_only(runs: Path, tmp_path: Path) -> None:
    _, report = compare(tmp_path, "local,fedavg", "seeds=1", "rounds=1")
    folder = Path(report["folder"]).parent / "local-seed0"
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints")
    (folder / "notes.txt").write_text("mine")
    text, report = compare(tmp_path, "local,fedavg", "seeds=1", "rounds=1")
    assert "notes.txt" in cell_of(report, "local", 0)["error"]
    assert "notes.txt" in text
    assert (folder / "notes.txt").read_text() == "mine"
    assert cell_of(report, "fedavg", 0)["result"]


def test_one_failure_is_reported_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = cells_module._run

    def diverges(cell: cells_module.Cell, display: Any) -> dict[str, Any]:
        if cell.method.strategy == "cwt":
            raise DivergedError("the loss must stay finite")
        return run(cell, display)

    monkeypatch.setattr(cells_module, "_run", diverges)
    text, report = compare(tmp_path, "cwt,fedavg", "seeds=0,4", "rounds=1")
    assert report["strategies"]["cwt"]["mean"] is None
    assert "cwt (2 of 2 failed)" in text
    assert "cwt seed 4 failed: the loss must stay finite" in text
    assert set(report["strategies"]["fedavg"]["values"]) == {0, 4}


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.fixture(scope="module")
def base_report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Compare once; the tests' further comparisons lie beside it."""
    folder = tmp_path_factory.mktemp("plain")
    return folder, compare(folder, "local,fedavg", "seeds=1", "rounds=1")[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("names", "options", "more"),
    [
        ("central,cwt", ["seeds=1"], {}),
        ("local,fedavg", ["seeds=2"], {}),
        ("fedavg,local", ["seeds=1"], {}),
        ("local,fedavg", ["seeds=1"], {"against": "local"}),
        ("local,fedavg", ["seeds=1"], {"metric": "loss"}),
        ("local,fedavg:lr=0.1", ["seeds=1"], {}),
    ],
)
def test_another_comparison_replaces_nothing_of_the_first(
    names: str, options: list[str], more: dict[str, Any], base_report: tuple[Path, dict[str, Any]]
) -> None:
    folder, report = base_report
    before = everything(folder)
    assert {"report.html", "compare.json", "compare.png", "curves.png"} <= {path.name for path in before}
    _, other = compare(folder, names, "rounds=1", *options, **more)
    assert other["folder"] != report["folder"]
    after = everything(folder)
    assert {path: after[path] for path in before} == before
    _, again = compare(folder, "local,fedavg", "seeds=1", "rounds=1")
    assert again == report
    assert everything(folder).keys() == after.keys()  # the same comparison has the same folder


@pytest.mark.sampled(1, of="worker processes")
def test_processes_give_the_same_bits_as_this_one(tmp_path: Path, compared: tuple[str, dict[str, Any]]) -> None:
    _, apart = compare(tmp_path, "local,fedavg", "seeds=1", jobs=2)
    for label in ("local", "fedavg"):
        assert cell_of(apart, label, 0)["result"]["final"] == cell_of(compared[1], label, 0)["result"]["final"]


def test_two_comparisons_never_share_a_folder_at_once(runs: Path, compared: tuple[str, dict[str, Any]]) -> None:
    with alone(Path(compared[1]["folder"]).parent), pytest.raises(RunError, match="only one process"):
        compare(runs, "local,fedavg", "seeds=2")


# --- pairs and variants -----------------------------------------------------------------------------------------------


@pytest.mark.sampled(2, of="slow studies")
def test_the_same_seed_begins_alike(tmp_path: Path) -> None:
    # With a learning rate of nearly nothing every method ends with the weights it began with.
    _, report = compare(tmp_path, "central,cwt,fedavg,local", "seeds=2", "lr=1e-30", "rounds=1", "momentum=0")
    for seed in (0, 1):
        finals = [cell_of(report, label, seed)["result"]["final"] for label in report["strategies"]]
        for final in finals[1:]:
            assert final["global"] == pytest.approx(finals[0]["global"])
            assert {n: m["accuracy"] for n, m in final["institutions"].items()} == {
                n: m["accuracy"] for n, m in finals[0]["institutions"].items()
            }
    assert cell_of(report, "cwt", 0)["result"]["final"] != cell_of(report, "cwt", 1)["result"]["final"]


def test_options_of_one_method_reach_it_and_no_other(compared: tuple[str, dict[str, Any]]) -> None:
    report = compared[1]
    assert cell_of(report, "fedreplay", 0)["options"] == ["strategy.cut=hidden2"]
    variant = cell_of(report, "fedreplay:cut=hidden1:patience=1", 0)
    assert variant["options"] == ["strategy.cut=hidden1", "strategy.patience=1"]
    assert variant["folder"] == "../fedreplay-cut-hidden1-patience-1-seed0"
    config = (Path(report["folder"]) / variant["folder"] / "config.yaml").read_text()
    assert "cut: hidden1" in config
    assert "patience: 1" in config
    assert cell_of(report, "fedavg", 0)["options"] == []


# --- statistics -------------------------------------------------------------------------------------------------------


def slow_interval(values: list[float]) -> tuple[float, float]:
    """Integrate Student's density until 97.5 % of it lies below; no library knows what an interval is."""
    n = len(values)
    mean = sum(values) / n
    sd = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    nu = n - 1

    def density(t: float) -> float:
        scale = gamma((nu + 1) / 2) / (math.sqrt(nu * math.pi) * gamma(nu / 2))
        return float(scale * (1 + t * t / nu) ** (-(nu + 1) / 2))

    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        below = 0.5 + quad(density, 0, middle, limit=200)[0]
        low, high = (middle, high) if below < 0.975 else (low, middle)
    return mean - low * sd / math.sqrt(n), mean + low * sd / math.sqrt(n)


@pytest.mark.parametrize("values", [[0.9, 0.8, 0.85, 0.7, 0.9], [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]])
def test_the_interval_is_students(values: list[float]) -> None:
    assert interval(values) == pytest.approx(slow_interval(values), rel=1e-5)


@given(st.lists(st.floats(0, 1), min_size=5, max_size=8), st.floats(-1, 1))
def test_an_interval_holds_its_mean_and_moves_with_the_values(values: list[float], shift: float) -> None:
    low, high = interval(values) or (math.nan, math.nan)
    assert low - 1e-12 <= np.mean(values) <= high + 1e-12
    assert interval([value + shift for value in values]) == pytest.approx((low + shift, high + shift), abs=1e-9)


def test_differences_are_taken_seed_by_seed() -> None:
    ours = {0: 0.5, 1: 0.7, 2: 0.9, 3: 0.8, 4: 0.5, 6: 0.4}
    difference = paired_difference(ours, {0: 0.4, 1: 0.6, 3: 0.7, 4: 0.4, 5: 0.0, 6: 0.3})
    assert difference is not None
    assert difference["seeds"] == [0, 1, 3, 4, 6]
    assert difference["mean"] == pytest.approx(0.1)
    assert difference["interval"] == pytest.approx((0.1, 0.1))
    assert paired_difference({0: 0.5}, {0: 0.4})["interval"] is None  # type: ignore[index]
    assert paired_difference({0: 0.5}, {1: 0.4}) is None
    assert interval([0.5, 0.6, 0.5, 0.6]) is None


def test_a_summary_and_its_pictures_stand_one_seed_and_no_result(tmp_path: Path) -> None:
    result = {
        "final": {"global": {"accuracy": 0.8}, "institutions": {"a": {"accuracy": 0.9}, "b": {"accuracy": 0.7}}},
        "bytes": {"up": 1000, "down": 2000},
        "examples-seen": 10,
        "wall-seconds": 1.0,
        "versions": {"torch": "1", "flwr-replay": "0.1.0"},
        "rounds": 2,
        "failures": [{"round": 1, "institution": "b", "reason": "asleep"}],
    }
    cells = [
        {"label": "x", "strategy": "cwt", "seed": 3, "result": result},
        {"label": "y", "strategy": "local", "seed": 3, "error": "no data"},
    ]
    summary = summarise(cells, ["x", "y"], "y", "accuracy", True)
    assert summary["x"]["worst-institution"] == 0.7
    assert summary["x"]["difference"] is None
    report = {"title": "t", "metric": "accuracy", "against": "y", "seeds": [3], "cells": cells, "strategies": summary}
    report |= {"options": [], "higher-is-better": True}
    text = table(report)
    assert "y seed 3 failed: no data" in text
    assert "asleep" in text
    assert "no intervals" in text
    report["cells"] = [cell | {"options": [], "folder": "x-seed3"} for cell in cells]
    rows = [{"round": at, "institution": "", "metric": "accuracy", "value": at / 3} for at in (1, 2)]
    (tmp_path / "x-seed3").mkdir()
    (tmp_path / "x-seed3" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert "y (1 of 1 failed)" in write_compare_page(tmp_path, report).read_text()
    for name in ("compare.png", "curves.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


# --- wrong lines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "options", "more", "reported"),
    [
        ("fedavg,fedreplya", [], {}, "did you mean fedreplay"),
        ("fedavg,", [], {}, "unknown strategy"),
        ("strategies=fedavg,cwt", [], {}, "the methods come first, without a name"),
        ("fedreplay", ["fedavg"], {}, "write fedreplay,fedavg"),
        ("proxyfl", ["preset=paper|sound"], {}, "a comparison for each preset"),
        ("fedavg,proxyfl:dp=classifier", [], {}, "^proxyfl:dp=classifier: "),
        ("fedavg,cwt", ["strategy=local"], {}, "name the strategies before the options"),
        ("fedavg,cwt", ["seed=3"], {}, "seeds=3"),
        ("fedavg,cwt", ["runs-dir=x"], {}, "--runs-dir"),
        ("fedavg,cwt", ["seeds=0"], {}, "seeds is a number from 1"),
        ("fedavg,cwt", ["seeds=-2"], {}, "seeds is a number from 1"),
        ("fedavg,cwt", ["seeds=1,,2"], {}, "seeds is a number from 1"),
        ("fedavg,cwt", ["seeds=1,1"], {}, "without repetition"),
        ("fedavg,cwt", ["seeds=many"], {}, "got 'many'"),
        ("fedavg,cwt", ["rounds"], {}, "key=value"),
        ("fedavg,cwt", ["ruonds=3"], {}, "did you mean rounds"),
        ("fedavg,cwt", ["fedreplay.cut=conv1"], {}, "a compared method"),
        ("fedavg,fedreplay", ["cut=hidden1"], {}, "write fedreplay.cut=hidden1"),
        ("fedavg,fedreplay:cutt=hidden1", [], {}, "did you mean cut"),
        ("fedavg,fedreplay:seed=1", [], {}, "a comparison sets seed itself; got 'seed=1': write seeds=3"),
        ("fedavg", ["seed=1|2"], {}, "a comparison sets seed itself"),
        ("fedavg", ["seeds=1|2"], {}, "seeds are of the whole comparison"),
        ("fedavg", ["evaluate-before-mixing=true|false"], {"metric": "before-mixing-loss"}, "that all methods report"),
        ("fedavg,fedreplay:split=validation", [], {}, "run a comparison for each split"),
        ("fedavg,fedavg:task=diabetes:model=mlp", [], {}, "--metric must be one that all methods report"),
        ("fedavg,fedreplay:cut", [], {}, "unknown strategy 'fedreplay:cut'|a variant is written"),
        ("fedavg,fedreplay:cut=conv9", [], {}, "conv9"),
        ("fedavg:lr=1:lr=2,cwt", [], {}, "a variant sets an option once; got training.lr twice"),
        ("fedavg,fedavg", [], {}, "compared once"),
        ("fedavg,cwt", [], {"against": "cwtt"}, "did you mean cwt"),
        ("fedavg,cwt", [], {"jobs": 0}, "--jobs must be at least 1"),
        ("fedavg,cwt", [], {"metric": "acuracy"}, "did you mean accuracy"),
        ("fedavg,cwt", ["ks=0.999"], {}, "lower it"),
    ],
)
def test_a_wrong_line_is_refused_before_anything_runs(
    names: str, options: list[str], more: dict[str, Any], reported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells_module, "_run", fail_if_run)
    with pytest.raises(ConfigError, match=reported) as caught:
        compare(tmp_path, names, *options, **more)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_cell_of_other_options_is_not_taken_for_ours(tmp_path: Path) -> None:
    _, report = compare(tmp_path, "fedavg,local", "seeds=1", "rounds=1")
    config = Path(report["folder"]).parent / "local-seed0" / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.01", "lr: 0.5"))
    with pytest.raises(RunError, match=r"config\.yaml must be as the run wrote it"):
        compare(tmp_path, "fedavg,local", "seeds=1", "rounds=1")
    older(config.parent)
    with pytest.raises(RunError, match=r"another value of training\.lr"):
        compare(tmp_path, "fedavg,local", "seeds=1", "rounds=1")


def test_a_run_without_the_metric_asked_for_is_none_that_counts():
    result = {"final": {"global": {"accuracy": 0.5}, "institutions": {}}}
    cells = [{"label": "a", "strategy": "cwt", "seed": 0, "result": result}]
    summaries = summarise(cells, ["a"], "a", "external-accuracy", True)
    assert (summaries["a"]["values"], summaries["a"]["mean"]) == ({}, None)


@pytest.mark.sampled(2, of="slow studies")
def test_masked_sealed_and_plain_methods_stand_in_one_comparison(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    _, report = compare(tmp_path, "fedavg,cwt:sealed=true", "fedavg.masked=true|false", "seeds=1", "rounds=1")
    labels = [cell["label"] for cell in report["cells"]]
    assert labels == ["fedavg:masked=true", "fedavg:masked=false", "cwt:sealed=true"]
    masked, plain, _ = (report["strategies"][label]["mean"] for label in labels)
    assert masked == pytest.approx(plain)
    protection = [
        {json.loads(line)["protection"] for line in ledger.read_text().splitlines() if '"arrays"' in line}
        for cell in report["cells"]
        for ledger in tmp_path.rglob(f"{Path(cell['folder']).name}/ledger.jsonl")
    ]
    assert ["masked" in protection[0], "masked" in protection[1], "sealed" in protection[2]] == [True, False, True]
    pages = [tmp_path.rglob(f"{Path(cell['folder']).name}/report.html") for cell in report["cells"]]
    masked, plain, sealed = (next(page).read_text() for page in pages)
    assert "model, masked: weights or gradients of a network; the server reads their mean" in masked
    assert "model, sealed: weights or gradients of a network; the server cannot read them" in sealed
    assert "model: weights or gradients of a network." in plain


def test_a_comparison_says_who_has_learned_nothing_and_what_leaves(tmp_path: Path) -> None:
    words = ["task=digits", "nodes=2", "rounds=1", "model=mlp", "width=8", "partition=iid", "seeds=2", "device=cpu"]
    names = ["slow := fedavg:training.lr=1e-9", "fedavg:training.lr=0.1", "fedreplay:cut=hidden1"]
    text, report = compare_strategies(names, words, "", 1, tmp_path)
    sentences = [
        line for line in " ".join(text.split()).split("KS and TV")[0].split(". ") if "has learned nothing" in line
    ]
    assert len(sentences) == 1
    assert "slow has learned nothing, in 2 of 2 runs" in sentences[0]
    assert "with lr=1e-09, 40 batches of 32 in all: try lr=auto" in sentences[0]
    assert [row["leaves"] for row in report["strategies"].values()] == [["model"], ["model"], ["per-sample", "model"]]
    assert "per-sample, model" in " ".join(text.split())
