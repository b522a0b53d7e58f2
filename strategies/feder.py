"""FedER: the server's half; the institution's half is `clients/feder.py`.

Source: Pennisi et al. 2023, *Decentralized Distributed Learning with Privacy-Preserving Data Synthesis*, sections III-B
and III-C, eq. 4, and section IV-B.1.
Idea: Models hop between institutions. Each is trained on the institution's own examples and on synthetic images of the
institution that it comes from, so that it does not forget what it has learned there.
Travels: once, a buffer of synthetic images with labels from every institution, up (`Buffer`) and to others
(`KeepBuffer`); in every round the models, up and down (`TrainWithBuffers`, `Trained`). With mode=buffer-only models
stay.

    every institution i: train a generator on D_i;  B_i ← images that it draws          `Buffers`
    round 1: every i trains its own model on D_i
    in every further round:
        draw a K-cycle over the institutions present                                    `hop`
        every i receives the model of its predecessor j, and trains it:
            θ ← argmin L(θ; D_i) + L(θ; B_j), for E epochs                              # eq. 4

What is protected: Nothing by a guarantee. A generator depends on all images of its institution; that synthetic images
lie far from real ones is evidence, and no (ε, δ).

Deviations: The server passes models and buffers on; the paper's institutions send them to each other. In a round
every model goes to another institution, along one random cycle, as in the authors' code. Eq. 4's two terms are added,
where that code averages over real and synthetic examples. A batch of the buffer passes the model by itself: batch norm
normalises real and synthetic examples apart. In the first round there is no predecessor and no buffer, as in that code.
All models begin with the same weights. Every training begins with a fresh optimizer.

Failures: Who fails leaves its model as it was sent, and that model goes on in the next round. The model of an absent
institution waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid

from flwr_replay.config.sections import PASSES, one_of, within
from flwr_replay.config.strategy import StrategyConfig
from flwr_replay.errors import ConfigError
from flwr_replay.files.tensors import nested, unnested
from flwr_replay.movements.base import Exchange
from flwr_replay.movements.relay import Relay
from flwr_replay.movements.topology import mixing_matrix, receivers
from flwr_replay.payloads.common import Evaluate, Trained
from flwr_replay.payloads.feder import TrainOwnWithBuffers, TrainWithBuffers
from flwr_replay.payloads.local import EvaluateOwn, TrainedOwn
from flwr_replay.rng import derived_seed
from flwr_replay.server.members import Member
from flwr_replay.server.synthesis import STAGES, Buffers
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import StateDict, Weights, opened

__all__ = ["FedER", "FedERConfig"]

LARGEST = 2048  # images in a buffer; the paper has up to 512
MODES = ("standard", "buffer-only", "synthetic-only")


@dataclass(frozen=True, kw_only=True)
class FedERConfig(StrategyConfig):
    """Options of FedER."""

    name: ClassVar[str] = "feder"
    draws_images: ClassVar[bool] = True

    mode: str = "standard"  # standard | buffer-only: models stay | synthetic-only: no model sees a real image
    buffer: int = 512  # images in an institution's buffer; 0: none
    buffer_refresh: str = "never"  # never: one buffer for the whole run | round: a new one every round
    memory: str = "predecessor"  # whose buffers: predecessor | all
    local_epochs: int = 1  # E

    def __post_init__(self) -> None:
        one_of("strategy.mode", self.mode, MODES)
        one_of("strategy.buffer-refresh", self.buffer_refresh, ("never", "round"))
        one_of("strategy.memory", self.memory, ("predecessor", "all"))
        within("strategy.", self, buffer=(0, LARGEST), local_epochs=(1, PASSES))


class FedER(Relay):
    """Models go along random cycles, with synthetic images of the institutions that they come from."""

    name = "feder"
    config_type = FedERConfig
    config: FedERConfig
    begins_at_server = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plan, synthetic = self.settings.synthesis, self.config.mode == "synthetic-only"
        if plan is None:
            raise ConfigError("FedER needs a generator: give Settings(synthesis=...)")
        refreshed = self.config.buffer_refresh == "round"
        self.buffers = Buffers(self, plan, self.config.buffer, refreshed, always=synthetic)
        self.fresh: StateDict = {}  # the weights with which every model begins
        self.models: dict[str, StateDict] = {}  # by the institution where a model is: its weights
        self.origins: dict[str, str] = {}  # by the institution where a model is: the one where it began
        self.predecessors: dict[str, str] = {}  # in this round: where each institution's model comes from
        self.received: dict[str, list[int]] = {}  # in this round: the buffers that each institution trains on

    @property
    def stays(self) -> bool:
        """Whether models stay at the institutions."""
        return self.config.mode == "buffer-only"

    @property
    def stages(self) -> tuple[str, ...]:  # type: ignore[override]
        """The stages of the mode."""
        own = ("train-own-with-buffers", "evaluate-own") if self.stays else ("train-with-buffers", "evaluate")
        trained = self.config.buffer or self.config.mode == "synthetic-only"
        return (*(STAGES if self.config.buffer else STAGES[:1] if trained else ()), *own)

    @property
    def answer(self) -> type[Trained | TrainedOwn]:  # type: ignore[override]
        """What answers a request to train."""
        return TrainedOwn if self.stays else Trained

    # --- a round ------------------------------------------------------------------------------------------------------

    def exchange_round(
        self, grid: Grid, server_round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Draw buffers if need be, let the models hop, deliver the buffers, have all institutions train."""
        self.fresh = self.fresh or opened(arrays)
        self.buffers.prepare(grid, server_round, config)
        self.hop(server_round, [member.name for member in self.members])
        self.received = self.buffers.deliver(grid, server_round, self.wanted(server_round), config)
        replies = self.exchange(grid, server_round, self.configure_train(server_round, arrays, config, grid))
        for member, reply in self.answers(replies):
            answer = self.answer.decode(reply.content)
            self.recorder.saw(answer.examples_seen)
            if isinstance(answer, Trained):
                self.models[member.name] = opened(answer.arrays)
        return ArrayRecord(), None

    def hop(self, server_round: int, present: Sequence[str]) -> None:
        """Move every model along one K-cycle over the institutions present; who has no model yet begins one."""
        here = [name for name in sorted(present) if name in self.origins]
        cycle = mixing_matrix("random", max(1, len(here)), server_round - 1, self.settings.seed)
        self.predecessors = {here[to]: name for k, name in enumerate(here) for to in receivers(cycle, k)[0]}
        models, origins = dict(self.models), dict(self.origins)
        for name, before in self.predecessors.items():
            if not self.stays:
                self.models[name], self.origins[name] = models[before], origins[before]
        for name in set(present) - set(here):
            self.models[name], self.origins[name] = ({} if self.stays else self.fresh), name

    def wanted(self, server_round: int) -> dict[str, list[int]]:
        """Return the buffers that each institution trains on in this round."""
        numbers, found = self.buffers.numbers, {}
        for name, before in self.predecessors.items():
            others = [before] if self.config.memory == "predecessor" else sorted(set(numbers) - {name})
            found[name] = [numbers[other] for other in others if other in numbers and other != name]
        return found

    def train_request(self, server_round: int, member: Member) -> TrainWithBuffers | TrainOwnWithBuffers:
        """Ask to train the model that is at this institution, on its examples and on buffers."""
        buffers = self.received.get(member.name, [])
        common: dict[str, Any] = {
            "server_round": server_round,
            "run": self.settings.run,
            "lr": self.lr(max(1, server_round)),
            "mode": self.config.mode,
            "local_epochs": self.config.local_epochs,
            "buffers": buffers,
            "buffered": len(buffers) * self.config.buffer,
        }
        if self.stays:
            return TrainOwnWithBuffers(**common, init_seed=derived_seed(self.settings.seed, "model"))
        return TrainWithBuffers(**common, arrays=self.models.get(member.name, self.fresh))

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def evaluation(self, server_round: int, arrays: Weights) -> Evaluate | EvaluateOwn:
        """Every institution tests the model that it has trained last."""
        if self.stays:
            return EvaluateOwn(server_round=server_round, run=self.settings.run)
        return Evaluate(server_round=server_round, run=self.settings.run, arrays=arrays)

    def addressed(self, member: Member, request: Request) -> Request:
        """Put into an evaluation the model that is at this institution."""
        request = super().addressed(member, request)
        if isinstance(request, Evaluate) and member.name in self.models:
            request = replace(request, arrays=self.models[member.name])
        return request

    # --- what a checkpoint holds, and what will travel ----------------------------------------------------------------

    def state(self) -> tuple[StateDict, dict[str, Any]]:
        """Return the models, where each is and began, and what is known of buffers."""
        names = sorted(self.models)
        arrays = nested({"fresh": self.fresh, **{str(i): self.models[name] for i, name in enumerate(names)}})
        return arrays, {"at": names, "origins": dict(self.origins), "buffers": self.buffers.state()}

    def restore(self, arrays: StateDict, values: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        parts = unnested(arrays)
        self.fresh, self.origins = parts["fresh"], values["origins"]
        self.models = {name: parts[str(i)] for i, name in enumerate(values["at"])}
        self.buffers.restore(values["buffers"])

    def models_at_end(self, arrays: StateDict) -> Mapping[str, StateDict]:
        """Return every model, by the institution that has trained it last."""
        return {} if self.stays else self.models

    def forecast(self, arrays: StateDict, num_rounds: int) -> list[Exchange]:
        """Generators and buffers once, then a training at every institution in every round."""
        members, names = list(self.members), [member.name for member in self.members]
        self.buffers.numbers = {name: i for i, name in enumerate(names, 1)} if self.config.buffer else {}
        found, held = list[Exchange](), {name: set[tuple[int, int]]() for name in names}
        refreshed = self.buffers.refreshed
        for server_round in range(1, num_rounds + 1):
            self.hop(server_round, names)
            self.received = self.wanted(server_round)
            for member in members:
                held[member.name] |= {(server_round * refreshed, n) for n in self.received.get(member.name, [])}
                answer = self.answer.empty(arrays) if self.answer is Trained else blank_own()
                request = self.train_request(server_round, member)
                request = request if self.stays else replace(request, arrays=arrays)  # type: ignore[call-arg]
                found.append((member, request, answer, 1))
        deliveries = {name: len(pairs) for name, pairs in held.items()}
        found = [*self.buffers.forecast(deliveries, num_rounds), *found]
        self.models, self.origins, self.received, self.buffers.numbers = {}, {}, {}, {}
        return found


def blank_own() -> TrainedOwn:
    """Return the answer of a training that leaves its model at the institution."""
    return TrainedOwn(num_examples=0, examples_seen=0, train_loss=0.0)
