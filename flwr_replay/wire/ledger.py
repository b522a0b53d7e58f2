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
    """A ledger file, which only grows."""

    def record(self, message: dict[str, Any], found: Iterable[Row], raw_bytes: int | None = None) -> None:
        """Record the fields of one message.

        Parameters
        ----------
        message : dict[str, Any]
            The beginning of every line: the message's exchange, institution, direction and stage.
        found : Iterable[Row]
            The message's fields.
        raw_bytes : int | None
            The bytes of the raw examples that its per-sample fields represent, written with the first of these fields.
        """
        head, lines = json.dumps(message)[:-1], []
        for row in found:
            samples = raw_bytes is not None and row.kind in SAMPLE_KINDS
            raw = f', "raw-bytes": {raw_bytes}' if samples else ""
            lines.append(f"{head}, {_field(row)}{raw}}}\n")
            raw_bytes = None if samples else raw_bytes
        self.write("".join(lines))


def unanswered(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each request of the last exchange without an answer in the ledger.

    An interrupted exchange loses answers that institutions may have sent. Only the institutions' own ledgers have
    their fields.
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
    """Write the end of a line; cached, since the same fields are sent many times."""
    return json.dumps({"field": row.field, "kind": row.kind, "bytes": row.bytes, "protection": row.protection})[1:-1]
