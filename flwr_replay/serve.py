"""From a `NumPyClient` to a Flower `ClientApp` under the message API.

    app = serve(lambda context: MyNumPyClient())

This is how a user's own NumPyClient runs under these strategies. `fit` answers train messages, `evaluate` answers
evaluate messages. Weights keep the names under which they arrived.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from numpy.typing import NDArray
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flwr_replay.errors import ConfigError
from flwr_replay.institution.client import InstitutionClient
from flwr_replay.payloads.common import OPEN_STAGES
from flwr_replay.wire.payload import request_of
from flwr_replay.wire.records import StateDict, Weights, array_record, arrays_in, config_in, metrics_in

__all__ = ["ProximalApp", "serve", "serving"]

MOST = 2**63 - 1  # of a whole number in Flower's records


def serve(make_client: Callable[[Context], NumPyClient | Client], mods: list[Mod] | None = None) -> ClientApp:
    """Wrap a NumPyClient as a ClientApp.

    Parameters
    ----------
    make_client : Callable[[Context], NumPyClient | Client]
        Builds the client for one message, as Flower's `client_fn` does, with or without `.to_client()`.
    mods : list[Mod] | None
        Flower mods around it.
    """
    _refuse_made(make_client)
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _fit(_numpy_client(make_client(context)), message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client = _numpy_client(make_client(context))
        if isinstance(client, InstitutionClient):  # whose metrics may lack a loss
            return Message(client.answer(*_received(message)).encode(), reply_to=message)
        named, config = _received(message)
        loss, num_examples, own = client.evaluate(_own(named), config)
        return Message(RecordDict({"metrics": _metrics(num_examples, {"loss": float(loss), **own})}), reply_to=message)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        client = _numpy_client(make_client(context))
        if not isinstance(client, InstitutionClient):
            raise ValueError("this NumPyClient answers no queries")
        answer = client.answer({}, config_in(message.content))
        return Message(answer.encode(), reply_to=message)

    return app


def serving(make_client: Callable[[Context], InstitutionClient]) -> Mod:
    """Make a Flower mod that serves the stages that a user's own ClientApp does not have.

    The InstitutionClient answers messages of the stages that it adds (`encode`, `extract`). All others go to the user's
    app: `ClientApp(mods=[serving(make_client)])`.
    """
    _refuse_made(make_client)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        request = request_of(message)
        if request is None or request.stage_name in OPEN_STAGES:
            return call_next(message, context)
        return _fit(_numpy_client(make_client(context), InstitutionClient), message)

    return mod


class ProximalApp(ClientApp):
    """Flower's ClientApp, to whose own training FedProx's term is added: L(θ_k) + μ/2 ‖θ_k - θ‖² (Li et al. 2020).

    Every step of a torch optimizer in a train message has μ (θ_k - θ) added to its gradients, after whatever clipped
    them. θ is what a parameter was before its first step, μ the `proximal-mu` of the request; without it all is as it
    was. A step that calls a closure is a ConfigError.
    """

    def __init__(self, mods: list[Mod] | None = None) -> None:
        super().__init__(mods=[*(mods or ()), _proximal])


def _proximal(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    mu, received = float(config_in(message.content).get("proximal-mu", 0.0)), dict[torch.Tensor, torch.Tensor]()

    def pull(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if [*args[1:], *kwargs.values()] not in ([], [None]):  # the first argument is the optimizer
            raise ConfigError("ProximalApp adds to gradients before a step; a closure computes new ones: leave it out")
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            if parameter not in received:
                received[parameter] = parameter.detach().clone()
            parameter.grad.add_(parameter.detach() - received[parameter], alpha=mu)

    hook = register_optimizer_step_pre_hook(pull) if mu else None
    try:
        return call_next(message, context)
    finally:
        if hook:
            hook.remove()


def _refuse_made(make_client: object) -> None:
    """Refuse a client or a model in place of the function that makes a client."""
    if isinstance(make_client, torch.nn.Module) or not callable(make_client):
        got = f"a {type(make_client).__name__}: write def make_client(context): return …, and give make_client"
        raise ConfigError(f"make_client must be a function of Flower's Context; got {got}")


def _numpy_client(client: NumPyClient | Client, kind: type[NumPyClient] = NumPyClient) -> NumPyClient:
    """Undo `NumPyClient.to_client()`."""
    inner = getattr(client, "numpy_client", client)
    if not isinstance(inner, kind):
        raise ConfigError(f"make_client must return a {kind.__name__}; got {type(client).__name__}: return one")
    return inner


def _fit(client: NumPyClient, message: Message) -> Message:
    arrays: Weights | None
    if isinstance(client, InstitutionClient):
        arrays, metrics, _ = client.answer(*_received(message)).contents()
        num_examples = metrics.pop("num-examples")
    else:
        named, config = _received(message)
        trained, num_examples, metrics = client.fit(_own(named), config)
        arrays = dict(zip(named if len(named) == len(trained) else map(str, range(len(trained))), trained, strict=True))
    content = RecordDict({"metrics": _metrics(num_examples, metrics)})
    if arrays:
        content["arrays"] = array_record(arrays)
    return Message(content, reply_to=message)


def _received(message: Message) -> tuple[StateDict, dict[str, Any]]:
    return arrays_in(message.content), {**metrics_in(message.content), **config_in(message.content)}


def _own(named: StateDict) -> list[NDArray[Any]]:
    return [array.copy() for array in named.values()]  # a user's own code may write into what it receives


def _metrics(num_examples: int, metrics: dict[str, Any]) -> MetricRecord:
    """Return what a record of metrics can hold, NumPy's numbers as Python's; the rest stays, and the log says so."""
    values: dict[str, Any] = {"num-examples": int(num_examples)}
    for name, value in metrics.items():
        plain = value.tolist() if hasattr(value, "tolist") else value
        numbers = list(plain) if isinstance(plain, list | tuple) else [plain]
        kind = float if any(isinstance(number, float) for number in numbers) else int
        fits = all(isinstance(n, bool | int | float) and (kind is float or abs(n) <= MOST) for n in numbers)
        if not fits or not isinstance(name, str):
            log = logging.getLogger("flwr")
            log.warning("a metric is a number or a list of them; %.80r is a %s: left out", name, type(value).__name__)
            continue
        values[name] = list(map(kind, numbers)) if isinstance(plain, list | tuple) else kind(plain)
    return MetricRecord(values)
