"""Files written completely or not at all, with checksums, for their owner only; JSON, JSON lines and named arrays."""

from __future__ import annotations

from flwr_replay.files.atomic import (
    NAME,
    Form,
    alone,
    fits,
    home,
    make_folder,
    private_folder,
    read_bytes,
    read_json,
    read_text,
    stamp,
    sweep,
    sync,
    tally,
    tighten,
    write_atomic,
    write_json,
    write_once,
)
from flwr_replay.files.lines import Lines, each_line, parts, read_lines

__all__ = [
    "NAME",
    "Form",
    "Lines",
    "alone",
    "each_line",
    "fits",
    "home",
    "make_folder",
    "parts",
    "private_folder",
    "read_bytes",
    "read_json",
    "read_lines",
    "read_text",
    "stamp",
    "sweep",
    "sync",
    "tally",
    "tighten",
    "write_atomic",
    "write_json",
    "write_once",
]
