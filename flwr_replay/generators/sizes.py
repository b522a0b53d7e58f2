"""How large a run's generator and prior are, known before they are built."""

import importlib

import torch
from torch import nn

from flwr_replay.config.run import RunConfig
from flwr_replay.generators.autoencoder import VQVAE2, VQVAE2Config
from flwr_replay.generators.base import ImageForm
from flwr_replay.generators.stylegan2 import StyleGAN2Config, networks

__all__ = ["bytes_of"]


def bytes_of(config: RunConfig) -> int:
    """Return the bytes of the weights of a run's generator and prior without building them; 0 where it has none."""
    task, generator, modules = config.task, config.generator, list[nn.Module]()
    if config.replay.name == "none" and not config.draws_images:
        return 0
    with torch.device("meta"):
        if isinstance(generator, StyleGAN2Config):
            modules += networks(generator, ImageForm(task.channels, task.size, task.classes))
        if isinstance(generator, VQVAE2Config):
            coder = VQVAE2(generator, task.channels + (task.kind == "segmentation"), task.size)
            classes = task.classes if task.kind == "classification" else config.prior.bins
            prior = importlib.import_module(f"flwr_replay.generators.{config.prior.name}")
            modules += [coder, prior.code_prior(config.prior, coder, classes)]
    return sum(value.numel() * value.element_size() for module in modules for value in module.state_dict().values())
