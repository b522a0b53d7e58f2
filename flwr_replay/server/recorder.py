"""The recorder of a run. This base class logs through Flower; `runs.directory.RunDirectory` also writes to the disk."""

import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import RecordDict

from flwr_replay.errors import one_line
from flwr_replay.payloads.common import Evaluation
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.server.members import Member
from flwr_replay.wire.payload import LedgerRow
from flwr_replay.wire.records import StateDict

__all__ = ["Recorder", "Snapshot"]

REASONS, CUT = 10_000, 100  # characters of an institution's reasons that are kept whole, and of each one after these


@dataclass(frozen=True)
class Snapshot:
    """All that a run needs to continue after an exchange with the same bits."""

    exchange: int
    arrays: StateDict  # the global weights
    state_arrays: StateDict  # the strategy's own arrays
    state_values: dict[str, Any]  # plain values that JSON holds
    trained: Mapping[str, int]  # by name, the last exchange in which an institution has trained
    examples: dict[str, int]  # by institution: number of training examples
    label_scale: tuple[float, float] | None = None  # regression: mean and standard deviation of the labels
    bindings: dict[str, tuple[int, str]] = field(default_factory=dict)  # by institution: node id, SHA-256 of its proof


class Recorder:
    """Logs a run and collects its failures; writes nothing to the disk."""

    def __init__(self) -> None:
        self.failures: list[dict[str, Any]] = []
        self.alike: dict[tuple[str, str], list[str]] = {}  # by exchange and reason: who failed since `tell_alike`
        self.characters = Counter[str]()  # by institution: characters of its reasons in these
        self.per_round = 1  # exchanges in a round
        self.earlier = 0  # how many of these are from before the run was resumed
        self.after_others = True  # whether there was a run, so far as is known, that nodes may still answer
        self.begun = 0  # the last exchange that was begun before the run was resumed
        self.released: dict[str, dict[str, Any]] = {}  # by institution: the epsilon and delta that it stated last
        self.tested: dict[str, Evaluation] = {}  # by institution: its sums over the shard that was tested last
        self.notes: dict[str, Any] = {}  # what a method adds to the run's result, by name
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def log(self, text: str) -> None:
        """Write a line to Flower's log."""
        logging.getLogger("flwr").info(text)

    def begin(self, strategy: str, num_rounds: int, per_round: int, done: int) -> None:
        """Note that a run begins, or is resumed after `done` exchanges."""
        self.per_round = per_round
        self.log(f"{strategy}: {num_rounds} rounds" + (f" of {per_round} exchanges" if per_round > 1 else ""))

    def kept_private(self, run: str, key: str) -> None:
        """Say where institutions keep private models; a run directory is asked for them, so that it need not say."""
        self.log(
            f"private models stay at the institutions: NAME's is $FLWR_REPLAY_HOME/state/NAME/runs/{run}/"
            f"{key}-….safetensors, and $FLWR_REPLAY_HOME is ~/.flwr-replay if it is not set"
        )

    def travelled(
        self,
        exchange: int,
        member: Member,
        direction: str,
        fields: list[LedgerRow],
        stage: str = "",
        raw_bytes: int | None = None,
        split: str = "",
        content: RecordDict | None = None,
    ) -> None:
        """Note one message: its fields, and perhaps all of its content.

        `raw_bytes` is the size of the raw examples behind its per-sample fields. `split` is the split of an evaluation.
        """

    def flush(self) -> None:
        """Write what has been noted."""

    def saw(self, examples: int) -> None:
        """Count training examples used, with repetition."""

    def evaluated(self, exchange: int, pooled: dict[str, float], own: dict[str, dict[str, float]]) -> None:
        """Note the metrics of a round, pooled and by institution."""
        self.log(
            f"round {exchange // self.per_round}: " + ", ".join(f"{name} {value:.4f}" for name, value in pooled.items())
        )

    def forgetting_row(self, exchange: int, data_of: Sequence[str], own: dict[str, dict[str, float]]) -> None:
        """Note the metrics on each institution's training examples, after an exchange that trained on `data_of`."""

    def advised(self, advice: str) -> None:
        """Say, and note for the result, what to change before anything is trained; nothing if it is empty."""
        if advice:
            self.log(advice)
            self.notes["upload-advice"] = advice

    def generated(
        self, name: str, network: str, losses: list[float], **figures: Sequence[float] | float | None
    ) -> None:
        """Note the training of a network, generator or prior: the losses, and other figures by name.

        Under DP institutions withhold them.
        """
        texts = [f"loss {_some([f'{loss:.4f}' for loss in losses]) or 'withheld'}"]
        for figure, values in figures.items():
            if values is not None and np.size(values):
                texts.append(f"{figure} {_some([f'{value:.4g}' for value in np.atleast_1d(values)])}")
        self.log(f"{network} at {name}: {'; '.join(texts)}")

    def spent(
        self, exchange: int, name: str, epsilon: float | None, delta: float, plan: PrivacyPlan, *, proven: bool
    ) -> None:
        """Note the epsilon and delta that an institution states for all its releases so far; of a sum also its own.

        Without epsilon its noise is not secret. `proven`: whether the epsilon is proven for this method.
        """
        kind = plan.mechanism if epsilon is not None else "not protected: noise from the run's seed"
        stated = {"epsilon": epsilon, "delta": delta, "proven": proven}
        accountant = plan.accountant if "DP-SGD" in plan.mechanism else "exact"
        alone = {"alone": plan.alone(epsilon, delta)} if plan.institutions and epsilon else {}
        self.released[name] = {**stated, **alone, "mechanism": kind, "accountant": accountant}

    def failed(self, exchange: int, name: str, reason: str) -> None:
        """Note that an institution refused, failed or did not answer; of long reasons without end, their beginnings."""
        reason = one_line(reason)
        kept = reason if self.characters[name] < REASONS or len(reason) <= CUT else f"{reason[: CUT - 2]} …"
        self.characters[name] += len(kept)
        self.failures.append({"round": exchange, "institution": name, "reason": kept})
        about = f" (round {ceil(exchange / self.per_round)})" if self.per_round > 1 else ""
        names = self.alike.setdefault((f"exchange {exchange}{about}", reason), [])
        names.append(name)
        if len(names) == 1:  # of the others `tell_alike` makes one line
            logging.getLogger("flwr").warning("%s takes no part in exchange %s%s: %s", name, exchange, about, reason)

    def tell_alike(self) -> None:
        """Log in one line who failed for a reason that another one's line has already."""
        for (where, _), (first, *others) in self.alike.items():
            if others:
                names = ", ".join(others)
                logging.getLogger("flwr").warning("in %s the reason of %s is also that of %s", where, first, names)
        self.alike = {}

    def failures_line(self) -> str:
        """Return the failures of the last exchange that had any, in one line, each reason once."""
        by_reason: dict[str, list[str]] = {}
        failures = self.failures[self.earlier :]
        for failure in failures:
            if failure["round"] == failures[-1]["round"]:
                by_reason.setdefault(failure["reason"], []).append(failure["institution"])
        return (
            "; ".join(f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in by_reason.items())
            or "none gave a reason"
        )

    def end_exchange(self, snapshot: Snapshot) -> None:
        """Note that an exchange is over."""

    def restore(self) -> Snapshot | None:
        """Return the snapshot to resume from; None for a new run."""
        return None

    def folder(self, name: str, fresh: bool = False) -> Path:
        """Return a folder for the server's data during the run; `fresh` empties it."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="flwr-replay-")
        path = Path(self._folder.name) / name
        if fresh:
            shutil.rmtree(path, ignore_errors=True)
        path.mkdir(exist_ok=True)
        return path


def _some(values: list[str]) -> str:
    """Write values in a line, without the middle of a long series.

    >>> _some(["0.9", "0.7", "0.6", "0.5", "0.4", "0.4", "0.3"])
    '0.9, 0.7, 0.6, …, 0.4, 0.4, 0.3'
    """
    return ", ".join(values if len(values) <= 6 else [*values[:3], "…", *values[-3:]])
