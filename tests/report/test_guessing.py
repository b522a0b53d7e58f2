"""What guessing would have stands beside a run's metrics."""

import re

from page import Page
from sklearn.datasets import load_diabetes

from flwr_replay.engines.simulate import run_inline
from flwr_replay.files.atomic import read_json, read_text, write_json
from flwr_replay.report.metrics import guessing_lines, no_better_than_guessing
from flwr_replay.report.pages import write_page
from flwr_replay.report.progress import Display
from flwr_replay.report.run_files import json_of, write_of
from flwr_replay.report.summary import summary


def test_a_regression_is_compared_with_the_mean_label(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    job = ["task=diabetes", "strategy=cwt", "nodes=2", "rounds=1", f"runs_dir={tmp_path}"]
    result, folder = run_inline(job, Display())
    pattern = r"training labels, ([\d.]+)[^,]*, would have rmse about ([\d.]+); this model has ([\d.]+\d)"
    shown = [re.findall(pattern, text) for text in (summary(result, folder), read_text(folder / "report.html"))]
    assert shown[0] == shown[1]
    [(mean, guessed, has)] = shown[0]
    labels = load_diabetes().target  # the run's are those for training
    assert abs(float(mean) - labels.mean()) < 5
    assert abs(float(guessed) - labels.std()) < 5
    assert abs(float(has) - result["final"]["global"]["rmse"]) < 0.01


def test_where_one_label_is_all_there_is_a_model_may_still_be_worse():
    counts = {"one": [4, 2, 0, 0], "right": [5, 0, 0, 0], "none": [0, 0, 0, 0], "good": [3, 0, 0, 3]}
    assert guessing_lines({"accuracy": 0.8}, counts)[1:] == [
        "no better than always naming its own most frequent label: one"
    ]
    of_all = guessing_lines({"accuracy": 0.5}, {f"clinic-{k}": [0, 3, 0, 3] for k in range(30)})[1]
    assert of_all.endswith("label: all 30 institutions that were tested")


def test_who_names_one_label_or_knows_no_label_in_validation_has_learned_nothing():
    chance = {"accuracy": 0.5, "balanced-accuracy": 0.5, "auc": 0.5}
    own = {f"validation-{name}": value for name, value in {"balanced-accuracy": 0.83, "auc": 1.0}.items()}
    result = {"final": {"global": chance | own}, "validation-examples": 40}
    each_its_own = {"north": [9, 0, 9, 0], "south": [0, 9, 0, 9]}
    assert not no_better_than_guessing(result, each_its_own)
    assert no_better_than_guessing({"final": {"global": chance}}, each_its_own)
    learned = {
        "final": {"global": chance | {"validation-balanced-accuracy": 0.5, "validation-auc": 0.9}},
        "validation-examples": 40,
    }
    assert not no_better_than_guessing(learned, each_its_own)
    unlearned = {
        "final": {"global": {**chance, "auc": 0.9, "validation-balanced-accuracy": 0.6}},
        "validation-examples": 40,
    }
    assert no_better_than_guessing(unlearned, each_its_own)
    assert no_better_than_guessing({"final": {"global": chance | {"auc": 0.9}}}, {"all": [0, 9, 0, 9]})


def test_what_is_said_of_test_examples_stands_before_those_of_validation(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    job = ["task=digits", "strategy=fedavg", "nodes=2", "rounds=1", "model.width=4", "split=validation"]
    _, folder = run_inline([*job, f"runs_dir={tmp_path}"], Display())
    confusion = json_of(folder, "confusion.json")
    named = confusion["institutions"]["institution-1"] = [0] * 100
    named[1] = 3
    write_of(folder, "confusion.json", confusion)
    text = Page(write_page(folder)).text
    assert 0 < text.index("No better than always naming") < text.index("Test examples were used only then")
    result = read_json(folder / "result.json")
    for own in result["final"]["institutions"].values():
        own["accuracy"] = 0.125
    write_json(folder / "result.json", result)
    text = Page(write_page(folder)).text
    assert "test examples, the same at each institution; always the most frequent" in text
