"""What all movements share: Flower's rounds with roll call, ledger, failures, evaluation, checkpoints, resumption.

A movement is a Flower `Strategy`. Its `start` is this loop:

    open: wait for the institutions, call the roll, restore the last checkpoint
    for each exchange:
        train: the movement's exchange gives new weights        `configure_train`, `aggregate_train`
        evaluate, if due
        checkpoint

In every method `num_rounds` counts passes over the institutions' data. Flower's `server_round` counts exchanges; a
pass may take several. `observers.py` has what observes the loop.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import ceil
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flwr_replay.config.brought import brought
from flwr_replay.config.catalogue import choices
from flwr_replay.config.halves import load_strategy
from flwr_replay.config.sections import require
from flwr_replay.config.strategy import StrategyConfig
from flwr_replay.errors import ConfigError, RefusedError, RunError
from flwr_replay.learning.training import learning_rate, refuse_single_batches
from flwr_replay.movements.evaluating import Evaluating
from flwr_replay.movements.observers import UNMIXED_ON, Forgetting, FurtherTests, Observer
from flwr_replay.movements.run import EvaluateFn, Run
from flwr_replay.payloads.common import ExpectsReplay
from flwr_replay.privacy.dpsgd import refuse_mixing
from flwr_replay.privacy.plan import mechanisms_of
from flwr_replay.server.asking import refuse_unsaid_nodes
from flwr_replay.server.members import Member
from flwr_replay.server.recorder import Recorder, Snapshot
from flwr_replay.server.replay_base import Replay
from flwr_replay.server.replay_buffers import BufferReplay
from flwr_replay.server.replay_codes import GenerativeReplay
from flwr_replay.server.replay_forecast import exchanges_of
from flwr_replay.server.settings import Settings
from flwr_replay.wire.payload import Payload, Request
from flwr_replay.wire.records import StateDict, Weights, array_record, opened
from flwr_replay.wire.sealed import blank

__all__ = ["Exchange", "Movement", "Settings"]

Exchange = tuple[Member, Request, Payload, int]


class Movement(Evaluating):
    """Base of the four movements."""

    mixes: ClassVar[bool] = False  # whether trained models are averaged or mixed, so that they can be tested before
    supports_replay: ClassVar[bool] = False  # whether institutions may train on replayed examples
    dp_mechanisms: ClassVar[tuple[str, ...]] = ()  # what DP-SGD can train here; each subclass must state its own
    takes_fraction: ClassVar[bool] = False  # whether in a round a fraction of the institutions may train
    begins_at_server: ClassVar[bool] = True  # whether the server draws the fresh weights
    global_model: ClassVar[bool] = True  # whether the server has a model that it could test
    private_key: ClassVar[str] = ""  # begins the names of the files with private models, where institutions keep such

    def __init__(
        self,
        config: StrategyConfig | None = None,
        settings: Settings | None = None,
        recorder: Recorder | None = None,
        **unknown: object,
    ) -> None:
        super().__init__(config, settings, recorder, **unknown)
        self.check_fraction(self.settings)
        self.replay = self.new_replay()
        judged, unmixed = self.settings.split, self.settings.evaluate_before_mixing
        at_end = judged != "test"  # then nobody tests on test examples before
        self.observers: list[Observer] = [FurtherTests(UNMIXED_ON[judged])] if unmixed else []
        further = {"external": self.settings.external, UNMIXED_ON["test"]: unmixed and at_end, "test": at_end}
        self.observers += [FurtherTests(split, at_end) for split, asked in further.items() if asked]
        self.observers += [Forgetting(self.recorder)] if self.settings.forgetting else []
        private = self.settings.privacy and "train" in self.stages
        observed = any(one.split != "test" for one in self.observers)
        own = self.needs_roll_call or self.replay or observed or private or self.settings.pinned
        self.ours_only = bool(own)

    def new_replay(self) -> Replay | None:
        """Return what the options say is replayed."""
        plan, synthesis = self.settings.replay_plan, self.settings.synthesis
        if plan:
            return GenerativeReplay(self, plan, self.checkpoint)
        return BufferReplay(self, synthesis) if synthesis and synthesis.replays else None

    @classmethod
    def check(cls, config: Any, settings: Settings, names: Sequence[str] = ()) -> None:
        """Refuse options that do not fit the rest of the run, before it begins.

        The base class refuses replay and DP where the method has none, and batches of one where the model cannot train
        on them.

        Parameters
        ----------
        config : Any
            The strategy's own options.
        settings : Settings
            The rest of the run: model, task, training, privacy.
        names : Sequence[str]
            The institutions' names, if they are known before the roll call, as in a simulation.

        Raises
        ------
        ConfigError, TrainingError
            If an option does not fit.
        """
        if (settings.replay_plan or (settings.synthesis and settings.synthesis.replays)) and not cls.supports_replay:
            raise ConfigError(
                f"replay is for serial and parallel methods; got strategy={cls.name}: choose replay=none, or strategy="
                f"{methods_with('supports_replay')}"
            )
        require(
            cls.mixes or not settings.evaluate_before_mixing,
            f"evaluate-before-mixing is for methods that average or mix models; got strategy={cls.name}: leave it out",
        )
        cls.check_fraction(settings)
        wanted = settings.privacy.mechanisms if settings.privacy else ()
        if settings.privacy:
            settings.privacy.check_method(cls.name, mechanisms_of(cls))
        if settings.model is not None and {"classifier", "encoder", "proxy"} & set(wanted):
            refuse_mixing(settings.model(0))
        if settings.model is not None:
            refuse_single_batches(settings.model(0), settings.training.batch_size, settings.training.batch_size)

    @classmethod
    def check_fraction(cls, settings: Settings) -> None:
        """Refuse a fraction where every institution must take part in every round."""
        if settings.fraction < 1 and not cls.takes_fraction:
            raise ConfigError(
                f"fraction is for methods that can train in a round with some of the institutions; got strategy="
                f"{cls.name}: leave it out, or choose strategy={methods_with('takes_fraction')}"
            )

    # --- what a movement or a method defines --------------------------------------------------------------------------

    def exchanges(self, num_rounds: int) -> Iterator[int]:
        """Yield the numbers of all exchanges of a run, from 1."""
        yield from range(1, num_rounds * self.exchanges_per_round() + 1)

    def begin_run(self) -> None:
        """Fix what holds for the whole run; called after the roll call and after `restore`."""

    def state(self) -> tuple[StateDict, dict[str, Any]]:
        """Return what a checkpoint must hold in addition to the global weights: arrays, and plain values."""
        return {}, {}

    def restore(self, arrays: StateDict, values: dict[str, Any]) -> None:
        """Restore what `state` returned."""

    def data_of(self, answered: list[str]) -> list[str]:
        """Return the institutions whose data an exchange has trained on, given those that answered."""
        return answered

    def trains_in(self, num_rounds: int) -> Mapping[str, Sequence[int]]:
        """Return the rounds in which each institution trains if all stay, by name; who never does may lack."""
        return dict.fromkeys(self.members.names, range(1, num_rounds + 1))

    def trainings(self, num_rounds: int) -> Mapping[str, int]:
        """Return in how many rounds each institution trains if all stay, by name."""
        return Counter({name: len(rounds) for name, rounds in self.trains_in(num_rounds).items()})

    @abstractmethod
    def forecast(self, arrays: StateDict, num_rounds: int) -> list[Exchange]:
        """Return the exchanges of training if every institution stays: member, request, answer, how often."""

    def exchange_round(
        self, grid: Grid, server_round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Train in one server round: one exchange, unless a movement needs more."""
        replies = self.exchange(grid, server_round, self.configure_train(server_round, arrays, config, grid))
        return self.aggregate_train(server_round, replies)

    def forecast_evaluation(self, arrays: StateDict, num_rounds: int) -> list[Exchange]:
        """Return the exchanges of evaluation, those of the observers included."""
        rounds, every, trains_in = range(1, num_rounds + 1), self.settings.evaluate_every, self.trains_in(num_rounds)
        evaluated = {at for at in rounds if at % every == 0 or at == num_rounds}
        travelling, answer = self.travelling(arrays), self.evaluated.empty(self.task)

        def times(member: Member, observer: Observer | None) -> int:
            trains = trains_in.get(member.name, [])
            can: Sequence[int] = rounds[min(trains, default=num_rounds + 1) - 1 :] if self.own_models else rounds
            can = trains if observer and observer.split in UNMIXED_ON.values() else can
            evaluations = len((evaluated if not observer or not observer.at_end else {num_rounds}) & {*can})
            return observer.forecast(len(can) * self.exchanges_per_round(), evaluations) if observer else evaluations

        requests: list[tuple[Request, Observer | None]] = [(self.judging(0, travelling), None)]
        requests += [(self.evaluation_on(one.split, 0, travelling), one) for one in self.observers]
        return [(m, request, answer, times(m, observer)) for request, observer in requests for m in self.members]

    def travelling(self, arrays: Weights) -> Weights:
        """Return weights as they travel: in a sealed run, bytes of the same number as a sealed parcel has."""
        if not self.settings.sealed:
            return arrays
        return blank(arrays, self.settings.run, "model", self.members.names)

    def all_stages(self) -> list[str]:
        """Return the stages of replay and the method's own."""
        return [*(self.replay.stages if self.replay else ()), *self.stages]

    def forecast_replay(self) -> list[Exchange]:
        """Return the exchanges of replay before the first round."""
        return exchanges_of(self.replay, list(self.members)) if self.replay else []

    def addressed(self, member: Member, request: Request) -> Request:
        """Add to a request to train how many examples the institution should have kept for replay."""
        request = super().addressed(member, request)
        if self.replay and isinstance(request, ExpectsReplay):
            request = replace(request, **self.replay.instructions(member.name))
        return request

    def models_at_end(self, arrays: StateDict) -> Mapping[str, StateDict]:
        """Return the models that the server has after the last round, by the names of their files."""
        return {"global": arrays} if arrays and not self.settings.sealed else {}

    # --- the loop -----------------------------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the strategy; the signature is Flower's.

        Parameters
        ----------
        grid : Grid
            Flower's, or `flwr_replay.engines.inline.InlineGrid`.
        initial_arrays : ArrayRecord
            The fresh global weights.
        num_rounds : int
            Passes over the institutions' data, also where one takes several exchanges.
        timeout : float | None
            Seconds to wait for an answer; None: as in the settings.
        train_config, evaluate_config : ConfigRecord | None
            Further instructions, sent unchanged; they override this package's own.
        evaluate_fn : Callable[[int, ArrayRecord], MetricRecord | None] | None
            Evaluation at the server, after each round that the institutions evaluate; it gets the round's number.

        Returns
        -------
        Result
            The weights, and the metrics by round.

        Raises
        ------
        ConfigError
            If the method needs more than this app has, or a deployment does not say how many institutions it has.
        RunError
            If too few institutions join, or none that answers can take part.
        RefusedError
            If every institution refuses.
        DivergedError
            If no institution's weights and losses are finite, or the server's are not.
        """
        self.refuse(grid, evaluate_fn)
        self.timeout = self.settings.timeout if timeout is None else timeout
        train, test = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        run = Run(grid=grid, num_rounds=num_rounds, train_config=train, evaluate_config=test, evaluate_fn=evaluate_fn)
        self.extra = frozenset([*train, *test])
        arrays, done = self.open(run, initial_arrays)
        for server_round in islice(self.exchanges(num_rounds), done, None):
            arrays = self.train(run, server_round, arrays)
            self.evaluate_if_due(run, server_round, arrays)
            self.checkpoint(server_round, opened(arrays))
        run.result.arrays = arrays
        return run.result

    def refuse(self, grid: Grid, evaluate_fn: EvaluateFn | None) -> None:
        """Refuse what could not work, before anything is sent."""
        refuse_unsaid_nodes(grid, self.settings.nodes)
        ours = self.ours_only or self.settings.split != "test"
        require(self.settings.roll_call or not ours, self.needs)
        require(
            evaluate_fn is None or self.global_model,
            f"evaluate_fn needs a global model; {type(self).__name__} has none, and institutions test theirs: omit it",
        )
        require(
            evaluate_fn is None or not self.settings.sealed,
            "evaluate_fn needs weights that the server can read; in a sealed run it can read none: omit it",
        )

    def open(self, run: Run, initial_arrays: ArrayRecord) -> tuple[ArrayRecord, int]:
        """Wait for the institutions and call the roll; begin a run, or resume it from the last checkpoint.

        Returns
        -------
        arrays : ArrayRecord
            The weights to start from.
        done : int
            How many exchanges have been made.
        """
        if self.settings.sealed:
            initial_arrays = ArrayRecord()  # institutions make the fresh weights
        arrays, done, snapshot = initial_arrays, 0, self.recorder.restore()
        if snapshot:
            self.members.remember(snapshot.examples, snapshot.bindings)
        self.assemble(run.grid)
        if not len(self.members):
            kind = RunError if self.unfit else RefusedError
            raise kind(f"no institution takes part; {self.recorder.failures_line()}")
        self.scale_labels(snapshot.label_scale if snapshot else self.members.label_scale())
        if snapshot:
            arrays, done = self.resumed(snapshot, initial_arrays), snapshot.server_round
        self.say_what_differs(run)
        self.begin_run()
        self.recorder.begin(self.name, run.num_rounds, self.exchanges_per_round(), done)
        if self.private_key:
            self.recorder.kept_private(self.settings.run, self.private_key)
        return arrays, done

    def say_what_differs(self, run: Run) -> None:
        """Log a learning rate that replaces the settings', and proxies without noise."""
        lr, privacy = run.train_config.get("lr"), self.settings.privacy
        if lr is not None and lr != self.settings.training.lr and self.members.ours:
            self.recorder.log(
                f"lr={lr!r} of train_config replaces training.lr={self.settings.training.lr:g} in all training at the "
                "institutions, generators for replay included: leave lr out of train_config if this is not meant"
            )
        if "proxy" in self.dp_mechanisms and not (privacy and privacy.covers("proxy")):
            self.recorder.log(
                f"{type(self).__name__}: no privacy= that covers proxies: they are trained without noise, and have no "
                "epsilon"
            )

    def resumed(self, snapshot: Snapshot, initial_arrays: ArrayRecord) -> ArrayRecord:
        """Restore what a checkpoint holds; return its weights."""
        saved = snapshot.arrays
        # the model's order, so that files of the weights have the same bytes
        order = dict.fromkeys([*(name for name in initial_arrays if name in saved), *saved])
        self.trained = dict(snapshot.trained)
        self.restore(snapshot.state_arrays, snapshot.state_values)
        if self.replay:
            self.replay.restore(snapshot.state_values["replay"])
        return array_record({name: saved[name] for name in order})

    def train(self, run: Run, server_round: int, arrays: ArrayRecord) -> ArrayRecord:
        """Make one exchange; return the weights after it, which are the same if it failed."""
        self.call_roll(run.grid, server_round)
        for name in self.members.left():
            self.recorder.failed(server_round, name, "its node has gone; the run goes on without it until it returns")
        if self.replay:
            last = server_round > (run.num_rounds - 1) * self.exchanges_per_round()
            self.replay.prepare(run.grid, server_round, opened(arrays), run.train_config, last)
        trained, metrics = self.exchange_round(run.grid, server_round, arrays, run.train_config)
        if metrics is not None:
            run.trained(ceil(server_round / self.exchanges_per_round()), metrics)
        if trained is None:
            return arrays
        arrays, data_of = self.finite(trained), self.data_of(self.answered)
        for observer in self.observers:
            observer.after_exchange(server_round, data_of, self.tester(run, server_round, arrays))
        return arrays

    def lr(self, server_round: int) -> float:
        """Return the learning rate of the pass that this exchange belongs to."""
        return learning_rate(self.settings.training, (server_round - 1) // self.exchanges_per_round())

    def summary(self) -> None:
        """Log the strategy and its options."""
        self.recorder.log(f"{type(self).__name__} {self.config}")

    def checkpoint(self, server_round: int, arrays: StateDict) -> None:
        """Give the recorder all that a resumed run needs."""
        known, trained = self.members.known, dict(self.trained)
        examples = {member.name: member.num_examples for member in known}
        bindings = {member.name: (member.node_id, member.proof) for member in known}
        state_arrays, state_values = self.state()
        if self.replay:
            state_values = {**state_values, "replay": self.replay.state()}
        self.recorder.end_exchange(
            Snapshot(server_round, arrays, state_arrays, state_values, trained, examples, self.label_scale, bindings)
        )


def methods_with(declared: str) -> str:
    """Return the names of this package's methods that declare something to be true, joined by commas."""
    ours = [name for name in choices("strategy") if name not in brought()]
    return ", ".join(name for name in ours if getattr(load_strategy(name)[0], declared))
