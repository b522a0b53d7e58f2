"""What a run ran on: versions, platform, cores, device."""

import os
import platform
from functools import cache
from importlib import metadata
from typing import Any

from flwr_replay.config.catalogue import package_of
from flwr_replay.config.run import RunConfig

__all__ = ["PACKAGES", "environment", "versions"]

PACKAGES = ("flwr-replay", "flwr", "ray", "torch", "torchvision", "numpy", "hydra-core")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter; of a missing one, `absent`."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def environment(config: RunConfig) -> dict[str, Any]:
    """Return what stands in a run's `environment.json`."""
    package = package_of(config.strategy.name)
    more = [name for name in (package.distribution if package else "", config.model.library) if name]
    return {
        "versions": versions() | {name: _version(name) for name in more},
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads": config.threads,
        "device": config.device,
    }


@cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"
