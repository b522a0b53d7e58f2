"""What an institution may answer: the fields declared, numbers that can be, and weights of the model that was sent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

from flwr_replay.errors import WireError
from flwr_replay.fields import Field
from flwr_replay.wire import Payload, Request, Row, arrays_in, opened, rows

__all__ = ["check_answer", "not_finite"]


def check_answer(
    answer: RecordDict, declared: type[Payload] | None, request: type[Request] | None, asked: RecordDict
) -> list[Row]:
    """Refuse an answer that cannot be used, before anything is made of it.

    Parameters
    ----------
    answer : RecordDict
        What came.
    declared : type[Payload] | None
        What it must be; None takes the answer of a user's own ClientApp as it is.
    request : type[Request] | None
        What it answers; None if that is not one of ours.
    asked : RecordDict
        The request's records; weights that come back must be those that were sent, by name, shape and dtype.

    Returns
    -------
    list of Row
        The fields, as the ledger counts them.

    Raises
    ------
    WireError
        If the answer is something else.
    """
    found = list(rows(answer, declared))
    if declared is None:
        return found
    declared.check_scalars(answer)
    weights, sent_weights = (_weights(payload) for payload in (declared, request))
    sent, came = asked.get("arrays"), answer.get("arrays")
    if isinstance(came, ArrayRecord):
        opened(came)  # raises where bytes are not what they say
    if weights and sent_weights and isinstance(sent, ArrayRecord) and isinstance(came, ArrayRecord):
        _check_weights(_forms(sent), _forms(came), weights.part)
    return found


def _weights(payload: type[Payload] | None) -> Field | None:
    fields = payload.declared().values() if payload else ()
    return next((field for field in fields if field.shape == "state dict"), None)


def _forms(record: ArrayRecord) -> dict[str, tuple[Any, ...]]:
    return {name: (tuple(array.shape), array.dtype) for name, array in record.items()}


def _check_weights(sent: dict[str, tuple[Any, ...]], came: dict[str, tuple[Any, ...]], part: bool) -> None:
    for name, form in came.items():
        if sent.get(name) != form:
            raise WireError(f"weights must come back as they were sent; {name!r} is {form}, was {sent.get(name)}")
    if not part and (lacking := sorted(sent.keys() - came.keys())):
        raise WireError(f"weights must come back as they were sent; {lacking[0]!r} is missing")


def not_finite(replies: Iterable[tuple[str, Message]]) -> list[str]:
    """Return the names of those whose weights are not finite."""
    return [name for name, reply in replies if not all(np.isfinite(array).all() for array in arrays_in(reply.content))]
