"""SplitNN, peer-to-peer mode: the server's half; the institution's half is `clients/splitnn.py`.

Source: Vepakomma et al. 2018 (arXiv:1812.00564); Qu et al. 2022, section 4.1, for the visits and the cut after conv1.
Idea: One model, cut in two, visits the institutions in turn. The part before the cut trains at the institution, the
rest at the server. In every batch activations and gradients cross the cut.
Travels: the part before the cut, to the visited institution (`Enter`) and back (`Half`); in every batch the activations
and labels of its examples up (`LabelledActivations`) and the gradients at the cut down (`NextBatch`, `Leave`); for
evaluation the whole model.

    for each round: for each institution k:
        θ_E → k                                                       # Enter
        for each batch x, y at k:
            k:       a ← E(x)                                         # up: a, y
            server:  θ_S ← θ_S − η ∇L(S(a), y)                        # down: g = ∂L/∂a, and the request for the next a
            k:       θ_E ← θ_E − η g · ∂E(x)/∂θ_E
        θ_E ← k                                                       # Leave, Half

The process at k ends between messages. So k keeps θ_E, norm statistics and optimizer in its state directory, as they
are before a batch. When the gradient arrives, k computes E(x) once more; the first E(x) changes nothing that is kept.
With optimizer-state=reset the result is CWT's, bit for bit (on CPUs with equal torch threads).

share-labels=false is the U-shaped variant: k holds the head too, and labels never leave. A batch takes two exchanges.
In the first, a goes up and S(a) down. In the second, the gradient at S(a) goes up (`HeadGradients`) and g down; the
gradient reveals something about the labels. The result is the same.

micro-batches=m > 1 is another algorithm, with fewer messages: a message holds a group of m batches. The part with the
loss (the server's, or the head) still steps after each batch. Every part before it computes its m outputs with the
weights that it has when the message arrives. It later takes m steps, one for each gradient, although all m gradients
belong to those weights. The last group of a visit may be smaller.

What is protected: Nothing. In every round the server sees the activations of all examples of an institution, except
those that fill no batch. After conv1 activations are close to the images. The server sees the labels too or, with
share-labels=false, gradients and a head that were computed from them. Nothing is differentially private.

Deviations: θ_E goes from one institution to the next through the server, as Flower's messages require. An evaluation
sends the whole model, so institutions see the server's part. With optimizer-state=keep the server keeps one optimizer
for its part over all visits, while in CWT each institution keeps one for the whole model. A visit that fails leaves
both parts and the server's optimizer as they were before it.
"""

import math
import sys
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import Tensor

from flwr_replay.config.sections import BATCH, one_of, within
from flwr_replay.config.strategy import StrategyConfig, Traits
from flwr_replay.errors import DivergedError, WireError, refuse_each
from flwr_replay.learning.latents import bytes_by_cut
from flwr_replay.learning.training import iterations, late_steps, make_optimizer, mean_loss
from flwr_replay.models import StagedModel, placed, split, split_before_head
from flwr_replay.models.layers import step
from flwr_replay.movements.base import Exchange, Outcome, Settings
from flwr_replay.movements.serial import Serial
from flwr_replay.payloads.splitnn import (
    Activations,
    Enter,
    EnterUnlabelled,
    Half,
    HeadGradients,
    HeadLoss,
    LabelledActivations,
    Leave,
    NextBatch,
    NextBatchUnlabelled,
)
from flwr_replay.report.summary import upload_advice
from flwr_replay.server.asking import stopped
from flwr_replay.server.members import Member
from flwr_replay.wire.payload import Payload, Request
from flwr_replay.wire.records import StateDict, Weights, array_record, opened
from flwr_replay.wire.weights import load_arrays, load_optimizer_arrays, optimizer_arrays, to_arrays

__all__ = ["SplitNN", "SplitNNConfig"]


@dataclass(frozen=True, kw_only=True)
class SplitNNConfig(StrategyConfig):
    """Options of SplitNN; Qu et al. cut after conv1."""

    name = "splitnn"
    traits = Traits(supports_replay=True, needs_roll_call=True)
    cut: str = ""  # the last stage of the institution's part; empty: the model's first stage, the paper's conv1
    share_labels: bool = True  # false: the head stays at the institution, and labels never leave
    micro_batches: int = 1  # batches that a message holds
    optimizer_state: str = "reset"  # reset: every visit begins with fresh momentum | keep: each party keeps its own

    def __post_init__(self) -> None:
        within("strategy.", self, micro_batches=(1, BATCH))
        one_of("strategy.optimizer-state", self.optimizer_state, ("keep", "reset"))


class SplitNN(Serial):
    """One model, cut in two, visits the institutions in turn."""

    needs = ("model", "task", "input_shape")
    config_type = SplitNNConfig
    config: SplitNNConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        labelled, unlabelled = ("enter", "next-batch"), ("enter-unlabelled", "next-batch-unlabelled", "head-loss")
        self.stages = (*(labelled if self.config.share_labels else unlabelled), "leave", "evaluate")
        self.kept: StateDict = {}  # the state of the server's optimizer after the last visit

    @classmethod
    def check(cls, config: SplitNNConfig, settings: Settings, names: Sequence[str] = ()) -> None:
        """Refuse a cut that the model lacks, or one that leaves the server nothing."""
        refuse_each(partial(super().check, config, settings, names), lambda: cls(config, settings).parts)

    @cached_property
    def parts(self) -> tuple[StagedModel, ...]:
        """The parts of the model: the institution's, the server's and, with share-labels=false, the head."""
        assert self.settings.model is not None
        model = placed(self.settings.model(0), self.settings.device).train()
        return (split if self.config.share_labels else split_before_head)(model, self.config.cut)

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of one example's activations at the cut, and where the server's part ends."""
        assert self.settings.input_shape is not None
        shapes, x = [], torch.zeros(1, *self.settings.input_shape, device=self.settings.device)
        parts = self.parts[:2]  # built before, since what is built in inference mode cannot be trained
        with torch.inference_mode():
            for part in parts:
                x = part.eval()(x)
                part.train()
                shapes.append(tuple(x.shape[1:]))
        return shapes

    def begin_run(self) -> None:
        """Compare what a round will upload with the raw data, before anything is trained."""
        super().begin_run()
        assert self.settings.input_shape is not None
        b = self.settings.training.batch_size
        replayed = self.replay.options.num_replayed(b, held=sys.maxsize) if self.replay else 0  # at most
        rows = sum(sum(self.group_sizes(member, replayed)) for member in self.cycle_members())
        raw = sum(member.raw_bytes for member in self.members)
        blank_1 = torch.zeros(1, *self.settings.input_shape, device=self.settings.device)
        gradient = 4 * math.prod(self.shapes[1])  # ∂L/∂S(a)
        answered = self.blank_labels(1).nbytes if self.config.share_labels else gradient
        sizes, drawback = bytes_by_cut(self.parts[:2], blank_1, answered, "float32"), "moves more of the training there"
        advice = upload_advice("uploads of each round", sizes, self.parts[0].stages[-1], rows, raw, drawback)
        self.recorder.advised(advice)

    # --- one visit ----------------------------------------------------------------------------------------------------

    def training(
        self, member: Member, exchange: int, arrays: StateDict
    ) -> Generator[Request, Any, tuple[StateDict, float]]:
        """Train both parts at one institution; every `yield` sends a request and takes its answer.

        It returns the whole model after the visit, and the loss in nats, a mean over the visit's batches.
        """
        server, losses = self.parts[1], []
        load_arrays(server, {name: arrays[name] for name in server.state_dict()})
        optimizer = make_optimizer(server, self.settings.training, self.lr(exchange))
        load_optimizer_arrays(optimizer, {name: array.copy() for name, array in self.kept.items()})  # a visit may fail
        sizes, b = self.group_sizes(member, self.num_replayed(member)), self.mixed_batch_size(member)
        answer = yield self.train_request(exchange, arrays)  # θ_E → k; up: a, y of the first group
        for group, n in enumerate(sizes):
            a = [a_B.requires_grad_() for a_B in self.received(answer.activations, (n, *self.shapes[0]), b)]
            if self.config.share_labels:
                for a_B, y_B in zip(a, self.labels(answer, n, b), strict=True):
                    batch_loss = self.task.loss(server(a_B), y_B)
                    losses.append(step(server, optimizer, batch_loss))  # θ_S ← θ_S − η ∇L(S(a), y)
            else:
                s = [server(a_B) for a_B in a]
                answer = yield self.head_loss(exchange, group, _joined(s))  # down: S(a); up: ∂L/∂S(a)
                if len(answer.losses) != len(a):
                    raise WireError(f"{len(a)} batches have as many losses; got {len(answer.losses)}")
                losses += torch.tensor(list(map(float, answer.losses)))
                late_steps(server, optimizer, s, self.received(answer.gradients, (n, *self.shapes[1]), b))
            g = _joined([a_B.grad for a_B in a if a_B.grad is not None])  # ∂L/∂a
            # down: g; up: a, y of the next group, after the last one θ_E ← k
            answer = yield self.next_batch(exchange, group + 1, g, last=group + 1 == len(sizes))
        loss, whole = mean_loss(losses), self.whole(answer, server, arrays)
        self.recorder.saw(sum(sizes))
        self.kept = optimizer_arrays(optimizer) if self.config.optimizer_state == "keep" else {}
        return whole, loss

    def exchange_round(self, grid: Grid, exchange: int, arrays: ArrayRecord, config: ConfigRecord) -> Outcome:
        """Make one visit, message by message; if it fails, the next institution gets the same weights."""
        member, trained = self.visited(exchange), dict(self.exchanger.trained)
        if member is None:
            self.exchanger(grid, exchange, [])  # ends the run if no institution of a whole cycle is present
            return self.broken_off(trained)
        training = self.training(member, exchange, opened(arrays))
        request = next(training)
        while True:
            replies = self.exchanger(grid, exchange, [self.message(member, request, config)])
            if not replies:
                return self.broken_off(trained)
            try:
                request = training.send(request.answer.decode(replies[0].content))
            except StopIteration as ended:
                self.missed = frozenset()
                whole, loss = ended.value
                return array_record(whole), MetricRecord({"train-loss": loss})
            except (DivergedError, WireError) as error:  # this institution's answer cannot be used
                self.recorder.failed(exchange, member.name, str(error))
                if self.stops_without_answers():
                    fault = f"{member.name}: {error}"
                    diverged = [fault] if isinstance(error, DivergedError) else []
                    raise stopped(f"no institution could be visited; {fault}", 1, diverged) from None
                return self.broken_off(trained)

    def broken_off(self, trained: dict[str, int]) -> tuple[None, None]:
        """End a failed visit: its institution has saved no optimizer to continue with."""
        self.exchanger.trained = trained
        return None, None

    # --- requests -----------------------------------------------------------------------------------------------------

    def train_request(self, exchange: int, arrays: Weights) -> Enter:
        """Send the institution its part of the model; ask for the first activations."""
        request, servers = Enter if self.config.share_labels else EnterUnlabelled, self.parts[1].state_dict()
        part = {name: array for name, array in opened(arrays).items() if name not in servers}
        return request(**self.where(exchange, 0), arrays=part)

    def next_batch(self, exchange: int, group: int, gradients: NDArray[Any], last: bool) -> NextBatch | Leave:
        """Send the gradients of a group; ask for the activations of the next, or for the institution's part."""
        labelled = NextBatch if self.config.share_labels else NextBatchUnlabelled
        return (Leave if last else labelled)(**self.where(exchange, group), gradients=gradients)

    def head_loss(self, exchange: int, group: int, outputs: NDArray[Any]) -> HeadLoss:
        """Send the outputs S(a) of a group; ask for the gradients at S(a)."""
        where = self.where(exchange, group)
        return HeadLoss(**{**where, "message": where["message"] + 1}, outputs=outputs)

    def where(self, exchange: int, group: int) -> dict[str, Any]:
        """Return the instructions that every message of a visit has."""
        return {
            "exchange": exchange,
            "run": self.settings.run,
            "cut": self.parts[0].stages[-1],
            "with_head": not self.config.share_labels,
            "lr": self.lr(exchange),
            "optimizer_state": self.config.optimizer_state,
            "micro_batches": self.config.micro_batches,
            "message": group if self.config.share_labels else 2 * group,
            "group": group,
        }

    def forecast(self, arrays: StateDict, num_rounds: int) -> list[Exchange]:
        """One visit to each institution of the itinerary in every round, group by group."""
        exchanges = []
        enter = self.train_request(0, arrays)
        for member in self.cycle_members():
            sizes, b = self.group_sizes(member, self.num_replayed(member)), self.mixed_batch_size(member)
            visit: list[tuple[Request, Payload, int]] = [(enter, self.empty(sizes[0]), 1)]
            for (n, following), times in Counter(zip(sizes, [*sizes[1:], 0], strict=True)).items():
                gradients = [np.zeros((n, *shape), np.float32) for shape in self.shapes]
                if not self.config.share_labels:
                    losses = [0.0] * math.ceil(n / b)
                    answer = HeadGradients.blank(gradients=gradients[1], losses=losses)
                    visit.append((self.head_loss(0, 0, gradients[1]), answer, times))
                request = self.next_batch(0, 0, gradients[0], last=not following)
                half = Half.blank(enter.arrays)
                visit.append((request, self.empty(following) if following else half, times))
            exchanges += [(member, request, answer, times) for request, answer, times in visit]
        return self.every_round(exchanges, num_rounds)

    def empty(self, n: int) -> Activations:
        """Return a blank upload of n examples, as large as a real one."""
        answer = LabelledActivations if self.config.share_labels else Activations
        labels = {"labels": self.blank_labels(n)} if self.config.share_labels else {}
        return answer.blank(activations=np.zeros((n, *self.shapes[0]), np.float32), **labels)

    # --- answers ------------------------------------------------------------------------------------------------------

    def received(self, array: NDArray[Any], shape: tuple[int, ...], b: int) -> tuple[Tensor, ...]:
        """Return an array that an institution sent, in batches of b; it must be finite and of this shape."""
        if array.shape != shape or not np.isfinite(array).all():
            raise WireError(
                f"activations and gradients of {shape[0]} examples must be finite and have shape {shape}; got "
                f"{array.shape}{'' if np.isfinite(array).all() else ', not finite'}"
            )
        return self.batches(array, b)

    def labels(self, upload: LabelledActivations, n: int, b: int) -> tuple[Tensor, ...]:
        """Return the labels of an upload, which must be n of the task's, in batches of b."""
        if upload.labels.shape != self.blank_labels(n).shape or not self.task.accepts(upload.labels):
            raise WireError(f"{n} activations must come with as many labels of {self.task}; got others")
        return self.batches(upload.labels, b)

    def batches(self, array: NDArray[Any], b: int) -> tuple[Tensor, ...]:
        """Split an array into batches of b, on the server's device."""
        return torch.split(torch.tensor(array, device=self.settings.device), b)

    def num_replayed(self, member: Member) -> int:
        """Return how many replayed examples each of an institution's batches has."""
        if self.replay is None:
            return 0
        return self.replay.options.num_replayed(self.settings.training.batch_size, self.replay.holding(member.name))

    def mixed_batch_size(self, member: Member) -> int:
        """Return how many examples each of an institution's batches has, replayed ones included."""
        return self.settings.training.batch_size + self.num_replayed(member)

    def group_sizes(self, member: Member, replayed: int) -> list[int]:
        """Return how many examples each group of a visit has, with so many replayed ones in every batch."""
        b, m = self.settings.training.batch_size, self.config.micro_batches
        return group_sizes(member.num_examples, b, m, replayed)

    def whole(self, answer: Half, server: StagedModel, before: StateDict) -> StateDict:
        """Return the whole model: the institution's part, finite and in the form that was sent, and the server's."""
        whole = {**opened(answer.arrays), **to_arrays(server)}
        forms = ({name: (a.shape, a.dtype) for name, a in arrays.items()} for arrays in (whole, before))
        if next(forms) != next(forms) or not all(np.isfinite(array).all() for array in whole.values()):
            raise WireError("the institution's part must come back finite and in the form that it had; it did not")
        return {name: whole[name] for name in before}

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> tuple[StateDict, dict[str, Any]]:
        """Return the state of the server's optimizer and the itinerary."""
        return self.kept, super().state()[1]

    def restore(self, arrays: StateDict, values: dict[str, Any]) -> None:
        """Restore both."""
        super().restore(arrays, values)
        self.kept = arrays


def group_sizes(examples: int, batch_size: int, micro_batches: int, num_replayed: int = 0) -> list[int]:
    """Return how many examples each group of a visit has.

    Every batch has `num_replayed` replayed examples in addition to its own.

    >>> group_sizes(70, 16, 1), group_sizes(70, 16, 3), group_sizes(5, 16, 3)
    ([16, 16, 16, 16], [48, 16], [5])
    """
    batches, size = iterations(examples, batch_size), min(batch_size, examples) + num_replayed
    return [min(micro_batches, batches - first) * size for first in range(0, batches, micro_batches)]


def _joined(tensors: Sequence[Tensor]) -> NDArray[Any]:
    return torch.cat(list(tensors)).detach().cpu().numpy()
