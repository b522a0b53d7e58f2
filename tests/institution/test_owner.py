"""What a node owns: arrays of a user's own, and the keys of a node's configuration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from flwr_replay.errors import ConfigError, DataError
from flwr_replay.institution.node import institution_of
from flwr_replay.institution.owner import Institution

X, Y = torch.rand(6, 1, 4, 4), torch.arange(6) % 2
RUN = {"strategy": "cwt", "task": "folder", "channels": 1, "task.size": 8, "device": "cpu"}


def test_owns_float_tensors_as_they_are() -> None:
    institution = Institution.from_arrays("a", (X, Y), (X[:2], Y[:2]))
    assert torch.equal(institution.train.x, X)
    assert torch.equal(institution.train.y, Y)
    assert len(institution.test) == 2


def test_without_test_examples_only_testing_fails() -> None:
    institution = Institution.from_arrays("a", (np.zeros((3, 1, 4, 4), np.uint8), np.arange(3)))
    assert len(institution.train) == 3
    with pytest.raises(DataError, match="must hold test examples"):
        _ = institution.test


def test_refuses_images_that_are_neither_bytes_nor_float32() -> None:
    with pytest.raises(DataError, match="uint8 or float32"):
        Institution.from_arrays("a", (X.double(), Y))


def test_a_node_owns_what_its_configuration_names(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("strategies: [cwt]")
    owned = {"name": "a", "data": "/d", "state": str(tmp_path), "policy": str(tmp_path / "policy.yaml")}
    institution, _ = institution_of(Context(1, 2, owned, RecordDict(), RUN))
    assert (institution.name, institution.policy.strategies) == ("a", ("cwt",))
    assert institution.state == tmp_path / "a"


@pytest.mark.parametrize(
    ("owned", "message"),
    [
        ({"name": "a", "data": "/d", "polcy": "/p"}, "unknown key 'polcy' .* did you mean policy"),
        ({"name": "a"}, "data is missing"),
        ({"nmae": "a"}, "must say what it owns"),
    ],
)
def test_refuses_a_wrong_node_configuration(owned: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        institution_of(Context(1, 2, owned, RecordDict(), RUN))
