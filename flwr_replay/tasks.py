"""The kinds of task, for whoever writes a ServerApp or ClientApp: the same as `flwr_replay.learning.tasks`."""

from __future__ import annotations

from flwr_replay.learning.tasks import Classification, Regression, Segmentation, Task

__all__ = ["Classification", "Regression", "Segmentation", "Task"]
