"""Federated learning for institutions whose data differ, on Flower."""

from pathlib import Path

__version__ = "0.1.0"

# In a checkout and in the bundle that `flwr run` ships, `strategies/` and its three siblings stand beside
# this folder; in a wheel they lie inside it.
_root = Path(__file__).resolve().parent.parent
if not (Path(__file__).parent / "strategies").is_dir() and (_root / "strategies").is_dir():
    __path__.append(str(_root))
