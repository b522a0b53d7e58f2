"""What one node owns: its name, data, device, state directory, policy and ledger.

In a simulation an institution owns one shard of a data set. In a deployment the node's own configuration names what it
owns: `--node-config 'name="a" data="/data/a" state="/var/lib/flwr-replay" policy="/etc/flwr-replay/policy.yaml"'`.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import ArrayLike
from torch import Tensor

from flwr_replay.ciphers.seal import Seal
from flwr_replay.data import Dataset, Examples, examples_of
from flwr_replay.errors import DataError, RefusedError, TrainingError
from flwr_replay.files.atomic import home, make_folder, private_folder, sweep, sync
from flwr_replay.institution.policy import Policy
from flwr_replay.learning.training import select_device
from flwr_replay.memory import on_forget
from flwr_replay.wire.ledger import Ledger
from flwr_replay.wire.payload import LedgerRow
from flwr_replay.wire.recording import DIRECTIONS, FOLDER, Recording

__all__ = ["Institution", "Shard"]

Given = tuple[ArrayLike, ArrayLike] | torch.utils.data.Dataset[Any] | torch.utils.data.DataLoader[Any]
_prepared: set[Path] = set()  # state directories that this process has made and swept
on_forget(_prepared.clear)


@dataclass(frozen=True)
class Shard:
    """Examples on the institution's device: x (n, C, H, W) as stored, y (n,).

    On the CPU they share the memory of the data set, which may be a memory map: nobody may write to them.
    """

    x: Tensor
    y: Tensor
    raw_bytes: int

    @classmethod
    def of(cls, examples: Examples, device: torch.device) -> Self:
        """Move examples to a device; on the CPU nothing is copied."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # a memory map; nobody writes
            # In C order: PyTorch takes one channel with odd strides for "channels last" and computes other bits.
            x, y = (torch.from_numpy(array.ravel()).view(array.shape).to(device) for array in (examples.x, examples.y))
        return cls(x, y, examples.nbytes)

    def __len__(self) -> int:
        return len(self.y)


@dataclass
class Institution:
    """One node and what it owns. The data are read at first use, which is after the policy has agreed."""

    name: str
    read: Callable[[], Dataset]
    device: torch.device
    read_pooled: Callable[[], Dataset] | None = None  # simulation only: the union of all institutions
    read_external: Callable[[], Examples] | None = None  # simulation only: other institutions' test examples
    policy: Policy = field(default_factory=Policy)
    state_root: Path = field(default_factory=lambda: home() / "state")
    tests_external: bool = False  # external=true: models are tested on its external examples, too
    validates: bool = False  # split=validation: models are tested on its validation examples, too
    tests_training: bool = False  # forgetting=true: models are tested on its training examples, too
    batch_size: int = 0  # examples in a batch; 0: as many as the run says
    classes: str = ""  # for which its generator draws images: all, or numbers; empty: those of which it has enough
    private_model: str = ""  # in conf/model, of the private model φ; empty: like the common model
    frozen: Callable[[], str] = str  # SHA-256 of what does not train in its copy of the model; empty: all of it trains
    read_seal: Callable[[], Seal] | None = None  # its key, and those that it has pinned; None: nothing is sealed
    record: str = "none"  # none | up | all: of its messages, those that it keeps in its state directory
    record_mb: float = inf  # the most that these may take
    digested: bool = False  # messages are recorded, here or by a simulation: its state says which examples it had
    reports_losses: bool = True  # of trainings; not with a floor; else they need not be finite, as a failure would tell
    durable: bool = False  # ledger lines reach the disk before anything leaves

    def __post_init__(self) -> None:
        self.reports_losses &= not self.policy.min_count

    @classmethod
    def from_arrays(cls, name: str, train: Given, test: Given | None = None, device: str = "cpu") -> Self:
        """Make an institution of examples that are in memory, as a user's own ClientApp has them.

        Parameters
        ----------
        name : str
            Unique among the institutions; shuffles derive from it.
        train, test : tuple, torch Dataset or DataLoader
            x, shape (n, C, H, W), uint8 or float32, and y, shape (n,), int64: arrays or CPU tensors. A Dataset or
            DataLoader of such pairs, also Hugging Face's, is read here, once and whole: transforms are applied once.
        device : str
            Where they are used: auto, cpu or cuda[:N].

        Raises
        ------
        DataError
            If they are no images with labels, or a DataLoader draws only some of its examples.
        """
        train_shard = examples_of(train)
        held = train_shard.take(np.arange(0)) if test is None else examples_of(test)
        return cls(name, lambda: Dataset(name, train_shard, held), select_device(device))

    @cached_property
    def state(self) -> Path:
        """The institution's state directory. Its files survive rounds and restarts, and never leave."""
        folder = self.state_root / self.name
        if folder not in _prepared or not folder.is_dir():
            private_folder(make_folder(folder, "the institution's state directory"))
            sweep(folder)
            _prepared.add(folder)
        return folder

    @cached_property
    def seal(self) -> Seal | None:
        """What seals and opens parcels; None if it seals nothing."""
        return self.read_seal() if self.read_seal else None

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
        """Test examples of other institutions; in a classification, only of classes that this one trains on.

        Kalra et al. 2023, section 4.3, note 4: a class that it has never seen would measure nothing.
        """
        external = self.read_external() if self.read_external else self.data.external
        if external is not None and self.data.train.y.dtype == np.int64:
            external = external.take(np.flatnonzero(np.isin(external.y, self.data.train.y)))
        if external is None or not len(external):
            raise DataError(
                f"external=true tests on other institutions' examples; {self.name!r} holds none of classes that it "
                "trains on: add rows with split=external to its manifest, or leave external out"
            )
        return Shard.of(external, self.device)

    def shard(self, split: str) -> Shard:
        """Return the training, the validation, the test or the external examples; only the validation's may be none."""
        if split == "external":
            return self.external
        if split == "validation":
            return self.validation or Shard(self.train.x[:0], self.train.y[:0], 0)
        return self.train if split == "train" else self.test

    def check_split(self, split: str) -> None:
        """Refuse a test on examples that the run's configuration does not name."""
        further = {"validation": self.validates, "train": self.tests_training, "external": self.tests_external}
        if split != "test" and not further.get(split, False):
            raise RefusedError(
                "an institution tests on its test examples, with split=validation on its validation examples, with "
                "forgetting=true on its training examples and with external=true on others'; this run asks for "
                f"split={split!r} without it: refused"
            )

    @cached_property
    def pooled(self) -> Shard:
        """All institutions' training examples together; only a simulation has them."""
        if self.read_pooled is None:
            raise TrainingError(  # this text is sent to the server
                f"institution {self.name!r} owns its own data only; strategy=central needs one institution that owns "
                "everything: run it in a simulation, or with all data at one node and nodes=1"
            )
        return Shard.of(self.read_pooled().train, self.device)

    def record_release(
        self, about: dict[str, Any], asked: RecordDict, answer: RecordDict, rows: list[LedgerRow]
    ) -> None:
        """Write what is about to leave to the institution's own ledger: run, round, stage, and of a test the split.

        With `record`, the answer is kept before it leaves, and with record=all also what was asked.
        """
        message, kept = {"time": datetime.now(UTC).isoformat(timespec="seconds"), **about}, {}
        if self.record != "none":
            named = {**message, "institution": self.name}
            kept = {
                "request": self._recording.keep({**named, "direction": "down"}, asked),
                "message": self._recording.keep({**named, "direction": "up"}, answer),
            }
        self._ledger.record(message | {key: name for key, name in kept.items() if name}, rows)
        self._ledger.flush(to_disk=self.durable)

    @cached_property
    def _recording(self) -> Recording:
        return Recording(self.state / FOLDER, DIRECTIONS[self.record], self.record_mb)

    @cached_property
    def _ledger(self) -> Ledger:
        ledger = Ledger(self.state)
        if self.durable:
            sync(self.state)  # the entry of a new file
        return ledger
