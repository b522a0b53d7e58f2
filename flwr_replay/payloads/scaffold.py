"""What travels in SCAFFOLD: weights, and beside them, under names of their own, a control of their size."""

from __future__ import annotations

from dataclasses import dataclass

from flwr_replay.payloads.common import Train, Trained

__all__ = ["CONTROL", "TrainControlled"]

CONTROL = "control."  # begins the names of its arrays


@dataclass(frozen=True, kw_only=True)
class TrainControlled(Train, stage="train-controlled", answer=Trained):
    """Train these weights, each step corrected by this control less your own."""
