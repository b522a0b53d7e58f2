"""Fréchet Inception distance (Heusel et al. 2017) by torchmetrics, with a file of the user's; nothing is downloaded."""

from pathlib import Path

import torch
from torch import Tensor

from flwr_replay.errors import ConfigError
from flwr_replay.models.layers import as_input
from flwr_replay.models.pretrained import read_weights
from flwr_replay.terminal import installing

__all__ = ["InceptionDistance"]

FEATURES = 2048
AT_ONCE = 32  # images of 299 x 299 pixels


class InceptionDistance:
    """Measures how far sets of images lie from real ones.

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
        for x in torch.split(x_nCHW, AT_ONCE):
            self.metric.update(as_input(x).expand(-1, 3, -1, -1).to(self.device), real=real)
