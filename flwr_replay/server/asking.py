"""Messages in transit: waiting for nodes, sending requests, replies as they arrive, reasons of failures."""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import inf

from flwr.app import Message
from flwr.serverapp import Grid

from flwr_replay.config.hiding import Hiding
from flwr_replay.errors import DivergedError, FlwrReplayError, RunError
from flwr_replay.payloads.common import OPEN_STAGES, Failure
from flwr_replay.wire.payload import request_of
from flwr_replay.wire.records import config_in

__all__ = [
    "GONE",
    "LOST",
    "ask",
    "deployed",
    "failure_of",
    "reason_of",
    "split_of",
    "stopped",
    "unsaid_nodes",
    "wait_for_nodes",
    "with_advice",
    "worker_failed",
]

EXPIRED = (3, 4)  # Flower's codes for a message or an answer that is missing or has expired
GONE = 5  # for a node that has gone without a word
LOST = (*EXPIRED, GONE, 8)  # the last for a ClientApp that was killed
SIMULATED = ("InMemoryGrid",)  # Flower's grid of a Ray simulation
INLINE = "InlineGrid"  # which nobody joins later
ENTERED = 1.0  # seconds without another node after which it has all: Flower makes them in one loop as the app begins
WORKER_FAILED = 0  # its code for a worker that has failed; over a network anybody can send it
DEPLOYED = ("GrpcGrid", "HttpGrid")  # Flower's grids of deployments; a simulation's has all nodes from the start
#: What Ray says where modules of two apps have the same names, and what to do. A module of the folder in which the
#: SuperLink was started goes before the app's.
ANOTHER = re.compile("Can't get attribute .* on <module .* from ")
OTHER_APP = (
    ": if that file is another app's, the SuperLink was started in its folder: stop it, and start it in a folder "
    "without apps, by flwr run PATH-OF-THE-APP"
)
SILENCE = 60.0  # seconds without an answer, after which it is said for the first time
LONGEST = 1000  # the most characters of a reason that an institution gives


def deployed(grid: Grid) -> bool:
    """Say whether SuperNodes join over the network."""
    return type(grid).__name__ in DEPLOYED


def worker_failed(grid: Grid, reply: Message) -> bool:
    """Say whether a simulation's engine answers that a worker has failed; no engine of our own answers so."""
    return type(grid).__name__ in SIMULATED and reply.has_error() and reply.error.code == WORKER_FAILED


def unsaid_nodes(grid: Grid, nodes: int) -> list[str]:
    """Return what is wrong with a deployment that does not say its size: it would begin with the first institution."""
    fault = (
        "a deployment must say how many institutions it waits for; got nodes=0: set nodes to their number, in an app "
        "of your own by Settings(nodes=…)"
    )
    return [fault] if not nodes and deployed(grid) else []


def wait_for_nodes(
    grid: Grid,
    number: int,
    seconds: float,
    say: Callable[[str], None],
    missing: int = 0,
    who: Callable[[], str] = str,
    hiding: Hiding = Hiding.NOTHING,
) -> bool:
    """Wait until so many nodes have joined, and in the end for all but those that may be missing.

    `say` is told from time to time how many have, and `who` has not, by name; empty: not known. Returned is whether
    all have. Where the run hides all but sums, institutions answer only together with all whose keys they have pinned.
    """
    begun, due, before = time.monotonic(), 0.0, 0
    simulated = type(grid).__name__ in SIMULATED
    seconds = 0 if type(grid).__name__ == INLINE else seconds
    deadline = begun + seconds
    while (joined := len(set(grid.get_node_ids()))) < number:
        if simulated and joined > before:
            deadline, before = min(begun + seconds, time.monotonic() + ENTERED), joined
        if time.monotonic() >= deadline:
            if joined >= (minimum := number - missing):
                return False
            if simulated and joined:
                raise RunError(
                    f"this run needs at least {minimum} institutions; Flower simulates {joined}: --federation-config "
                    f"num-supernodes={number}, or lower nodes"
                )
            advice = "start more SuperNodes (a simulation: --federation-config num-supernodes=N) or lower nodes"
            if away := who():
                others = f"if the others' officers agree, whose pages and policies were for {number}"
                less = " and every peers.txt without it," * hiding.sums_only
                go_on = f", or go on with nodes={joined}{less} {others}"
                advice = f"start its SuperNode and resume the run{go_on}"
                if hiding.sums_only and joined < 3:
                    advice = "start its SuperNode and resume the run: masks need three institutions"
            raise RunError(
                f"this run needs at least {minimum} institutions; {joined} joined within {seconds:g} s{away}: {advice}"
            )
        if (waited := time.monotonic() - begun) >= due:
            say(f"waiting for institutions to join: {joined} of {number}{who()}, {waited / 60:.0f} min")
            due = max(SILENCE, 2 * due)
        time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))
    return True


def ask(
    grid: Grid,
    messages: Iterable[Message],
    seconds: float,
    at_once: int | None = None,
    silent: Callable[[list[Message], float], None] = lambda messages, waited: None,
) -> Iterator[tuple[Message, Message | None]]:
    """Send messages; yield each with its reply when that arrives, or with None if no reply came in time.

    In a deployment Flower's own `send_and_receive` looks for replies only every three seconds.

    Messages are drawn one by one, each just before it is sent; `seconds` is the time to wait for each reply. At most
    `at_once` messages wait for a reply at a time. Their replies are fetched one by one, which bounds the memory that
    they take, however many institutions there are. None: as many as the grid's own `at_once` says, else all. `silent`
    is told the messages whose replies are missing, and for how many seconds the first has been waited for: after a
    minute, then each time that this has doubled.
    """
    unsent, at_once = iter(messages), at_once or getattr(grid, "at_once", None)
    due = SILENCE
    waiting: dict[str, tuple[Message, float]] = {}
    pause = 0.02
    while True:
        if fresh := list(islice(unsent, None if at_once is None else at_once - len(waiting))):
            list(grid.push_messages(fresh))
            deadline = time.monotonic() + seconds
            waiting |= {message.metadata.message_id: (message, deadline) for message in fresh}
            pause, due = 0.02, SILENCE
        if not waiting:
            return
        before = len(waiting)
        for ids in [list(waiting)] if at_once is None else [[message_id] for message_id in waiting]:
            replies = list(grid.pull_messages(ids))
            while replies:
                reply = replies.pop(0)
                if asked := waiting.pop(reply.metadata.reply_to_message_id, None):
                    yield asked[0], reply
                del reply  # free its memory before the next one is read
        for message_id, (message, deadline) in list(waiting.items()):
            if time.monotonic() >= deadline:
                del waiting[message_id]
                yield message, None
        waited = time.monotonic() + seconds - min((deadline for _, deadline in waiting.values()), default=inf)
        if waited >= due:
            silent([message for message, _ in waiting.values()], waited)
            due *= 2
        if len(waiting) == before:
            time.sleep(pause)
            pause = min(0.2, 1.5 * pause)


def failure_of(message: Message) -> Failure | None:
    """Return the failure that an institution with this package's ClientApp sent in place of an answer; else None."""
    if message.has_error() or "failure" not in message.content.get("config", {}):
        return None
    failure = Failure.decode(message.content)
    return replace(failure, failure=_line(failure.failure) or failure.error)


def reason_of(message: Message, reply: Message | None) -> str:
    """Return the reason why a message has no answer; of a traceback, its last line."""
    about = message.metadata
    if reply is None or (reply.error.code in EXPIRED and time.time() >= about.created_at + about.ttl):
        return f"no answer within timeout={about.ttl:g} s"
    lines = (reply.error.reason or "").strip().splitlines()
    reason = f"error {reply.error.code}: {_line(lines[-1]) if lines else 'no reason given'}"
    return reason + (OTHER_APP if ANOTHER.search(reason) else "")


def split_of(message: Message) -> str:
    """Return the split on which a request asks to evaluate; empty if it asks for another stage."""
    return str(config_in(message.content).get("split", ""))


def with_advice(fault: FlwrReplayError, message: Message, method: str) -> FlwrReplayError:
    """Return the failure of a user's own ClientApp; for a stage that such an app lacks, with what it needs."""
    request = request_of(message)
    if request is None or request.stage_name in OPEN_STAGES:
        return fault
    return type(fault)(
        f"a ClientApp of your own needs ClientApp(mods=[serving(make_client)]) here, which makes a {method}Client "
        f"(docs/flower.md in flwr-replay's repository): {fault}"
    )


def _line(text: str) -> str:
    """Return a foreign text as one printable line."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[:LONGEST]).split())


def stopped(why: str, failed: int, diverged: Sequence[str]) -> RunError | DivergedError:
    """Return the error that ends a run without answers: divergence if all `failed` messages failed by it."""
    return DivergedError(diverged[0]) if diverged and len(diverged) == failed else RunError(why)
