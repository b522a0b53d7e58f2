"""Files that are written once: keys, and what a run is bound to."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

from flwr_replay.files.atomic import read_text, sync, write_atomic
from flwr_replay.files.disk import there, writing

__all__ = ["write_once"]


def write_once(path: Path, text: str, to_disk: bool = True) -> str:
    """Write a file unless it exists, and return its content; of several concurrent writers, the first wins.

    Without `to_disk` a loss of power may lose or damage it.
    """
    mine = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    while not there(path):
        with writing(path):
            write_atomic(mine, text, to_disk)
            with suppress(FileExistsError, FileNotFoundError):  # another process was first, or `sweep` removed `mine`
                os.link(mine, path)
            mine.unlink(missing_ok=True)
            if to_disk:
                sync(path.parent)
    return read_text(path)
