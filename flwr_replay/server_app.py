"""The ServerApp: compose the configuration, build the strategy, start it, write the run directory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flwr_replay.client_app import backbone
from flwr_replay.compose import from_run_config, load_strategy
from flwr_replay.config import RunConfig
from flwr_replay.errors import FlwrReplayError
from flwr_replay.movements.base import Settings
from flwr_replay.progress import Display, LogDisplay
from flwr_replay.rng import derived_seed
from flwr_replay.run import RunDirectory, open_run
from flwr_replay.tasks import make_task
from flwr_replay.training import select_device, to_arrays
from flwr_replay.wire import NamedArrays, array_record

__all__ = ["app", "execute"]

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what Flower's run config says; an error of the user's is one line, and the run counts as failed."""
    try:
        result, folder = execute(grid, from_run_config(context.run_config), LogDisplay())
    except FlwrReplayError as error:
        sys.exit(f"error: {error}")
    print(f"{result['metric']} {result['final']['global'][result['metric']]:.4f}  {folder}")


def execute(grid: Grid, config: RunConfig, display: Display) -> tuple[dict[str, Any], Path]:
    """Run one configuration over a grid; return what `result.json` holds, and the run directory.

    What can be refused without any institution is refused before the run directory is made.

    Parameters
    ----------
    grid : Grid
        Flower's, or `flwr_replay.engine.InlineGrid`.
    config : RunConfig
        Resolved; `resume` names a run directory to go on with.
    display : Display
        Where progress is shown.
    """
    torch.set_num_threads(config.threads)
    build, task = backbone(config.model, config.task), make_task(config.task)
    strategy_type, _ = load_strategy(config.strategy.name)
    strategy_type.check(config.strategy, build)
    device = select_device(config.device)
    config = open_run(config)
    stored = Path(config.runs_dir) / config.run_name / "result.json"
    if stored.exists() and (result := json.loads(stored.read_text()))["rounds"] >= config.rounds:
        return result, stored.parent  # a finished run is not run again
    settings = Settings(
        training=config.training,
        nodes=config.nodes,
        seed=config.seed,
        evaluate_every=config.evaluate_every,
        timeout=config.timeout,
        wait=config.wait,
        run=config.run_name,
        task=task,
        model=build,
        device=device,
    )
    fresh = array_record(to_arrays(build(derived_seed(config.seed, "model"))))
    recorder = RunDirectory(config, display)
    try:
        finished = strategy_type(config.strategy, settings, recorder).start(grid, fresh, config.rounds)
        final = NamedArrays.of(finished.arrays).state_dict()
        return recorder.finish(final, task.metric, task.higher_is_better), recorder.path
    finally:
        recorder.close()
