"""Data-parallel training on one machine: several processes, each with its share of every batch.

PyTorch's DistributedDataParallel averages the gradients, over NCCL on GPUs and over gloo on CPUs. Each rank's loss is
weighted by its share of the batch. So the weights are those that one process would compute, up to rounding.

The processes, one for each rank, know nothing from one training to the next: weights and optimizer state come with
every request, and go back to the process that asked. They end with it, whatever ends it.
"""

import multiprocessing
import os
import pickle
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flwr_replay.config.sections import TrainingConfig, require
from flwr_replay.errors import ConfigError, RunError
from flwr_replay.learning.latents import on_device
from flwr_replay.learning.training import make_optimizer
from flwr_replay.models import has_batch_norm
from flwr_replay.processes import end_with_parent
from flwr_replay.wire.records import StateDict
from flwr_replay.wire.weights import load_arrays, load_optimizer_arrays, optimizer_arrays, to_arrays

__all__ = ["Batches", "Epoch", "Loss", "Ranks"]

GRACE = 2  # seconds in which a process ends that has said its last

Loss = Callable[[Tensor, Tensor], Tensor]  # the mean loss over a batch, of outputs (B, ...) and labels (B, ...)
Epoch = Callable[[nn.Module, torch.optim.Optimizer, Loss, Iterable[tuple[Tensor, Tensor]]], list[Tensor]]
Answer = tuple[StateDict, StateDict, NDArray[np.float32]]  # weights, optimizer state, losses


class Batches(Protocol):
    """Reads one epoch's batches, of each only the rows in `share`; it can be pickled."""

    def __call__(self, *, share: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs (B, ...) and labels (B, ...)."""


class Ranks:
    """Processes that take every optimizer step together; they start at the first training.

    One is the process that asks, without any other. Of several on `cuda`, each has a GPU of its own.
    """

    def __init__(self, count: int, device: torch.device | str) -> None:
        self.count, self.device = count, torch.device(device)
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self.pipes: list[Connection] = []

    def check(self, module: nn.Module, size: int) -> None:
        """Refuse what several processes cannot train as one would, on batches of `size` examples.

        Raises
        ------
        ConfigError
            If the module has batch norm or cannot be sent to another process, a batch is too small, or there are too
            few GPUs.
        """
        if self.count == 1:
            return
        option = f"strategy.server-processes={self.count}"
        require(
            not has_batch_norm(module),
            f"{option} shares every batch out, but batch norm normalises over all of it: set model.norm=group, or "
            "leave server-processes out",
        )
        require(
            size >= self.count,
            f"{option} shares every batch out; got batches of {size}: raise training.batch-size where there are more "
            "examples, or take fewer processes",
        )
        if self.device.type == "cuda":
            require(
                self.device.index is None,
                f"{option} takes the first GPUs; got device={self.device}: set device=cuda, or leave the other out",
            )
            gpus = torch.cuda.device_count()
            require(self.count <= gpus, f"{option} takes as many GPUs; there are {gpus}: take fewer processes")
        _pickled(module)

    def train(
        self,
        epoch: Epoch,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        training: TrainingConfig,
        loss: Loss,
        batches: Batches,
        size: int,
    ) -> list[Tensor]:
        """Train a module for one epoch; it and its optimizer then are as if this process had done so, up to rounding.

        Parameters
        ----------
        epoch : Epoch
            The loop over the batches, a function of a module; every rank runs it on its share of them.
        module : nn.Module
            On the device; one that `check` takes.
        optimizer, training : torch.optim.Optimizer, TrainingConfig
            As `make_optimizer` builds it; the learning rate is the optimizer's own.
        size : int
            Examples of each batch, of all ranks together.

        Returns
        -------
        losses : list of Tensor
            The mean loss of each batch.

        Raises
        ------
        ConfigError
            As `check`.
        RunError
            If a process fails or ends.
        """
        if self.count == 1:
            return epoch(module, optimizer, loss, on_device(batches(share=slice(None)), self.device))
        if not self.processes:
            self.check(module, size)
            self._start()
        here = deepcopy(module).cpu()
        lr, state = optimizer.param_groups[0]["lr"], optimizer_arrays(optimizer)
        given = _pickled((epoch, here, training, lr, state, loss, batches, size))
        try:
            with suppress(OSError):  # of a process that has ended, which is noticed below
                for pipe in self.pipes:
                    pipe.send_bytes(given)
            weights, state, losses = self._answer()
        except BaseException:
            self.close()
            raise
        load_arrays(module, weights)
        load_optimizer_arrays(optimizer, state)
        return list(torch.from_numpy(losses))

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()  # they keep nothing
            process.join()
        for pipe in self.pipes:
            pipe.close()
        if self.processes:
            self._meeting.cleanup()
        self.processes, self.pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process with PyTorch's threads may hang
        self._meeting = tempfile.TemporaryDirectory(prefix="flwr-replay-")
        for rank in range(self.count):
            pipe, theirs = context.Pipe()
            device = torch.device("cuda", rank) if self.device.type == "cuda" else self.device
            place = (rank, self.count, device, Path(self._meeting.name) / "ranks", torch.get_num_threads())
            process = context.Process(target=_serve, args=(theirs, *place))
            process.start()
            self.pipes.append(pipe)
            self.processes.append(process)
            theirs.close()  # so that its end is seen here

    def _answer(self) -> Answer:
        """Wait for all ranks; return the answer of the first."""
        answers: dict[int, Any] = {}
        while len(answers) < self.count:
            for pipe in wait([pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]):
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = self.pipes[rank].recv()
                except (EOFError, OSError):
                    answers[rank] = "it ended"
                if isinstance(answers[rank], str):
                    raise self._fault(rank, answers[rank])
        answer: Answer = answers[0]
        return answer

    def _fault(self, rank: int, fault: str) -> RunError:
        self.processes[rank].join(GRACE)
        ended = [(k, process.exitcode) for k, process in enumerate(self.processes) if process.exitcode]
        what = f"process {rank}: {fault}"
        if ended:  # the others then only say that they lost it
            what = ", ".join(f"process {k} ended with exit code {code}" for k, code in ended)
        return RunError(
            f"all {self.count} processes that train at the server must finish; {what}: run again with --resume, or "
            "with a lower strategy.server-processes"
        )


def _pickled(what: object) -> bytes:
    """Pickle what another process gets; not by `Connection.send`, which would share the tensors' memory."""
    try:
        return pickle.dumps(what)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"strategy.server-processes sends the model to other processes, and it cannot be sent: {error}: define its "
            "layers at the top of a module, or leave server-processes out"
        ) from None


def _serve(pipe: Connection, rank: int, ranks: int, device: torch.device, meeting: Path, threads: int) -> None:
    """Be a rank: train whenever asked, until the other end of the pipe is closed."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    torch.set_num_threads(threads)
    for backend in ("GLOO", "NCCL"):  # nothing listens on the network
        os.environ[f"{backend}_SOCKET_IFNAME"] = next(  # this machine's loopback interface
            name for name, at in psutil.net_if_addrs().items() if any(entry.address == "127.0.0.1" for entry in at)
        )
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=meeting.as_uri(), rank=rank, world_size=ranks)
        while True:
            given = pickle.loads(pipe.recv_bytes())
            answer = _train(rank, ranks, device, *given)
            pipe.send(None if rank else answer)
    except EOFError:
        return
    except Exception as fault:
        pipe.send(f"{type(fault).__name__}: {' '.join(str(fault).split())[:200]}")


def _train(
    rank: int,
    ranks: int,
    device: torch.device,
    epoch: Epoch,
    module: nn.Module,
    training: TrainingConfig,
    lr: float,
    state: StateDict,
    loss: Loss,
    batches: Batches,
    size: int,
) -> Answer:
    """Train on one rank's share; all ranks return the same weights, optimizer state and losses."""
    module.to(device)
    optimizer = make_optimizer(module, training, lr)
    load_optimizer_arrays(optimizer, state)
    together = DistributedDataParallel(module, device_ids=[device] if device.type == "cuda" else None)

    def share_of_loss(outputs: Tensor, y_B: Tensor) -> Tensor:
        return loss(outputs, y_B) * (len(y_B) / size * ranks)  # the mean over ranks is the mean over the batch

    share = slice(rank, None, ranks)
    losses = torch.stack(epoch(together, optimizer, share_of_loss, on_device(batches(share=share), device))) / ranks
    dist.all_reduce(losses)
    return to_arrays(module), optimizer_arrays(optimizer), losses.cpu().numpy()
