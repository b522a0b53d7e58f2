"""What a Ray cluster's machines get of this one: the package, and the code in the working directory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import flwr_replay
from flwr_replay.errors import ConfigError

__all__ = ["ship"]

BESIDE = ("strategies", "clients", "simulations", "conf")  # inside the package in a wheel, beside it in a checkout
CODE = (".py", ".toml", ".md", ".yaml", ".json")  # as in a bundle of `flwr run`
LARGEST = 10**7  # bytes


def ship(scratch: Path, own: bool) -> dict[str, object]:
    """Copy into a folder what must travel; return it as entries of Ray's runtime environment.

    Parameters
    ----------
    scratch : Path
        An empty folder, which must stay until Ray has uploaded it.
    own : bool
        Whether the run names code of the user's own. Then the code in the working directory travels, too.

    Raises
    ------
    ConfigError
        If that code is too large.
    """
    package = Path(flwr_replay.__file__).parent
    copy, skipped = scratch / "flwr_replay", shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, copy, ignore=skipped)
    for name in BESIDE:
        if not (copy / name).exists():
            shutil.copytree(package.parent / name, copy / name, ignore=skipped)
    environment: dict[str, object] = {"py_modules": [str(copy)]}
    if own:
        _copy_code(Path.cwd(), scratch / "own")
        environment["working_dir"] = str(scratch / "own")
    return environment


def _copy_code(folder: Path, to: Path) -> None:
    """Copy a folder's code; not hidden folders, virtual environments and run directories."""
    size = 0
    for place, folders, names in os.walk(folder):
        if Path(place) != folder and {"pyvenv.cfg", "run-id"} & set(names):
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        for path in (Path(place, name) for name in names if name.endswith(CODE)):
            size += path.stat().st_size
            if size > LARGEST:
                raise ConfigError(
                    f"the code in the working directory travels to the cluster, {', '.join(CODE)} of at most "
                    f"{LARGEST // 10**6} MB; {folder} has more: start in a folder that holds your code alone"
                )
            target = to / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
