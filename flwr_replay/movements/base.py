"""What all movements share: Flower's rounds with roll call, ledger, failures, evaluation, checkpoints, resumption.

A movement is a Flower `Strategy`. Its `start` is this loop:

    open: wait for the institutions, call the roll, restore the last checkpoint
    for each exchange of each round:                            `rounds`, then `step`
        train: the movement's exchange gives new weights        `configure_train`, `aggregate_train`
        evaluate, if due
        checkpoint

In every method `num_rounds` counts passes over the institutions' data. Flower's `server_round` counts exchanges; a
pass may take several. A movement has a roll (`server/roll.py`), exchanges (`server/exchange.py`) and evaluations.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from flwr_replay.config.sections import require
from flwr_replay.config.strategy import StrategyConfig, Traits, refuse_stray
from flwr_replay.errors import RefusedError, RunError
from flwr_replay.learning.tasks import Task
from flwr_replay.learning.training import learning_rate
from flwr_replay.movements.evaluating import SPLIT_OF, EvaluateFn, Evaluations, RunState
from flwr_replay.movements.refusals import refuse_fraction, refuse_options, say_what_differs
from flwr_replay.payloads.common import Evaluate, Evaluation, ExpectsReplay
from flwr_replay.server.exchange import Exchange, Exchanger
from flwr_replay.server.members import Member
from flwr_replay.server.one_line import errors_in_one_line
from flwr_replay.server.recorder import Recorder, Snapshot
from flwr_replay.server.replay_base import Replay
from flwr_replay.server.replay_codes import GenerativeReplay
from flwr_replay.server.replay_sums import StatisticsReplay
from flwr_replay.server.roll import Roll
from flwr_replay.server.settings import Settings, checked_arguments
from flwr_replay.server.synthesis import BufferReplay
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import StateDict, Weights, array_record, opened
from flwr_replay.wire.sealed import blank

__all__ = ["Exchange", "Movement", "Outcome", "Settings"]

Outcome = tuple[ArrayRecord | None, MetricRecord | None]  # of an exchange: the weights, none if they stay; its metrics

errors_in_one_line()  # when a strategy is imported, since arguments that are refused never reach `start`


class Movement(Strategy):
    """Base of the four movements: Flower's strategy, with a roll, exchanges and evaluations.

    A method defines the request to train and what becomes of the answers; it writes, sends and reads messages by
    `message`, `exchange` and `answers`.

    None means the defaults; without a recorder a run is only logged through Flower. A method within another one takes
    that one's exchanger, with its institutions and ledger. Arguments that only Flower's strategies have, such as
    `fraction_evaluate`, are refused by a ConfigError.
    """

    config_type: ClassVar[type[StrategyConfig]]
    config: StrategyConfig
    stages: tuple[str, ...] = ("train", "evaluate")  # all stages that a run requests
    needs: ClassVar[tuple[str, ...]] = ()  # names of settings, which have no default
    evaluated: type[Evaluation] = Evaluation  # the answer to an evaluation

    def __init_subclass__(cls) -> None:
        refuse_stray(cls)

    def __init__(
        self,
        config: StrategyConfig | None = None,
        settings: Settings | None = None,
        recorder: Recorder | None = None,
        exchanger: Exchanger | None = None,
        **unknown: object,
    ) -> None:
        self.config, settings = checked_arguments(type(self).__name__, self.config_type, config, settings, unknown)
        refuse_fraction(type(self), settings)
        self.recorder = recorder or Recorder()
        self.exchanger = exchanger or Exchanger(self, settings, self.recorder)
        self.members = self.exchanger.members
        self.message, self.answers = self.exchanger.message, self.exchanger.answers
        self.evaluations = Evaluations(self, self.exchanger)
        self.roll = Roll(self.exchanger, type(self), self.all_stages)
        self.replay: Replay | None = None
        if settings.replay_plan and settings.replay_plan.replay.name == "statistics":
            self.replay = StatisticsReplay(self.exchanger, settings.replay_plan)
        elif settings.replay_plan:
            self.replay = GenerativeReplay(self.exchanger, self.roll, settings.replay_plan, self.checkpoint)
        elif settings.synthesis and settings.synthesis.replays:
            self.replay = BufferReplay(self.exchanger, settings.synthesis)
        private = self.settings.privacy and "train" in self.stages
        observed = self.settings.forgetting or any(test.split != "test" for test in self.evaluations.further)
        own = self.traits().needs_roll_call or self.replay or observed or private or self.settings.hiding.pinned
        self.roll.ours_only = bool(own)

    @classmethod
    def traits(cls) -> Traits:
        """Return what the method is, from its options; of a subclass without options of its own, what it inherits."""
        stated = cls.config_type.traits
        return stated if "config_type" in vars(cls) else stated.inherited()

    @classmethod
    def check(cls, config: Any, settings: Settings, names: Sequence[str] = ()) -> None:
        """Refuse options that do not fit the rest of the run, before it begins.

        The base class refuses replay and DP where the method has none, and batches of one where the model cannot train
        on them. `names` are the institutions', if they are known before the roll call, as in a simulation.

        Raises
        ------
        ConfigError, TrainingError
            If an option does not fit.
        """
        refuse_options(cls, settings)

    @property
    def settings(self) -> Settings:
        """What every strategy needs in addition to its own options."""
        return self.exchanger.settings

    @property
    def task(self) -> Task:
        """The task."""
        return self.exchanger.task

    def blank_labels(self, n: int) -> NDArray[Any]:
        """Return n blank labels of the task, as large as real ones."""
        return self.task.blank_labels(n, self.settings.input_shape or ())

    def begin(self) -> None:
        """Fix, and say, what holds for the whole run, also of what is replayed."""
        self.begin_run()
        if self.replay:
            self.replay.begin_run()

    # --- what a movement or a method defines --------------------------------------------------------------------------

    @abstractmethod
    def exchanges_per_round(self) -> int:
        """Return how many exchanges make one pass over the institutions' data, or one epoch at the server."""

    def round_of(self, exchange: int) -> int:
        """Return the round that an exchange belongs to, from 1."""
        return ceil(exchange / self.exchanges_per_round())

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
        """Return the exchanges of training if every institution stays: member, request, answer, how often.

        The strategy is the forecast's own, and never runs: what this changes in it need not be set back.
        """

    def every_round(self, exchanges: Iterable[Exchange], num_rounds: int) -> list[Exchange]:
        """Return a round's exchanges as often as each institution trains."""
        times = self.trainings(num_rounds)
        return [(m, request, answer, n * times[m.name]) for m, request, answer, n in exchanges if times[m.name]]

    def exchange_round(self, grid: Grid, exchange: int, arrays: ArrayRecord, config: ConfigRecord) -> Outcome:
        """Train in one server round: one exchange, unless a movement needs more."""
        replies = self.exchanger(grid, exchange, self.configure_train(exchange, arrays, config, grid))
        return self.aggregate_train(exchange, replies)

    def forecast_evaluation(self, arrays: StateDict, num_rounds: int) -> list[Exchange]:
        """Return the exchanges of evaluation, those of further tests included."""
        answer = self.evaluated.empty(self.task)
        tests = self.evaluations.forecast(self.travelling(arrays), num_rounds, self.trains_in(num_rounds))
        return [(member, request, answer, times) for member, request, times in tests]

    def travelling(self, arrays: Weights) -> Weights:
        """Return weights as they travel: in a sealed run, bytes of the same number as a sealed parcel has."""
        if self.settings.hiding.readable:
            return arrays
        return blank(arrays, self.settings.run, "model", self.members.names)

    def all_stages(self) -> list[str]:
        """Return the stages of replay and the method's own."""
        return [*(self.replay.stages if self.replay else ()), *self.stages]

    def addressed(self, member: Member, request: Request) -> Request:
        """Add to a request what depends on the institution: what it last did, and what it has for replay."""
        request = self.exchanger.addressed(member, request)
        if self.replay and isinstance(request, ExpectsReplay):
            request = replace(request, **self.replay.instructions(member.name))
        return request

    def examples_of(self, member: Member, request: type[Request], instructions: dict[str, Any]) -> range:
        """Return the numbers of examples that an answer may report; see `Exchanger.examples_of`."""
        return self.exchanger.examples_of(member, request, instructions)

    def stops_without_answers(self) -> bool:
        """Return whether an exchange without answers ends the run."""
        return True

    def evaluation(self, exchange: int, arrays: Weights) -> Request:
        """Return the request to evaluate."""
        return Evaluate(exchange=exchange, arrays=arrays, run=self.settings.run)

    def evaluation_on(self, split: str, exchange: int, arrays: Weights) -> Request:
        """Return the request to evaluate on a split, or before mixing on one."""
        return replace(self.evaluation(exchange, arrays), split=SPLIT_OF.get(split, split))  # type: ignore[call-arg]

    def tested_on(self, split: str, member: Member, arrays: Weights) -> Weights | None:
        """Return the weights that an institution is to test on a split; None: it has nothing to test there."""
        return arrays

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask all that can test to evaluate on their test shards, or on their validation examples."""
        return (self.message(m, request, config) for m, request in self.evaluations.requests(server_round, arrays))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Pool the metrics over the test shards: by sums, or by weighted means for a user's own ClientApp."""
        return self.evaluations.completed(server_round, replies)

    def models_at_end(self, arrays: StateDict) -> Mapping[str, StateDict]:
        """Return the models that the server has after the last round, by the names of their files."""
        return {"global": arrays} if arrays and self.settings.hiding.readable else {}

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
            Evaluation at the server: of the fresh weights as round 0, and after each round that the institutions
            evaluate; it gets the round's number.

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
        require(num_rounds >= 1, f"num_rounds must be at least 1; got {num_rounds}")
        self.roll.refuse(grid, self.settings.split != "test")
        self.evaluations.refuse(evaluate_fn)
        self.exchanger.timeout = self.settings.timeout if timeout is None else timeout
        train, test = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        run = RunState(
            grid=grid, num_rounds=num_rounds, train_config=train, evaluate_config=test, evaluate_fn=evaluate_fn
        )
        self.exchanger.extra = frozenset([*train, *test])
        arrays = self.open(run, initial_arrays)
        if not run.done:
            self.evaluations.at_server(run, 0, arrays)
        run.result.arrays = self.rounds(run, arrays)
        return run.result

    def rounds(self, run: RunState, arrays: ArrayRecord) -> ArrayRecord:
        """Make the exchanges of all rounds; return the weights after the last."""
        for exchange in range(1, run.num_rounds * self.exchanges_per_round() + 1):
            arrays = self.step(run, exchange, arrays)
        return arrays

    def step(self, run: RunState, exchange: int, arrays: ArrayRecord) -> ArrayRecord:
        """Make an exchange, evaluate if that is due, write a checkpoint; a resumed run passes what was done before."""
        if exchange <= run.done:
            return arrays
        arrays = self.train(run, exchange, arrays)
        self.evaluate_if_due(run, exchange, arrays)
        self.checkpoint(exchange, opened(arrays))
        return arrays

    def open(self, run: RunState, initial_arrays: ArrayRecord) -> ArrayRecord:
        """Wait for the institutions and call the roll; begin a run, or resume it. Return the weights to start from."""
        if not self.settings.hiding.readable:
            initial_arrays = ArrayRecord()  # institutions make the fresh weights
        arrays, snapshot = initial_arrays, self.recorder.restore()
        if snapshot:
            self.exchanger.restore(snapshot)
        self.roll.assemble(run.grid)
        if not len(self.members):
            kind = RunError if self.roll.unfit else RefusedError
            raise kind(f"no institution takes part; {self.recorder.failures_line()}")
        self.exchanger.scale_labels(snapshot.label_scale if snapshot else self.members.label_scale())
        if snapshot:
            arrays, run.done = self.resumed(snapshot, initial_arrays), snapshot.exchange
        say_what_differs(self, run)
        self.begin()
        self.recorder.begin(self.config.name, run.num_rounds, self.exchanges_per_round(), run.done)
        if key := self.traits().private_key:
            self.recorder.kept_private(self.settings.run, key)
        return arrays

    def resumed(self, snapshot: Snapshot, initial_arrays: ArrayRecord) -> ArrayRecord:
        """Restore what a checkpoint holds; return its weights."""
        saved = snapshot.arrays
        # the model's order, so that files of the weights have the same bytes
        order = dict.fromkeys([*(name for name in initial_arrays if name in saved), *saved])
        self.restore(snapshot.state_arrays, snapshot.state_values)
        if self.replay:
            self.replay.restore(snapshot.state_values["replay"])
        return array_record({name: saved[name] for name in order})

    def train(self, run: RunState, exchange: int, arrays: ArrayRecord) -> ArrayRecord:
        """Make one exchange; return the weights after it, which are the same if it failed."""
        self.roll.call(run.grid, exchange)
        for name in self.members.left():
            self.recorder.failed(exchange, name, "its node has gone; the run goes on without it until it returns")
        if self.replay:
            last = self.round_of(exchange) == run.num_rounds
            self.replay.prepare(run.grid, exchange, opened(arrays), run.train_config, last)
        trained, metrics = self.exchange_round(run.grid, exchange, arrays, run.train_config)
        if metrics is not None:
            run.trained(self.round_of(exchange), metrics)
        if trained is None:
            return arrays
        arrays = self.exchanger.finite(trained)
        self.evaluations.after_exchange(run, exchange, arrays, self.data_of(self.exchanger.answered))
        return arrays

    def evaluate_if_due(self, run: RunState, exchange: int, arrays: ArrayRecord) -> None:
        """Have every institution evaluate, every `evaluate_every` rounds and after the last."""
        self.evaluations.if_due(run, exchange, arrays)

    def lr(self, exchange: int) -> float:
        """Return the learning rate of the pass that this exchange belongs to."""
        return learning_rate(self.settings.training, self.round_of(exchange) - 1)

    def summary(self) -> None:
        """Log the strategy and its options."""
        self.recorder.log(f"{type(self).__name__} {self.config}")

    def checkpoint(self, exchange: int, arrays: StateDict) -> None:
        """Give the recorder all that a resumed run needs."""
        state_arrays, state_values = self.state()
        if self.replay:
            state_values = {**state_values, "replay": self.replay.state()}
        self.recorder.end_exchange(self.exchanger.snapshot(exchange, arrays, state_arrays, state_values))
