"""What a node owns: arrays of a user's own, and the keys of a node's configuration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset as HuggingFace
from flwr.app import Context, RecordDict
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

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


def halved(batch: dict[str, list[np.ndarray]]) -> dict[str, list[torch.Tensor]]:
    """A transform as in Flower's quickstart: bytes with channels last to numbers with channels first."""
    return {**batch, "img": [torch.tensor(np.asarray(image)).permute(2, 0, 1) / 510 for image in batch["img"]]}


@pytest.mark.parametrize("shuffle", [True, False])
def test_takes_a_dataset_or_a_data_loader_in_the_order_of_the_data_set(shuffle: bool) -> None:
    own = TensorDataset(X, Y)
    institution = Institution.from_arrays("a", DataLoader(own, batch_size=4, shuffle=shuffle, drop_last=True), own)
    for shard in (institution.train, institution.test):
        assert torch.equal(shard.x, X)
        assert torch.equal(shard.y, Y)


def test_takes_a_loader_of_flower_datasets_rows_through_their_transform() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 3), np.uint8)
    rows = HuggingFace.from_dict({"img": list(pixels), "label": Y.tolist()}).with_transform(halved)
    train, test = Institution.from_arrays("a", DataLoader(rows, batch_size=4, shuffle=True), rows).data.train, rows
    assert (train.x.dtype, train.y.dtype) == (np.float32, np.int64)
    assert np.array_equal(train.x, pixels.transpose(0, 3, 1, 2).astype(np.float32) / 510)
    assert np.array_equal(train.y, Y)
    assert Institution.from_arrays("b", test).data.train.digest == train.digest


def test_images_with_channels_last_are_turned_and_float64_becomes_float32() -> None:
    rows = [(np.full((4, 4, 3), k, np.uint8), k % 2) for k in range(5)]
    assert Institution.from_arrays("a", rows).data.train.x.shape == (5, 3, 4, 4)  # type: ignore[arg-type]
    train = Institution.from_arrays("a", TensorDataset(X.double(), Y.double())).data.train
    assert (train.x.dtype, train.y.dtype) == (np.float32, np.float32)


def test_a_collate_fn_of_the_users_counts() -> None:
    def collated(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {"image": torch.stack([x for x, _ in pairs]) / 2, "label": torch.stack([y for _, y in pairs])}

    loader = DataLoader(TensorDataset(X, Y), batch_size=2, collate_fn=collated)
    assert torch.equal(Institution.from_arrays("a", loader).train.x, X / 2)


def test_a_loader_that_chooses_examples_is_refused() -> None:
    half = DataLoader(TensorDataset(X, Y), sampler=SubsetRandomSampler([0, 1, 2]))
    with pytest.raises(DataError, match=r"draw each of its 6 examples once; .*SubsetRandomSampler .*give .*Subset"):
        Institution.from_arrays("a", half)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "list: ValueError: it is empty"),
        (7, "got int"),
        ([{"pixels": 1, "label": 2}], "needs a column image or img or x"),
    ],
)
def test_what_are_no_images_with_labels_is_one_line(given: object, message: str) -> None:
    with pytest.raises(DataError, match=f"must be .images, labels., or a Dataset or DataLoader.*{message}"):
        Institution.from_arrays("a", given)  # type: ignore[arg-type]


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
