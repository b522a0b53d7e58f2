"""The ledger: one JSON line for each field of each message, at the server and at every institution."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr_replay.files.atomic import Form, write_atomic
from flwr_replay.files.disk import looked, there
from flwr_replay.files.lines import LEDGER, Lines, each_line, lines_of, moved, opened, segments
from flwr_replay.wire.payload import LedgerRow

__all__ = ["LEDGER", "Ledger", "Traffic", "ledger_lines", "unanswered"]

BEGUN = "ledger.begun"  # a folder's file: its ledger has lines
SEGMENT = 64 * 2**20  # bytes from which on a ledger is closed to the next segment
RAW = "raw-bytes-they-stand-for"
SAMPLE_KINDS = ("per-sample", "per-sample-raw", "synthetic")


class Ledger(Lines):
    """A folder's ledger, which only grows, in segments.

    If it had lines and has none, a new one would not be the record of what left: a RunError.
    """

    def __init__(self, folder: Path) -> None:
        self._begun = folder / BEGUN
        self._marked = there(self._begun)
        if self._marked and not any(status.st_size for status in looked(segments(folder / LEDGER)).values()):
            raise moved(folder / LEDGER)
        super().__init__(folder / LEDGER, SEGMENT)

    def flush(self, to_disk: bool = False) -> None:
        """Write the added lines to the file, as `Lines.flush`, and that it has lines."""
        super().flush(to_disk)
        if self._least and not self._marked:
            write_atomic(self._begun, "", to_disk)
            self._marked = True

    def record(self, message: dict[str, Any], fields: Iterable[LedgerRow], raw_bytes: int | None = None) -> None:
        """Record the fields of one message, whose lines begin with its exchange, institution, direction, stage.

        The bytes of the raw examples that its per-sample fields represent are written with the first of these fields.
        """
        head, lines = json.dumps(message)[:-1], []
        for row in fields:
            samples = raw_bytes is not None and row.kind in SAMPLE_KINDS
            raw = f', "raw-bytes": {raw_bytes}' if samples else ""
            lines.append(f"{head}, {_field(row)}{raw}}}\n")
            raw_bytes = None if samples else raw_bytes
        self.write("".join(lines))


def ledger_lines(folder: Path, form: Form | None = None) -> Iterator[dict[str, Any]]:
    """Read the lines of a folder's ledger one by one, the oldest segment first, though it grows; as `each_line`."""
    path, read = folder / LEDGER, set[Path]()
    while True:
        last = opened(path)  # before the segments are listed: it may be closed to a further one at any moment
        with last or nullcontext():
            if not (closed := [segment for segment in segments(path)[:-1] if segment not in read]):
                yield from lines_of(last, path, form) if last else ()
                return
        for segment in closed:
            read.add(segment)
            yield from each_line(segment, form)


class Traffic:
    """Sums of a ledger's bytes by direction and kind, and the raw bytes that per-sample uploads represent."""

    def __init__(self, entries: Iterable[dict[str, Any]] = ()) -> None:
        self.by_kind: dict[str, dict[str, int]] = {"up": {}, "down": {}}
        self.begun = 0  # the last exchange of these entries
        for entry in entries:
            self.begun = max(self.begun, entry["round"])
            self.add(entry["direction"], entry["kind"], entry["bytes"])
            if "raw-bytes" in entry:
                self.add(entry["direction"], RAW, entry["raw-bytes"])

    def add(self, direction: str, kind: str, size: int) -> None:
        """Add the bytes of a field; a lost answer has none."""
        if size:
            sums = self.by_kind[direction]
            sums[kind] = sums.get(kind, 0) + size

    def record(self, direction: str, fields: Sequence[LedgerRow], raw_bytes: int | None) -> None:
        """Add the fields of one message, as `Ledger.record` writes them."""
        for row in fields:
            self.add(direction, row.kind, row.bytes)
            if raw_bytes is not None and row.kind in SAMPLE_KINDS:
                self.add(direction, RAW, raw_bytes)
                raw_bytes = None

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes sent, by direction."""
        return {way: sum(n for kind, n in sums.items() if kind != RAW) for way, sums in self.by_kind.items()}


def unanswered(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each request of the last exchange without an answer in the ledger.

    An interrupted exchange loses answers that institutions may have sent. Only the institutions' own ledgers have
    their fields.
    """
    waiting: dict[str, dict[str, Any]] = {}
    entry: dict[str, Any] = {}
    for entry in entries:
        if entry["direction"] == "down":
            waiting[entry["institution"]] = entry
        else:
            waiting.pop(entry["institution"], None)
    lost = {"direction": "up", "field": "answer", "kind": "not received", "bytes": 0, "protection": "unknown"}
    return [
        {**{key: asked[key] for key in ("round", "institution", "direction", "stage")}, **lost}
        for asked in waiting.values()
        if (asked["round"], asked["stage"]) == (entry["round"], entry["stage"])
    ]


@lru_cache(maxsize=4096)
def _field(row: LedgerRow) -> str:
    """Write the end of a line; cached, since the same fields are sent many times."""
    return json.dumps({"field": row.field, "kind": row.kind, "bytes": row.bytes, "protection": row.protection})[1:-1]
