"""One run over a grid: build the strategy, start it, write the run directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp import Grid
from torch import nn

from flwr_replay.config.compose import load_strategy, model_named
from flwr_replay.config.sections import RunConfig, require
from flwr_replay.files.atomic import alone
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.learning.tasks import make_task
from flwr_replay.learning.training import select_device
from flwr_replay.models.pretrained import load_pretrained
from flwr_replay.models.zoo import backbone
from flwr_replay.movements.base import Movement, Settings
from flwr_replay.privacy.plan import NOTHING, PrivacyPlan
from flwr_replay.report.progress import Display
from flwr_replay.rng import derived_seed
from flwr_replay.runs.directory import RunDirectory, resumable
from flwr_replay.runs.opening import open_run, read_result
from flwr_replay.wire.payload import REQUESTS
from flwr_replay.wire.records import array_record, opened
from flwr_replay.wire.weights import to_arrays

__all__ = ["execute", "settings_of"]


def beginning(config: RunConfig) -> Callable[[int], nn.Module]:
    """Return the builder of the backbone as the server begins with it: fresh, or with the user's weights."""
    fresh, file = backbone(config.model, config.task), config.model.weights
    require(
        not file or load_strategy(config.strategy.name)[0].begins_at_server,
        f"model.weights is read by the server, and strategy={config.strategy.name} begins at the institutions: leave "
        "one of them out",
    )
    return (lambda seed: load_pretrained(fresh(seed), file)) if file else fresh


def settings_of(config: RunConfig) -> Settings:
    """Return what a run's strategy needs beside its own options."""
    return Settings(
        training=config.training,
        nodes=config.nodes,
        seed=config.seed,
        evaluate_every=config.evaluate_every,
        external=config.external,
        forgetting=config.forgetting,
        timeout=config.timeout,
        wait=config.wait,
        task=make_task(config.task),
        model=beginning(config),
        private_models=tuple(
            backbone(model_named(name), config.task) for name in getattr(config.strategy, "private_models", ())
        ),
        input_shape=(config.task.channels, config.task.size, config.task.size),
        device=select_device(config.device),
        replay_plan=ReplayPlan.of(config),
        privacy=PrivacyPlan.of(config),
    )


def claim(strategy: Movement) -> str:
    """Say in plain words what of a run is differentially private, from what its stages declare."""
    privacy = strategy.settings.privacy
    if privacy is None:
        return NOTHING
    return privacy.sentence({stage: REQUESTS[stage].answer for stage in strategy.all_stages()})


def execute(grid: Grid, config: RunConfig, display: Display) -> tuple[dict[str, Any], Path]:
    """Run one configuration over a grid; return what `result.json` holds, and the run directory.

    What can be refused without any institution is refused before the run directory is made.

    Parameters
    ----------
    grid : Grid
        Flower's, or `flwr_replay.runs.engine.InlineGrid`.
    config : RunConfig
        Resolved; `resume` names a run directory to go on with.
    display : Display
        Where progress is shown.
    """
    torch.set_num_threads(config.threads)
    settings = settings_of(config)
    strategy_type, _ = load_strategy(config.strategy.name)
    strategy_type.check(config.strategy, settings)
    config, run_id = open_run(config)
    stored = Path(config.runs_dir) / config.run_name / "result.json"
    if stored.exists() and (result := read_result(stored.parent))["rounds"] >= config.rounds:
        return result, stored.parent  # a finished run is not run again
    first = array_record(to_arrays(beginning(config)(derived_seed(config.seed, "model"))))
    with alone(stored.parent), resumable(stored.parent):
        recorder = RunDirectory(config, display)
        strategy = strategy_type(config.strategy, replace(settings, run=run_id), recorder)
        try:
            final = opened(strategy.start(grid, first, config.rounds).arrays)
            metric = strategy.task.metric
            missing = strategy.replay.missing if strategy.replay else {}
            result = recorder.finish(final, metric, strategy.task.higher_is_better, claim(strategy), missing)
            return result, recorder.path
        finally:
            recorder.close()
