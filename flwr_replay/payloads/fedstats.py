"""What travels in FedStats: a head with what lies before it down, once the sums of features by class up.

With products of features, too, if the request says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from flwr_replay.config.sections import CLASSES
from flwr_replay.payloads.common import Spending, Summed, Trained
from flwr_replay.payloads.replay import Kept
from flwr_replay.wire.fields import instruction, model
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import StateDict, Weights

__all__ = ["DRAWS", "MOST_FEATURES", "PRODUCTS", "SUMS", "ClassSums", "KeepDraws", "Summarise", "pairs_of"]

MOST_FEATURES = 4096  # whose products are summed: 8.4 million numbers
PRODUCTS, SUMS = "products-of-features", "sums-by-class"  # no module of PyTorch's has such a name
DRAWS = "draws"  # key of an institution's state: what features are drawn from


def pairs_of(features: int) -> int:
    """Return how many products F features have, each pair once, and each feature with itself."""
    return features * (features + 1) // 2


@dataclass(frozen=True, kw_only=True)
class ClassSums(Trained):
    """Sums over the training examples, in the place of the head's weights: by class of features, and of examples.

    If they are asked for, so are the products of features, of all classes together (`PRODUCTS`). A regression has one
    class, and its label is one more feature; the last product, of labels with themselves, gives way to the sum of
    labels. All are in units of the noise (`flwr_replay.privacy.sums.noises`), and divided by the number of examples.
    All other weights are as they were sent. No step is taken. What a frozen encoder makes is summed beside the weights
    (`SUMS`): by class the number of examples and its features.
    """

    arrays: Weights = model(means="class sums", dp="statistics")

    @classmethod
    def blank(cls, sent: Weights | None = None, **known: Any) -> Self:
        """Return blank sums; there is no loss."""
        return super().blank(sent, **{"train_loss": None, **known})


@dataclass(frozen=True, kw_only=True)
class Summarise(Spending, Summed, Request, stage="summarise", answer=ClassSums):
    """Sum the features that these weights make of your training examples, class by class."""

    arrays: Weights = model()
    run: str = instruction()
    clip: float = instruction("the largest L2 norm of an image's features")
    products: int = instruction("numbers: products of features, each pair once; 0: none are asked for", default=0)
    sums: int = instruction("numbers: sums by class of a frozen encoder's features; 0: those of the head's", default=0)

    @classmethod
    def added(cls, instructions: Mapping[str, Any]) -> StateDict:
        """Return blank products, and sums that are not in the place of the head's weights."""
        n, sums = instructions.get("products", 0), instructions.get("sums", 0)
        added = {PRODUCTS: np.zeros(n, np.float32)} if 0 < n <= pairs_of(MOST_FEATURES) else {}
        return added | ({SUMS: np.zeros(sums, np.float32)} if 0 < sums <= CLASSES * (1 + MOST_FEATURES) else {})


@dataclass(frozen=True, kw_only=True)
class KeepDraws(Request, stage="keep-draws", answer=Kept):
    """Save a Gaussian for each class: `means`, `factor` and `counts` of `flwr_replay.learning.draws.Draws`."""

    arrays: Weights = model(means="generator weights")
    run: str = instruction()
