"""Are these originals the run's? Checked before anything is scored by them."""

from __future__ import annotations

from flwr_replay.errors import DataError, FlwrReplayError
from flwr_replay.lab.changes import OfChange
from flwr_replay.lab.evidence import Evidence, Exhibit
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


def refused(exhibit: Exhibit, evidence: Evidence, originals: Originals) -> str:
    """Say why originals are not the institution's, or return an empty text.

    What any field of the institution's answers says, computed anew, decides. Where nothing can be computed anew, as
    under secret noise, the number of examples in an answer must be theirs; more cannot be checked.
    """
    for other in evidence.exhibits:
        trial_type = TRIALS.get(other.means) if other.declared.kind != "synthetic" else None
        if other.institution != exhibit.institution or trial_type is None:
            continue
        try:
            trial_type(other, evidence).rows(originals)
        except DataError as error:
            if str(error).startswith(f"{OTHERS}:"):
                return str(error)
        except FlwrReplayError:  # nothing of this field can be computed anew
            continue
        else:
            return ""
    numbers = {int(answer.content.scalars.get("num-examples", len(originals.y_N))) for answer in exhibit.answers}
    if exhibit.stage not in ("evaluate", "evaluate-own") and len(originals.y_N) not in numbers:
        return f"{OTHERS}: {len(originals.y_N)} examples, the answers say {', '.join(map(str, sorted(numbers)))}"
    return ""
