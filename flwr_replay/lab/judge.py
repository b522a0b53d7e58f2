"""The judge of the privacy lab: it alone has originals, and it checks that they are the right ones.

In a simulation originals are dealt anew from the run's options; at an institution they are its own data. A data folder
that has gained a file deals other images. So the judge computes what was sent anew from the originals, and refuses them
where that gives something else.

`N` all images of an institution, `n` those behind an answer, `C` channels, `H` height, `W` width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flwr_replay.config.run import RunConfig
from flwr_replay.data import load
from flwr_replay.data.dealt import dealt, loaded
from flwr_replay.errors import DataError
from flwr_replay.models.layers import as_input

__all__ = ["Originals", "check_anew", "check_replay", "originals_of", "rows_behind", "rows_in_order"]

NEAR = 1e-3  # the largest distance from what was sent, as a part of its length; other threads give other last bits
OTHERS = "originals must be the run's: what was sent, computed anew from them, is something else"


@dataclass(frozen=True)
class Originals:
    """An institution's training examples, and examples of the same source that no institution trains on.

    Attributes
    ----------
    x_NCHW, y_N : Tensor
        Its training images in [0, 1], and their labels.
    others_NCHW, other_y : Tensor
        Test examples of the same source: non-members for attacks on membership.
    """

    x_NCHW: Tensor
    y_N: Tensor
    others_NCHW: Tensor
    other_y: Tensor


def originals_of(config: RunConfig, institution: str, data: str = "") -> Originals:
    """Deal a simulated institution's examples anew, or read an institution's own.

    Parameters
    ----------
    config : RunConfig
        The run's.
    institution : str
        Its name.
    data : str
        The institution's own data, as in its `--node-config`; empty: a simulation's.

    Raises
    ------
    DataError
        If the run was deployed and no data are given, or they hold no images.
    """
    if data:
        own = load(replace(config.task, data_dir=data, download=False, site_column="site"))
    elif config.nodes:
        part = dealt(config.task, config.partition, config.nodes, config.seed)
        if institution not in part.names:
            raise DataError(
                f"originals of {institution!r} are not the run's to deal; a simulation has {', '.join(part.names)}: "
                "give the institution's own data with --data"
            )
        own = part.examples(loaded(config.task), part.names.index(institution))
    else:
        raise DataError("the run was deployed; only an institution can judge: give its own data with --data")
    sides = [(torch.tensor(part.x), torch.tensor(part.y)) for part in (own.train, own.test)]
    (x, y), (other_x, other_y) = sides
    return Originals(as_input(x), y, as_input(other_x), other_y)


def check_replay(config: RunConfig) -> None:
    """Refuse to compute anew what institutions made of batches with replayed images, which the judge does not have."""
    if config.replay.name != "none":
        raise DataError("institutions trained on replayed images, too, which the judge does not have")


def check_anew(sent_n: Tensor, anew_n: Tensor) -> None:
    """Refuse originals from which computing what was sent anew gives something else."""
    if sent_n.shape != anew_n.shape or not bool((sent_n - anew_n).norm() <= NEAR * sent_n.norm()):
        raise DataError(f"{OTHERS}: give the data of the run, as they were when it ran")


def rows_behind(sent_n: Tensor, anew: Callable[[], Tensor], others: bool = False) -> Tensor:
    """Return which original is behind each row that was sent, (n,): the one from which computing it anew gives it.

    Parameters
    ----------
    sent_n : Tensor
        What was sent, a row for each image.
    anew : callable
        Computes the same of all N originals.
    others : bool
        Whether some rows may be of others' images; these are -1.

    Raises
    ------
    DataError
        If a row is that of no original; with `others`, if none is.
    """
    sent_nF, anew_NF = sent_n.flatten(1).float(), anew().flatten(1).float()
    if sent_nF.shape[1] != anew_NF.shape[1]:
        raise DataError(f"{OTHERS}: give the data of the run")
    distances_nN = torch.cdist(sent_nF, anew_NF, compute_mode="donot_use_mm_for_euclid_dist")
    least_n, rows_n = distances_nN.min(1)
    own_n = least_n <= NEAR * sent_nF.norm(dim=1).clamp(min=1e-6)
    if not bool(own_n.any() if others else own_n.all()):
        raise DataError(f"{OTHERS}: give the data of the run, as they were when it ran")
    return torch.where(own_n, rows_n, -1)


def rows_in_order(number: int, first: int, originals: Originals) -> Tensor:
    """Return the originals behind rows that have secret noise, (n,): they come in the institution's order.

    That these are the right originals cannot be checked by computing them anew.
    """
    return (first + torch.arange(number)) % len(originals.y_N)
