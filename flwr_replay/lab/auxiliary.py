"""The attacker's own images: those that nobody has, those of an institution that colludes, or a folder's."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flwr_replay.attacks.attacker import Auxiliary
from flwr_replay.config.run import RunConfig
from flwr_replay.data.dealt import dealt, loaded
from flwr_replay.errors import ConfigError, DataError, nearest
from flwr_replay.lab.judge import load_for
from flwr_replay.models.layers import as_input

__all__ = ["auxiliary_of", "without"]

UNDEALT = "undealt"  # images of the data set that no institution has
MOST = 2000  # auxiliary images
BUILT_IN = ("digits",)  # formats that read no folder


def auxiliary_of(config: RunConfig, aux: str) -> Auxiliary | None:
    """Return the attacker's own images; None for none."""
    if aux == "none":
        return None
    folder = Path(aux).exists()
    if folder and config.task.format in BUILT_IN:
        raise ConfigError(
            f"--aux must be none, {UNDEALT} or an institution: task={config.task.name} reads no folder; got {aux!r}"
        )
    if not folder:
        if not config.nodes:
            raise ConfigError(f"--aux={aux} is for simulations; this run was deployed: give a data folder, or none")
        partition, dataset = dealt(config.task, config.partition, config.nodes, config.seed), loaded(config.task)
        if aux == UNDEALT:
            rest = np.setdiff1d(np.arange(len(dataset.train.y)), np.concatenate(partition.train))
            examples, name = dataset.train.take(rest), "images of the same source that no institution has"
        elif aux in partition.names:
            examples = partition.examples(dataset, partition.names.index(aux)).train
            name = f"images of {aux} (which colludes)"
        else:
            raise ConfigError(
                f"--aux must be none, {UNDEALT}, an institution or a data folder; got {aux!r}: "
                f"{nearest(aux, ['none', UNDEALT, *partition.names])}"
            )
    else:
        whole = replace(config.task, data_dir=aux, download=False, fit="exact", validation=False)  # none is held out
        examples = load_for("--aux", whole).train
        name = f"images of {Path(aux).name}"
    if not len(examples):
        raise DataError(f"--aux={aux} must have images; there are none: choose an institution, a folder, or none")
    chosen = examples.take(np.linspace(0, len(examples) - 1, min(MOST, len(examples))).astype(int))
    x = as_input(torch.from_numpy(np.ascontiguousarray(chosen.x)))
    return Auxiliary(f"{len(x):,} {name}", x, torch.from_numpy(np.asarray(chosen.y)))


def without(auxiliary: Auxiliary | None, victims: Sequence[Tensor]) -> Auxiliary | None:
    """Return the auxiliary images that are no victims'; None if none is left.

    Victims are images (n, C, H, W) in [0, 1] that an attacker of the real world would not have: those attacked, and
    those asked about.
    """
    if auxiliary is None:
        return None
    attacked = {row.tobytes() for images in victims for row in images.numpy()}
    own = [i for i, row in enumerate(auxiliary.images_mCHW.numpy()) if row.tobytes() not in attacked]
    if len(own) == len(auxiliary.labels_m):
        return auxiliary
    removed = len(auxiliary.labels_m) - len(own)
    source = f"{auxiliary.source} (without {removed:,} that the institution or the judge has)"
    return Auxiliary(source, auxiliary.images_mCHW[own], auxiliary.labels_m[own]) if own else None
