"""A server that never ran this package's strategies: it sends what it likes straight to institutions' ClientApps."""

import json
import shlex
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from types import SimpleNamespace

from flwr.app import Message
from harness import node_configs

from flwr_replay.client_app import app
from flwr_replay.config.compose import compose
from flwr_replay.engines.inline import InlineGrid, identify_process
from flwr_replay.models.zoo import backbone
from flwr_replay.privacy.places import drawn_places
from flwr_replay.wire.records import arrays_in, config_in, metrics_in
from flwr_replay.wire.weights import to_arrays

identify_process()  # messages can be made before any server is there


class HostileServer:
    """Sends requests, in any order, to one institution that has 40 training examples of three classes.

    Parameters
    ----------
    folder : Path
        Of the hospitals: data, and state directories.
    *options : str
        The run's configuration, which is the server's choice too.
    policy : str
        The institution's policy file.
    **own : str
        More of its node config.
    """

    def __init__(self, folder, *options, name="a", policy="", **own):
        [node] = node_configs(folder, folder / "state", names=[name])
        node |= {key.replace("_", "-"): value for key, value in own.items()}
        if policy:
            node["policy"] = str(folder / f"policy-{abs(hash(policy))}.yaml")
            (folder / f"policy-{abs(hash(policy))}.yaml").write_text(policy)
        self.state, self.options = folder / "state" / name, options
        self.grid = InlineGrid(app, {"overrides": shlex.join(options)}, [node])

    @cached_property
    def config(self):
        return compose(self.options)

    @cached_property
    def weights(self):
        return to_arrays(backbone(self.config.model, self.config.task)(0))

    def send(self, request):
        """Send a payload; return the reply."""
        return self.send_content(request.encode(), request.message_type)

    def send_content(self, content, kind="train"):
        [reply] = self.grid.send_and_receive([Message(content, 2, kind)])
        return reply

    @property
    def ledger(self):
        return [json.loads(line) for line in (self.state / "ledger.jsonl").read_text().splitlines()]

    def charges(self, run):
        path = self.state / "runs" / run / "privacy.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def at_the_same_time(patch, maker, method, *asking):
    """Ask in threads, each of which waits in `maker.method` for another, which must not come; return the answers."""
    made, both = getattr(maker, method), threading.Barrier(2)

    def waits(self, *about):
        with suppress(threading.BrokenBarrierError):
            both.wait(timeout=0.5)
        return made(self, *about)

    patch.setattr(maker, method, waits)
    with ThreadPoolExecutor(len(asking)) as pool:
        answers = list(pool.map(lambda ask: ask(), asking))
    assert both.broken
    return answers


def drawn_at(draws, examples, size, stream):
    """Draw places as `drawn_places` does, by numbers that are each example's own, whoever else is there."""
    assert len(draws) == examples
    return drawn_places(examples, size, SimpleNamespace(uniform=lambda n: draws))


def refusal(reply):
    """Return the line of a refusal; empty if it was none."""
    return config_in(reply.content).get("failure", "")


def weights(reply):
    return arrays_in(reply.content)


def metrics(reply):
    return metrics_in(reply.content)
