"""What travels in AvgPush: an institution's model up, after each pass; the senders' models down."""

from __future__ import annotations

from dataclasses import dataclass

from flwr_replay.payloads.relay import Released, TrainPeer
from flwr_replay.wire.payload import Request

__all__ = ["Push"]


@dataclass(frozen=True, kw_only=True)
class Push(TrainPeer, Request, stage="push", answer=Released):
    """Train your own model and release it."""
