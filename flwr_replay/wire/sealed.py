"""The form of a sealed parcel: one array of bytes, of which a server can read the head and no more.

    mark | length of the head | head | salt | a wrapped key for each receiver | sealed body

The head says which run, who sent it, who can open it, in which exchange, and what kind of field it was. The body holds
named arrays as they would have travelled. `flwr_replay/ciphers/seal.py` seals and opens; nothing here can.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, NamedTuple, Self

import numpy as np
from flwr.app import Array, ArrayRecord

from flwr_replay.errors import WireError
from flwr_replay.wire.records import Weights, array_record, decoded

__all__ = [
    "SEALED",
    "SEALED_NAME",
    "Head",
    "SealedParcel",
    "blank",
    "head_of",
    "is_sealed",
    "joined_body",
    "pack",
    "parted_body",
    "unpack",
]

SEALED = "sealed"  # of a row of the ledger: its protection
SEALED_NAME = "sealed"  # of a parcel's array
MARK = b"flwr-replay sealed 1\n"
LENGTH = Struct(">I")
NUMBERS = Struct(">IQd")  # the sender's place among the receivers, the exchange, w of PushSum
SALT, WRAPPED, TAG = 32, 48, 16  # bytes
DIGITS = 64  # of a digest of options
MOST_HEAD = 2**20  # bytes; the names of some thousand institutions


class Head(NamedTuple):
    """What a parcel says of itself. Every word of it is bound to the seal."""

    run: str
    options: str  # SHA-256 of the run's options, 64 hexadecimal digits
    kind: str  # of the field that is sealed: model or synthetic
    sender: str
    receivers: tuple[str, ...]  # who can open it, by name; the sender is among them
    exchange: int  # in which it was released
    weight: float  # the sender's w of PushSum; 1 where there is none

    def pack(self) -> bytes:
        """Write the head; its length does not depend on the sender or the numbers."""
        texts = json.dumps([self.run, self.options, self.kind, *self.receivers]).encode()
        return NUMBERS.pack(self.receivers.index(self.sender), self.exchange, self.weight) + texts

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Undo `pack`; a WireError if it is no head."""
        try:
            place, exchange, weight = NUMBERS.unpack_from(data)
            run, options, kind, *receivers = texts = json.loads(data[NUMBERS.size :])
            head = cls(run, options, kind, receivers[place], tuple(receivers), exchange, weight)
            good = all(type(text) is str for text in texts) and head.pack() == data
        except Exception as error:  # of any kind, since the bytes come from another machine
            raise WireError(f"a sealed parcel must have a head; this one's cannot be read: {error}") from None
        if not good:
            raise WireError("a sealed parcel's head must be written in one way only; this one's is not")
        return head


@dataclass(frozen=True)
class SealedParcel:
    """A sealed parcel, before it is packed."""

    head: bytes
    salt: bytes
    wrapped: Sequence[bytes]  # by receiver
    body: bytes


def pack(parcel: SealedParcel) -> ArrayRecord:
    """Write a parcel as a record of one array."""
    chunks = [MARK, LENGTH.pack(len(parcel.head)), parcel.head, parcel.salt, *parcel.wrapped, parcel.body]
    return array_record({SEALED_NAME: np.frombuffer(b"".join(chunks), np.uint8)})


def head_of(array: Array) -> tuple[Head, memoryview, int]:
    """Read a parcel's head; return it, all bytes, and where the head ends.

    Only a receiver can tell whether what it says is true. A WireError if it is no parcel.
    """
    numbers = decoded(array)
    if numbers.dtype != np.uint8 or numbers.ndim != 1:
        raise WireError(f"a sealed parcel is an array of bytes; got {numbers.dtype} {numbers.shape}")
    data = numbers.data
    begin = len(MARK) + LENGTH.size
    if bytes(data[: len(MARK)]) != MARK or len(data) < begin:
        raise WireError("a sealed parcel begins with its mark; this does not: it is damaged, or of another version")
    (length,) = LENGTH.unpack_from(data, len(MARK))
    return Head.unpack(bytes(data[begin : begin + min(length, MOST_HEAD)])), data, begin + length


def unpack(array: Array) -> tuple[Head, SealedParcel]:
    """Undo `pack`; a WireError if it is no parcel."""
    head, data, end = head_of(array)
    keys = end + SALT
    body = keys + WRAPPED * len(head.receivers)
    if len(data) < body + TAG:
        raise WireError(f"a sealed parcel for {len(head.receivers)} has at least {body + TAG} bytes; got {len(data)}")
    wrapped = [bytes(data[at : at + WRAPPED]) for at in range(keys, body, WRAPPED)]
    return head, SealedParcel(
        bytes(data[len(MARK) + LENGTH.size : end]), bytes(data[end:keys]), wrapped, bytes(data[body:])
    )


def is_sealed(record: Mapping[str, Any]) -> bool:
    """Say whether a record holds sealed parcels only: one, or several under names of their own."""
    return bool(record) and all(name.rpartition(".")[2] == SEALED_NAME for name in record)


def joined_body(record: ArrayRecord) -> bytes:
    """Write named arrays, with the bytes that they would have travelled with."""
    form = [[name, a.dtype, list(a.shape), a.stype, len(a.data)] for name, a in record.items()]
    texts = json.dumps(form).encode()
    return b"".join([LENGTH.pack(len(texts)), texts, *(array.data for array in record.values())])


def parted_body(body: bytes) -> ArrayRecord:
    """Undo `joined_body`; the arrays are checked when they are decoded. Another body is a WireError."""
    record, end = ArrayRecord(), 0
    try:
        (length,) = LENGTH.unpack_from(body)
        end = LENGTH.size + length
        for name, dtype, shape, stype, size in json.loads(body[LENGTH.size : end]):
            if name in record or type(size) is not int or not 0 <= size <= len(body) - end:
                raise ValueError(f"{str(name)[:40]!r} has {str(size)[:40]} bytes")
            record[name] = Array(dtype, tuple(shape), stype, body[end : end + size])
            end += size
    except Exception as error:  # of any kind, since the bytes come from another machine
        raise WireError(f"a sealed parcel must hold named arrays; this one does not: {error}") from None
    if end != len(body):
        raise WireError(f"a sealed parcel holds its arrays and nothing else; {len(body) - end} bytes are left over")
    return record


def blank(arrays: Weights, run: str, kind: str, receivers: Sequence[str]) -> ArrayRecord:
    """Return zeros of the size that these arrays have when they are sealed."""
    head = Head(run, "0" * DIGITS, kind, receivers[0], tuple(receivers), 0, 1.0).pack()
    body = bytes(len(joined_body(array_record(arrays))) + TAG)
    return pack(SealedParcel(head, bytes(SALT), [bytes(WRAPPED)] * len(receivers), body))
