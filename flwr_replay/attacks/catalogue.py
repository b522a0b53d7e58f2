"""The attacks by name: what each takes, needs and gives; `flwr_replay.lab` tries them.

One of the user's own is such an `Attack`, or a function, which tells members (`flwr_replay.lab.own`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from flwr_replay.wire.fields import Meaning

__all__ = ["ATTACKS", "Attack", "Gives", "Need"]

Gives = Literal["membership", "labels", "images"]
Need = Literal["auxiliary", "network"]  # images of the attacker's own (--aux); a request with the network (record=all)


@dataclass(frozen=True)
class Attack:
    """One attack."""

    name: str = ""
    source: str = ""
    gives: Gives = "membership"
    takes: tuple[Meaning, ...] = ()  # numbers that mean one of these; empty: any
    needs: tuple[Need, ...] = ()
    timed: bool = False  # whether more time finds more
    run: Callable[..., Any] | None = None  # the function, of one of the user's own

    def __call__(self, *asked: object) -> Any:
        """Call the user's function."""
        assert self.run is not None
        return self.run(*asked)


CHANGES: tuple[Meaning, ...] = ("weights", "gradient")
SENT: tuple[Need, ...] = ("network",)
AUX: tuple[Need, ...] = ("network", "auxiliary")
RECONSTRUCTED = Attack(
    "reconstruction error", "a small loss, as Yeom et al. 2018", "membership", ("generator weights",)
)
PRIOR = Attack("prior likelihood", RECONSTRUCTED.source, "membership", ("generator weights",), SENT)
COUNTS = Attack("label counts", "Zhao et al. 2020; Yin et al. 2021", "labels", CHANGES, SENT)
ANALYTIC = Attack("analytic inversion", "Phong et al. 2018", "images", CHANGES, SENT)
MATCHING = Attack(
    "gradient matching", "Geiping et al. 2020; Qu et al. 2022, eq. 1", "images", CHANGES, SENT, timed=True
)
LAST = Attack("gradient matching, last message", MATCHING.source, "images", ("weights",), SENT, timed=True)
LOSS = Attack("loss threshold", "Yeom et al. 2018", "membership", ("weights",))
LIRA = Attack("offline LiRA", "Carlini et al. 2022", "membership", ("weights",), ("auxiliary",), timed=True)
RATIO = Attack(
    "likelihood ratio, all others known",
    "Neyman and Pearson 1933; Kairouz, Oh and Viswanath 2015",
    "membership",
    ("gradient", "class sums"),
    SENT,
)
OPTIMISED = Attack(
    "latent matching", "He et al. 2019; Qu et al. 2022, eq. 2", "images", ("activations",), SENT, timed=True
)
DECODER = Attack("learned decoder", "He et al. 2019", "images", ("activations",), AUX, timed=True)
NEAREST = Attack("nearest auxiliary image", "a look-up, as a baseline", "images", ("activations",), AUX)
DECODED = Attack("decoded codes", "Razavi et al. 2019", "images", ("codes",), SENT)
SHOWN = Attack("reading", "labels travel as they are", "labels", ("labels",))
AT_CUT = Attack("labels at the cut", "Erdoğan et al. 2022", "labels", ("gradients at a cut",), SENT)
LOOKED_AT = Attack("look at them", "raw examples travel as they are", "images", ("images",))
RELEASED = Attack("nearest released image", "Chen et al. 2020", "membership", ("images",), ("auxiliary",))
ALONE = Attack("alone in a class", "a look-up: the class's sum is its features", "labels", ("class sums",), SENT)
ATTACKS = {value.name: value for value in [*globals().values()] if isinstance(value, Attack)}  # all of the above
