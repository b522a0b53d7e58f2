"""A Flower `Grid` that calls the ClientApp in this process, one node after another: no Ray, no ports.

For tests, notebooks and `flwr-replay run` on small data. The messages, records and apps are Flower's own. With the same
seed and the same number of torch threads, the results have the same bits as a simulation's.

A call of the ClientApp cannot be interrupted here. A message's time to live is the run's timeout. An answer that took
longer is dropped, as Flower's SuperLink does; files that the institution has written stay, as they do there.
"""

import time
import traceback
from collections.abc import Iterable, Mapping
from typing import Any, Self
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flwr_replay.wire.payload import CLIENT_APP_RAISED

__all__ = ["InlineGrid", "identify_process", "partitions"]

RUN_ID = 1
EXPIRED = 4  # Flower's code for an answer that has expired
SUPERLINK = 1  # Flower's node id of the server


class InlineGrid(Grid):
    """K nodes, all served by one ClientApp in this process.

    Parameters
    ----------
    app : ClientApp
        Serves every node.
    run_config : Mapping[str, Any]
        Flower's run config, which every node gets.
    node_configs : list[Mapping[str, Any]]
        One for each node; a simulation's hold partition-id and num-partitions.
    """

    at_once: int | None = 1  # it answers while a message is pushed: more messages at a time would only take memory

    def __init__(self, app: ClientApp, run_config: Mapping[str, Any], node_configs: list[Mapping[str, Any]]) -> None:
        self.app = app
        self.contexts = {
            node_id: Context(RUN_ID, node_id, dict(node_config), RecordDict(), dict(run_config))
            for node_id, node_config in enumerate(node_configs, start=SUPERLINK + 1)
        }
        self._replies: dict[str, Message] = {}
        identify_process()

    @classmethod
    def simulated(cls, app: ClientApp, run_config: Mapping[str, Any], nodes: int, **node_config: Any) -> Self:
        """Make a grid whose nodes each own one partition."""
        return cls(app, run_config, partitions(nodes, **node_config))

    def set_run(self, run: Any) -> None:
        """Nothing to set: this grid serves one run."""

    @property
    def run(self) -> Any:
        """Flower's run information, which only a SuperLink has."""
        raise RuntimeError("an InlineGrid has no SuperLink, and so no run information")

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Make a message as Flower does."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Answer messages at once; keep the replies until they are pulled."""
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = uuid4().hex  # as Flower's grids do when they push
            reply = self.answer(message)
            self._replies[reply.metadata.reply_to_message_id] = reply
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages."""
        return [self._replies.pop(message_id) for message_id in message_ids if message_id in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send and answer one message after another."""
        return self.pull_messages(self.push_messages(messages))

    def answer(self, message: Message) -> Message:
        """Call the ClientApp; an error, or an answer after the time to live, becomes an error reply."""
        context = self.contexts.get(message.metadata.dst_node_id)
        began = time.monotonic()
        try:
            if context is None:
                raise LookupError(f"no node {message.metadata.dst_node_id}")
            reply = self.app(message, context)
        except Exception:
            reply = Message(Error(CLIENT_APP_RAISED, traceback.format_exc()), reply_to=message)
        if (took := time.monotonic() - began) > message.metadata.ttl:
            return Message(Error(EXPIRED, f"answered after {took:.3g} s"), reply_to=message)
        return reply


def partitions(nodes: int, **node_config: Any) -> list[Mapping[str, Any]]:
    """Return the configurations of nodes that each own one partition."""
    return [{"partition-id": k, "num-partitions": nodes, **node_config} for k in range(nodes)]


def identify_process() -> None:
    """Give this process a sender id, which a `Message` takes from the process since Flower 1.40."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        return
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN_ID, SUPERLINK
