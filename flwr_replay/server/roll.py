"""The roll call: who takes part, and who has come back."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from flwr_replay.config.binding import digest_of
from flwr_replay.config.hiding import Hiding
from flwr_replay.errors import WireError, refuse_all
from flwr_replay.files.atomic import NAME
from flwr_replay.payloads.common import Failure, Present, RollCall
from flwr_replay.server.answers import legible
from flwr_replay.server.asking import GONE, ask, deployed, failure_of, reason_of, unsaid_nodes, wait_for_nodes
from flwr_replay.server.exchange import Exchanger
from flwr_replay.server.members import Member, present
from flwr_replay.wire.payload import CLIENT_APP_RAISED, LedgerRow, rows
from flwr_replay.wire.weights import form_of, to_arrays

__all__ = ["Roll"]

OURS = "flwr_replay.errors."  # an error of this package's client; an app that knows no roll call raises another
LONGEST = 8.0  # seconds between two looks for who comes back, in the first minutes
SEALED = {Hiding.NOTHING: "", Hiding.SEALED: "all", Hiding.MASKED: "sums"}  # as the roll call says it
AGAIN = "; they may still answer an earlier run: if none is live, start their SuperNodes again"


class Roll:
    """Calls the roll, and enters in `exchange.members` who answers.

    `method` is the strategy's class, a `Movement`. `stages` returns all stages that the run requests.
    """

    ours_only = False  # whether this run needs this package's client everywhere

    def __init__(self, exchanger: Exchanger, method: type[Any], stages: Callable[[], Sequence[str]]) -> None:
        self.exchanger, self.method, self.stages = exchanger, method, stages
        self.settings, self.recorder, self.members = exchanger.settings, exchanger.recorder, exchanger.members
        self.nodes = max(1, self.settings.nodes)
        known = method.traits().one_form and self.settings.model is not None
        self.form = form_of(to_arrays(self.settings.model(0))) if known else ""  # type: ignore[misc]
        self.bereft: set[int] = set()  # nodes that had gone without a word when the roll was called, until they answer
        self.unfit = False  # whether an institution was refused for its answer

    def request(self, exchange: int = 0) -> RollCall:
        """Return the request to a node that joins or returns."""
        return RollCall(
            strategy=self.method.config_type.name,
            run=self.settings.run,
            stages=list(self.stages()),
            form=self.form,
            frozen=self.settings.frozen,
            training=digest_of(repr(self.settings.training)),
            record=self.settings.record,
            sealed=SEALED[self.settings.hiding],
            exchange=exchange,
        )

    @property
    def needs(self) -> str:
        """What a method needs of a user's own app if a ClientApp that trains and evaluates is not enough."""
        name = self.method.__name__
        return (
            f"{name} needs {name}Client at every institution, app = serve(make_client), and "
            "Settings(roll_call=True) at the server: the page docs/flower.md in flwr-replay's repository "
            "shows both"
        )

    def refuse(self, grid: Grid, ours: bool) -> None:
        """Refuse, with all that is wrong: a deployment of unsaid size, settings that a method needs and has not.

        And a user's own app where this run, or `ours`, needs this package's client.
        """
        served = self.settings.roll_call or not (self.ours_only or ours)
        needed = dict.fromkeys((*self.method.needs, *(() if served else ("task",))))
        lacking = [f"{name}=…" for name in needed if getattr(self.settings, name) is None]
        faults = unsaid_nodes(grid, self.settings.nodes)
        faults += [f"{self.method.__name__} lacks settings: give Settings({', '.join(lacking)})"] if lacking else []
        refuse_all(faults if served else [*faults, self.needs])

    def assemble(self, grid: Grid) -> None:
        """Wait until enough nodes have joined, and call the roll at the beginning of a run, or where it goes on.

        A node that was killed counts as joined until Flower misses it, a minute later. Then it is waited for once more.
        """
        wait, plan = self.settings.wait, self.settings.privacy
        missing, who = plan.dropouts if plan else 0, partial(self.missing, grid)
        joined = wait_for_nodes(grid, self.nodes, wait, self.recorder.log, missing, who, self.settings.hiding)
        self.call(grid, 0)
        called, pause = time.monotonic(), 0.5
        wait = wait if joined else 0.0  # it has passed
        if self.lacks() and joined:
            self.recorder.log(f"waiting for who has gone to come back{self.missing(grid)}, up to wait={wait:g} s")
        while self.lacks() and (waited := time.monotonic() - called) < wait:
            time.sleep(min(pause, wait - waited))
            self.call(grid, 0)
            pause = min(2 * pause, max(LONGEST, waited / 60))  # who says so of itself, each time, fills no ledger
        if self.lacks() and wait and set(grid.get_node_ids()) - self.members.online:
            self.call(grid, 0)  # for who came back while the last call waited for a slow answer
        if self.members.contested:
            self.recorder.log("the roll is called once more for all: what most pin decides, not what the first pins")
            self.members.ask_all_again()
            self.call(grid, 0)
        failed = {failure["institution"] for failure in self.recorder.failures[self.recorder.earlier :]}
        for name in self.members.not_back():
            if name not in failed:
                self.recorder.failed(0, name, "it took part before the run was resumed; the run goes on without it")

    def missing(self, grid: Grid) -> str:
        """Name the institutions that are expected and have not answered the roll call; empty if none are known."""
        if not (expected := {*self.settings.clinics, *self.members.not_back()}):
            return ""
        self.call(grid, 0)
        away = sorted(name for name in expected if not self.members.get(name))
        return f"; missing: {', '.join(away)}" if away else ""

    def lacks(self) -> bool:
        """Say whether an institution may come back: its node had gone at the roll call, or just before."""
        return len(self.members) < self.nodes and (bool(self.bereft) or len(self.members.online) < self.nodes)

    def call(self, grid: Grid, exchange: int) -> None:
        """Call the roll for nodes that join or return; report and leave out those that refuse or answer invalidly.

        In a user's own app nobody is asked, since a ClientApp that lacks the query would log an error.
        """
        if not self.settings.roll_call:
            for member in self.members.unasked(grid.get_node_ids()):
                self.recorder.log(f"{member.name} is Flower's node {member.node_id}")
            return
        request = self.request(exchange)
        newcomers = self.members.newcomers(grid.get_node_ids())
        messages = [self.exchanger.message(Member(str(node_id), node_id), request) for node_id in newcomers]
        calls = {message.metadata.dst_node_id: message for message in messages}
        silent = partial(self.exchanger.silent, hint=AGAIN if deployed(grid) and self.recorder.after_others else "")
        pairs = ask(grid, messages, self.exchanger.timeout, silent=silent)
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
                        member = present(node_id, reply, self.settings.hiding.pinned)
                        if self.ours_only and not member.ours:
                            raise WireError(f"runs a ClientApp of its own, and {self.needs}")
                        arrived.append(member)
            except WireError as error:
                faults[node_id], self.unfit = str(error), True
        refused = self.members.admit(sorted(arrived, key=lambda member: member.node_id))
        self.unfit |= bool(refused)
        faults |= refused
        taken = {member.name for member in self.members.known}
        for message in messages:
            node_id = message.metadata.dst_node_id
            claimed = names.get(node_id, "")  # the name in a refusal, which is not proven
            name = claimed if NAME.fullmatch(claimed) and claimed not in taken else str(node_id)
            member = self.members.by_node(node_id) or Member(self.members.called(node_id) or name, node_id)
            reply = replies[node_id]
            asking, answer = list(rows(message.content, RollCall)), self.answer_of(reply)
            content = reply.content if answer and reply is not None else None
            self.recorder.travelled(exchange, member, "down", asking, "roll-call", content=message.content)
            self.recorder.travelled(exchange, member, "up", answer, "roll-call", content=content)
            if node_id in faults:
                self.recorder.failed(exchange, member.name, faults[node_id])
        self.recorder.tell_alike()
        self.recorder.flush()

    def answer_of(self, reply: Message | None) -> list[LedgerRow]:
        """Return the fields of any answer to the roll call, as the ledger counts them."""
        for declared in (Failure, Present, None) if reply is not None and reply.has_content() else ():
            try:
                with legible():
                    fields = list(rows(reply.content, declared))  # type: ignore[union-attr]
                    return self.settings.privacy.protected(fields, declared, {}) if self.settings.privacy else fields
            except WireError:
                continue
        return []
