"""What travels in the methods with a private model and a proxy: the proxy; never the private model.

With proxy-optimizer=travels the state of the proxy's optimizer is beside its weights, under names of its own. Under DP
it has the proxy's epsilon. It is computed from noised gradients and from what arrived, so it is post-processing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flwr_replay.payloads.common import LAST_TRAINING, ExpectsReplay, LabelScale, Spending, Summed, Trained
from flwr_replay.payloads.relay import MIXED, Released, TrainPeer
from flwr_replay.payloads.two import TwoEvaluations
from flwr_replay.wire.fields import instruction, model, statistic
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import Weights

__all__ = [
    "EvaluatePair",
    "EvaluateWithProxy",
    "Listening",
    "Mutual",
    "PairEvaluation",
    "ReleasedProxy",
    "TrainMutually",
    "TrainProxy",
    "TrainedMutually",
]

PROXY_STEPS = "steps of the proxy, by DP-SGD or plain; 0: the institution's budget is used up"


@dataclass(frozen=True, kw_only=True)
class Listening(LabelScale):
    """Fields of a request: how the private model listens to the proxy."""

    listen: str = instruction("loss or pool", default="loss")
    holdout: float = instruction("share of the own examples by which a pool's weights are chosen", default=0.1)


@dataclass(frozen=True, kw_only=True)
class Mutual(Listening, ExpectsReplay):
    """Fields of a request to train: the private model's options and mutual learning's (Kalra et al. 2023, eq. 4-5)."""

    alpha: float = instruction("weight of the proxy's predictions in the private model's loss")
    beta: float = instruction("weight of the private model's predictions in the proxy's loss")
    proxy_optimizer: str = instruction("of its optimizer's state: stays, travels or reset", default="stays")
    private_seed: int = instruction("seed of the private model's fresh weights, used at the first training")
    private_optimizer: str = instruction("sgd or adam")
    private_lr: float = instruction("per step")
    private_epochs: int = instruction("passes that the private model trains alone, before both train")
    private_batch_size: int = instruction("examples, in these passes")
    private_shift: int = instruction("pixels by which images are shifted at most, in these passes")


@dataclass(frozen=True, kw_only=True)
class ReleasedProxy(Released):
    """A trained proxy, perhaps with its optimizer's state; the loss is the private model's."""

    arrays: Weights = model(dp="proxy")
    num_steps: int = statistic(PROXY_STEPS, public=True)


@dataclass(frozen=True, kw_only=True)
class TrainProxy(Mutual, TrainPeer, Request, stage="train-proxy", answer=ReleasedProxy):
    """Kalra et al. 2023, Algorithm 1, lines 2-6: train your proxy and your private model."""


@dataclass(frozen=True, kw_only=True)
class TrainedMutually(Trained):
    """A trained proxy for the server to average, perhaps with its optimizer's state; the loss is as above."""

    arrays: Weights = model(dp="proxy+update")  # of the latter: the update, over the number of examples
    num_steps: int = statistic(PROXY_STEPS, public=True)


@dataclass(frozen=True, kw_only=True)
class TrainMutually(Spending, Mutual, Summed, Request, stage="train-mutually", answer=TrainedMutually):
    """Train this proxy together with your private model."""

    arrays: Weights = model()
    run: str = instruction()
    lr: float = instruction("of the proxy, per step")
    optimizer_state: str = instruction("keep or reset", default="keep")
    continues: int = instruction(LAST_TRAINING, default=0)


@dataclass(frozen=True, kw_only=True)
class PairEvaluation(TwoEvaluations):
    """Sums over the test shard of the private model and of the proxy."""

    other = "proxy"

    proxy_loss: float | None = statistic(
        "the task's loss, mean over the shard; none: the policy allows counts only", default=None
    )
    proxy_confusion: Sequence[int] = statistic("examples; as confusion", default=(), counted=True)
    proxy_hits_in_group: int | None = statistic("examples; as hits_in_group", default=None, counted=True)
    proxy_scores: Sequence[int] = statistic("examples; as scores", default=())


@dataclass(frozen=True, kw_only=True)
class EvaluatePair(Listening, Request, stage="evaluate-pair", answer=PairEvaluation, message_type="evaluate"):
    """Test your private model and your proxy on your test shard."""

    run: str = instruction()
    mixed: bool = instruction(MIXED, default=True)
    split: str = instruction("test, validation, train or external", default="test")


@dataclass(frozen=True, kw_only=True)
class EvaluateWithProxy(
    Listening, Request, stage="evaluate-with-proxy", answer=PairEvaluation, message_type="evaluate"
):
    """Test your private model and this proxy on your test shard."""

    arrays: Weights = model()
    run: str = instruction()
    split: str = instruction("test, validation, train or external", default="test")
