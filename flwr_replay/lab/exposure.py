"""What an institution's generator shows of its images: examined at the institution, nothing leaves.

Training images, *members*, are compared with test images, *others*, as many of each class. A generator that comes
nearer to members than to others gives away who was in the training. Others should come from the members' source: where
they do not, an attack may tell the sources apart, and its AUC is too high.

    nearest sample: the distance of an image to the nearest of many that the generator draws
    projection:     its distance to the nearest image that the generator can make (Pennisi et al. 2023, section IV-C.2)
    membership:     who takes the images at small distances for members is right with this area under the ROC curve

The network that is projected with, and the one of the privacy loss, are others than the one that measures.
These are attacks that were tried. That they fail is evidence, and no guarantee.

`n` images, `F` numbers in an image's vector.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flwr_replay.attacks.membership import bootstrapped
from flwr_replay.errors import DataError
from flwr_replay.generators.base import Look
from flwr_replay.generators.perceptual import (
    InceptionDistance,
    LocalFeatures,
    LpipsFeatures,
    Pixels,
    frechet,
    nearest,
    spread,
)
from flwr_replay.generators.pictures import draw_grid
from flwr_replay.institution.synthesis import SynthesisStages
from flwr_replay.learning.training import torch_rng
from flwr_replay.models.layers import as_input
from flwr_replay.report.charts import FORMS, write_figures
from flwr_replay.report.plots import histograms
from flwr_replay.rng import derived_seed

__all__ = ["examine", "matched"]

FEWEST = 8  # images on each side


def examine(
    stages: SynthesisStages,
    run: str,
    images: int,
    samples: int,
    folder: Path,
    backbone: str = "",
    inception: str = "",
) -> dict[str, Any]:
    """Attack the institution's own generator.

    Parameters
    ----------
    run : str
        Whose generator it is, if it was trained under DP; otherwise all runs share it.
    images, samples : int
        Members, and others, at most; images that the generator draws.
    folder : Path
        For the pictures: patients' images and those that the generator makes. It must stay here.
    backbone, inception : str
        Files with AlexNet or VGG-16, for LPIPS distances too, and with FID's Inception, for its Fréchet distance.

    Returns
    -------
    dict
        `attacks`, each with the mean squared distance of `members` and of `others`, and an AUC; Fréchet distances,
        diversity, and the numbers of images.

    Raises
    ------
    DataError
        If there are too few images on one side.
    TrainingError
        If the generator's training is not complete.
    """
    institution, plan = stages.institution, stages.plan
    generator, seed = stages.complete(run), derived_seed(stages.identity)
    shards = institution.train, institution.test
    chosen = matched([shard.y.cpu() for shard in shards], plan.form.classes, images, torch_rng(seed, "examined"))
    if (count := len(chosen[0])) < FEWEST:
        raise DataError(
            f"the attacks need {FEWEST} training images, and test images of their classes; there are {count}: add some"
        )
    sides = [
        (as_input(shard.x[rows.to(shard.x.device)]).cpu(), shard.y.cpu()[rows])
        for shard, rows in zip(shards, chosen, strict=True)
    ]
    drawn = stages.drawn(run, samples, "examined")
    synthetic, labels = as_input(torch.from_numpy(drawn["images"])), torch.from_numpy(drawn["labels"])

    data, device = stages.images(), institution.device
    inceptions = InceptionDistance(inception, data.x, device) if inception else None
    measuring, projecting = (
        LocalFeatures(plan.form, derived_seed(seed, purpose)).to(device).learn(data.x, data.y)
        for purpose in ("measure", "project")
    )
    looks: list[Look] = [Pixels(), measuring, *([LpipsFeatures(backbone, plan.form).to(device)] if backbone else [])]
    made = [generator.closest(x, y, projecting) for x, y in sides]
    attacks = []
    for look in looks:
        sample_SF, real = look.embed_all(synthetic, device), [look.embed_all(x, device) for x, _ in sides]
        near = [look.embed_all(x, device) for x in made]
        distances = {
            "nearest sample": [nearest(x_nF, sample_SF) for x_nF in real],
            "projection": [(x_nF - y_nF).square().sum(1) for x_nF, y_nF in zip(real, near, strict=True)],
        }
        for attack, (members, others) in distances.items():
            in_n, out_n = members.cpu().numpy(), others.cpu().numpy()
            auc = bootstrapped(-in_n, -out_n, seed)
            means = {"members": float(in_n.mean()), "others": float(out_n.mean())}
            figures = {**means, "auc": auc.value, "low": auc.low, "high": auc.high}
            attacks.append({"attack": attack, "distance": look.name, **figures})
            title = f"AUC {auc.value:.2f} ({auc.low:.2f} to {auc.high:.2f})"
            shown = histograms({"training images": in_n, "held-out images": out_n}, f"{attack}, {look.name}", title)
            name = "-".join(f"{attack} {look.name}".replace(",", "").split())
            write_figures(folder, {name: shown}, ("png", *FORMS))
    for name, (x, _), closest in zip(("members", "others"), sides, made, strict=True):
        distances_nS = torch.cdist(measuring.embed_all(x, device), measuring.embed_all(synthetic, device))
        pick = synthetic[distances_nS.argmin(1).cpu()]  # what looks most like each image
        draw_grid(folder / f"{name}-real-projection-nearest.png", {"real": x, "projection": closest, "nearest": pick})

    (x_in, y_in), (x_out, _) = sides
    pooled_in, pooled_out, pooled_made = (
        measuring.pooled(x.to(device)).detach().cpu().double().numpy() for x in (x_in, x_out, synthetic)
    )
    real_spread = spread(x_in, y_in)
    return {
        "institution": institution.name,
        "images": count,
        "samples": samples,
        "attacks": attacks,
        "frechet-distance, local features": frechet(pooled_made, pooled_in),
        "frechet-distance, local features, of real others": frechet(pooled_out, pooled_in),
        **({"frechet-inception-distance": inceptions.of(synthetic)} if inceptions else {}),
        **({"frechet-inception-distance, of real others": inceptions.of(institution.test.x)} if inceptions else {}),
        "diversity, pixels": spread(synthetic, labels) / real_spread if real_spread else None,
    }


def matched(labels: Sequence[Tensor], classes: int, most: int, rng: torch.Generator) -> list[Tensor]:
    """Return rows of each side: of every class as many as of the other side, and about so many in all.

    Otherwise an attack might tell classes apart, which says nothing about members.
    """
    counts = torch.stack([torch.bincount(y, minlength=classes) for y in labels]).amin(0)
    wanted = (counts * min(1.0, most / max(1, int(counts.sum())))).long()
    orders = [torch.randperm(len(y), generator=rng) for y in labels]
    return [
        torch.cat([order[y[order] == k][:n] for k, n in enumerate(wanted)])
        for y, order in zip(labels, orders, strict=True)
    ]
