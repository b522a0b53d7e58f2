"""What the numbers of a field are, and which attacks take them; or, in a sentence, why none is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from flwr_replay.attacks import codes, gradients, labels, latents, membership

__all__ = ["ATTACKS", "MEANINGS", "Attack", "Meaning", "attacks_on"]

Meaning = Literal[
    "weights", "gradient", "activations", "codes", "labels", "gradients at a cut", "images", "scales"
]  # what a declaration of a field says of its numbers
MEANINGS: tuple[Meaning, ...] = get_args(Meaning)


@dataclass(frozen=True)
class Attack:
    """One attack, as results name it."""

    name: str
    finds: Literal["images", "labels", "members"]
    auxiliary: bool  # whether it needs auxiliary data; all others are at least tuned on them
    source: str
    function: Callable[..., Any]


MATCHING = Attack("gradient matching", "images", False, "Geiping et al. 2020; Qu et al. 2022, eq. 1", gradients.invert)
ANALYTIC = Attack("analytic inversion", "images", False, "Phong et al. 2018", gradients.first_input)
COUNTS = Attack("label counts", "labels", False, "Zhao et al. 2020; Yin et al. 2021", gradients.label_counts)
OPTIMISED = Attack("latent matching", "images", False, "He et al. 2019; Qu et al. 2022, eq. 2", latents.invert)
DECODER = Attack("learned decoder", "images", True, "He et al. 2019", latents.learned_decoder)
NEAREST = Attack("nearest auxiliary image", "images", True, "a look-up, as a baseline", latents.nearest_auxiliary)
DECODED = Attack("decoded codes", "images", False, "Razavi et al. 2019", codes.decoded)
AT_CUT = Attack("labels at the cut", "labels", False, "Erdoğan et al. 2022", labels.labels_at_cut)
LOSS = Attack("loss threshold", "members", False, "Yeom et al. 2018", membership.loss_scores)
LIRA = Attack("offline LiRA", "members", True, "Carlini et al. 2022", membership.lira_scores)
RELEASED = Attack("nearest released image", "members", True, "Chen et al. 2020", membership.nearest_scores)

ATTACKS: dict[Meaning, tuple[Attack, ...] | str] = {
    "weights": (COUNTS, ANALYTIC, MATCHING, LOSS, LIRA),
    "gradient": (COUNTS, ANALYTIC, MATCHING),
    "activations": (OPTIMISED, DECODER, NEAREST),
    "codes": (DECODED,),
    "labels": "Labels need no attack: they are read as they are.",
    "gradients at a cut": (AT_CUT,),
    "images": (RELEASED,),
    "scales": "A scale is one number for an image, a 127th of its largest latent; no attack on it alone is known. "
    "Attacks on the latents use it.",
}


def attacks_on(meaning: Meaning) -> tuple[Attack, ...]:
    """Return the attacks on a field with this meaning; none where a sentence says why."""
    known = ATTACKS[meaning]
    return () if isinstance(known, str) else known
