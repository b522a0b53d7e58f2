"""What all movements share: Flower's rounds with roll call, ledger, failures, evaluation, checkpoints, resumption.

A movement is a Flower `Strategy`. Its `start` is the loop that you see; `configure_train` and `aggregate_train` say
what one exchange is. `num_rounds` counts passes over the institutions' data, in every method; Flower's
`server_round` counts exchanges, of which one pass may take several.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flwr_replay.config.sections import require
from flwr_replay.errors import RefusedError, RunError
from flwr_replay.learning.training import learning_rate, refuse_single_batches
from flwr_replay.payloads.common import Evaluate, Evaluation, ExpectsReplay
from flwr_replay.privacy.dpsgd import refuse_mixing
from flwr_replay.privacy.plan import mechanisms_of
from flwr_replay.server.asking import wait_for_nodes
from flwr_replay.server.evaluation import Pooled, pool_answers, with_external
from flwr_replay.server.exchange import Exchanging
from flwr_replay.server.members import Member
from flwr_replay.server.recorder import Recorder, Snapshot
from flwr_replay.server.replay import GenerativeReplay
from flwr_replay.server.replay_forecast import exchanges_of
from flwr_replay.server.settings import Settings
from flwr_replay.wire.payload import Payload, Request
from flwr_replay.wire.records import StateDict, Weights, array_record, opened

__all__ = ["Exchange", "Movement", "Settings"]

Exchange = tuple[Member, Request, Payload, int]


class Movement(Exchanging):
    """Base of the four movements."""

    supports_replay: ClassVar[bool] = False  # whether a batch at the institutions may hold replayed examples
    dp_mechanisms: ClassVar[tuple[str, ...]] = ()  # what this method can train by DP-SGD; a subclass says it anew
    evaluated: ClassVar[type[Evaluation]] = Evaluation  # what answers an evaluation
    begins_at_server: ClassVar[bool] = True  # whether the server has the fresh weights

    def __init__(self, config: Any = None, settings: Settings | None = None, recorder: Recorder | None = None) -> None:
        super().__init__(config, settings, recorder)
        plan = self.settings.replay_plan
        self.replay = GenerativeReplay(self, plan, self.checkpoint) if plan else None
        self.elsewhere: Pooled | None = None  # the last metrics on other institutions' examples

    @classmethod
    def check(cls, config: Any, settings: Settings, names: Sequence[str] = ()) -> None:
        """Refuse options that do not fit the rest of the run, before it begins: in the base, batches of one.

        Parameters
        ----------
        config : Any
            The strategy's own options.
        settings : Settings
            With the model and the shape of an example.
        names : Sequence[str]
            Of the institutions, where they are known before the roll call: in a simulation.

        Raises
        ------
        ConfigError, TrainingError
            If they do not fit.
        """
        require(
            cls.supports_replay or settings.replay_plan is None,
            f"replay is for serial and parallel methods; got strategy={cls.name}: choose replay=none, or strategy=cwt, "
            "splitnn, fedavg, fedsgd, fedprox, fedavgm or fedavgshare",
        )
        wanted = settings.privacy.config.mechanisms if settings.privacy else ()
        if settings.privacy:
            settings.privacy.check_method(cls.name, mechanisms_of(cls))
        if settings.model is not None and {"classifier", "encoder", "proxy"} & set(wanted):
            refuse_mixing(settings.model(0))
        if settings.model is not None:
            refuse_single_batches(settings.model(0), settings.training.batch_size, settings.training.batch_size)

    # --- what a movement or a method says -----------------------------------------------------------------------------

    @abstractmethod
    def exchanges_per_round(self) -> int:
        """Return how many exchanges make one pass over the institutions' data."""

    def state(self) -> tuple[StateDict, dict[str, Any]]:
        """Return what a checkpoint must hold beside the global weights: arrays, and plain values."""
        return {}, {}

    def restore(self, arrays: StateDict, values: dict[str, Any]) -> None:
        """Take back what `state` gave."""

    def trained_on(self, answered: list[str]) -> list[str]:
        """Return whose data an exchange has trained on, from the names of those who answered: in the base, these."""
        return answered

    def evaluation(self, server_round: int, arrays: Weights) -> Request:
        """Return what each institution is asked to evaluate."""
        return Evaluate(server_round=server_round, arrays=arrays, run=self.settings.run)

    def evaluation_on(self, split: str, server_round: int, arrays: Weights) -> Request:
        """Return the same for other examples than the institution's test shard: train or external."""
        return replace(self.evaluation(server_round, arrays), split=split)  # type: ignore[call-arg]

    @abstractmethod
    def forecast(self, arrays: StateDict, num_rounds: int) -> list[Exchange]:
        """Return what training will send if every institution stays: member, request, answer, how often."""

    def exchange_round(
        self, grid: Grid, server_round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Run the training half of one server round: one exchange, unless a movement needs more."""
        replies = self.exchange(grid, server_round, self.configure_train(server_round, arrays, config, grid))
        return self.aggregate_train(server_round, replies)

    def forecast_evaluation(self, arrays: StateDict, num_rounds: int) -> list[Exchange]:
        """Return what evaluation will send."""
        every, answer = self.settings.evaluate_every, self.evaluated.empty(self.settings.task)
        kinds = [(self.evaluation(0, arrays), num_rounds // every + (1 if num_rounds % every else 0))]
        if self.settings.external:
            kinds.append((self.evaluation_on("external", 0, arrays), kinds[0][1]))
        if self.settings.forgetting:
            kinds.append((self.evaluation_on("train", 0, arrays), num_rounds * self.exchanges_per_round()))
        return [(member, request, answer, times) for request, times in kinds for member in self.members]

    def all_stages(self) -> list[str]:
        """Put the stages of replay before the method's own."""
        return [*(self.replay.replay_plan.stages if self.replay else ()), *self.stages]

    def forecast_replay(self) -> list[Exchange]:
        """Return what replay will send before the first round."""
        if self.replay is None:
            return []
        self.replay.expect(list(self.members))
        return exchanges_of(self.replay, list(self.members))

    def addressed(self, member: Member, request: Request) -> Request:
        """Tell a visited institution, besides, how many examples it holds for replay: none is lost unnoticed."""
        request = super().addressed(member, request)
        if self.replay and isinstance(request, ExpectsReplay):
            request = replace(request, replayed=self.replay.holding(member.name))  # type: ignore[call-arg]
        return request

    # --- the loop -----------------------------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the strategy; the signature is Flower's.

        Parameters
        ----------
        grid : Grid
            Flower's, or `flwr_replay.runs.engine.InlineGrid`.
        initial_arrays : ArrayRecord
            The fresh global weights.
        num_rounds : int
            Passes over the institutions' data.
        timeout : float | None
            Seconds to wait for an answer; None: as in the settings.
        train_config, evaluate_config : ConfigRecord | None
            Further instructions, sent along unchanged; they win over this package's own.
        evaluate_fn : Callable[[int, ArrayRecord], MetricRecord | None] | None
            Evaluation at the server, after each evaluated round.

        Raises
        ------
        RunError
            If institutions are missing, or none that answers can take part.
        RefusedError
            If every institution refuses.
        DivergedError
            If weights or losses are finite at no institution, or not at the server.
        """
        self.timeout = self.settings.timeout if timeout is None else timeout
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        self.extra = frozenset([*train_config, *evaluate_config])
        result, arrays = Result(), initial_arrays
        done, snapshot = 0, self.recorder.restore()
        if snapshot:
            self.members.remember(snapshot.examples, snapshot.bindings)
        wait_for_nodes(grid, max(self.min_nodes, self.settings.nodes), self.settings.wait)
        self.call_roll(grid, 0)
        if not len(self.members):
            kind = RunError if self.unfit else RefusedError
            raise kind(f"no institution takes part; {self.recorder.failures_line()}")
        self.scale_labels(snapshot.label_scale if snapshot else self.members.label_scale())
        if snapshot:
            saved = snapshot.arrays  # files of weights have the same bytes if these are in the same order
            order = dict.fromkeys([*(name for name in initial_arrays if name in saved), *saved])
            done, arrays = snapshot.server_round, array_record({name: saved[name] for name in order})
            self.trained = set(snapshot.trained)
            self.restore(snapshot.state_arrays, snapshot.state_values)
            if self.replay:
                self.replay.restore(snapshot.state_values["replay"])
        per_round = self.exchanges_per_round()
        self.recorder.begin(self, num_rounds, per_round, done)
        for server_round in range(done + 1, num_rounds * per_round + 1):
            self.call_roll(grid, server_round)
            if self.replay:
                last = server_round > (num_rounds - 1) * per_round
                self.replay.prepare(grid, server_round, opened(arrays), train_config, last)
            trained, metrics = self.exchange_round(grid, server_round, arrays, train_config)
            if trained is not None:
                arrays = self.finite(trained)
            if self.settings.forgetting and trained is not None:  # a visit that came to nothing changes nothing
                self.look_back(grid, server_round, arrays, evaluate_config)
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
            completed, rest = divmod(server_round, per_round)
            due = rest == 0 and (completed % self.settings.evaluate_every == 0 or completed == num_rounds)
            if due:
                if self.settings.external:
                    self.elsewhere = self.tested_on("external", grid, server_round, arrays, evaluate_config)
                asked = self.configure_evaluate(server_round, arrays, evaluate_config, grid)
                answers = self.exchange(grid, server_round, asked, needed=False)
                pooled = self.aggregate_evaluate(server_round, answers)
                if pooled is None and completed == num_rounds and self.members.ours:
                    raise RunError(
                        f"nobody could evaluate the last round; {self.recorder.failures_line()}: resume the run"
                    )
                if pooled is not None:
                    result.evaluate_metrics_clientapp[server_round] = pooled
                if evaluate_fn and (central := evaluate_fn(server_round, arrays)) is not None:
                    result.evaluate_metrics_serverapp[server_round] = central
            self.checkpoint(server_round, opened(arrays))
        result.arrays = arrays
        return result

    # --- Flower's hooks that all movements share ----------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every institution to evaluate on its test shard."""
        request = self.evaluation(server_round, arrays)
        return [self.message(member, request, config) for member in self.members]

    def look_back(self, grid: Grid, server_round: int, arrays: ArrayRecord, config: ConfigRecord) -> None:
        """Have every institution test the model on its own training examples: a row of the forgetting matrix."""
        taught = self.trained_on(self.answered)
        if found := self.tested_on("train", grid, server_round, arrays, config):
            self.recorder.looked_back(server_round, taught, found[1])

    def tested_on(
        self, split: str, grid: Grid, server_round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> Pooled | None:
        """Have every institution test the model on other examples than its test shard."""
        request = self.evaluation_on(split, server_round, arrays)
        asked = [self.message(member, request, config) for member in self.members if member.ours]
        return self.pooled(server_round, self.exchange(grid, server_round, asked, needed=False))

    def pooled(self, server_round: int, replies: Iterable[Message]) -> Pooled | None:
        """Pool what evaluations tell; one that cannot be is its sender's failure."""
        refuse, settings = partial(self.recorder.failed, server_round), self.settings
        return pool_answers(self.answers(replies), settings.task, refuse, self.evaluated, settings.input_shape)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Pool the metrics over the test shards: by summed counts, or weighted means for a user's own ClientApp."""
        found = self.pooled(server_round, replies)
        if found is None:
            return None
        pooled, own = found
        if self.elsewhere:
            pooled, own = with_external(found, self.elsewhere)
        self.recorder.evaluated(server_round, pooled, own)
        return MetricRecord(dict(pooled))

    def lr(self, server_round: int) -> float:
        """Return the learning rate of the pass that this exchange belongs to."""
        return learning_rate(self.settings.training, (server_round - 1) // self.exchanges_per_round())

    def summary(self) -> None:
        """Log what runs."""
        self.recorder.log(f"{type(self).__name__} {self.config}")

    def checkpoint(self, server_round: int, arrays: StateDict) -> None:
        """Hand all that a resumed run needs to the recorder."""
        known, trained = self.members.known, sorted(self.trained)
        examples = {member.name: member.num_examples for member in known}
        bindings = {member.name: (member.node_id, member.proof) for member in known}
        state_arrays, state_values = self.state()
        if self.replay:
            state_values = {**state_values, "replay": self.replay.state()}
        self.recorder.end_exchange(
            Snapshot(server_round, arrays, state_arrays, state_values, trained, examples, self.label_scale, bindings)
        )
