"""A model's card: its front matter, the run's tables, the noise of private runs."""

from dataclasses import replace

import pytest
import yaml
from exported_runs import run_at

from flwr_replay import load_model
from flwr_replay.finished.export import card
from flwr_replay.finished.trained import TrainedModel
from flwr_replay.privacy.accounting import rounded_up
from flwr_replay.report.run_files import rows_of


def test_the_card_of_a_private_run_tells_its_noise(tmp_path, monkeypatch):
    private = ["dp=classifier", "sigma=2.3456", "delta=1e-3", "model=mlp"]
    result, folder = run_at(tmp_path, monkeypatch, "task=digits", "strategy=fedavg", *private)
    [noise] = result["noise"]["institution-1"]
    text, told = card(folder, load_model(folder), ""), result["privacy"]["institution-1"]
    assert f"| classifier: sigma {noise['sigma']:.3g}, clip C 1, sampling rate" in text
    assert f"| institution-1 | {rounded_up(told['epsilon'])} | 0.001 | yes | classifier |" in text


def section(text, heading):
    """Return the cells of a card's table, its heads first."""
    lines = text.partition(f"## {heading}\n")[2].partition("\n## ")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]


def test_a_card_has_front_matter_and_the_runs_tables(ran):
    result, folder = ran
    model = load_model(folder)
    _, matter, body = card(folder, model, "").split("---\n", 2)
    [index] = yaml.safe_load(matter)["model-index"]
    [listed] = index["results"]
    assert yaml.safe_load(matter)["pipeline_tag"] == listed["task"]["type"] == "image-classification"
    assert listed["dataset"] == {"name": "digits", "type": "digits", "split": "test"}
    final = result["final"]
    told = {metric["type"]: metric["value"] for metric in listed["metrics"]}
    assert told == {name: final["global"][name] for name in ("accuracy", "balanced-accuracy", "macro-f1", "loss")}
    heads, pooled, *own = section(body, "Results by institution")
    for row, metrics in zip([pooled, *own], [final["global"], *final["institutions"].values()], strict=True):
        assert dict(zip(heads, row, strict=True))["accuracy"] == f"{metrics['accuracy']:.4f}"
    heads, *counts = section(body, "Confusion matrix")
    assert heads == ["label", *"zothfisven"]
    right = sum(int(row[at]) for at, row in enumerate(counts, 1))
    assert right / sum(int(cell) for row in counts for cell in row[1:]) == pytest.approx(final["global"]["accuracy"])
    best = card(folder, load_model(folder, best=True), "", best=True)  # the only round
    assert section(best, "Confusion matrix") == [["label", *"zothfisven"], *counts]
    heads, *trained = section(body, "Class counts")
    examples = {row["institution"]: row["examples"] for row in rows_of(folder, "members.jsonl")}
    assert {name: sum(map(int, row)) for name, *row in trained} == examples
    assert "- Preparation: 1 channel, 8 x 8 pixels (fit: exact), bytes divided by 255; not standardised." in body
    named = TrainedModel(model.network, replace(model.task, class_names=("a|b", *"cdefghijk"), mean=(0.5,), std=(2,)))
    other = card(folder, named, "institution-1")
    assert section(other, "Confusion matrix")[0][1] == "a\\|b"
    assert "Test examples of institution-1: a row" in other
    assert "the model itself then: mean 0.5; standard deviation 2." in other
    assert not section(other, "Results by institution")
