"""An attack of the user's own: `privacy attack RUN --attack mypkg:attack`.

    def attack(seen: Seen, images: Tensor, labels: Tensor, seed: int) -> n numbers

It is asked who was in the training. The images are of members and of as many others with the same labels, shuffled; the
larger an image's number, the surer the attacker is that it is a member's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flwr_replay.attacks.attacker import Auxiliary
from flwr_replay.config.parts import import_part, users_code
from flwr_replay.config.sections import require
from flwr_replay.errors import ConfigError
from flwr_replay.files.tensors import StateDict

__all__ = ["Seen", "own_scores"]


@dataclass(frozen=True)
class Seen:
    """What an attacker has seen of one field of an institution's answers.

    Attributes
    ----------
    sent, asked : list of dict of str to ndarray
        The field in each answer, and all arrays of the request that it answers; empty where that was not recorded.
    model : nn.Module | None
        The network in evaluation mode, with the weights of the last answer; None where the field is not all of them.
    auxiliary : Auxiliary | None
        The attacker's own images (`--aux`).
    """

    sent: list[StateDict]
    asked: list[StateDict]
    model: nn.Module | None
    auxiliary: Auxiliary | None


def own_scores(name: str, seen: Seen, images_n: Tensor, labels_n: Tensor, seed: int) -> Tensor:
    """Return what the user's function says of each image, float64 (n,).

    Raises
    ------
    ConfigError
        If the function cannot be imported, fails, or returns something else.
    """
    attack = import_part("--attack", name)
    with users_code(ConfigError, f"--attack {name} failed"):
        scores = torch.as_tensor(attack(seen, images_n, labels_n, seed)).detach().double().cpu()
    shape = tuple(scores.shape)
    require(shape == (len(labels_n),), f"--attack {name} must return {len(labels_n)} numbers; got shape {shape}")
    return scores
