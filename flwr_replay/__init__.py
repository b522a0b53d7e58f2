"""Federated learning for institutions whose data differ, on Flower."""

from pathlib import Path
from typing import Any

__all__ = ["load_model"]
__version__ = "0.1.0"

# In a checkout and in the bundle that `flwr run` ships, `strategies/` and its three siblings stand beside
# this folder; in a wheel they lie inside it.
_root = Path(__file__).resolve().parent.parent
if not (Path(__file__).parent / "strategies").is_dir() and (_root / "strategies").is_dir():
    __path__.append(str(_root))


def __getattr__(name: str) -> Any:
    """Import what this package offers in Python when it is first used, since PyTorch takes seconds."""
    if name == "load_model":
        from flwr_replay.runs.trained import load_model

        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
