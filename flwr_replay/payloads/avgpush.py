"""What travels in AvgPush: an institution's model up, after each pass; the senders' models down."""

from dataclasses import dataclass

from flwr_replay.payloads.common import Evaluation, LabelScale
from flwr_replay.payloads.relay import MIXED, Released, TrainPeer
from flwr_replay.wire.fields import instruction
from flwr_replay.wire.payload import Request

__all__ = ["EvaluatePeer", "Push"]


@dataclass(frozen=True, kw_only=True)
class Push(TrainPeer, Request, stage="push", answer=Released):
    """Train your own model and release it."""


@dataclass(frozen=True, kw_only=True)
class EvaluatePeer(LabelScale, Request, stage="evaluate-peer", answer=Evaluation, message_type="evaluate"):
    """Test your own model on your test shard."""

    run: str = instruction()
    mixed: bool = instruction(MIXED, default=True)
    split: str = instruction("test, validation, train or external", default="test")
