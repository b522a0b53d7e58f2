"""The judge of the privacy lab: it alone has originals, and it checks that they are the right ones.

In a simulation originals are dealt anew from the run's options; at an institution they are its own data. A data folder
that has gained a file deals other images. So the judge computes what was sent anew from the originals, and refuses them
where that gives something else. What has secret noise cannot be computed anew: there a digest of the data decides,
which was written during the run.

`N` all images of an institution, `n` those behind an answer, `C` channels, `H` height, `W` width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flwr_replay.attacks.membership import equal_label_shares
from flwr_replay.config.run import RunConfig
from flwr_replay.config.sections import TaskConfig
from flwr_replay.data import Dataset, load
from flwr_replay.data.dealt import dealt, loaded
from flwr_replay.errors import DataError, FlwrReplayError
from flwr_replay.institution.node import own_task
from flwr_replay.lab.evidence import ALL
from flwr_replay.models.layers import as_input

__all__ = [
    "Candidates",
    "Originals",
    "OtherOriginals",
    "check_anew",
    "check_replay",
    "load_for",
    "originals_of",
    "rows_behind",
    "rows_in_order",
    "same_data",
]

NEAR = 1e-3  # the largest distance from what was sent, as a share of its length; other threads give other last bits
OTHERS = "originals must be the run's: what was sent, computed anew from them, is something else"
FEWEST = 20  # members, and others, below which an interval says nothing
Candidates = tuple[Tensor, Tensor]  # images and labels
SURE = 3.0  # standard deviations by which noisy rows must resemble their own originals


class OtherOriginals(DataError):
    """The originals are surely not those of the run."""


@dataclass(frozen=True)
class Originals:
    """An institution's training examples, and examples of the same source that no institution trains on."""

    x_NCHW: Tensor  # its training images in [0, 1]
    y_N: Tensor
    others_NCHW: Tensor  # test images of the same source: non-members for attacks on membership
    other_y: Tensor
    digest: str  # of the training examples, as `Examples.digest`; empty: of several institutions together
    by_patient: bool = False  # whether the data name patients

    def beside_others(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return rows of its images, and as many of the others of each label; none where no label could be equal."""
        sides = self.y_N.numpy(), self.other_y.numpy()
        if self.y_N.ndim > 1 or not np.intersect1d(*sides).size:  # masks have no label
            return torch.arange(0), torch.arange(0)
        own, others = equal_label_shares(*sides, seed)
        return torch.from_numpy(own), torch.from_numpy(others)

    def candidates(self, rows: Tensor, others: Tensor) -> tuple[Candidates, Candidates]:
        """Return members and others of these rows, about whom an attack on membership is asked.

        Raises
        ------
        DataError
            If there are too few.
        """
        if len(rows) < FEWEST:
            raise DataError(
                f"there are {len(rows)} training images with as many others of equal labels; it needs {FEWEST}"
            )
        return (self.x_NCHW[rows], self.y_N[rows]), (self.others_NCHW[others], self.other_y[others])


def load_for(option: str, task: TaskConfig) -> Dataset:
    """Load a folder that an option of the command names: the attacker's auxiliary images, or an institution's own data.

    Raises
    ------
    DataError
        If it cannot be used; the line names the option, where a run's would be task.data-dir.
    """
    try:
        return load(task)
    except FlwrReplayError as error:
        raise DataError(f"{option}={task.data_dir}: {str(error).replace('task.data-dir', option)}") from None


def originals_of(config: RunConfig, institution: str, data: str = "") -> Originals:
    """Deal a simulated institution's examples anew, or those of all; or read its own from `data`, as its node does.

    Raises
    ------
    DataError
        If the run was deployed and no data are given, or they hold no images.
    """
    if data:
        owned = [load_for("--data", own_task(config.task, data))]
    elif config.nodes and not config.clinics:  # which a deployment's study has
        partition = dealt(config.task, config.partition, config.nodes, config.seed)
        if institution not in (*partition.names, ALL):
            raise DataError(
                f"originals of {institution!r} are not the run's to deal; a simulation has "
                f"{', '.join(partition.names)}: "
                "give the institution's own data with --data"
            )
        names = partition.names if institution == ALL else [institution]
        owned = [partition.examples(loaded(config.task), partition.names.index(name)) for name in names]
    else:
        raise DataError(
            "the run was deployed; only who has the data of all can judge: attack the same options, run in this process"
            if institution == ALL
            else "the run was deployed; only an institution can judge: give its own data with --data"
        )
    x, other_x, y, other_y = (
        torch.from_numpy(np.concatenate([getattr(getattr(own, split), key) for own in owned]))
        for key in "xy"
        for split in ("train", "test")
    )
    digest, patients = owned[0].train.digest if len(owned) == 1 else "", owned[0].train.patients
    return Originals(as_input(x), y, as_input(other_x), other_y, digest, patients is not None)


def same_data(originals: Originals, digests: Sequence[str]) -> bool:
    """Say whether a run's digests prove that these are its data; False if it has none, or its data changed meanwhile.

    Raises
    ------
    OtherOriginals
        If it had others.
    """
    if digests and originals.digest not in digests:
        raise OtherOriginals(
            "originals must be the run's: their digest is not that of its data: give the data of the run, as they were "
            "when it ran"
        )
    return list(digests) == [originals.digest]


def check_replay(config: RunConfig) -> None:
    """Refuse to compute anew what institutions made of batches with replayed images, which the judge does not have."""
    if config.replay.name != "none":
        raise DataError("institutions trained on replayed images, too, which the judge does not have")


def check_anew(sent_n: Tensor, anew_n: Tensor) -> None:
    """Refuse originals from which computing what was sent anew gives something else."""
    if sent_n.shape != anew_n.shape or not bool((sent_n - anew_n).norm() <= NEAR * sent_n.norm()):
        raise OtherOriginals(f"{OTHERS}: give the data of the run, as they were when it ran")


def rows_behind(sent_n: Tensor, anew: Callable[[], Tensor], others: bool = False, near: float = NEAR) -> Tensor:
    """Return which original is behind each row that was sent, (n,): the one from which computing it anew gives it.

    `anew` computes the rows of all N originals. With `others` some rows may be of others' images; these are -1. `near`
    is the largest distance, as a share of a row's length; 0 for whole numbers.

    Raises
    ------
    OtherOriginals
        If a row is that of no original; with `others`, if none is.
    """
    sent_nF, anew_NF = sent_n.flatten(1).float(), anew().flatten(1).float()
    if sent_nF.shape[1] != anew_NF.shape[1]:
        raise OtherOriginals(f"{OTHERS}: give the data of the run")
    distances_nN = torch.cdist(sent_nF, anew_NF, compute_mode="donot_use_mm_for_euclid_dist")
    least_n, rows_n = distances_nN.min(1)
    own_n = least_n <= near * sent_nF.norm(dim=1).clamp(min=1e-6)
    if not bool(own_n.any() if others else own_n.all()):
        raise OtherOriginals(f"{OTHERS}: give the data of the run, as they were when it ran")
    return torch.where(own_n, rows_n, -1)


def rows_in_order(sent_n: Tensor, first: int, number: int, anew: Callable[[], Tensor]) -> Tensor:
    """Return the originals behind rows that have secret noise, (n,): they come in the institution's order.

    Computing them anew gives no noise. So each row must resemble its own original more than the next one's, over all
    rows by `SURE` standard deviations.

    `first` is the place of the first of them among the institution's images, of which its answer says the `number`.
    `anew` computes the rows of all N originals without noise.

    Raises
    ------
    OtherOriginals
        If the number is another.
    DataError
        If the rows do not resemble these originals: they are others, or the noise hides whose they are.
    """
    anew_NF = anew().flatten(1).float()
    if len(anew_NF) != number:
        raise OtherOriginals(f"{OTHERS}: {len(anew_NF)} examples, the answer says {number}")
    rows_n = first + torch.arange(len(sent_n))
    centred_nF, sent_nF = anew_NF[rows_n] - anew_NF.mean(0), sent_n.flatten(1).float()
    own_n, next_n = ((sent_nF * others_nF).sum(1) for others_nF in (centred_nF, centred_nF.roll(1, 0)))
    gain_n = own_n - next_n
    if not bool(gain_n.sum() > SURE * gain_n.square().sum().sqrt()):
        raise DataError("what was sent does not resemble these originals: they are others, or the noise hides it")
    return rows_n
