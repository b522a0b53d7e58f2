"""What the numbers of a field are, and which attacks take them; or, in a sentence, why none is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from flwr_replay.attacks import codes, gradients, labels, latents, membership
from flwr_replay.wire.fields import Meaning

__all__ = ["ATTACKS", "Attack", "nothing_tried", "number_timed"]


@dataclass(frozen=True)
class Attack:
    """One attack, as results name it."""

    name: str
    finds: Literal["images", "labels", "members"]
    auxiliary: bool  # whether it needs auxiliary data; all others are at least tuned on them
    source: str
    function: Callable[..., Any] | None  # none: what was sent needs no more than a look
    timed: bool = False  # whether more time finds more


MATCHING = Attack(
    "gradient matching", "images", False, "Geiping et al. 2020; Qu et al. 2022, eq. 1", gradients.invert, True
)
LAST = Attack("gradient matching, last message", "images", False, MATCHING.source, gradients.invert, True)
ANALYTIC = Attack("analytic inversion", "images", False, "Phong et al. 2018", gradients.first_input)
COUNTS = Attack("label counts", "labels", False, "Zhao et al. 2020; Yin et al. 2021", gradients.label_counts)
OPTIMISED = Attack("latent matching", "images", False, "He et al. 2019; Qu et al. 2022, eq. 2", latents.invert, True)
DECODER = Attack("learned decoder", "images", True, "He et al. 2019", latents.learned_decoder, True)
NEAREST = Attack("nearest auxiliary image", "images", True, "a look-up, as a baseline", latents.nearest_auxiliary)
DECODED = Attack("decoded codes", "images", False, "Razavi et al. 2019", codes.decoded)
LOOKED_AT = Attack("look at them", "images", False, "raw examples travel as they are", None)
SHOWN = Attack("reading", "labels", False, "labels travel as they are", None)
AT_CUT = Attack("labels at the cut", "labels", False, "Erdoğan et al. 2022", labels.labels_at_cut)
LOSS = Attack("loss threshold", "members", False, "Yeom et al. 2018", membership.loss_scores)
LIRA = Attack("offline LiRA", "members", True, "Carlini et al. 2022", membership.lira_scores, True)
RECONSTRUCTED = Attack(
    "reconstruction error", "members", False, "a small loss, as Yeom et al. 2018", membership.loss_scores
)
PRIOR = Attack("prior likelihood", "members", False, "a small loss, as Yeom et al. 2018", membership.loss_scores)
RELEASED = Attack("nearest released image", "members", True, "Chen et al. 2020", membership.nearest_scores)

ATTACKS: dict[Meaning, tuple[Attack, ...] | str] = {
    "generator weights": (RECONSTRUCTED, PRIOR),
    "weights": (COUNTS, ANALYTIC, MATCHING, LAST, LOSS, LIRA),
    "gradient": (COUNTS, ANALYTIC, MATCHING),
    "activations": (OPTIMISED, DECODER, NEAREST),
    "codes": (DECODED,),
    "labels": (SHOWN,),
    "gradients at a cut": (AT_CUT,),
    "images": (LOOKED_AT, RELEASED),
    "scales": "A scale is one number for an image, a 127th of its largest latent; no attack on it alone is known. "
    "Attacks on the latents use it.",
}


def number_timed(meaning: Meaning, messages: int) -> int:
    """Return how many attacks share the time for a field that came in so many messages."""
    known = [one for one in ATTACKS[meaning] if isinstance(one, Attack)]
    return sum(one.timed for one in known if one is not LAST or messages > 1)


def nothing_tried(meaning: Meaning, drawn: bool) -> str:
    """Say why no attack was tried on a field with this meaning; `drawn`: a generator has drawn it."""
    known = ATTACKS[meaning]
    if meaning == "labels" and drawn:
        return "a generator drew images for these labels; they are labels of nobody"
    if meaning == "labels":
        return "labels travel as they are, so nothing has to be guessed; classes are counted where there are originals"
    if isinstance(known, str):
        return known
    names = ", ".join(attack.name for attack in known)
    return f"attacks are known ({names}), none could be tried here: they need originals, or auxiliary images"
