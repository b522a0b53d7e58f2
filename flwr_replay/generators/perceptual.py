"""How alike two images look: the distance of a network's features.

Source: Zhang et al. 2018 (LPIPS, arXiv 1801.03924), eq. 1: for every layer a unit vector at every place;

    d(x, y) = Σ over layers of the mean over places of ‖w ⊙ (f(x) − f(y))‖²

An image becomes one long vector here, whose squared distance to another's is d. With `local features` all w are one
over the number of layers, and the network has learned the institution's own task. `LPIPS` needs the extra `gan` and the
backbone's weights in a file: nothing is downloaded.

`n` images, `A` and `B` batches, `C` channels, `H` height, `W` width, `F` numbers in an image's vector, `K` features.
"""

import warnings
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_replay.config.sections import require
from flwr_replay.errors import ConfigError
from flwr_replay.generators.base import AT_ONCE, ImageForm, Look, rows_of_step
from flwr_replay.models.layers import as_input
from flwr_replay.models.pretrained import read_weights
from flwr_replay.models.seeding import seeded
from flwr_replay.rng import derived_seed
from flwr_replay.terminal import installing

__all__ = [
    "InceptionDistance",
    "LocalFeatures",
    "LpipsFeatures",
    "Pixels",
    "frechet",
    "nearest",
    "nearest_other",
    "precision",
    "spread",
    "squared_distances",
]

SIDE = 64  # pixels: larger images are made smaller for local features; LPIPS has smaller ones made larger
WIDTHS = (16, 32, 64)  # channels of the local network
STEPS, RATE, BATCH = 300, 1e-3, 32  # of its training
FEATURES, RESIZED = 2048, 32  # of FID's Inception: numbers of an image, and images of 299 x 299 pixels at a time
BACKBONES = {"alex": (64, 3, 11, 11), "vgg": (64, 3, 3, 3)}  # the shape of the first convolution


class Pixels(Look):
    """The mean squared difference of pixels."""

    name = "pixels"

    def embed(self, x_BCHW: Tensor) -> Tensor:
        """Return the pixels, scaled."""
        flat_BF = x_BCHW.flatten(1)
        return flat_BF / sqrt(flat_BF.shape[1])


class LocalFeatures(Look):
    """Three convolutions, trained to classify the institution's own images; of two seeds they are two networks."""

    def __init__(self, form: ImageForm, seed: int) -> None:
        super().__init__()
        self.form, self.seed, self.name, self.learned = form, seed, "local features", False
        with seeded(derived_seed(seed, "local features")), torch.device("cpu"):
            sizes = (form.channels, *WIDTHS)
            self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairwise(sizes))
            self.head = nn.Linear(WIDTHS[-1], form.classes)

    def maps(self, x_BCHW: Tensor) -> list[Tensor]:
        """Return the features of every layer."""
        x = x_BCHW if self.form.size <= SIDE else F.interpolate(x_BCHW, size=(SIDE, SIDE), mode="area")
        maps = []
        for layer in self.layers:
            x = F.relu(layer(x))
            maps.append(x)
        return maps

    def embed(self, x_BCHW: Tensor) -> Tensor:
        """Return the unit vectors of all places and layers, scaled."""
        maps = self.maps(x_BCHW)
        return torch.cat([unit(m).flatten(1) / (m[0, 0].numel() * len(maps)) ** 0.5 for m in maps], dim=1)

    def pooled(self, x_BCHW: Tensor) -> Tensor:
        """Return the last layer's features, averaged over places: (B, K)."""
        return self.maps(x_BCHW)[-1].mean((2, 3))

    def learn(self, x_nCHW: Tensor, y_n: Tensor) -> Self:
        """Train on an institution's images, uint8 or in [0, 1], and their classes; return itself, frozen."""
        optimizer = torch.optim.Adam(self.parameters(), lr=RATE)
        for step in range(STEPS):
            rows = rows_of_step(step, len(y_n), BATCH, self.seed).to(x_nCHW.device)
            device = self.head.weight.device
            scores_BK = self.head(self.pooled(as_input(x_nCHW[rows]).to(device)))
            optimizer.zero_grad()
            F.cross_entropy(scores_BK, y_n[rows.to(y_n.device)].to(device)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return self.freeze()

    def freeze(self) -> Self:
        """Learn no more; return itself."""
        self.learned = True
        return self.requires_grad_(False)


class LpipsFeatures(Look):
    """LPIPS, version 0.1, with the user's file of torchvision's weights of AlexNet or VGG-16.

    Grey images have their channel repeated.

    Raises
    ------
    ConfigError
        If the package is missing, the file does not have these weights, or the images have other channels.
    """

    def __init__(self, file: str, form: ImageForm) -> None:
        super().__init__()
        require(
            form.channels in (1, 3),
            f"LPIPS needs images of 1 or 3 channels; got {form.channels}: leave generator.perceptual-weights empty",
        )
        try:
            import lpips
        except ImportError:
            raise ConfigError(f"generator.perceptual-weights needs the package lpips: {installing('gan')}") from None
        path = Path(file).expanduser().absolute()
        weights = read_weights(path, "generator.perceptual-weights", ["features.0.weight"]).arrays
        first = weights.get("features.0.weight")
        kind = next((name for name, shape in BACKBONES.items() if first is not None and first.shape == shape), "")
        with warnings.catch_warnings():  # it calls torchvision in an old way
            warnings.simplefilter("ignore")
            self.lpips = lpips.LPIPS(net=kind or "alex", pnet_rand=True, verbose=False)
        own = self.lpips.net.state_dict()  # its parts are sliceK.N of torchvision's features.N
        ours = {name: "features." + name.split(".", 1)[1] for name in own}
        if any(weights.get(theirs, torch.empty(0)).shape != own[name].shape for name, theirs in ours.items()):
            raise ConfigError(
                f"generator.perceptual-weights must be torchvision's weights of AlexNet or VGG-16; {file} holds "
                "others: save alexnet(weights=…).state_dict()"
            )
        self.lpips.net.load_state_dict({name: weights[theirs] for name, theirs in ours.items()})
        self.requires_grad_(False)
        self.name = f"LPIPS, {kind}"

    def embed(self, x_BCHW: Tensor) -> Tensor:
        """Return the weighted unit vectors of all places and layers, scaled."""
        x = x_BCHW.expand(-1, 3, -1, -1) * 2 - 1
        if x.shape[-1] < SIDE:
            x = F.interpolate(x, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        maps = self.lpips.net(self.lpips.scaling_layer(x))
        weights = [lin.model[-1].weight.clamp(min=0).sqrt() for lin in self.lpips.lins]
        each = [unit(m) * w / m[0, 0].numel() ** 0.5 for m, w in zip(maps, weights, strict=True)]
        return torch.cat([scaled.flatten(1) for scaled in each], dim=1)


class InceptionDistance:
    """Fréchet Inception distance (Heusel et al. 2017) by torchmetrics: how far sets of images lie from real ones.

    The file has the weights of FID's Inception, `pt_inception-2015-12-05-6726825d.pth` of the project torch-fidelity.
    Real images have 1 or 3 channels, uint8 or in [0, 1].

    Raises
    ------
    ConfigError
        If a package is missing, the file has other weights, or the images have other channels.
    """

    def __init__(self, file: str, real_nCHW: Tensor, device: torch.device) -> None:
        path = Path(file).expanduser().absolute()
        if real_nCHW.shape[1] not in (1, 3):
            raise ConfigError(f"--inception-weights is for images of 1 or 3 channels; got {real_nCHW.shape[1]}")
        try:
            from torchmetrics.image.fid import FrechetInceptionDistance

            read_weights(path, "--inception-weights")  # refuses a file that would run code when torch-fidelity loads it
            self.metric = FrechetInceptionDistance(
                FEATURES, reset_real_features=False, normalize=True, feature_extractor_weights_path=str(path)
            ).to(device)
        except ModuleNotFoundError:
            raise ConfigError(f"--inception-weights needs torchmetrics: {installing('gan')}") from None
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:120]
            raise ConfigError(f"--inception-weights must be those of FID's Inception; {path}: {reason}") from None
        self.device = device
        self._add(real_nCHW, real=True)

    def of(self, x_nCHW: Tensor) -> float:
        """Return the distance of these images from the real ones."""
        self.metric.reset()
        self._add(x_nCHW, real=False)
        return float(self.metric.compute())

    def _add(self, x_nCHW: Tensor, real: bool) -> None:
        for x in torch.split(x_nCHW, RESIZED):
            self.metric.update(as_input(x).expand(-1, 3, -1, -1).to(self.device), real=real)


def unit(x_BKHW: Tensor) -> Tensor:
    """Divide the features of every place by their length."""
    return x_BKHW * (x_BKHW.square().sum(1, keepdim=True) + 1e-10).rsqrt()


def squared_distances(a_AF: Tensor, b_BF: Tensor) -> Tensor:
    """Return the squared distances (A, B)."""
    squares_AB = a_AF.square().sum(1)[:, None] + b_BF.square().sum(1)[None]
    return (squares_AB - 2 * a_AF @ b_BF.T).clamp(min=0)


def nearest(a_AF: Tensor, b_BF: Tensor) -> Tensor:
    """Return the squared distance (A,) of every a to the nearest of all b."""
    return torch.cat([squared_distances(a, b_BF).amin(1) for a in torch.split(a_AF, AT_ONCE)])


def nearest_other(x_nF: Tensor) -> Tensor:
    """Return the squared distance (n,) of every vector to the nearest of all others."""
    nearest = []
    for first in range(0, len(x_nF), AT_ONCE):
        distances_An = squared_distances(x_nF[first : first + AT_ONCE], x_nF)
        distances_An[torch.arange(len(distances_An)), torch.arange(first, first + len(distances_An))] = torch.inf
        nearest.append(distances_An.amin(1))
    return torch.cat(nearest)


def spread(x_nCHW: Tensor, y_n: Tensor) -> float:
    """Return the mean distance of two images of a class, pixels, averaged over the classes with more than one."""
    flat_nF, distances = as_input(x_nCHW).flatten(1).cpu(), []
    for label in torch.unique(y_n):
        own = flat_nF[(y_n == label).cpu()][:AT_ONCE]
        if len(own) > 1:
            distances.append(float(torch.cdist(own, own).sum() / (len(own) * (len(own) - 1))))
    return float(np.mean(distances))


def precision(drawn_AF: Tensor, real_nF: Tensor, neighbours: int = 3) -> float:
    """Return the share of drawn images that lie among real ones (Kynkäänniemi et al. 2019, arXiv 1904.06991, eq. 1).

    One does if it is as near to some real image as that image's third nearest other real one.
    """
    distances_nn = squared_distances(real_nF, real_nF)
    radii_n = distances_nn.kthvalue(min(neighbours + 1, len(real_nF)), dim=1).values  # the nearest is the image itself
    return float((squared_distances(drawn_AF, real_nF) <= radii_n).any(1).float().mean())


def frechet(a_AK: NDArray[np.float64], b_BK: NDArray[np.float64]) -> float:
    """Return the Fréchet distance of two sets of features, as if both were normal (Heusel et al. 2017, eq. 6)."""
    moments = [(x.mean(0), np.atleast_2d(np.cov(x, rowvar=False))) for x in (a_AK, b_BK)]
    (mean_a, cov_a), (mean_b, cov_b) = moments
    roots = np.sqrt(np.linalg.eigvals(cov_a @ cov_b).astype(complex)).real.sum()
    return float(np.square(mean_a - mean_b).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * roots)
