"""The global weights of the best evaluated round, in the folder `best/` of a run directory.

Each file is better than those before it, and named after its exchange. While a run lasts there may be three, so that it
can resume from either of its last two checkpoints; in the end one is left. Runs that resume end with the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

from flwr_replay.errors import DamagedError, RunError
from flwr_replay.files.atomic import private_folder
from flwr_replay.files.disk import entries, remove
from flwr_replay.files.tensors import OF_RUN, read_own, write_tensors
from flwr_replay.report.run_files import mark_of
from flwr_replay.wire.records import StateDict

__all__ = ["BestModel", "best_of"]

Evaluated = tuple[int, dict[str, float], dict[str, dict[str, float]]]  # the exchange, pooled metrics, each one's own


def best_of(history: Sequence[Evaluated], metric: str, higher_is_better: bool) -> Evaluated:
    """Return the first of the evaluations with the best metric, among those at the most institutions."""
    sign = 1 if higher_is_better else -1

    def judged(evaluated: Evaluated) -> tuple[int, float]:
        return sum(metric in own for own in evaluated[2].values()), sign * evaluated[1].get(metric, -sign * inf)

    return max(history, key=judged)


class BestModel:
    """The best global weights of a run, by its directory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._mark = folder / "best", mark_of(folder)

    def files(self) -> dict[int, Path]:
        """Return the files by exchange, in order."""
        return {int(path.stem): path for path in entries(self.folder, "[0-9]*.safetensors")}

    @property
    def exchange(self) -> int:
        """The exchange after which the best weights were tested.

        Raises
        ------
        RunError
            If there are none.
        """
        if not (files := self.files()):
            raise RunError(
                f"{self.folder.parent} has no best model: methods whose institutions keep models of their own have "
                "none, nor have runs of older versions: take the last one"
            )
        return max(files)

    def file(self) -> Path:
        """Return the file with the best weights."""
        return self.files()[self.exchange]

    def write(self, exchange: int, arrays: StateDict) -> None:
        """Keep the weights of a round that is better than all before."""
        file = private_folder(self.folder) / f"{exchange:06d}.safetensors"
        write_tensors(file, arrays, {OF_RUN: self._mark})

    def settle(self, exchange: int) -> None:
        """Delete what is not the best at this exchange, and was before it."""
        self._delete([at for at in self.files() if at <= exchange][:-1])

    def end(self, exchange: int, last: StateDict | None) -> Path | None:
        """Delete all but the best; return its file, or None if that is lost.

        Parameters
        ----------
        exchange : int
            Of the best.
        last : StateDict | None
            The weights of the last exchange if they are the best: if their file is lost, it is written again.
        """
        if last is not None and exchange not in self.files():
            self.write(exchange, last)
        self._delete([at for at in self.files() if at != exchange])
        return self.files().get(exchange)

    def rewind(self, exchange: int, log: Callable[[str], None]) -> None:
        """Delete what was best only after this exchange, and what is damaged or another run's; `log` is told why.

        Raises
        ------
        RunError
            If a file could not be read. Nothing is deleted then.
        """
        damaged = []
        for at, path in self.files().items():
            try:
                read_own(path, self._mark)
            except DamagedError as error:
                damaged.append(at)
                if at <= exchange:
                    log(f"{error}; the run goes on without the best round's model")
        self._delete([at for at in self.files() if at > exchange or at in damaged])

    def _delete(self, exchanges: list[int]) -> None:
        for path in (self.files()[at] for at in exchanges):
            remove(path)
