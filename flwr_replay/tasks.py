"""The kinds of task, for authors of a ServerApp or ClientApp; re-exported from `flwr_replay.learning.tasks`."""

from flwr_replay.learning.tasks import Classification, Regression, Segmentation, Task

__all__ = ["Classification", "Regression", "Segmentation", "Task"]
