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
        draw a K-cycle over the institutions present                                    `Cycles`
        every i receives the model of its predecessor j, and trains it:
            θ ← argmin L(θ; D_i) + L(θ; B_j), for E epochs                              # eq. 4
    with order=queue, in every further round, until as many models are trained as there are institutions:
        who is free trains the first model of its queue, and passes it on to another at random       `Queues`

`Buffers` is in `flwr_replay/server/synthesis.py`, `Cycles` and `Queues` in `flwr_replay/movements/hops.py`.

What is protected: Nothing by a guarantee. A generator depends on all images of its institution; that synthetic images
lie far from real ones is evidence, and no (ε, δ).

Deviations: The server passes models and buffers on; the paper's institutions send them to each other. In a round
every model goes to another institution, along one random cycle, as in the authors' code. Eq. 4's two terms are added,
where that code averages over real and synthetic examples. A batch of the buffer passes the model by itself: batch norm
normalises real and synthetic examples apart. In the first round there is no predecessor and no buffer, as in that code.
All models begin with the same weights. A model that hops begins every training with a fresh optimizer. With order=queue
a round ends when its trainings have; until then nobody waits for the slow.

With fraction= the cycle or the queues of a round are among those drawn for it; all train their generators before.

Failures: Who fails leaves its model as it was sent, and that model goes on, in the next round or queue; along cycles a
model that could not begin begins the next time. The model of an absent or undrawn institution waits for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from flwr_replay.config.sections import PASSES, one_of, require, within
from flwr_replay.config.strategy import StrategyConfig, Traits
from flwr_replay.errors import ConfigError, RunError, refuse_each
from flwr_replay.files.tensors import nested, unnested
from flwr_replay.movements.base import Exchange, Outcome
from flwr_replay.movements.evaluating import RunState
from flwr_replay.movements.hops import Cycles, Hops, Queues, Reopening
from flwr_replay.movements.relay import Relay
from flwr_replay.payloads.common import Evaluate, Trained
from flwr_replay.payloads.feder import TrainOwnWithBuffers, TrainWithBuffers
from flwr_replay.payloads.local import EvaluateOwn, TrainedOwn
from flwr_replay.rng import derived_seed
from flwr_replay.server.members import Member
from flwr_replay.server.settings import Settings
from flwr_replay.server.synthesis import STAGES, Buffers
from flwr_replay.wire.bounds import cut_back
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import StateDict, Weights, opened

__all__ = ["FedER", "FedERConfig"]

LARGEST = 2048  # images in a buffer, as in Table III
SCORE = "balanced-accuracy"  # section IV-B
MODES = ("standard", "buffer-only", "synthetic-only")


@dataclass(frozen=True, kw_only=True)
class FedERConfig(StrategyConfig):
    """Options of FedER."""

    name = "feder"
    traits = Traits(
        relayed=True,
        takes_fraction=True,
        needs_roll_call=True,
        own_models=True,
        global_model=False,
        own_batches=True,
        draws_images=True,
        dp_mechanisms=("generator", "prior"),
    )

    mode: str = "standard"  # standard | buffer-only: models stay | synthetic-only: no model sees a real image
    buffer: int = 512  # images in an institution's buffer; 0: none
    buffer_refresh: str = "never"  # never: one buffer for the whole run | round: a new one every round
    memory: str = "predecessor"  # whose buffers: predecessor | all
    local_epochs: int = 1  # E
    optimizer_state: str = "reset"  # reset: a fresh one for every training | keep: a model that stays keeps its own
    order: str = "cycle"  # cycle: one random cycle in each round | queue: a trained model joins another's queue
    durations: tuple[float, ...] = ()  # order=queue: how long each institution trains; empty: answers decide
    private_models: tuple[str, ...] = ()  # mode=buffer-only: of conf/model, by turns; empty: the run's model
    agreement: bool = False  # after the last round, test every model at every institution

    def __post_init__(self) -> None:
        one_of("strategy.mode", self.mode, MODES)
        one_of("strategy.order", self.order, ("cycle", "queue"))
        one_of("strategy.buffer-refresh", self.buffer_refresh, ("never", "round"))
        one_of("strategy.memory", self.memory, ("predecessor", "all"))
        one_of("strategy.optimizer-state", self.optimizer_state, ("keep", "reset"))
        within("strategy.", self, buffer=(0, LARGEST), local_epochs=(1, PASSES))
        stays = self.mode == "buffer-only"
        require(
            stays or self.optimizer_state == "reset",
            f"a model that hops begins with a fresh optimizer; got mode={self.mode} with optimizer-state=keep: "
            "choose reset, or mode=buffer-only",
        )
        require(
            stays or not self.private_models,
            f"models that hop have one form; got mode={self.mode} with private-models: choose mode=buffer-only",
        )
        require(
            not (stays and (self.order == "queue" or self.agreement)),
            "with mode=buffer-only models stay: leave order and agreement out",
        )
        require(
            all(0 < duration < inf for duration in self.durations),
            f"strategy.durations must be positive and finite; got {list(self.durations)}",
        )

    @property
    def classifiers(self) -> str:
        """With mode=buffer-only they stay."""
        return "kept" if self.mode == "buffer-only" else "released"


class FedER(Relay):
    """Models go from institution to institution, with synthetic images of where they come from."""

    config_type = FedERConfig
    config: FedERConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plan, synthetic = self.settings.synthesis, self.config.mode == "synthetic-only"
        if plan is None:
            raise ConfigError("FedER needs a generator: give Settings(synthesis=...)")
        refreshed = self.config.buffer_refresh == "round"
        self.buffers = Buffers(self.exchanger, plan, self.config.buffer, refreshed, always=synthetic)
        self.hops = self.new_hops()
        self.fresh: StateDict = {}  # the weights with which every model begins
        self.models: dict[str, StateDict] = {}  # by the institution where a model began: its weights
        self.trained_at: dict[str, StateDict] = {}  # by institution: the model that it has trained last

    def new_hops(self, durations: Sequence[float] = ()) -> Hops:
        """Return the order of the options, at its beginning."""
        if self.config.order == "queue":
            return Queues(self.settings.seed, self.config.durations or durations)
        return Cycles(self.settings.seed, self.stays)

    @classmethod
    def check(cls, config: FedERConfig, settings: Settings, names: Sequence[str] = ()) -> None:
        """Refuse durations for fewer institutions than there are, and models that cannot be built for the task."""
        durations = config.durations
        refuse_each(
            partial(super().check, config, settings, names),
            lambda: require(
                not durations or len(durations) >= len(names),
                f"strategy.durations must have a number for each institution; got {len(durations)} for {len(names)}",
            ),
            lambda: require(
                settings.fraction == 1 or not durations,
                f"durations are for all institutions in every round; got fraction={settings.fraction:g}: leave one out",
            ),
            *(partial(fresh, 0) for fresh in settings.private_models),
            lambda: require(
                settings.hiding.readable or not config.agreement,
                "agreement compares models that the server hands to all; got sealed=true: leave one of the two out",
            ),
        )

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

    def begin_run(self) -> None:
        """Note what decides the order of a queue."""
        super().begin_run()
        self.check(self.config, self.settings, [member.name for member in self.members])
        if self.config.order == "queue":
            self.recorder.notes["order-decided-by"] = "durations" if self.config.durations else "arrival"

    # --- a round ------------------------------------------------------------------------------------------------------

    def exchange_round(self, grid: Grid, exchange: int, arrays: ArrayRecord, config: ConfigRecord) -> Outcome:
        """Draw buffers if need be and deliver them; have every institution train a model, which then goes on."""
        self.fresh = self.fresh or opened(arrays)
        self.hops.begin_round(exchange, [member.name for member in self.trainers(exchange)])
        self.buffers.prepare(grid, exchange, config, givers := self.givers())
        if STAGES[0] in self.stages and not self.buffers.trained:
            raise RunError(f"no institution could train its generator; {self.recorder.failures_line()}")
        if self.config.buffer and givers and not self.buffers.numbers:
            raise RunError(f"no institution has sent a buffer; {self.recorder.failures_line()}: resume the run")
        self.buffers.deliver(grid, exchange, self.wanted(), config)

        def following() -> Message | None:  # None until somebody who can train has a model
            if (turn := self.hops.start()) is None:
                return None
            member = self.members.get(turn.institution)
            assert member is not None
            return self.message(member, self.train_request(exchange, member), config)

        def take(member: Member, reply: Message) -> None:
            answer = self.answer.decode(reply.content)
            self.recorder.saw(answer.examples_seen)
            if isinstance(answer, Trained):
                model = opened(answer.arrays)
                model = self.trained_at[member.name] = {**model, **cut_back(model)}
                self.models[self.hops.turn(member.name).model] = model
            self.hops.pass_on(member.name, trained=True)

        def as_sent(member: Member) -> None:
            self.hops.pass_on(member.name, trained=False)

        messages = Reopening(following)
        self.exchanger(grid, exchange, messages, take=take, missed=as_sent, at_once=self.hops.at_once)
        self.count_missed()
        return ArrayRecord(), None

    def givers(self) -> set[str]:
        """Return the institutions of whose buffers others may learn in this round."""
        present = [member.name for member in self.members]
        sources = {name: names if self.config.memory != "all" else present for name, names in self.sources().items()}
        return {other for name, names in sources.items() for other in names if other != name}

    def sources(self) -> dict[str, Sequence[str]]:
        """Return, by institution: where the models that it may train in this round come from; no models begin there."""
        return {name: names for name, names in self.hops.sources().items() if names}

    def wanted(self) -> dict[str, list[int]]:
        """Return the buffers that each institution may train on in this round."""
        return {name: self.memory(name, names) for name, names in self.sources().items()}

    def memory(self, name: str, sources: Sequence[str]) -> list[int]:
        """Return the numbers of these institutions' buffers, or with memory=all of all others'."""
        numbers = self.buffers.numbers
        others = sorted(numbers) if self.config.memory == "all" else sources
        return [numbers[other] for other in others if other in numbers and other != name]

    def train_request(self, exchange: int, member: Member) -> TrainWithBuffers | TrainOwnWithBuffers:
        """Ask to train a model on the institution's examples, and on buffers unless the model begins here."""
        turn, held = self.hops.turn(member.name), self.buffers.held.get(member.name, [])
        buffers = [number for number in self.memory(member.name, [turn.before]) if turn.before and number in held]
        common: dict[str, Any] = {
            "exchange": exchange,
            "run": self.settings.run,
            "lr": self.lr(max(1, exchange)),
            "mode": self.config.mode,
            "local_epochs": self.config.local_epochs,
            "optimizer_state": self.config.optimizer_state,
            "buffers": buffers,
            "buffered": len(buffers) * self.config.buffer,
        }
        if self.stays:
            return TrainOwnWithBuffers(**common, init_seed=derived_seed(self.settings.seed, "model"))
        return TrainWithBuffers(**common, arrays=self.models.get(turn.model, self.fresh))

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def evaluation(self, exchange: int, arrays: Weights) -> Evaluate | EvaluateOwn:
        """Every institution tests the model that it has trained last."""
        if self.stays:
            return EvaluateOwn(exchange=exchange, run=self.settings.run)
        return Evaluate(exchange=exchange, run=self.settings.run, arrays=arrays)

    def tested_on(self, split: str, member: Member, arrays: Weights) -> Weights | None:
        """Return the model that this institution has trained last."""
        return self.trained_at.get(member.name, self.fresh) or arrays

    def evaluate_if_due(self, run: RunState, exchange: int, arrays: ArrayRecord) -> None:
        """Evaluate; with `agreement`, after the last round have every institution test every model."""
        super().evaluate_if_due(run, exchange, arrays)
        if self.config.agreement and exchange == run.num_rounds:
            self.recorder.notes["agreement"] = self.agreement(run, exchange)

    def agreement(self, run: RunState, exchange: int) -> dict[str, Any]:
        """Return every model's balanced accuracy by institution, and its standard deviation over the models."""
        scores: dict[str, dict[str, float]] = {}
        for model, weights in sorted(self.models_at_end({}).items()):
            request = self.evaluation_on("test", exchange, weights)
            messages = (self.message(member, request, run.evaluate_config) for member in self.members)
            replies = self.exchanger(run.grid, exchange, messages, needed=False)
            _, own = self.evaluations.pooled(exchange, replies) or ({}, {})
            for name, metrics in own.items():
                scores.setdefault(name, {})[model] = metrics[SCORE]
        spread = {name: float(np.std(list(by_model.values()))) for name, by_model in scores.items()}
        return {"metric": SCORE, "by-institution": scores, "standard-deviation": spread}

    # --- what a checkpoint holds, and what will travel ----------------------------------------------------------------

    def state(self) -> tuple[StateDict, dict[str, Any]]:
        """Return the models, the order, and what is known of buffers."""
        models = {f"model-{i}": self.models[name] for i, name in enumerate(sorted(self.models))}
        # Most of what was trained last are models as they stand now: their number is enough.
        numbers = {id(weights): number for number, weights in models.items()}
        trained_at = {name: numbers.setdefault(id(w), f"older-{name}") for name, w in self.trained_at.items()}
        older = {number: self.trained_at[name] for name, number in trained_at.items() if number not in models}
        values = {"models": sorted(self.models), "trained-at": trained_at}
        values |= {"hops": self.hops.state(), "buffers": self.buffers.state()}
        return nested({"fresh": self.fresh, **models, **older}), values

    def restore(self, arrays: StateDict, values: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        groups = unnested(arrays)
        self.fresh = groups["fresh"]
        self.models = {name: groups[f"model-{i}"] for i, name in enumerate(values["models"])}
        self.trained_at = {name: groups[number] for name, number in values["trained-at"].items()}
        self.hops.restore(values["hops"])
        self.buffers.restore(values["buffers"])

    def models_at_end(self, arrays: StateDict) -> Mapping[str, StateDict]:
        """Return every model, by the institution where it is; those of queues by where they began."""
        if self.stays or not self.settings.hiding.readable:
            return {}
        return {name: self.models.get(model, self.fresh) for name, model in self.hops.names().items()}

    def forecast(self, arrays: StateDict, num_rounds: int) -> list[Exchange]:
        """Generators and buffers once, then as many turns in every round as there are institutions."""
        members = {member.name: member for member in self.members}
        self.buffers.numbers = {name: i for i, name in enumerate(members, 1)} if self.config.buffer else {}
        self.hops = self.new_hops([1.0] * len(members))  # if answers decide: as if all took equally long
        travelling = self.travelling(arrays)
        answer = TrainedOwn.blank() if self.stays else Trained.blank(travelling)
        begun: set[str] = set()  # models that have been trained
        self.buffers.held = {name: list(self.buffers.numbers.values()) for name in members}
        alike: dict[tuple[str, bool, int], tuple[Request, int]] = {}  # requests of one size, and how many there are
        delivered = {name: set[tuple[int, int]]() for name in members}
        drawn = {name: set[int]() for name in members}
        for exchange in range(1, num_rounds + 1):
            self.hops.begin_round(exchange, [member.name for member in self.trainers(exchange)])
            for name in self.givers():
                drawn[name].add(exchange * self.buffers.refreshed)
            for name, numbers in self.wanted().items():
                delivered[name] |= {(exchange * self.buffers.refreshed, number) for number in numbers}
            while turn := self.hops.start():
                request: Request = self.train_request(exchange, members[turn.institution])
                fresh = not self.settings.hiding.readable and turn.model not in begun  # the institution makes it
                if isinstance(request, TrainWithBuffers):
                    request = replace(request, arrays={} if fresh else travelling)
                begun.add(turn.model)
                key = turn.institution, fresh, len(request.buffers)
                first, times = alike.get(key, (request, 0))
                alike[key] = first, times + 1
                self.hops.pass_on(turn.institution, trained=True)
        deliveries = {name: len(pairs) for name, pairs in delivered.items()}
        draws = {name: len(rounds) for name, rounds in drawn.items()}
        exchanges = [(members[name], request, answer, times) for (name, *_), (request, times) in alike.items()]
        return [*self.buffers.forecast(deliveries, draws), *exchanges]

    def forecast_evaluation(self, arrays: StateDict, num_rounds: int) -> list[Exchange]:
        """Return the evaluations, and those of every model by all after the last round."""
        tests, blank = len(self.trains_in(num_rounds)) * self.config.agreement, self.evaluated.empty(self.task)
        further = [(member, self.evaluation(0, arrays), blank, tests) for member in self.members]
        return [*super().forecast_evaluation(arrays, num_rounds), *further]
