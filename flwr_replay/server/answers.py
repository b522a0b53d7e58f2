"""Checks of institutions' answers: the declared fields, valid numbers, and weights of the form that was sent.

An invalid answer counts as its sender's failure. It never stops the other institutions.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, RecordDict

from flwr_replay.config.hiding import Hiding
from flwr_replay.errors import FlwrReplayError, WireError
from flwr_replay.payloads.common import MOST, Trained, whole_number
from flwr_replay.wire.bounds import LARGEST, LARGEST_NUMBER, largest
from flwr_replay.wire.fields import RECORD_OF, Field
from flwr_replay.wire.masked import blank_masked, is_masked
from flwr_replay.wire.payload import LedgerRow, Payload, Request, rows
from flwr_replay.wire.records import StateDict, Weights, arrays_in, config_in, metrics_in, opened, undecoded
from flwr_replay.wire.sealed import SEALED_NAME, head_of, is_sealed
from flwr_replay.wire.weights import check_weights

__all__ = ["check_answer", "check_foreign", "legible", "read_answer"]

PASSES = 1000  # the most passes over an institution's examples that one answer may report


@contextmanager
def legible() -> Iterator[None]:
    """Turn any error while reading an answer into a WireError: the answer is not as declared."""
    try:
        yield
    except FlwrReplayError:
        raise
    except Exception as error:  # of any class, since the sender made the records
        line = " ".join(str(error).split())[:200]
        raise WireError(f"an answer must be readable; this is not: {type(error).__name__} {line}") from None


METRIC = re.compile(r"\w[\w .-]{0,79}")  # a foreign metric's name: it stands in logs, pages and trackers
OURS = ("delta", "epsilon", "epsilon-not-proven")


def read_answer(answer: RecordDict, declared: type[Payload] | None) -> tuple[list[LedgerRow], dict[str, Any]]:
    """Return an answer's fields, as the ledger counts them, and its metrics.

    `declared` is None for the answer of a user's own ClientApp, which is not checked here. Another payload is a
    WireError, and so is an invalid epsilon or delta.
    """
    fields = list(rows(answer, declared))
    if declared is None:
        return fields, {}
    declared.check_scalars(answer)
    metrics = metrics_in(answer)
    epsilon, delta = metrics.get("epsilon", 0.0), metrics.get("delta", 0.0)
    if not (epsilon >= 0 and 0 <= delta <= 1):
        raise WireError(f"an epsilon is not below 0 and a delta lies in [0, 1]; got {epsilon} and {delta}")
    return fields, metrics


def check_answer(
    answer: RecordDict,
    declared: type[Payload],
    request: type[Request],
    asked: RecordDict,
    examples: range,
    hiding: Hiding = Hiding.NOTHING,
    sender: str = "",
) -> None:
    """Refuse an invalid answer, which `read_answer` has read, before it is used.

    `asked` are the request's records: returned weights must have the names, shapes and dtypes of those sent. `examples`
    are the numbers of examples that the answer may report. In a sealed run `sender` is the institution that must have
    sealed the arrays; what is in them, their receivers check. Of weights under masks only the mean can be checked.

    Raises
    ------
    WireError
        If the answer is invalid.
    DivergedError
        If its weights are not finite.
    """
    read = arrays_in(answer)
    payload: Any = declared.of(read, {**config_in(answer), **metrics_in(answer)})
    if "num_examples" in declared.declared() and payload.num_examples not in examples:
        wanted = f"{examples[0]}, by the roll call" if len(examples) == 1 else f"{examples[0]} to {examples[-1]}"
        raise WireError(f"num_examples must be {wanted}; got {payload.num_examples}")
    seen = getattr(payload, "examples_seen", 0)
    if seen > MOST * PASSES:
        raise WireError(f"examples_seen must be at most {MOST * PASSES:,}; got {seen}")
    if "num_steps" in declared.declared() and payload.num_steps > seen:
        raise WireError(f"num_steps must be at most examples_seen, here {seen:,}; got {payload.num_steps:,}")
    arrays = undecoded(answer)
    if arrays and is_sealed(arrays) == hiding.readable:
        raise WireError(f"arrays come {'in plain' if hiding.readable else 'sealed'} in this run; these do not: refused")
    if arrays and is_masked(arrays) != hiding.sums_only:
        how = "under masks" if hiding.sums_only else "in plain"
        raise WireError(f"weights come {how} in this run; these do not: refused")
    if not hiding.readable:
        if arrays:
            _check_head(arrays, declared, config_in(asked), metrics_in(answer).get("weight", 1.0), sender)
        return
    added = request.added(config_in(asked))
    if arrays and hiding.sums_only:
        blank = blank_masked({**opened(undecoded(asked) or {}), **added})
        _check_weights(_forms(blank), _forms(arrays), part=False)
        return
    weights, sent_weights = _weights(declared), _weights(request)
    sent = asked.get("arrays")
    if weights and sent_weights and isinstance(sent, ArrayRecord) and not (weights.optional and arrays is None):
        forms, returned = {**_forms(sent), **_forms(added)}, _forms(arrays or {})
        part = weights.part
        _check_weights(part(forms) if callable(part) else forms, returned, part is True)
    if weights:
        check_weights(read)
    else:
        _check_numbers(read, declared)


def check_foreign(answer: RecordDict, asked: RecordDict, trained: bool) -> None:
    """Refuse an invalid answer of a user's own ClientApp.

    `asked` are the records of the request, for weights if `trained`, otherwise for metrics.

    Raises
    ------
    WireError
        If the weights have another form than those sent, or a number is invalid.
    DivergedError
        If weights are not finite.
    """
    if trained:
        returned = Trained.from_foreign(answer).arrays
        sent = asked.get("arrays")
        if isinstance(sent, ArrayRecord) and isinstance(returned, ArrayRecord):
            _check_weights(_forms(sent), _forms(returned), part=False)
        check_weights(opened(returned))
        return
    metrics = {name: value for record in answer.metric_records.values() for name, value in record.items()}
    whole_number("num-examples", metrics.pop("num-examples", 1))
    for name in metrics:
        if not METRIC.fullmatch(name) or name in OURS:
            raise WireError(
                f"a metric's name has letters, digits, spaces, _ . and -, and is none of ours; got {name!r}"
            )
    numbers = {name: value for name, value in metrics.items() if not isinstance(value, list)}
    if not numbers or not all(abs(value) <= LARGEST_NUMBER for value in numbers.values()):  # NaN is not
        rule = f"an evaluation must hold metrics, all finite and at most {LARGEST_NUMBER:g} in size"
        raise WireError(f"{rule}; got {str(numbers)[:200] if numbers else 'none'}")


def _check_head(
    arrays: ArrayRecord, declared: type[Payload], instructions: Mapping[str, Any], weight: float, sender: str
) -> None:
    """Refuse a parcel that says another sender, exchange or weight than its answer: its receivers would refuse it."""
    if list(arrays) != [SEALED_NAME]:
        raise WireError(f"an answer has one sealed parcel; got {len(arrays)}, or one of another name: refused")
    head = head_of(arrays[SEALED_NAME])[0]
    kinds = {field.kind for field in declared.declared().values() if RECORD_OF[field.kind] == "arrays"}
    in_head = (head.run, head.sender, head.exchange, head.weight)
    if head.kind not in kinds or in_head != (instructions["run"], sender, instructions.get("server-round", 0), weight):
        raise WireError(
            f"a parcel's head says its run, sender, exchange and weight; that of {sender} says others than the answer "
            "that it came with: refused"
        )


def _weights(payload: type[Payload]) -> Field | None:
    return next((field for field in payload.declared().values() if field.shape == "state dict"), None)


def _forms(arrays: Weights) -> dict[str, tuple[Any, ...]]:
    return {name: (tuple(array.shape), str(array.dtype)) for name, array in arrays.items()}


def _check_weights(sent: dict[str, tuple[Any, ...]], returned: dict[str, tuple[Any, ...]], part: bool) -> None:
    for name, form in returned.items():
        if sent.get(name) != form:
            raise WireError(f"weights must come back as they were sent; {name!r} is {form}, was {sent.get(name)}")
    if not part and (lacking := sorted(sent.keys() - returned.keys())):
        raise WireError(f"weights must come back as they were sent; {lacking[0]!r} is missing")


def _check_numbers(arrays: StateDict, declared: type[Payload]) -> None:
    """Refuse latents, activations and gradients at a cut by which training may diverge; of labels the task decides."""
    for name, array in arrays.items():
        if declared.by_key()[name].means == "labels" or not np.issubdtype(array.dtype, np.floating):
            continue
        if not (most := largest({name: array})) <= LARGEST:  # NaN fails, too
            raise WireError(
                f"{name} must be finite and at most {LARGEST:g} in size; got {most:g}: check the data and the weights "
                "that were sent"
            )
