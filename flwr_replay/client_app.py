"""The ClientApp: compose the configuration, build this institution's client for the chosen strategy, serve it."""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod

from flwr_replay.config.binding import binding
from flwr_replay.config.compose import model_named
from flwr_replay.config.halves import load_client
from flwr_replay.config.run import RunConfig
from flwr_replay.config.sections import require
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.generators.synthesis import SynthesisPlan
from flwr_replay.institution.client import InstitutionClient
from flwr_replay.institution.guard import guard
from flwr_replay.institution.node import institution_of, take_data
from flwr_replay.institution.owner import Institution
from flwr_replay.learning.tasks import make_task
from flwr_replay.memory import forget
from flwr_replay.models.zoo import backbone
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.serve import serve

__all__ = ["app", "app_with", "client_of", "make_client"]


def make_client(context: Context) -> InstitutionClient:
    """Build the client of the strategy that the run's configuration names."""
    return client_of(*institution_of(context))


def client_of(institution: Institution, config: RunConfig) -> InstitutionClient:
    """Build an institution's client of the strategy that a composed configuration names."""
    torch.set_num_threads(config.threads)
    replay_plan, privacy, synthesis = _plans(config)
    require(
        not (institution.private_model and config.replay.name == "statistics"),
        "replay=statistics draws features for the run's own model, and a private-model of a SuperNode needs images: "
        "leave private-model out of --node-config, or choose replay=none",
    )
    for plan in (replay_plan, synthesis):
        if plan:
            plan.check_device(institution.device)
    client = load_client(config.strategy.name, config.replay.name)(
        institution,
        backbone(config.model, config.task),
        make_task(config.task),
        config.training,
        config.seed,
        replay_plan,
        privacy,
        backbone(model_named(institution.private_model), config.task) if institution.private_model else None,
        binding(config),
        synthesis,
    )
    assert isinstance(client, InstitutionClient)
    return client


@lru_cache(maxsize=64)  # the same options come with every message
def _plans(config: RunConfig) -> tuple[ReplayPlan | None, PrivacyPlan | None, SynthesisPlan | None]:
    return ReplayPlan.of(config), PrivacyPlan.of(config), SynthesisPlan.of(config)


def app_with(data: Callable[[Context], Mapping[str, Any]]) -> ClientApp:
    """Return a ClientApp for examples that your own code loads; policy, ledger, masks and noise are as in `app`.

    No training of your own answers: a server could ask it beside the masks.

    Parameters
    ----------
    data : Callable[[Context], Mapping[str, Any]]
        Returns train and test, and perhaps val, of the node that the context names: pairs of arrays, Datasets or
        DataLoaders, as `flwr_replay.data.own.arrays_of` takes them. What it computes from several patients, such as a
        mean, is in no epsilon. The server writes the context's `run_config`: let nothing in it choose examples.
    """

    def own(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        try:
            take_data(context, data)
        except Exception as error:
            return guard(message, context, partial(_fail, error))  # no other data answer in their place
        return call_next(message, context)

    forget()  # what another app of this process, as of a notebook's earlier cell, has read
    mods: list[Mod] = [own, guard]
    return serve(make_client, mods=mods)


def _fail(error: Exception, *_: object) -> Message:
    raise error


app = serve(make_client, mods=[guard])
