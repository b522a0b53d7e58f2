"""Federated learning for institutions whose data differ, on Flower."""

from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["Classification", "Institution", "Settings", "TrainingConfig", "compare", "load_model", "run"]
__version__ = "0.1.0"

# In a checkout and in the bundle that `flwr run` ships, `strategies/` and its three siblings stand beside
# this folder; in a wheel they lie inside it.
_root = Path(__file__).resolve().parent.parent
if not (Path(__file__).parent / "strategies").is_dir() and (_root / "strategies").is_dir():
    __path__.append(str(_root))


OFFERED = {  # in Python, by the module that has it
    **{"compare": "api", "load_model": "finished.trained", "run": "api"},
    **{"Classification": "learning.tasks", "Institution": "institution.owner"},  # for your own Flower app
    **{"Settings": "movements.base", "TrainingConfig": "config.sections"},
}


def __getattr__(name: str) -> Any:
    """Import what is offered when it is first used, since PyTorch takes seconds."""
    if name not in OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{OFFERED[name]}"), name)


def __dir__() -> list[str]:
    """List what is offered, also before it is imported."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
