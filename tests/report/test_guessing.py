"""What guessing would have stands beside a run's metrics."""

import re

from sklearn.datasets import load_diabetes

from flwr_replay.files.atomic import read_text
from flwr_replay.report.progress import Display
from flwr_replay.report.summary import summary
from flwr_replay.runs.simulate import run_inline


def test_a_regression_is_compared_with_the_mean_label(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    job = ["task=diabetes", "strategy=cwt", "nodes=2", "rounds=1", f"runs_dir={tmp_path}"]
    result, folder = run_inline(job, Display())
    said = r"training labels, ([\d.]+)[^,]*, would have rmse about ([\d.]+); this model has ([\d.]+\d)"
    shown = [re.findall(said, text) for text in (summary(result, folder), read_text(folder / "report.html"))]
    assert shown[0] == shown[1]
    [(mean, guessed, has)] = shown[0]
    labels = load_diabetes().target  # the run's are those for training
    assert abs(float(mean) - labels.mean()) < 5
    assert abs(float(guessed) - labels.std()) < 5
    assert abs(float(has) - result["final"]["global"]["rmse"]) < 0.01
