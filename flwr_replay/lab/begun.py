"""The weights with which a training began, as far as the server knows them.

A request brings them, in SplitNN the first of a visit. An institution of a gossip begins with fresh ones, whose seed
the server has told it, and later with what it has mixed. The server relays every model that is mixed, so it computes
the same: Kalra et al. 2023, Algorithm 1, lines 7-10.
"""

from __future__ import annotations

from typing import Any

from flwr_replay.files.tensors import StateDict, unnested
from flwr_replay.lab.evidence import Answer, Evidence
from flwr_replay.learning.pushsum import mixed, parcel, sender_name
from flwr_replay.wire.weights import parted, to_arrays

__all__ = ["begun_with", "visit"]


def begun_with(answer: Answer, evidence: Evidence) -> StateDict:
    """Return the weights with which the training behind an answer began; empty: they are not known.

    Parameters
    ----------
    answer : Answer
        With a trained model.
    evidence : Evidence
        What else the server has.
    """
    if answer.request is None:
        return {}
    asked: dict[str, Any] = answer.request.scalars
    if "gradients" in answer.request.arrays:
        begun = visit(answer, evidence)
        return begun[0].request.arrays if begun and begun[0].request else {}
    if answer.request.arrays:
        return parted(answer.request.arrays)[0]
    if committed := asked.get("committed", 0):
        return _mixed(str(answer.content.about["institution"]), committed, evidence)
    if "init-seed" in asked and ("committed" in asked or not asked.get("continues", True)):
        return to_arrays(evidence.model(int(asked["init-seed"])))
    return {}


def visit(answer: Answer, evidence: Evidence) -> list[Answer]:
    """Return the answers of one of SplitNN's visits that ends with this one; none if its first was not recorded."""
    found: list[Answer] = []
    for one in evidence.of_institution(str(answer.content.about["institution"])):
        scalars = one.request.scalars if one.request else {}
        if scalars.get("message") == 0:
            found = []  # a visit that failed begins anew
        if "message" in scalars:
            found.append(one)
        if one.file == answer.file:
            break
    first = found[0].request if found else None
    return found if first and first.scalars["message"] == 0 else []


def _mixed(institution: str, exchange: int, evidence: Evidence) -> StateDict:
    """Mix what an institution released in an exchange with the parcels of that exchange that it acknowledged."""
    released: Answer | None = None
    delivered: Answer | None = None
    for one in evidence.of_institution(institution):
        scalars = one.request.scalars if one.request else {}
        if "committed" in scalars and scalars["server-round"] == exchange and one.content.arrays:
            released = one
        elif scalars.get("exchange") == exchange and one.content.scalars.get("parcels", []) == scalars.get(
            "parcels", []
        ):
            delivered = one
    if released is None or delivered is None or delivered.request is None:
        return {}
    scalars = delivered.request.scalars
    senders = [sender_name(i) for i in range(len(scalars.get("weights", [])))]
    models = unnested(delivered.request.arrays, only=senders)
    shares = zip(senders, scalars.get("weights", []), scalars.get("shares", []), strict=True)
    parcels = [parcel(models[sender], w, share) for sender, w, share in shares]
    theta, _ = mixed(released.content.arrays, released.content.scalars["weight"], scalars["kept"], parcels)
    return parted(theta)[0]
