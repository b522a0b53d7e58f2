"""One grid for all tests: a run in process that follows a script of data and small functions."""

from typing import NamedTuple

from flwr.app import Error, Message

from flwr_replay.engines.inline import InlineGrid
from flwr_replay.memory import forget
from flwr_replay.wire.records import config_in

__all__ = ["NEVER", "Asked", "Grid", "first_times", "nth"]

NEVER = 9999  # the code of an answer that never comes; none of Flower's


class Asked(NamedTuple):
    """What is asked of whom, in which exchange."""

    stage: str
    name: str
    exchange: int


class Grid(InlineGrid):
    """An `InlineGrid` that goes wrong where a script says so, and keeps what was asked and answered.

    `failing`, `losing`, `stopping` and `breaking` are beginnings of (stage, name, exchange), or a function of the grid
    and an `Asked`; `nth` and `first` make such functions. Set them as attributes.

    Attributes
    ----------
    failing : messages that fail; the institution does not see them.
    losing : messages whose answers are lost on their way.
    stopping, breaking : messages before or after which the run breaks off.
    before : function of grid and message, called before the institution has it. What it returns is the answer.
    after : function of grid, message and reply. What it returns is the answer in the reply's place.
    there : function of the grid, called when the server looks who is there. It returns node ids, or None for all.
    looks : how often it has looked.
    forgetful : whether every message meets a new process, where nothing but the disk is left.
    backwards : whether replies come in the opposite order.
    asked, log : every `Asked` in order; with its message and its reply.
    """

    failing = losing = stopping = breaking = ()
    before = after = there = None
    forgetful = backwards = False
    at_once = None  # all requests before the first reply, as over a network
    looks = 0

    def __init__(self, app, run_config, node_configs):
        super().__init__(app, run_config, node_configs)
        self.asked, self.log = [], []

    def name_of(self, node):
        config = self.contexts[node].node_config if node in self.contexts else {"name": str(node)}
        return config["name"] if "name" in config else f"institution-{config['partition-id'] + 1}"

    def times(self, stage, name):
        """Return how often a stage was asked of an institution so far."""
        return sum(at[:2] == (stage, name) for at in self.asked)

    def of(self, stage, name=""):
        """Return requests and replies of one stage, of one institution or all."""
        return [(asked, reply) for at, asked, reply in self.log if at.stage == stage and name in ("", at.name)]

    def who(self, stage):
        """Return in which order a stage was asked of whom."""
        return [at.name for at in self.asked if at.stage == stage]

    def get_node_ids(self):
        self.looks += 1
        present = self.there(self) if self.there else None
        return super().get_node_ids() if present is None else present

    def pull_messages(self, message_ids):
        replies = [
            reply
            for reply in super().pull_messages(message_ids)
            if not (reply.has_error() and reply.error.code == NEVER)
        ]
        return replies[::-1] if self.backwards else replies

    def _means(self, where, at):
        return where(self, at) if callable(where) else any(at[: len(place)] == tuple(place) for place in where)

    def answer(self, message):
        config = config_in(message.content)
        name = self.name_of(message.metadata.dst_node_id)
        at = Asked(config.get("stage", ""), name, config.get("server-round", 0))
        self.asked.append(at)
        if self._means(self.stopping, at):
            raise KeyboardInterrupt
        if self.forgetful:
            forget()
        if self._means(self.failing, at):
            reply = Message(Error(2, "made to fail"), reply_to=message)
        else:
            reply = (self.before and self.before(self, message)) or super().answer(message)
            reply = (self.after and self.after(self, message, reply)) or reply
        self.log.append((at, message, reply))
        if self._means(self.breaking, at):
            raise KeyboardInterrupt
        return Message(Error(2, "lost on its way"), reply_to=message) if self._means(self.losing, at) else reply


def nth(*calls):
    """Mean a stage of an institution when it is asked for the n-th time: (stage, name, n)."""
    return lambda grid, at: (at.stage, at.name, grid.times(at.stage, at.name)) in calls


def first_times(*calls):
    """Mean the first times that a stage of an institution is asked: (stage, name), as often as it stands here."""
    return lambda grid, at: grid.times(at.stage, at.name) <= calls.count(at[:2])
