"""Messages: payloads with declared fields, and their translation to Flower's records.

Authors of payloads import from here. `flwr_replay.wire.ledger` and `flwr_replay.wire.weights` are imported by name.
"""

from __future__ import annotations

from flwr_replay.wire.fields import Field, Kind, instruction, model, notice, per_sample, statistic
from flwr_replay.wire.payload import REQUESTS, LedgerRow, Payload, Request, request_of, rows
from flwr_replay.wire.records import StateDict, Weights, array_record, opened

__all__ = [
    "REQUESTS",
    "Field",
    "Kind",
    "LedgerRow",
    "Payload",
    "Request",
    "StateDict",
    "Weights",
    "array_record",
    "instruction",
    "model",
    "notice",
    "opened",
    "per_sample",
    "request_of",
    "rows",
    "statistic",
]
