"""Data to deal and to read: small sets made here, and the real ones where they lie beside the repository."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from flwr_replay.config.sections import TaskConfig
from flwr_replay.data import Dataset, Examples

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def shared() -> Path:
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no folder shared/data beside the repository: real data are not here")
    return folder


@pytest.fixture(scope="session")
def task() -> Callable[..., TaskConfig]:
    """A task as conf/task has it, with some options set."""

    def make(name: str, **options: Any) -> TaskConfig:
        values = yaml.safe_load((ROOT / "conf" / "task" / f"{name}.yaml").read_text(encoding="utf-8"))
        values["class_names"] = tuple(values["class_names"])
        return TaskConfig(**{**values, **options})

    return make


@pytest.fixture(scope="session")
def examples() -> Callable[..., Examples]:
    """Examples with given labels; an image says which example it is."""

    def make(y: Any, sites: Any = None) -> Examples:
        y = np.asarray(y)
        x = np.arange(len(y), dtype=np.uint32).view(np.uint8).reshape(len(y), 1, 2, 2)
        labels = y.astype(np.float32 if y.dtype.kind == "f" else np.int64)
        return Examples(x, labels, None if sites is None else np.asarray(sites, np.str_))

    return make


@pytest.fixture(scope="session")
def dataset(examples: Callable[..., Examples]) -> Callable[..., Dataset]:
    """A data set with n training examples of as many classes, and test and validation examples in proportion."""

    def make(n: int = 400, classes: int = 10, seed: int = 0, continuous: bool = False, val: bool = True) -> Dataset:
        rng = np.random.default_rng(seed)

        def labels(count: int) -> Any:
            return rng.normal(size=count) if continuous else rng.permutation(np.arange(count) % classes)

        held = examples(labels(max(n // 4, 1))) if val else None
        return Dataset("made", examples(labels(n)), examples(labels(max(n // 2, 1))), held)

    return make


@pytest.fixture
def make(tmp_path: Path, task: Callable[..., TaskConfig]) -> Callable[..., TaskConfig]:
    """Folder tasks with grey 8 x 8 images of two classes."""
    return lambda **options: task("folder", **{"data_dir": str(tmp_path), "channels": 1, "size": 8, **options})
