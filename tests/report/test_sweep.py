"""Pictures of a metric against the values of a swept option."""

from pathlib import Path

import pytest
from page import Page, drawn_marks

from flwr_replay.report.pages import sweeps
from flwr_replay.studies.compare import compare_strategies


@pytest.mark.sampled(2, of="slow studies")
def test_a_sweep_has_a_picture_of_the_metric_by_the_option(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    options = [
        "partition.size=60",
        "nodes=2",
        "rounds=2",
        "seeds=2",
        "model=mlp",
        "model.width=4",
        "fedavg.lr=0.01|0.1|1",
    ]
    _, report = compare_strategies(["fedavg", "cwt:lr=0.1", "local"], options, "", 1, tmp_path)
    folder, rows = Path(report["folder"]), report["strategies"]
    text = (folder / "report.html").read_text()
    page = Page(folder / "report.html")
    assert page.faults == []
    caption = "accuracy by training.lr, mean over seeds; band: lowest to highest seed"
    assert caption in page.text
    assert "accuracy of validation examples by round, mean over seeds; band: lowest to highest seed" in page.text
    means = [rows[f"fedavg:lr={lr}"]["mean"] for lr in ("0.01", "0.1", "1")]
    shown = ", ".join(f"{mean:.3f} at {lr:g}" for mean, lr in zip(means, (0.01, 0.1, 1), strict=True))
    local = rows["local"]["mean"]
    alt = f"{caption}. fedavg: {shown}; local: {local:.3f} at 0.01, {local:.3f} at 1."
    assert f'aria-label="{alt}"' in text
    ((chart, _),) = sweeps(report).values()
    assert {row[0] for row in chart.rows} == {"fedavg", "local"}  # cwt has one value, and no other
    assert [len({x for x, _ in outline}) for outline in drawn_marks(chart.svg)[1]] == [3, 2]
    assert "training.lr, logarithmic" in page.text
    judged = {}
    for cell in report["cells"]:
        judged.setdefault(cell["label"], []).append(cell["result"]["final"]["global"]["validation-accuracy"])
    chosen = max((f"fedavg:lr={lr}" for lr in ("0.01", "0.1", "1")), key=lambda label: sum(judged[label]))
    told = f"fedavg: best {rows[chosen]['mean']:.3f} at {float(chosen.rpartition('=')[2]):g}, by validation examples"
    assert told in page.text
    assert f"local: {local:.3f}, without this option" in page.text
    assert text.count("fill-opacity: 0.15") == 2 + len(rows)


def test_a_metric_of_test_examples_alone_is_not_said_to_be_of_validation_examples(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    options = [
        "partition.size=60",
        "nodes=2",
        "rounds=1",
        "model=mlp",
        "model.width=4",
        "external=true",
        "fedavg.lr=0.01|1",
    ]
    _, report = compare_strategies(["fedavg"], options, "", 1, tmp_path, "external-accuracy")
    ((_, told),) = [drawn_marks(chart.svg)[1:] for chart, _ in sweeps(report).values()]
    assert not [text for text, _ in told if "validation" in text]
    text = Page(Path(report["folder"]) / "report.html").text
    assert "external-accuracy by round" in text


def test_no_picture_of_a_sweep_without_one_and_one_for_each_option():
    def report(*labels):
        cells = []
        for label in labels:
            strategy, *options = label.split(":")
            cells.append({"label": label, "strategy": strategy, "options": options})
        rows = {label: {"mean": 0.1 * at, "values": {0: 0.1 * at}} for at, label in enumerate(labels, 1)}
        return {"metric": "loss", "higher-is-better": False, "seeds": [0], "cells": cells, "strategies": rows}

    assert sweeps(report("cwt", "fedavg")) == {}
    assert sweeps(report("cwt:model=mlp", "cwt:model=resnet18")) == {}
    assert sweeps(report("cwt:lr=1", "fedavg:lr=2")) == {}  # neither is swept
    both = sweeps(report("cwt:lr=1:width=8", "cwt:lr=2:width=8", "cwt:lr=1:width=16", "cwt:lr=2:width=16"))
    assert {name: caption for name, (_, caption) in both.items()} == {
        "by-lr": "loss by lr",
        "by-width": "loss by width",
    }
    beside = " ".join(text for text, _ in drawn_marks(both["by-lr"][0].svg)[2])
    assert "cwt:width=8: best 0.100 at 1" in beside
    assert "cwt:width=16: best 0.300 at 1" in beside
    failed = report("cwt:lr=1", "cwt:lr=2", "cwt:lr=3")
    failed["strategies"]["cwt:lr=2"] = {"mean": None, "values": {}}
    ((chart, caption),) = sweeps(failed).values()
    assert (caption, chart.told) == ("loss by lr", "cwt: 0.100 at 1, 0.300 at 3")
    assert drawn_marks(chart.svg)[1] == []
