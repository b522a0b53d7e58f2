"""What a strategy reports to: the base logs through Flower, `runs.directory.RunDirectory` keeps it on disk, too."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr_replay.server.members import Member
from flwr_replay.wire.payload import Row
from flwr_replay.wire.records import StateDict

__all__ = ["Recorder", "Snapshot"]


@dataclass(frozen=True)
class Snapshot:
    """All that a run needs to go on after an exchange with the same bits."""

    server_round: int
    arrays: StateDict  # the global weights
    state_arrays: StateDict  # the strategy's own
    state_values: dict[str, Any]  # plain values that JSON holds
    trained: list[str]  # names of those that have trained
    examples: dict[str, int]  # how many training examples each institution has
    label_scale: tuple[float, float] | None = None  # regression: mean and standard deviation of the labels
    bindings: dict[str, tuple[int, str]] = field(default_factory=dict)  # of each: node id, SHA-256 of its proof


class Recorder:
    """Logs what happens; keeps failures, and nothing on disk."""

    def __init__(self) -> None:
        self.failures: list[dict[str, Any]] = []
        self.earlier = 0  # how many of these are of earlier attempts
        self.released: dict[str, dict[str, Any]] = {}  # by institution: what it states that it has released
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def log(self, text: str) -> None:
        """Write a line to Flower's log."""
        logging.getLogger("flwr").info(text)

    def begin(self, strategy: str, num_rounds: int, per_round: int, done: int) -> None:
        """Note that a run begins, or goes on after `done` exchanges."""

    def travelled(
        self,
        server_round: int,
        member: Member,
        direction: str,
        found: list[Row],
        stage: str = "",
        raw_bytes: int | None = None,
        split: str = "",
    ) -> None:
        """Note what one message held; `raw_bytes` is the size of the raw examples that its samples stand for.

        `split` says of a test on which examples it is.
        """

    def flush(self) -> None:
        """Keep what has been noted: the messages of an exchange have all been seen."""

    def saw(self, examples: int) -> None:
        """Note training examples used, with repetition."""

    def evaluated(self, server_round: int, pooled: dict[str, float], own: dict[str, dict[str, float]]) -> None:
        """Note the metrics of a round, pooled and of each institution."""
        self.log(f"round {server_round}: " + ", ".join(f"{name} {value:.4f}" for name, value in pooled.items()))

    def forgetting_row(self, server_round: int, data_of: Sequence[str], own: dict[str, dict[str, float]]) -> None:
        """Note the metrics on each institution's own training examples, after an exchange that trained on some's."""

    def generated(self, name: str, losses: list[float], perplexity: Sequence[float] = ()) -> None:
        """Note how the training of a generator or prior went: the loss of every epoch, and how many codes are in use.

        Nothing is told where it would not be private.
        """
        used = f"; codes in use (perplexity): {', '.join(f'{p:.1f}' for p in perplexity)}" if perplexity else ""
        self.log(f"generator at {name}: loss {', '.join(f'{loss:.4f}' for loss in losses) or 'withheld'}{used}")

    def spent(
        self, server_round: int, name: str, epsilon: float | None, delta: float, mechanism: str, *, proven: bool
    ) -> None:
        """Note what an institution states that it has released so far; no epsilon: its noise is not secret.

        `proven` says whether what the accountant computes for this method is a proof.
        """
        kind = mechanism if epsilon is not None else "not protected: noise from the run's seed"
        stated = {"epsilon": epsilon, "delta": delta, "proven": proven}
        self.released[name] = {**stated, "mechanism": kind, "accountant": "rdp"}

    def failed(self, server_round: int, name: str, reason: str) -> None:
        """Note that an institution refused, failed or did not answer."""
        self.failures.append({"round": server_round, "institution": name, "reason": reason})
        logging.getLogger("flwr").warning("%s takes no part in exchange %s: %s", name, server_round, reason)

    def failures_line(self) -> str:
        """Return the failures of the last exchange that had any as one line, each reason once."""
        by_reason: dict[str, list[str]] = {}
        found = self.failures[self.earlier :]
        for failure in (one for one in found if one["round"] == found[-1]["round"]):
            by_reason.setdefault(failure["reason"], []).append(failure["institution"])
        return (
            "; ".join(f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in by_reason.items())
            or "none gave a reason"
        )

    def end_exchange(self, snapshot: Snapshot) -> None:
        """Note that a server round is over."""

    def restore(self) -> Snapshot | None:
        """Return where to go on; None begins anew."""
        return None

    def folder(self, name: str, fresh: bool = False) -> Path:
        """Return a folder for data that the server keeps during the run; `fresh` empties it."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="flwr-replay-")
        path = Path(self._folder.name) / name
        if fresh:
            shutil.rmtree(path, ignore_errors=True)
        path.mkdir(exist_ok=True)
        return path
