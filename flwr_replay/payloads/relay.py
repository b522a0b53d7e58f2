"""What travels in the methods that exchange models over a graph: released models up, the senders' models down.

An institution uploads its model once, with its weight, however many institutions receive it. The server assigns shares,
which are numbers, and forwards the models unchanged. A parcel is one sender's model with the share and the weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flwr_replay.errors import WireError
from flwr_replay.payloads.common import LAST_TRAINING, STEPS, LabelScale, Spending, Spent
from flwr_replay.wire.fields import instruction, model, statistic
from flwr_replay.wire.payload import Payload, Request
from flwr_replay.wire.records import Weights

__all__ = ["MIXED", "Committed", "Deliver", "Released", "TrainPeer"]

LARGEST_W = 1e9  # the weights of all institutions add up to their number
MIXED = "test the model as it is after this exchange's mixing, or as it was released before"


@dataclass(frozen=True, kw_only=True)
class Released(Spent):
    """A model that an institution has trained and releases, with counts; no weights if nobody can receive it."""

    arrays: Weights = model(dp="classifier")
    weight: float = statistic("w of PushSum, 1 on average; it follows from the topology", public=True)
    num_examples: int = statistic("examples", public=True)
    examples_seen: int = statistic("examples; with repetition", public=True)
    num_steps: int = statistic(STEPS, public=True)
    train_loss: float | None = statistic("the task's loss, mean over the training", default=None, withheld=True)


@dataclass(frozen=True, kw_only=True)
class TrainPeer(Spending, LabelScale):
    """Fields of a request to train a model that is stored at the institution."""

    run: str = instruction()
    lr: float = instruction("per step")
    init_seed: int = instruction("seed of the fresh weights, used at the first training")
    committed: int = instruction("number of the exchange whose parcels the institution acknowledged last; 0: none yet")
    exchanged: bool = instruction("an institution may receive the model; otherwise it stays", default=True)
    optimizer_state: str = instruction("keep or reset", default="keep")
    continues: int = instruction(LAST_TRAINING, default=0)


@dataclass(frozen=True, kw_only=True)
class Committed(Payload):
    """Confirms that the parcels of an exchange are mixed and that the result is on the institution's disk."""

    num_examples: int = statistic("examples", public=True)
    parcels: Sequence[int] = statistic("numbers of the parcels that are mixed", default=(), public=True)


@dataclass(frozen=True, kw_only=True)
class Deliver(Request, stage="deliver", answer=Committed):
    """Kalra et al. 2023, Algorithm 1, lines 7-10: mix your share of your own model with these parcels."""

    arrays: Weights = model()  # a state dict for each parcel, under its position
    run: str = instruction()
    released_in: int = instruction("exchange in which the institution released its own model", key="exchange")
    kept: float = instruction("share of its own model that the institution keeps")
    parcels: Sequence[int] = instruction("numbers of the models, senders by name", default=())
    shares: Sequence[float] = instruction("share of each sender's model", default=())
    weights: Sequence[float] = instruction("w of each sender", default=())

    def check_shares(self) -> None:
        """Refuse shares and weights that none can be."""
        if not all(0 <= share <= 1 for share in (self.kept, *self.shares)) or not all(
            0 < w <= LARGEST_W for w in self.weights
        ):
            raise WireError(f"shares lie in [0, 1] and weights of PushSum in (0, {LARGEST_W:g}]; got others: refused")
