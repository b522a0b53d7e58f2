"""The folders that commands are given: that they are there, and which run is meant by `last`."""

from __future__ import annotations

from pathlib import Path

from flwr_replay.errors import RunError

__all__ = ["LAST", "absolute", "finished_place", "runs_folder"]

LAST = "last"  # the run in runs/ that began last
ROOT = "runs"  # where commands put their runs unless told otherwise


def absolute(place: str) -> Path:
    """Return a path that no longer depends on the working directory; it need not exist."""
    return Path(place).expanduser().absolute()


def runs_folder(place: str) -> Path:
    """Return the folder of runs.

    Raises
    ------
    RunError
        If it does not exist.
    """
    folder = absolute(place)
    if not folder.exists():
        raise RunError(
            f"there is no folder {folder}: `flwr-replay run` makes runs/ here, or give another by --runs-dir"
        )
    return folder


def finished_place(place: str) -> Path:
    """Return what a run, a comparison, a study or an institution has left; `last` is the run in runs/ that began last.

    Raises
    ------
    RunError
        If it does not exist.
    """
    from flwr_replay.runs.listing import runs_in

    if place == LAST and not Path(LAST).exists():
        return runs_in(runs_folder(ROOT))[-1]
    folder = absolute(place)
    if not folder.exists():
        raise RunError(
            f"there is no {folder}: give the directory of a run, which `flwr-replay runs list` names, or {LAST} for "
            "the newest in runs/"
        )
    return folder
