"""Balanced batches: what is drawn, who trains on them, and who refuses."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flwr_replay.errors import ConfigError
from flwr_replay.institution.learner import Learner
from flwr_replay.learning.training import balanced_rows
from flwr_replay.runs.options import resolve
from flwr_replay.studies.compare import compare_strategies


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(0, 99))
def test_rows_are_as_many_as_examples_of_classes_that_occur_and_follow_the_seed(labels, seed):
    drawn = [balanced_rows(torch.tensor(labels), torch.Generator().manual_seed(seed)) for _ in range(2)]
    assert torch.equal(*drawn)
    assert len(drawn[0]) == len(labels)
    assert {labels[row] for row in drawn[0]} <= {*labels}


def test_a_rare_class_is_drawn_as_often_as_a_frequent_one_and_its_examples_alike():
    labels = torch.tensor([0] * 9000 + [1] * 900 + [7] * 100)
    rows = balanced_rows(labels, torch.Generator().manual_seed(3))
    counts = np.bincount(labels[rows].numpy(), minlength=8)
    assert np.abs(counts[[0, 1, 7]] - 10_000 / 3).max() < 5 * (10_000 * 2 / 9) ** 0.5  # five standard deviations
    assert counts.sum() == 10_000
    rare = np.bincount(rows[labels[rows] == 7].numpy() - 9900, minlength=100)
    assert rare.min() > 0
    assert np.abs(rare - counts[7] / 100).max() < 5 * (counts[7] / 100) ** 0.5


def test_institutions_train_on_them_where_they_are_asked_to(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    words = ["task=digits", "nodes=2", "rounds=1", "model=mlp", "model.width=4", "seeds=1", "lr=0.1"]
    _, report = compare_strategies(["fedavg", "fedavg:batches=balanced"], words, "", 1, tmp_path)
    plain, balanced = (cell["result"] for cell in report["cells"])
    assert plain["examples-seen"] == balanced["examples-seen"]
    assert plain["final"] != balanced["final"]


@pytest.mark.parametrize("labels", [torch.rand(4), torch.zeros(4, 3, 3, dtype=torch.long)])
def test_an_app_of_ones_own_refuses_labels_that_are_no_classes_and_dp(labels):
    with pytest.raises(ConfigError, match="the labels of this task are no classes"):
        balanced_rows(labels, torch.Generator())
    learner = Learner(None, None, None, 4, None, None, dp=object(), balanced=True)
    with pytest.raises(ConfigError, match="not for training under DP"):
        learner.batches(None, torch.Generator())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["strategy=fedavg", "dp=classifier", "target-epsilon=8"], "batches=balanced is not for training under DP"),
        (["strategy=fedreplay"], "for methods whose institutions train on batches of their own"),
        (["strategy=proxyfl", "dp=none"], "for methods whose institutions train on batches of their own"),
        (["strategy=fedavg", "task=diabetes"], "draws classes equally often; got task=diabetes"),
        (["strategy=fedavg", "batches=even"], "training.batches must be"),
    ],
)
def test_what_cannot_balance_refuses(words, message):
    task = [] if "task=diabetes" in words else ["task=digits"]
    with pytest.raises(ConfigError, match=message):
        resolve([*task, "batches=balanced", *words], "runs", "")
