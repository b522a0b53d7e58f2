"""Who takes part: a strategy's members, the messages to them, the roll call."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_replay.config.binding import digest_of
from flwr_replay.config.sections import require
from flwr_replay.config.strategy import StrategyConfig
from flwr_replay.errors import ConfigError, WireError
from flwr_replay.files.atomic import NAME
from flwr_replay.learning.tasks import Task
from flwr_replay.payloads.common import Failure, LabelScale, Present, RollCall, Summed
from flwr_replay.report.progress import shown_time
from flwr_replay.server.answers import legible
from flwr_replay.server.asking import GONE, ask, deployed, failure_of, reason_of, wait_for_nodes
from flwr_replay.server.members import Member, Members, present
from flwr_replay.server.one_line import errors_in_one_line
from flwr_replay.server.recorder import Recorder
from flwr_replay.server.settings import Settings
from flwr_replay.wire.payload import CLIENT_APP_RAISED, Request, Row, request_of, rows
from flwr_replay.wire.weights import form_of, to_arrays

__all__ = ["Calling"]

OURS = "flwr_replay.errors."  # an error of this package's client; an app that knows no roll call raises another
MOST_NAMED = 8  # institutions in a line of the log
LONGEST = 8.0  # seconds between two looks for who comes back, in the first minutes
AGAIN = "; they may still answer an earlier run: if none is live, start their SuperNodes again"


errors_in_one_line()  # when a strategy is imported, since arguments that are refused never reach `start`


class Calling(Strategy):
    """Knows who takes part, and writes a message to each.

    Parameters
    ----------
    config : StrategyConfig | None
        The strategy's own options, its `<Name>Config`; None means the defaults.
    settings : Settings | None
        What every strategy needs; None means the defaults.
    recorder : Recorder | None
        Writes metrics, ledger and checkpoints; None only logs through Flower.
    **unknown : object
        Arguments that only Flower's strategies have, such as `fraction_evaluate`: refused.

    Raises
    ------
    ConfigError
        If an argument is unknown or of another type.
    """

    name: ClassVar[str]
    config_type: ClassVar[type[StrategyConfig]]
    config: StrategyConfig
    min_nodes: ClassVar[int] = 1
    stages: tuple[str, ...] = ("train", "evaluate")  # all stages that a run requests
    timeout: float  # seconds to wait for an answer
    needs_roll_call: ClassVar[bool] = False  # whether every institution must run this package's client, for all stages
    ours_only: bool  # whether this run needs that, for its options
    one_form: ClassVar[bool] = False  # whether all institutions' models must have the same names, shapes and dtypes
    extra: frozenset[str]  # keys that a user's own ServerApp adds to requests

    def __init__(
        self,
        config: StrategyConfig | None = None,
        settings: Settings | None = None,
        recorder: Recorder | None = None,
        **unknown: object,
    ) -> None:
        name, options = type(self).__name__, self.config_type
        require(
            not unknown,
            f"{name} takes options, settings= and recorder=; got {', '.join(unknown)}: write {name}("
            f"{options.__name__}(…), settings=Settings(nodes=…)). Settings(fraction=…) says how many train in "
            "a round; all evaluate",
        )
        known_as = f"{name} takes its options, then settings=Settings(…); got"
        require(
            config is None or isinstance(config, options),
            f"{known_as} {type(config).__name__} as its options: give {options.__name__}(…), or name settings=",
        )
        require(
            settings is None or isinstance(settings, Settings),
            f"{known_as} settings={type(settings).__name__}: give Settings(…)",
        )
        self.config = self.config_type() if config is None else config
        self.settings = settings or Settings()
        self.recorder = recorder or Recorder()
        known = self.one_form and self.settings.model is not None
        self.form = form_of(to_arrays(self.settings.model(0))) if known else ""  # type: ignore[misc]
        self.members = Members()
        self.bereft: set[int] = set()  # nodes that had gone without a word when the roll was called, until they answer
        self.unfit = False  # whether an institution was refused for its answer to the roll call
        self.longest = Counter[str]()  # by stage, the whole seconds of the longest valid answer
        self.trained: dict[str, int] = {}  # by name, the last exchange in which a request to train was answered
        self.answered: list[str] = []  # names of those that gave a valid answer in the last exchange
        self.failed: list[str] = []  # names of those that gave none
        self.diverged: list[str] = []  # failures in the last exchange by weights or losses that are not finite
        self.lost: list[str] = []  # names of those that gave no answer: too late, or their node or its app has ended
        self.faults: Counter[str] = Counter()  # of a simulation's workers: how often, by Flower's text
        self.label_scale: tuple[float, float] | None = None  # regression: mean and standard deviation of all labels

    @property
    def task(self) -> Task:
        """The task.

        Raises
        ------
        ConfigError
            If the settings have none.
        """
        if self.settings.task is None:
            raise ConfigError(f"{type(self).__name__} needs the task: give Settings(task=...)")
        return self.settings.task

    def blank_labels(self, n: int) -> NDArray[Any]:
        """Return n blank labels of the task, as large as real ones."""
        return self.task.blank_labels(n, self.settings.input_shape or ())

    def scale_labels(self, scale: tuple[float, float] | None) -> None:
        """Use this mean and standard deviation for all labels from now on, here and at the institutions."""
        self.label_scale = scale
        if scale is not None:
            self.settings = replace(self.settings, task=self.task.scaled(*scale))

    def addressed(self, member: Member, request: Request) -> Request:
        """Add to a request the fields that depend on the institution, or on all institutions' labels."""
        if "continues" in request.declared():
            request = replace(request, continues=self.trained.get(member.name, 0))  # type: ignore[call-arg]
        if "stated" in request.declared() and (released := self.recorder.released.get(member.name)):
            request = replace(request, stated=released["epsilon"] or 0.0)  # type: ignore[call-arg]
        if isinstance(request, LabelScale) and self.label_scale is not None:
            mean, scale = self.label_scale
            request = replace(request, label_mean=mean, label_scale=scale)  # type: ignore[call-arg]
        if isinstance(request, Summed) and self.settings.masked:
            request = replace(request, total=sum(one.num_examples for one in self.members.known))  # type: ignore[call-arg]
        return request

    def message(self, member: Member, request: Request, extra: ConfigRecord | None = None) -> Message:
        """Encode a request to one institution; every message has records of its own."""
        content = self.addressed(member, request).encode()
        if extra:
            content.config_records["config"].update(extra)
        group = str(request.server_round)
        return Message(content, member.node_id, request.message_type, group_id=group, ttl=self.timeout)

    @property
    def needs(self) -> str:
        """What a method needs of a user's own app if a ClientApp that trains and evaluates is not enough."""
        name = type(self).__name__
        return (
            f"{name} needs {name}Client at every institution, app = serve(make_client), and "
            "Settings(roll_call=True) at the server: the page docs/flower.md in flwr-replay's repository "
            "shows both"
        )

    def all_stages(self) -> list[str]:
        """Return all stages that the whole run requests."""
        return list(self.stages)

    # --- the roll call ------------------------------------------------------------------------------------------------

    def roll_call(self, server_round: int = 0) -> RollCall:
        """Return the request to a node that joins or returns."""
        return RollCall(
            strategy=self.name,
            run=self.settings.run,
            stages=self.all_stages(),
            form=self.form,
            training=digest_of(repr(self.settings.training)),
            record=self.settings.record,
            sealed="all" if self.settings.sealed else "sums" if self.settings.masked else "",
            server_round=server_round,
        )

    def assemble(self, grid: Grid) -> None:
        """Wait until enough nodes have joined, and call the roll at the beginning of a run, or where it goes on.

        A node that was killed counts as joined until Flower misses it, a minute later. Then it is waited for once more.
        """
        wait, nodes = self.settings.wait, max(self.min_nodes, self.settings.nodes)
        wait_for_nodes(grid, nodes, wait, self.recorder.log)
        self.call_roll(grid, 0)
        called, pause = time.monotonic(), 0.5
        if self.lacks(nodes):
            self.recorder.log(f"waiting for who has gone to come back, up to wait={wait:g} s")
        while self.lacks(nodes) and (waited := time.monotonic() - called) < wait:
            time.sleep(min(pause, wait - waited))
            self.call_roll(grid, 0)
            pause = min(2 * pause, max(LONGEST, waited / 60))  # who says so of itself, each time, fills no ledger
        if self.lacks(nodes) and wait and set(grid.get_node_ids()) - self.members.online:
            self.call_roll(grid, 0)  # for who came back while the last call waited for a slow answer
        if self.members.contested:
            self.recorder.log("the roll is called once more for all: what most pin decides, not what the first pins")
            self.members.ask_all_again()
            self.call_roll(grid, 0)
        said = {failure["institution"] for failure in self.recorder.failures[self.recorder.earlier :]}
        for name in self.members.not_back():
            if name not in said:
                self.recorder.failed(0, name, "it took part before the run was resumed; the run goes on without it")

    def lacks(self, nodes: int) -> bool:
        """Say whether an institution may come back: its node had gone at the roll call, or just before."""
        return len(self.members) < nodes and (bool(self.bereft) or len(self.members.online) < nodes)

    def call_roll(self, grid: Grid, server_round: int) -> None:
        """Call the roll for nodes that join or return; report and leave out those that refuse or answer invalidly.

        In a user's own app nobody is asked, since a ClientApp that lacks the query would log an error.
        """
        if not self.settings.roll_call:
            for member in self.members.unasked(grid.get_node_ids()):
                self.recorder.log(f"{member.name} is Flower's node {member.node_id}")
            return
        request = self.roll_call(server_round)
        newcomers = self.members.newcomers(grid.get_node_ids())
        asked = [self.message(Member(str(node_id), node_id), request) for node_id in newcomers]
        calls = {message.metadata.dst_node_id: message for message in asked}
        silent = partial(self.silent, hint=AGAIN if deployed(grid) else "")
        pairs = ask(grid, asked, self.timeout, silent=silent)
        replies = {message.metadata.dst_node_id: reply for message, reply in pairs}
        arrived: list[Member] = []
        faults: dict[int, str] = {}
        names: dict[int, str] = {}  # by node id, the names of those that refuse
        for node_id, reply in replies.items():
            if reply is not None:
                self.bereft.discard(node_id)
            try:
                with legible():
                    refusal = failure_of(reply) if reply is not None else None
                    if refusal:
                        faults[node_id], names[node_id] = refusal.failure, refusal.name
                    elif reply is not None and reply.has_error() and OURS in (reply.error.reason or ""):
                        raise WireError(reason_of(calls[node_id], reply))
                    elif reply is None or (reply.has_error() and reply.error.code != CLIENT_APP_RAISED):
                        faults[node_id] = (
                            f"no answer to the roll call ({reason_of(calls[node_id], reply)}); it is asked again"
                        )
                        if reply is not None and reply.error.code == GONE:
                            self.bereft.add(node_id)
                        self.members.ask_again(node_id)
                    else:
                        member = present(node_id, reply, self.settings.pinned)
                        if self.ours_only and not member.ours:
                            raise WireError(f"runs a ClientApp of its own, and {self.needs}")
                        arrived.append(member)
            except WireError as error:
                faults[node_id], self.unfit = str(error), True
        refused = self.members.admit(sorted(arrived, key=lambda member: member.node_id))
        self.unfit |= bool(refused)
        faults |= refused
        taken = {member.name for member in self.members.known}
        for message in asked:
            node_id = message.metadata.dst_node_id
            claimed = names.get(node_id, "")  # the name in a refusal, which is not proven
            name = claimed if NAME.fullmatch(claimed) and claimed not in taken else str(node_id)
            member = self.members.by_node(node_id) or Member(self.members.called(node_id) or name, node_id)
            reply = replies[node_id]
            asking, answer = list(rows(message.content, RollCall)), self.roll_answer(reply)
            came = reply.content if answer and reply is not None else None
            self.recorder.travelled(server_round, member, "down", asking, "roll-call", content=message.content)
            self.recorder.travelled(server_round, member, "up", answer, "roll-call", content=came)
            if node_id in faults:
                self.recorder.failed(server_round, member.name, faults[node_id])
        self.recorder.flush()

    def roll_answer(self, reply: Message | None) -> list[Row]:
        """Return the fields of any answer to the roll call, as the ledger counts them."""
        for declared in (Failure, Present, None) if reply is not None and reply.has_content() else ():
            try:
                with legible():
                    found = list(rows(reply.content, declared))  # type: ignore[union-attr]
                    return self.settings.privacy.protected(found, declared, {}) if self.settings.privacy else found
            except WireError:
                continue
        return []

    def silent(self, messages: list[Message], seconds: float, hint: str = "") -> None:
        """Say in the log for whose answers the run waits, and how long such an answer has taken before."""
        nodes = [message.metadata.dst_node_id for message in messages]
        names = sorted(self.members.called(node) or f"node {node}" for node in nodes)
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        request = request_of(messages[0])
        stage = request.stage_name if request else ""
        known = f"; {stage} took up to {shown_time(self.longest[stage])} before" if self.longest[stage] else hint
        self.recorder.log(f"waiting for {', '.join(names[:MOST_NAMED])}{more}, {seconds / 60:.0f} min{known}")
