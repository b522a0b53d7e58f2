"""The ledger: one JSON line for each field of each message, at the server and at every institution."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from flwr_replay.files.atomic import Lines
from flwr_replay.wire.payload import Row

__all__ = ["Ledger", "unanswered"]

SAMPLE_KINDS = ("per-sample", "per-sample-raw", "synthetic")


class Ledger(Lines):
    """A ledger on the disk, to which lines are added only."""

    def record(self, message: dict[str, Any], found: Iterable[Row], raw_bytes: int | None = None) -> None:
        """Write down what one message holds.

        Parameters
        ----------
        message : dict[str, Any]
            Whose it is, and which exchange it belongs to: the beginning of every line.
        found : Iterable[Row]
            Its fields.
        raw_bytes : int | None
            The size of the raw examples that its samples stand for, written beside the first field of samples.
        """
        head, lines = json.dumps(message)[:-1], []
        for row in found:
            beside = raw_bytes is not None and row.kind in SAMPLE_KINDS
            stand_for = f', "raw-bytes": {raw_bytes}' if beside else ""
            lines.append(f"{head}, {_field(row)}{stand_for}}}\n")
            raw_bytes = None if beside else raw_bytes
        self.write("".join(lines))


def unanswered(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each message of the last exchange whose answer the ledger lacks: it may have left all the same.

    An exchange that breaks off loses the answers that were on their way. What they held stands in the ledgers of the
    institutions only.
    """
    waiting: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if entry["direction"] == "down":
            waiting[entry["institution"]] = entry
        else:
            waiting.pop(entry["institution"], None)
    lost = {"direction": "up", "field": "answer", "kind": "not received", "bytes": 0, "protection": "unknown"}
    return [
        {**{key: entry[key] for key in ("round", "institution", "direction", "stage")}, **lost}
        for entry in waiting.values()
        if (entry["round"], entry["stage"]) == (entries[-1]["round"], entries[-1]["stage"])
    ]


@lru_cache(maxsize=4096)
def _field(row: Row) -> str:
    """Write the end of a line; the same fields travel again and again."""
    return json.dumps({"field": row.field, "kind": row.kind, "bytes": row.bytes, "protection": row.protection})[1:-1]
