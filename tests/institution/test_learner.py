"""A step that DP-SGD cannot take is refused before it is taken."""

import pytest
import torch
from torch import nn

from flwr_replay.errors import TrainingError
from flwr_replay.institution.budget import DPTraining
from flwr_replay.institution.learner import Learner
from flwr_replay.learning.tasks import Classification
from flwr_replay.privacy.accounting import SampledGaussian
from flwr_replay.privacy.secret import Stream


def test_a_step_under_dp_takes_no_penalty():
    model = nn.Linear(2, 3)
    dp = DPTraining(1.0, SampledGaussian(0.5, 1.0, 1), Stream(bytes(32)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = Learner(model, optimizer, Classification(3), 4, None, torch.Generator(), dp)
    before = model.weight.detach().clone()
    with pytest.raises(TrainingError, match="no penalty"):
        learner.step(torch.ones(4, 2), torch.zeros(4, dtype=torch.int64), penalty=model.weight.sum())
    assert torch.equal(model.weight, before)
    assert learner.seen == 0


def test_a_long_visit_says_how_many_steps_it_has_taken(monkeypatch, caplog):
    model = nn.Linear(2, 3)
    learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), Classification(3), 4, None, torch.Generator())
    monkeypatch.setattr("flwr_replay.institution.learner.SILENT", 1000)
    batch = torch.ones(4, 2), torch.zeros(4, dtype=torch.int64)
    with caplog.at_level("INFO", "flwr"):
        learner.step(*batch)
        assert not caplog.messages
        monkeypatch.setattr("flwr_replay.institution.learner.SILENT", 0)
        learner.step(*batch)
    (line,) = caplog.messages
    assert line.startswith("2 steps in this visit so far, ")
