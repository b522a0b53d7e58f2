"""Data folders that an attack is given: auxiliary images are the attacker's, an institution's own are the judge's."""

from __future__ import annotations

from flwr_replay.config.sections import TaskConfig
from flwr_replay.data import load
from flwr_replay.data.datasets import Dataset
from flwr_replay.errors import DataError, FlwrReplayError

__all__ = ["load_for"]


def load_for(option: str, task: TaskConfig) -> Dataset:
    """Load a folder that an option of the command names.

    Raises
    ------
    DataError
        If it cannot be used; the line names the option, where a run's would be task.data-dir.
    """
    try:
        return load(task)
    except FlwrReplayError as error:
        raise DataError(f"{option}={task.data_dir}: {str(error).replace('task.data-dir', option)}") from None
