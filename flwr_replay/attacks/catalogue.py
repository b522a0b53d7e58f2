"""The attacks, as results name them; `flwr_replay.lab.registry` says which numbers they take."""

from dataclasses import dataclass

__all__ = ["Attack"]


@dataclass(frozen=True)
class Attack:
    """One attack."""

    name: str
    source: str
    timed: bool = False  # whether more time finds more


MATCHING = Attack("gradient matching", "Geiping et al. 2020; Qu et al. 2022, eq. 1", timed=True)
LAST = Attack("gradient matching, last message", MATCHING.source, timed=True)
ANALYTIC = Attack("analytic inversion", "Phong et al. 2018")
COUNTS = Attack("label counts", "Zhao et al. 2020; Yin et al. 2021")
OPTIMISED = Attack("latent matching", "He et al. 2019; Qu et al. 2022, eq. 2", timed=True)
DECODER = Attack("learned decoder", "He et al. 2019", timed=True)
NEAREST = Attack("nearest auxiliary image", "a look-up, as a baseline")
DECODED = Attack("decoded codes", "Razavi et al. 2019")
LOOKED_AT = Attack("look at them", "raw examples travel as they are")
SHOWN = Attack("reading", "labels travel as they are")
AT_CUT = Attack("labels at the cut", "Erdoğan et al. 2022")
LOSS = Attack("loss threshold", "Yeom et al. 2018")
LIRA = Attack("offline LiRA", "Carlini et al. 2022", timed=True)
RECONSTRUCTED = Attack("reconstruction error", "a small loss, as Yeom et al. 2018")
PRIOR = Attack("prior likelihood", "a small loss, as Yeom et al. 2018")
RELEASED = Attack("nearest released image", "Chen et al. 2020")
RATIO = Attack("likelihood ratio, all others known", "Neyman and Pearson 1933; Kairouz, Oh and Viswanath 2015")
ALONE = Attack("alone in a class", "a look-up: the class's sum is its features")
