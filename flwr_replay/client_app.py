"""The ClientApp: compose the configuration, build this institution's client for the chosen strategy, serve it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from flwr.app import Context
from torch import nn

from flwr_replay.binding import binding
from flwr_replay.client import InstitutionClient
from flwr_replay.compose import load_client, model_named
from flwr_replay.config import ModelConfig, TaskConfig
from flwr_replay.guard import guard
from flwr_replay.institution import institution_of
from flwr_replay.models import build
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.replay.plan import Replaying
from flwr_replay.serve import serve
from flwr_replay.tasks import make_task

__all__ = ["app", "make_client"]


def make_client(context: Context) -> InstitutionClient:
    """Build the client of the strategy that the run's configuration names."""
    institution, config = institution_of(context)
    torch.set_num_threads(config.threads)
    client = load_client(config.strategy.name)(
        institution,
        backbone(config.model, config.task),
        make_task(config.task),
        config.training,
        config.seed,
        Replaying.of(config),
        PrivacyPlan.of(config),
        backbone(model_named(institution.private_model), config.task) if institution.private_model else None,
        binding(config),
    )
    assert isinstance(client, InstitutionClient)
    return client


@lru_cache(maxsize=4)
def backbone(model: ModelConfig, task: TaskConfig) -> Callable[[int], nn.Module]:
    """Return the one builder of a configuration's backbone: seed to fresh weights."""
    return partial(build, model, task)


app = serve(make_client, mods=[guard])
