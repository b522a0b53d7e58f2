"""What travels in FedER in addition to buffers: models, and the numbers of the buffers that they are trained on."""

from collections.abc import Sequence
from dataclasses import dataclass

from flwr_replay.payloads.common import LAST_TRAINING, Trained
from flwr_replay.payloads.local import TrainedOwn
from flwr_replay.wire.fields import instruction, model
from flwr_replay.wire.payload import Payload, Request
from flwr_replay.wire.records import Weights

__all__ = ["TrainOwnWithBuffers", "TrainWithBuffers", "WithBuffers"]


@dataclass(frozen=True, kw_only=True)
class WithBuffers(Payload):
    """Fields of a request to train on an institution's own examples and on buffers that it has received."""

    run: str = instruction()
    lr: float = instruction("per step")
    mode: str = instruction("the run's own")
    local_epochs: int = instruction("passes", default=1)
    buffers: Sequence[int] = instruction("numbers of the buffers to train on", default=())
    buffered: int = instruction("examples in these buffers", default=0)
    optimizer_state: str = instruction("keep or reset", default="reset")
    continues: int = instruction(LAST_TRAINING, default=0)
    stated: float = instruction("epsilon; without DP 0", default=0.0)


@dataclass(frozen=True, kw_only=True)
class TrainWithBuffers(WithBuffers, Request, stage="train-with-buffers", answer=Trained):
    """Train this model, which comes from another institution."""

    arrays: Weights = model()


@dataclass(frozen=True, kw_only=True)
class TrainOwnWithBuffers(WithBuffers, Request, stage="train-own-with-buffers", answer=TrainedOwn):
    """Train your own model, which stays with you."""

    init_seed: int = instruction("seed of the fresh weights, used at the first training")
