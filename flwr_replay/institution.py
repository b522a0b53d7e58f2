"""What one node owns: its name, its data, its device, its state directory, its policy and its own ledger.

In a simulation an institution is one part of a partitioned data set. In a deployment the node's own configuration
names it: `--node-config 'name="a" data="/data/a" state="/var/lib/flwr-replay" policy="/etc/flwr-replay/policy.yaml"'`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from torch import Tensor

from flwr_replay.compose import from_run_config
from flwr_replay.config import PartitionConfig, RunConfig, TaskConfig
from flwr_replay.data import Dataset, Examples, Partition, institution_name, load, partition
from flwr_replay.errors import ConfigError, DataError, RefusedError, TrainingError, nearest
from flwr_replay.files import home, make_folder, private_folder, sweep
from flwr_replay.ledger import Ledger
from flwr_replay.policy import Policy, read_policy
from flwr_replay.training import select_device
from flwr_replay.wire import Row

__all__ = ["Institution", "Shard", "dealt", "institution_of", "loaded"]

NODE_KEYS = ("name", "data", "state", "policy", "private-model")


@dataclass(frozen=True)
class Shard:
    """Examples on the institution's device: x (n, C, H, W) as stored, y (n,)."""

    x: Tensor
    y: Tensor
    raw_bytes: int

    @classmethod
    def of(cls, examples: Examples, device: torch.device) -> Shard:
        """Move examples to a device."""
        # Laid out anew, since PyTorch takes one channel with odd strides for "channels last" and computes other bits.
        x, y = (torch.from_numpy(array.ravel()).view(array.shape).to(device) for array in (examples.x, examples.y))
        return cls(x, y, examples.nbytes)

    def __len__(self) -> int:
        return len(self.y)


@dataclass
class Institution:
    """One node and what it owns; the data are read at first use, never before the policy has agreed."""

    name: str
    read: Callable[[], Dataset]
    device: torch.device
    read_pooled: Callable[[], Dataset] | None = None  # simulation only: the union of all institutions
    read_external: Callable[[], Examples] | None = None  # simulation only: other institutions' test examples
    policy: Policy = field(default_factory=Policy)
    state_root: Path = field(default_factory=lambda: home() / "state")
    tested_elsewhere: bool = False  # on its external examples, too
    looked_back: bool = False  # on its training examples, too: the run's configuration has forgetting=true
    private_model: str = ""  # of conf/model, where a method has a model that never leaves; empty: as the common one
    durable: bool = False  # wait until ledger lines are on the disk before anything leaves

    @classmethod
    def from_arrays(
        cls, name: str, train: tuple[Any, Any], test: tuple[Any, Any] | None = None, device: str = "cpu"
    ) -> Institution:
        """Own examples that are in memory already, for a stage that a user's own ClientApp serves.

        Parameters
        ----------
        name : str
            Unique among the institutions; shuffles derive from it.
        train, test : tuple
            x, shape (n, C, H, W), uint8 or float32, and y, shape (n,), int64: arrays or CPU tensors.
        device : str
            Where they are used: auto, cpu or cuda[:N].
        """
        used = Examples(np.asarray(train[0]), np.asarray(train[1]))
        held = Examples(np.asarray(test[0]), np.asarray(test[1])) if test else used.take(np.arange(0))
        return cls(name, lambda: Dataset(name, used, held), select_device(device))

    @cached_property
    def state(self) -> Path:
        """The institution's state directory; files here survive rounds and restarts and never leave."""
        folder = private_folder(make_folder(self.state_root / self.name, "the institution's state directory"))
        sweep(folder)
        return folder

    @cached_property
    def data(self) -> Dataset:
        """The institution's own examples."""
        dataset = self.read()
        if not len(dataset.train):
            raise DataError(f"institution {self.name!r} must hold training examples; got none: check its data folder")
        return dataset

    @cached_property
    def train(self) -> Shard:
        """Training examples."""
        return Shard.of(self.data.train, self.device)

    @cached_property
    def test(self) -> Shard:
        """Test examples."""
        if not len(self.data.test):
            raise DataError(f"institution {self.name!r} must hold test examples; got none: check its data folder")
        return Shard.of(self.data.test, self.device)

    @cached_property
    def validation(self) -> Shard | None:
        """Validation examples, where the data set has a split for them."""
        return Shard.of(self.data.val, self.device) if self.data.val is not None and len(self.data.val) else None

    @cached_property
    def external(self) -> Shard:
        """Test examples of other institutions; where there are classes, of those that this one trains on.

        Kalra et al. 2023, section 4.3, note 4: of a class that it has never seen, nothing would be measured.
        """
        found = self.read_external() if self.read_external else self.data.external
        if found is not None and self.data.train.y.dtype == np.int64:
            found = found.take(np.flatnonzero(np.isin(found.y, self.data.train.y)))
        if found is None or not len(found):
            raise DataError(
                f"external=true tests on other institutions' examples; {self.name!r} holds none of classes that it "
                "trains on: add rows with split=external to its manifest, or leave external out"
            )
        return Shard.of(found, self.device)

    def shard(self, split: str) -> Shard:
        """Return the training, the test or the external examples."""
        if split == "external":
            return self.external
        return self.train if split == "train" else self.test

    def check_split(self, split: str) -> None:
        """Refuse a test on examples that the run's configuration does not name."""
        if not {"test": True, "train": self.looked_back, "external": self.tested_elsewhere}.get(split, False):
            raise RefusedError(
                "an institution tests on its test examples, with forgetting=true on its training examples and with "
                f"external=true on others'; this run asks for split={split!r} without it: refused"
            )

    @cached_property
    def pooled(self) -> Shard:
        """The union of all institutions' training examples; a simulation only can pool them."""
        if self.read_pooled is None:
            raise TrainingError(  # which a deployed institution tells the server
                f"institution {self.name!r} owns its own data only; strategy=central needs one institution that owns "
                "everything: run it in a simulation, or with all data at one node and nodes=1"
            )
        return Shard.of(self.read_pooled().train, self.device)

    def record_release(self, rows: list[Row], *, run: str, server_round: int, stage: str, split: str = "") -> None:
        """Write to the institution's own ledger what is about to leave, of a test also on which examples."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        on = {"split": split} if split else {}
        self._ledger.record({"time": now, "run": run, "round": server_round, "stage": stage, **on}, rows)
        self._ledger.flush(to_disk=self.durable)

    @cached_property
    def _ledger(self) -> Ledger:
        return Ledger(self.state / "ledger.jsonl")


def institution_of(context: Context) -> tuple[Institution, RunConfig]:
    """Return this node's institution and the composed configuration; both are kept for later messages."""
    node = tuple(sorted((key, str(value)) for key, value in context.node_config.items()))
    return _institution(tuple(sorted(context.run_config.items())), node)


@lru_cache(maxsize=64)
def _institution(
    run_config: tuple[tuple[str, Any], ...], node: tuple[tuple[str, str], ...]
) -> tuple[Institution, RunConfig]:
    config = from_run_config(dict(run_config))
    owned = dict(node)
    if "data" in owned or "name" in owned:
        return _deployed(config, owned), config
    if "partition-id" not in owned:
        raise ConfigError(
            f"a SuperNode must say what it owns; got keys {', '.join(owned) or 'none'}: start it with "
            """--node-config 'name="a" data="/data/a"' (no spaces around =, strings in double quotes)"""
        )
    return _simulated(config, int(owned["partition-id"]), int(owned["num-partitions"]), owned), config


def _deployed(config: RunConfig, owned: Mapping[str, str]) -> Institution:
    for key in owned:
        if key not in NODE_KEYS:  # a mistyped policy must not mean that there is none
            raise ConfigError(f"unknown key {key!r} in --node-config: {nearest(key, NODE_KEYS)}")
    for key in ("name", "data"):
        if not owned.get(key):
            raise ConfigError(
                f"a SuperNode must have both name and data; {key} is missing: start it with "
                """--node-config 'name="a" data="/data/a"' (no spaces around =, strings in double quotes)"""
            )
    # The server must neither make it fetch nor choose, by a column or by sizes, whom it trains on and whom it tests on.
    task = replace(config.task, data_dir=owned["data"], download=False, site_column="site")
    task = replace(task, train_size=0, val_size=0, test_size=0)
    # Flower drops a key with spaces around = without a word; the SuperNode's log must show what is in force.
    rules = owned.get("policy") or "none: everything may leave"
    logging.getLogger("flwr").info("%s: data %s, policy %s", owned["name"], owned["data"], rules)
    return Institution(
        name=owned["name"],
        read=lambda: load(task),
        device=select_device(config.device),
        policy=read_policy(Path(owned["policy"]) if owned.get("policy") else None),
        state_root=Path(owned["state"]) if owned.get("state") else home() / "state",
        tested_elsewhere=config.external,
        looked_back=config.forgetting,
        private_model=_private_model(config, owned),
        durable=True,
    )


def _private_model(config: RunConfig, owned: Mapping[str, str]) -> str:
    names = getattr(config.strategy, "private_models", ())
    if len(names) > 1 and "private-model" not in owned:
        raise ConfigError(
            f"private-models={','.join(names)} go by turns in a simulation; a SuperNode says which is its own: start "
            """it with --node-config '… private-model="NAME"'"""
        )
    return owned.get("private-model", names[0] if names else "")


def _simulated(config: RunConfig, k: int, nodes: int, owned: Mapping[str, str]) -> Institution:
    names = dealt(config.task, config.partition, nodes, config.seed).names if config.partition.name == "natural" else ()
    private = getattr(config.strategy, "private_models", ())
    return Institution(
        name=names[k] if names else institution_name(k, nodes),
        read=lambda: dealt(config.task, config.partition, nodes, config.seed).examples(loaded(config.task), k),
        read_pooled=lambda: _union(config.task, config.partition, nodes, config.seed),
        read_external=lambda: dealt(config.task, config.partition, nodes, config.seed).external(loaded(config.task), k),
        device=select_device(config.device),
        policy=read_policy(Path(owned["policy"]) if owned.get("policy") else None),
        state_root=Path(owned["state"]) if owned.get("state") else home() / "state" / "simulation",
        tested_elsewhere=config.external,
        looked_back=config.forgetting,
        private_model=private[k % len(private)] if private else "",
    )


@lru_cache(maxsize=2)
def loaded(task: TaskConfig) -> Dataset:
    """Read a data set, once per process."""
    return load(task)


@lru_cache(maxsize=2)
def dealt(task: TaskConfig, how: PartitionConfig, nodes: int, seed: int) -> Partition:
    """Deal a data set to simulated institutions, once per process."""
    return partition(loaded(task), how, nodes, seed)


@lru_cache(maxsize=1)  # one copy, however many institutions ask how many examples there are
def _union(task: TaskConfig, how: PartitionConfig, nodes: int, seed: int) -> Dataset:
    part, dataset = dealt(task, how, nodes, seed), loaded(task)
    owned = [part.examples(dataset, k).train for k in range(nodes)]
    return replace(
        dataset, train=Examples(np.concatenate([own.x for own in owned]), np.concatenate([own.y for own in owned]))
    )
