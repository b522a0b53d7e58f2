"""What an institution keeps between messages: named arrays in its state directory, by run and exchange.

A deployed ClientApp's process ends with every message, and a Ray actor serves several institutions, so nothing that
must last lives in memory. Each save is atomic and the last three are kept: the server writes a checkpoint beside the
next exchange, so a crash may lose two. An exchange that is then repeated begins from what was there before, and gives
the same bits.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from safetensors.numpy import load_file, save

from flwr_replay.errors import PrivacyError, WireError
from flwr_replay.files import NAME, write_atomic
from flwr_replay.institution import Institution
from flwr_replay.wire import StateDict

__all__ = ["StateStore", "load_optimizer_arrays", "optimizer_arrays"]


class StateStore:
    """Arrays under a key, as they stood after an exchange of a run."""

    def __init__(self, institution: Institution) -> None:
        self.institution = institution

    @property
    def folder(self) -> Path:
        """The institution's state directory, made when it is first used."""
        return self.institution.state

    def of_run(self, run: str) -> Path:
        """Return the folder of what belongs to a run; it may not be there yet."""
        if not NAME.fullmatch(run):  # it comes from the server and must not lead out of the state directory
            raise WireError(f"a run's id has letters, digits, spaces, dots, hyphens and underscores; got {run!r}")
        return self.folder / run

    def settle(self, run: str, setting: str) -> None:
        """Note at the first message of a run under which setting it is made; later ones must have the same.

        Raises
        ------
        PrivacyError
            If this run was begun under another: what it has left here may depend on data without noise.
        """
        _settle(self.of_run(run), setting)

    def save(self, key: str, run: str, server_round: int, arrays: StateDict, to_disk: bool = True) -> None:
        """Keep arrays as they stand after exchange `server_round`; forget all but the last three.

        Without `to_disk` they outlive this process, but perhaps not a power failure.
        """
        folder = self.of_run(run)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{key}-{server_round:06d}.safetensors"
        spare = [old for old in self._files(key, run) if old != file][:-2]
        write_atomic(file, save(arrays), to_disk, over=spare.pop() if spare else None)
        for old in spare:
            old.unlink()

    def load(self, key: str, run: str, before: int) -> StateDict | None:
        """Return the arrays as they stood when exchange `before` began; None if there are none yet."""
        earlier = [file for file in self._files(key, run) if exchange_of(file) < before]
        return load_file(earlier[-1]) if earlier else None

    def at(self, key: str, run: str, server_round: int) -> StateDict | None:
        """Return the arrays that were saved after one exchange; None if none were, or they are gone."""
        file = self.of_run(run) / f"{key}-{server_round:06d}.safetensors"
        return load_file(file) if file.exists() else None

    def forget_after(self, key: str, run: str, server_round: int) -> None:
        """Remove what was saved after later exchanges, which are made again."""
        for file in self._files(key, run):
            if exchange_of(file) > server_round:
                file.unlink()

    def forget(self, key: str, run: str) -> None:
        """Remove all that was kept under keys that begin so."""
        for old in self.of_run(run).glob(f"{key}-*.safetensors"):
            old.unlink()

    def _files(self, key: str, run: str) -> list[Path]:
        """Return a key's files, the oldest first."""
        return sorted(self.of_run(run).glob(f"{key}-*.safetensors"))


def exchange_of(file: Path) -> int:
    """Return after which exchange a file was written."""
    return int(file.stem.rsplit("-", 1)[1])


@lru_cache(maxsize=1024)  # a process looks once
def _settle(folder: Path, setting: str) -> None:
    path = folder / "setting"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, setting)
    elif path.read_text(encoding="utf-8") != setting:
        raise PrivacyError(
            "a run keeps its privacy options, since what it has left here may depend on data without noise; "
            f"{folder.name!r} was begun with others: begin a new run"
        )


def optimizer_arrays(optimizer: torch.optim.Optimizer) -> StateDict:
    """Flatten an optimizer's tensors into named arrays: `<parameter index>.<name>`."""
    return {
        f"{index}.{name}": value.detach().cpu().numpy()
        for index, slots in optimizer.state_dict()["state"].items()
        for name, value in slots.items()
        if isinstance(value, torch.Tensor)
    }


def load_optimizer_arrays(optimizer: torch.optim.Optimizer, arrays: StateDict) -> None:
    """Put named arrays back into an optimizer of the same parameters; learning rate and the like stay as they are."""
    slots: dict[int, dict[str, torch.Tensor]] = {}
    for name, array in arrays.items():
        index, slot = name.split(".", 1)
        slots.setdefault(int(index), {})[slot] = torch.tensor(array)  # a copy: the optimizer goes on writing into it
    optimizer.load_state_dict({**optimizer.state_dict(), "state": slots})
