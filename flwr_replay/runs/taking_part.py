"""Who takes part in a run, as its checkpoints need it: `members.jsonl`, which only grows.

It has a line whenever something about an institution changes. So a checkpoint after each of many visits does not write
all institutions again; it records how much of the file belongs to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flwr_replay.files.atomic import read_bytes, write_atomic
from flwr_replay.files.lines import Lines, read_lines
from flwr_replay.report.run_files import FORMS, MEMBERS
from flwr_replay.server.recorder import Snapshot

__all__ = ["TakingPart"]


class Entry(NamedTuple):
    """What a checkpoint knows of an institution."""

    examples: int  # for training
    node: int  # Flower's node id
    proof: str  # SHA-256 of its first proof of identity
    trained: int  # the last exchange in which it has trained; 0: none, and True in older versions


class TakingPart:
    """The institutions of a run directory, with what a resumed run must know of each.

    Parameters
    ----------
    folder : Path
        The run directory.
    """

    def __init__(self, folder: Path) -> None:
        self._lines = Lines(folder / MEMBERS)
        self._entries: dict[str, Entry] = {}

    @property
    def names(self) -> set[str]:
        """Names of all that ever took part."""
        return {*self._entries}

    def note(self, snapshot: Snapshot) -> None:
        """Write what has changed since the last snapshot."""
        changed = list[dict[str, Any]]()
        for name, examples in snapshot.examples.items():
            entry = Entry(examples, *snapshot.bindings.get(name, (0, "")), snapshot.trained.get(name, 0))
            if self._entries.get(name) != entry:
                self._entries[name] = entry
                changed.append({"institution": name, **entry._asdict()})
        self._lines.append(changed)
        self._lines.flush()

    def restore(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint knows of the institutions, as a `Snapshot` names it; drop what was noted later.

        Parameters
        ----------
        values : Mapping
            The checkpoint's values. Those of older versions hold the institutions themselves.
        """
        path, size = self._lines.path, values.get("files", {}).get(MEMBERS, (0, 0))[0]
        self._lines.close()
        write_atomic(path, read_bytes(path)[:size])
        self._lines = Lines(path)
        self._entries = {row.pop("institution"): Entry(**row) for row in read_lines(path, FORMS[MEMBERS])}
        if "examples" in values:
            return {
                "examples": values["examples"],
                "trained": dict.fromkeys(values["trained"], 1),
                "bindings": values.get("bindings", {}),
            }
        return {
            "examples": {name: entry.examples for name, entry in self._entries.items()},
            "trained": {name: entry.trained for name, entry in self._entries.items() if entry.trained},
            "bindings": {name: (entry.node, entry.proof) for name, entry in self._entries.items()},
        }

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
