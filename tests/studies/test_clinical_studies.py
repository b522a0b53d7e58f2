"""Qu et al.'s figures and tables on folders made to the sets' own layout: all of it runs, small."""

import csv
import json
import sys
from dataclasses import replace
from statistics import fmean

import clinical
import pytest

from flwr_replay.cli.main import main
from flwr_replay.convert import retina as photographs
from flwr_replay.report.summary import summary
from flwr_replay.simulations import boneage, brats, retina
from flwr_replay.studies.methods import named


@pytest.fixture(autouse=True)
def smaller(monkeypatch):
    """Run images of a fourth of the quick studies' pixels; eyes are prepared at a fifth of Graham's size."""
    for size in ("RADIUS", "SIGMA"):
        monkeypatch.setattr(photographs, size, getattr(photographs, size) / 5)
    for study in (retina, boneage, brats):
        smaller = [
            [option.replace("task.size=32", "task.size=16") for option in comparison.quick]
            for comparison in study.COMPARISONS
        ]
        comparisons = [
            replace(comparison, quick=quick) for comparison, quick in zip(study.COMPARISONS, smaller, strict=True)
        ]
        monkeypatch.setattr(study, "COMPARISONS", comparisons)


@pytest.fixture
def study(tmp_path, monkeypatch, capsys):
    """Run the command as a user does; returns its exit code, and what it wrote."""
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["flwr-replay", "study", *words, "--runs-dir", str(tmp_path / "runs")])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr()

    return run


def results(folder):
    return {path.parent.name: json.loads(path.read_text()) for path in folder.rglob("result.json")}


@pytest.mark.sampled(1, of="whole studies")
def test_tables_1_and_3_on_retina(study, tmp_path):
    data, comparisons = str(clinical.retina(tmp_path / "retina", 108)), "table-1,table-3-weights"
    code, captured = study("retina", "--data", data, "--quick", "--only", comparisons)
    assert code == 0, captured.err
    runs = results(tmp_path / "runs")
    assert sorted(runs) == ["cwt-seed0", "fedavg-seed0"]
    (tmp_path / "runs" / "study-retina-quick-table-1-table-3-weights.html").stat()
    rows = [line.strip("| ").split(" | ") for line in captured.out.splitlines() if line.startswith("| institution-")]
    beside, table = [row for row in rows if " after " in row[0]], [row for row in rows if " after " not in row[0]]
    matrix = runs["cwt-seed0"]["forgetting"]["matrix"]  # two rounds of four visits: the last four rows are the table
    assert [row[0] for row in table] == [f"institution-{k}" for k in range(1, 5)]
    assert [[float(cell) for cell in row[1:]] for row in table] == [
        pytest.approx([after[k] for after in matrix[4:]], abs=6e-4) for k in range(4)
    ]
    assert len(beside) == 16
    assert beside[1][:2] == ["institution-1 after institution-2", "0.910"]
    ours = matrix[5][0]  # the data of the first, after the second's last visit
    assert [float(cell) for cell in beside[1][2:]] == pytest.approx([ours, ours - 0.910], abs=6e-5)
    drawn = csv.reader(next((tmp_path / "runs").glob("study-*-table-1-paper.csv")).open())
    assert [*drawn][2] == ["institution-1 after institution-2", "0", str(ours), "", "", "0.91"]
    shares = runs["cwt-seed0"]["skew"]
    assert shares["ks"] == pytest.approx(0.53, abs=0.05)
    assert "gradient matching" in captured.out
    code, captured = study("retina", "--data", data, "--quick", "--only", comparisons, "--dry-run")
    assert code == 0
    assert "table-1: 1 run, 1 finished" in captured.out
    assert "all: 2 runs, 0 to run" in captured.out


@pytest.mark.sampled(1, of="whole studies")
def test_table_2_on_boneage_has_the_control(study, tmp_path):
    data = str(clinical.boneage(tmp_path / "boneage", 72, 12))
    words = ["boneage", "--data", data, "--quick", "--only", "table-2-split-3"]
    code, captured = study(*words)
    assert code == 0, captured.err
    metrics = {
        (result["seed"], any(account and account["epsilon"] for account in result["privacy"].values())): result[
            "metric"
        ]
        for result in results(tmp_path / "runs").values()
    }
    assert metrics == {(0, False): "mae", (0, True): "mae"}
    for label in ("no privacy", "no privacy, gradient codebook", "with privacy"):
        assert f"\n| {label} |" in captured.out
    printed = next(line for line in captured.out.splitlines() if line.startswith("| with privacy | 9.84 ± 0.02 |"))
    assert float(printed.split(" | ")[3].strip(" |")) == pytest.approx(float(printed.split(" | ")[2]) - 9.84, abs=2e-4)
    code, captured = study(*words, "--seeds", "0,3", "--dry-run")
    assert code == 0
    assert "table-2-split-3: 3 runs, 3 finished" in captured.out  # a quick study has the first seed only
    code, captured = study(*words[:3], "--only", "table-2-split-3", "--seeds", "none", "--dry-run")
    assert code == 2
    assert "seeds is a number from 1" in " ".join(captured.err.split())


@pytest.mark.sampled(1, of="whole studies")
def test_figure_6_on_brats_has_both_dice_coefficients_of_the_same_runs(study, tmp_path):
    data = str(clinical.brats(tmp_path / "brats", 5))
    code, captured = study("brats", "--data", data, "--quick")
    assert code == 0, captured.err
    runs = results(tmp_path / "runs")
    assert len(runs) == len(brats.FIGURE_6)
    for result in runs.values():
        own = [metrics["dice"] for metrics in result["final"]["institutions"].values()]
        assert len(own) == 3
        assert result["final"]["global"]["dice-mean"] == pytest.approx(fmean(own))
    folder = next((tmp_path / "runs").rglob("fedreplay-seed0"))
    final = runs["fedreplay-seed0"]["final"]["global"]
    told = f"{final['dice-mean']:.4f} is the mean of the institutions' own; dice {final['dice']:.4f} is of all"
    assert f"dice-mean {told}" in summary(runs["fedreplay-seed0"], folder)
    page = (folder / "report.html").read_text()
    assert f"Dice-mean {told}".replace("'", "&#39;") in page
    assert "| method | mean (dice-mean) | pooled (dice) |" in captured.out
    numbers = list(csv.DictReader((tmp_path / "runs" / "study-brats-quick.csv").open()))
    beside = csv.DictReader((tmp_path / "runs" / "study-brats-quick-mean-paper.csv").open())
    assert {row["name"]: row["dashed"] for row in beside} == {"central": "0.853", "fedreplay": "0.854"}
    for label in ("cwt", "cwt, kept", "fedavgshare, kept"):
        assert captured.out.count(f"| {label} |") == 1  # the overview
        assert [row["metric"] for row in numbers if row["method"] == label] == ["dice-mean", "dice"]


def test_every_method_with_a_state_is_there_with_it_fresh_and_kept():
    for comparison in [*retina.COMPARISONS[:3], *boneage.COMPARISONS[:3], *brats.COMPARISONS]:
        methods = dict(map(named, comparison.methods))
        kept = {label for label in methods if label.endswith(", kept")}
        assert {label.removesuffix(", kept") for label in kept} == {*methods} - {"central", "fedreplay"} - kept
        for label in kept:
            assert methods[label] == methods[label.removesuffix(", kept")] + ":optimizer-state=keep"


def test_what_a_paper_prints_is_of_methods_that_the_comparison_has():
    comparisons = [
        comparison for module in (retina, boneage, brats) for comparison in module.COMPARISONS if comparison.paper
    ]
    assert len(comparisons) == 10
    for comparison in comparisons:
        if comparison.paper.of != "forgetting":
            assert {*comparison.paper.values} <= {*dict(map(named, comparison.methods))}


@pytest.mark.parametrize("name", ["retina", "boneage", "brats"])
def test_without_the_sets_folder_there_is_one_line(study, tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    only = ["--only", {"retina": "table-1", "boneage": "table-2-split-1", "brats": "mean"}[name]]
    for words in ((), ("--data", str(tmp_path / "none")), ("--data", str(elsewhere))):
        for quick in ((), ("--quick",)):
            code, captured = study(name, *only, *words, *quick)
            assert code == 2
            line = captured.err.splitlines()[-1]
            assert line.startswith("error: ")
            assert ("--data must be the folder" if "elsewhere" not in str(words) else str(elsewhere)) in line
    assert not (tmp_path / "runs").exists()
