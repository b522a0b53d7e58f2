"""Are these originals the run's? Checked before anything is scored by them."""

from __future__ import annotations

from flwr_replay.errors import FlwrReplayError
from flwr_replay.lab.evidence import Evidence
from flwr_replay.lab.judge import OTHERS, Originals, OtherOriginals, same_data
from flwr_replay.lab.registry import trial_of

__all__ = ["ANEW", "NUMBER", "checked"]

ANEW = "what was sent was computed anew from them"
DIGEST = "their digest is that which was written during the run"
NUMBER = "by their number only"  # how originals were checked


def checked(institution: str, evidence: Evidence, originals: Originals) -> str:
    """Say how the originals were checked.

    A digest that was written during the run decides. In a run without one, what any field of its answers says,
    computed anew, does. Where nothing can be computed anew, as under secret noise, the number of examples in an answer
    must be theirs; more cannot be checked, and results say so.

    Raises
    ------
    OtherOriginals
        If they are not the institution's.
    """
    if evidence.config.strategy.traits.pooled:
        raise OtherOriginals("the examples of all institutions were trained on together; the judge has those of one")
    if same_data(originals, evidence.digests(institution)):
        return DIGEST
    own = [one for one in evidence.exhibits if one.institution == institution]
    for exhibit in own:
        try:
            if trial := trial_of(exhibit, evidence):
                trial.rows(originals)
                return ANEW
        except OtherOriginals:
            raise
        except FlwrReplayError:  # nothing of this field can be computed anew
            continue
    said = [answer.content.scalars for exhibit in own for answer in exhibit.answers]
    numbers = {int(scalars["num-examples"]) for scalars in said if "num-examples" in scalars}
    if numbers and len(originals.y_N) not in numbers:
        some = ", ".join(map(str, sorted(numbers)))
        raise OtherOriginals(f"{OTHERS}: {len(originals.y_N)} examples, the answers say {some}")
    return NUMBER
