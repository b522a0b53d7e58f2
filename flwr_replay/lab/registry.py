"""What is known about numbers of each meaning: the attacks that take them, and the trial that makes images of them.

By the trials it is checked, too, before anything is scored, that originals are the run's (`checked`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from flwr_replay.attacks.catalogue import ATTACKS, LAST, Attack
from flwr_replay.config.catalogue import brought, code_of
from flwr_replay.config.own_code import allow
from flwr_replay.errors import ConfigError, FlwrReplayError, nearest
from flwr_replay.lab.changes import OfChange, of_weights
from flwr_replay.lab.evidence import Evidence, Exhibit
from flwr_replay.lab.judge import OTHERS, Originals, OtherOriginals, same_data
from flwr_replay.lab.own import own_attack
from flwr_replay.lab.trials import OfActivations, OfCodes, OfImages, Trial
from flwr_replay.wire.fields import Meaning

__all__ = ["TRIALS", "UNTRIED", "Only", "checked", "nothing_tried", "number_timed", "trial_of"]

ANEW = "what was sent was computed anew from them"
DIGEST = "their digest is that which was written during the run"
NUMBER = "by their number only"  # how originals were checked


TRIALS: dict[Meaning, Callable[[Exhibit, Evidence], Trial]] = {  # no image is behind other numbers
    "weights": of_weights,
    "gradient": OfChange,
    "activations": OfActivations,
    "codes": OfCodes,
    "images": OfImages,
}
UNTRIED: dict[Meaning, str] = {  # why no attack was tried; of others each needs more than there was
    "labels": "labels travel as they are, so nothing has to be guessed; classes are counted where there are originals",
    "scales": "A scale is one number for an image, a 127th of its largest latent; no attack on it alone is known. "
    "Attacks on the latents use it.",
}


@dataclass(frozen=True)
class Only:
    """What is attacked; an empty text stands for all."""

    institution: str = ""
    field: str = ""
    attack: str = ""

    def __post_init__(self) -> None:
        allow(code_of(self.attack, "attack"))  # whoever attacks has named it
        if self.attack and not self.one:
            raise ConfigError(
                f"--attack must be one that is built in, or mypkg:attack; got {self.attack!r}: "
                f"{nearest(self.attack, [*ATTACKS, *brought()['attack']])}"
            )

    @property
    def one(self) -> Attack | None:
        """The attack that is tried; None for all."""
        return self.own or ATTACKS.get(self.attack)

    @property
    def own(self) -> Attack | None:
        """The attack, if it is one of the user's own."""
        return own_attack(self.attack) if code_of(self.attack, "attack") else None


def trial_of(exhibit: Exhibit, evidence: Evidence) -> Trial | None:
    """Return the trial of a field; None where no image is behind it: what a generator drew is of nobody."""
    trial = TRIALS.get(exhibit.means) if exhibit.declared.kind != "synthetic" else None
    return trial(exhibit, evidence) if trial else None


def number_timed(meaning: Meaning, messages: int) -> int:
    """Return how many attacks share the time for a field that came in so many messages."""
    return sum(attack.timed for attack in _on(meaning) if attack is not LAST or messages > 1)


def _on(meaning: Meaning) -> list[Attack]:
    return [attack for attack in ATTACKS.values() if meaning in attack.takes]


def nothing_tried(meaning: Meaning, drawn: bool) -> str:
    """Say why no attack was tried on a field with this meaning; `drawn`: a generator has drawn it."""
    if meaning == "labels" and drawn:
        return "a generator drew images for these labels; they are labels of nobody"
    names = ", ".join(attack.name for attack in _on(meaning))
    known = f"attacks are known ({names}), none was tried: they need originals (--data) or auxiliary images (--aux)"
    return UNTRIED.get(meaning, known)


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
    own = [exhibit for exhibit in evidence.exhibits if exhibit.institution == institution]
    for exhibit in own:
        try:
            if trial := trial_of(exhibit, evidence):
                trial.rows(originals)
                return ANEW
        except OtherOriginals:
            raise
        except FlwrReplayError:  # nothing of this field can be computed anew
            continue
    scalars_of = [answer.content.scalars for exhibit in own for answer in exhibit.answers]
    numbers = {int(scalars["num-examples"]) for scalars in scalars_of if "num-examples" in scalars}
    if numbers and len(originals.y_N) not in numbers:
        some = ", ".join(map(str, sorted(numbers)))
        raise OtherOriginals(f"{OTHERS}: {len(originals.y_N)} examples, the answers say {some}")
    return NUMBER
