"""Are these originals the run's? Checked before anything is scored by them."""

from __future__ import annotations

from flwr_replay.errors import DataError, FlwrReplayError
from flwr_replay.lab.changes import OfChange
from flwr_replay.lab.evidence import Evidence
from flwr_replay.lab.judge import OTHERS, Originals
from flwr_replay.lab.trials import OfActivations, OfCodes, OfImages, Trial

__all__ = ["TRIALS", "refused"]

TRIALS: dict[str, type[Trial]] = {  # by what the numbers are; images that a generator drew are of nobody
    "activations": OfActivations,
    "codes": OfCodes,
    "gradient": OfChange,
    "images": OfImages,
    "weights": OfChange,
}


def refused(institution: str, evidence: Evidence, originals: Originals) -> str:
    """Say why originals are not the institution's, or return an empty text.

    What any field of its answers says, computed anew, decides. Where nothing can be computed anew, as under secret
    noise, the number of examples in an answer must be theirs; more cannot be checked.
    """
    if evidence.config.strategy.pooled:
        return "the examples of all institutions were trained on together; the judge has those of one"
    own = [one for one in evidence.exhibits if one.institution == institution]
    for exhibit in own:
        trial_type = TRIALS.get(exhibit.means) if exhibit.declared.kind != "synthetic" else None
        try:
            if trial_type:
                trial_type(exhibit, evidence).rows(originals)
                return ""
        except DataError as error:
            if str(error).startswith(f"{OTHERS}:"):
                return str(error)
        except FlwrReplayError:  # nothing of this field can be computed anew
            continue
    said = [answer.content.scalars for exhibit in own for answer in exhibit.answers]
    numbers = {int(scalars["num-examples"]) for scalars in said if "num-examples" in scalars}
    if numbers and len(originals.y_N) not in numbers:
        return f"{OTHERS}: {len(originals.y_N)} examples, the answers say {', '.join(map(str, sorted(numbers)))}"
    return ""
