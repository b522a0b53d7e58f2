"""Metrics and options of a run at a tracker: TensorBoard, MLflow or Weights & Biases.

The server alone tells it, once for each evaluation: pooled metrics, those of each institution, epsilon. Of the options,
paths stay out. No image, label, latent, weight or message is told. A run does not depend on its tracker: one that fails
is given up with a warning, and the next resumption tells what it missed.

`tracking.json` in the run directory says what has been told, so that a resumed run tells nothing twice.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

from flwr_replay.config.binding import OWN_FILES, flat, plain
from flwr_replay.config.run import RunConfig
from flwr_replay.errors import ConfigError
from flwr_replay.files.disk import there
from flwr_replay.report.run_files import TRACKING, json_of, read_run_id, write_of
from flwr_replay.terminal import installing

__all__ = ["Tracking", "check_tracker"]

PROJECT = "flwr-replay"  # at the tracker, unless its own environment variable names another
PLACES = ("runs_dir", "resume", "run_name", "task.data_dir", "model.weights", *OWN_FILES)
AT_ONCE = 100  # options or metrics in a call to MLflow
LONGEST = 250  # characters of an option there
QUIET = {  # of the trackers themselves, unless the user has set them: no reports to their makers, no long retries
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "WANDB_ERROR_REPORTING": "false",
}

Entry = tuple[int, Mapping[str, float], Mapping[str, Mapping[str, float]]]  # exchange, pooled metrics, institutions'


def check_tracker(tracker: str) -> None:
    """Refuse a tracker whose package is not installed."""
    if tracker != "none" and find_spec(tracker) is None:
        raise ConfigError(
            f"tracking={tracker} needs the package {tracker}, which is not installed: "
            f"{installing(tracker)}, or leave tracking out"
        )


class TensorBoard:
    """Event files in `tensorboard/` of the run directory."""

    def open(self, folder: Path, name: str, options: Mapping[str, Any], known: str) -> str:
        """Begin a run, or go on with the known one; return its id at the tracker. A resumed run has one more file.

        `folder` is the run directory, `name` the run's, `options` its options without paths.
        """
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder / "tensorboard"))  # type: ignore[no-untyped-call]
        if not known:
            self.writer.add_text("options", "\n".join(f"    {key}: {value}" for key, value in options.items()))
        return name

    def tell(self, exchange: int, values: Mapping[str, float]) -> None:
        """Write the values to the file."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, exchange)
        self.writer.flush()

    def close(self, finished: bool) -> None:
        """Close the file."""
        self.writer.close()


class MLflow:
    """A run at $MLFLOW_TRACKING_URI, in the experiment $MLFLOW_EXPERIMENT_NAME, else flwr-replay."""

    def open(self, folder: Path, name: str, options: Mapping[str, Any], known: str) -> str:
        """Make a run with the options as its parameters, or go on with the known one."""
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self.client: Any = MlflowClient()
        if known:
            self.client.update_run(known, status="RUNNING")
            self.run = known
            return known
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        known_experiment = self.client.get_experiment_by_name(project)
        experiment = known_experiment.experiment_id if known_experiment else self.client.create_experiment(project)
        self.run = str(self.client.create_run(experiment, run_name=name).info.run_id)
        params = [Param(key, str(value)[:LONGEST]) for key, value in options.items()]
        for start in range(0, len(params), AT_ONCE):
            self.client.log_batch(self.run, params=params[start : start + AT_ONCE])
        return self.run

    def tell(self, exchange: int, values: Mapping[str, float]) -> None:
        """Send the values."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, exchange) for name, value in values.items()]
        for start in range(0, len(metrics), AT_ONCE):
            self.client.log_batch(self.run, metrics=metrics[start : start + AT_ONCE])

    def close(self, finished: bool) -> None:
        """Say how the run ended."""
        self.client.set_terminated(self.run, "FINISHED" if finished else "KILLED")


class WandB:
    """A run in the project $WANDB_PROJECT, else flwr-replay; with WANDB_MODE=offline in `wandb/` only."""

    def open(self, folder: Path, name: str, options: Mapping[str, Any], known: str) -> str:
        """Begin or continue a run; no name of the machine or its user, no program, nothing of git is told."""
        import wandb

        run_id = known or sha256(read_run_id(folder).encode()).hexdigest()[:16]
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            dir=folder,
            id=run_id,
            name=name,
            resume="allow",
            config=dict(options),
            settings=wandb.Settings(
                host=PROJECT,  # in place of the machine's name
                console="off",
                silent=True,
                save_code=False,
                disable_git=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
            ),
        )
        return run_id

    def tell(self, exchange: int, values: Mapping[str, float]) -> None:
        """Send the values."""
        self.run.log(dict(values), step=exchange)

    def close(self, finished: bool) -> None:
        """End the run."""
        self.run.finish(0 if finished else 1)


Tracker = TensorBoard | MLflow | WandB
TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


class Tracking:
    """Tells a run's tracker, if its options name one, and gives up one that fails; `folder` is the run directory."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.folder, self.file = config, folder, folder / TRACKING
        self.wanted = config.tracking != "none"
        self._tracker: Tracker | None = None
        self.told: dict[str, Any] = {"tracker": config.tracking, "run": "", "exchange": 0}

    def tell(self, history: Sequence[Entry], per_round: int, epsilon: Mapping[str, float]) -> None:
        """Tell all evaluations that the tracker does not have yet; `epsilon` belongs to the last."""
        if not self.wanted:
            return
        before = dict(self.told)
        try:
            tracker = self._tracker or self._opened()
            before = dict(self.told)
            for entry in history:
                if entry[0] > self.told["exchange"]:
                    values = _values(entry, epsilon if entry is history[-1] else {})
                    self._note(exchange=entry[0])  # first, so that a killed process tells no point twice
                    tracker.tell(entry[0] // per_round, values)
                    before = dict(self.told)
        except Exception as error:  # whatever it is, the run must go on
            self.told = before
            self._give_up(error)

    def close(self, finished: bool) -> None:
        """End the run at the tracker."""
        try:
            if self._tracker:
                self._tracker.close(finished)
        except Exception as error:
            self._give_up(error)

    def _opened(self) -> Tracker:
        if there(self.file) and (tracked := json_of(self.folder, TRACKING))["tracker"] == self.config.tracking:
            self.told = tracked
        for key, value in QUIET.items():
            os.environ.setdefault(key, value)
        self._tracker, config = TRACKERS[self.config.tracking](), self.config
        self._note(run=self._tracker.open(self.folder, config.run_name, _options(config), self.told["run"]))
        return self._tracker

    def _note(self, **changed: Any) -> None:
        self.told = {**self.told, **changed}
        write_of(self.folder, TRACKING, self.told)

    def _give_up(self, error: Exception) -> None:
        self.wanted, self._tracker = False, None
        if self.file.exists():
            write_of(self.folder, TRACKING, self.told)
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        logging.getLogger("flwr").warning("tracking=%s stops, and the run goes on: %s", self.config.tracking, why)


def _options(config: RunConfig) -> dict[str, Any]:
    """Return the options without paths, which are the machine's own."""
    paths = {*PLACES, *(f"strategy.{name}" for name in config.strategy.files)}
    return {key: value for key, value in flat(plain(config)).items() if key not in paths}


def _values(entry: Entry, epsilon: Mapping[str, float]) -> dict[str, float]:
    """Return what is told of an evaluation: `accuracy`, `north/accuracy`, `epsilon` if it is known."""
    _, pooled, own = entry
    values = {**pooled, **{f"{name}/{metric}": value for name, by in own.items() for metric, value in by.items()}}
    for named, value in epsilon.items():
        if isfinite(value):
            values["epsilon-not-proven" if named.endswith("no proof)") else "epsilon"] = value
    return values
