"""A VQ-VAE-2 with a PixelCNN over its codes, as one image generator.

Source: Razavi et al. 2019 (arXiv 1906.00446), Algorithms 1-2: first the VQ-VAE-2 learns, then the prior learns the
codes of all images. To draw an image, the prior draws codes for a label, and the decoder makes the image of them.

Not in Pennisi et al. 2023, whose generator is StyleGAN2-ADA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flwr_replay.config.sections import PriorConfig
from flwr_replay.files.tensors import nested, unnested
from flwr_replay.generators.base import AT_ONCE, ImageForm, ImageGenerator, Look, rows_of_step, step_rng
from flwr_replay.generators.pixelcnn import build_prior
from flwr_replay.generators.vqvae2 import VQVAE2Config, build_generator
from flwr_replay.models.layers import as_input
from flwr_replay.rng import derived_seed
from flwr_replay.wire.records import StateDict
from flwr_replay.wire.weights import load_arrays, load_optimizer_arrays, optimizer_arrays, to_arrays

__all__ = ["VQVAE2Images"]


class VQVAE2Images(ImageGenerator):
    """First the generator's epochs, then the prior's; both have a rate of their own and Adam.

    Parameters
    ----------
    config, prior : VQVAE2Config, PriorConfig
        The options of both networks.
    form : ImageForm
        The images.
    seed : int
        Weights, orders and the codebooks' draws depend on it alone.
    device : torch.device
        Where both networks lie.
    """

    def __init__(
        self, config: VQVAE2Config, prior: PriorConfig, form: ImageForm, seed: int, device: torch.device
    ) -> None:
        self.config, self.seed, self.device = config, seed, device
        self.prior_config = prior
        self.generator = build_generator(config, form.channels, form.size, derived_seed(seed, "generator")).to(device)
        self.prior = build_prior(prior, self.generator, form.classes, derived_seed(seed, "prior")).to(device)
        self.optimizer = torch.optim.Adam(self.generator.parameters(), lr=config.lr)
        self.prior_optimizer = torch.optim.Adam(self.prior.parameters(), lr=prior.lr)

    def steps(self, examples: int) -> int:
        """Return the batches of all epochs of both."""
        return self._before_prior(examples) + self.prior_config.epochs * max(
            1, examples // self.prior_config.batch_size
        )

    def _before_prior(self, examples: int) -> int:
        return self.config.epochs * max(1, examples // self.config.batch_size)

    def train(self, images: Tensor, labels: Tensor, steps: range) -> dict[str, float]:
        """Make steps of the generator's training, or of the prior's once the generator is complete."""
        middle, losses, codes = self._before_prior(len(labels)), [], None
        for step in steps:
            if step < middle:
                losses.append(self._generator_step(images, step))
                continue
            codes = self._codes(images) if codes is None else codes
            losses.append(self._prior_step(codes, labels, step - middle))
        return {"loss": float(torch.stack(losses).mean())} if losses else {"loss": 0.0}

    def _generator_step(self, images: Tensor, step: int) -> Tensor:
        config, n = self.config, len(images)
        epoch = step // max(1, n // config.batch_size)
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr * 0.5 ** (epoch // config.lr_halving if config.lr_halving else 0)
        rows = rows_of_step(step, n, config.batch_size, self.seed).to(images.device)
        loss, _ = self.generator.train().loss(as_input(images[rows]).to(self.device), step_rng(self.seed, step))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def _prior_step(self, codes: Tensor, labels: Tensor, step: int) -> Tensor:
        rows = rows_of_step(step, len(labels), self.prior_config.batch_size, derived_seed(self.seed, "prior"))
        loss = self.prior.train().loss(codes[rows].to(self.device), labels[rows.to(labels.device)].to(self.device))
        self.prior_optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.prior_optimizer.step()
        return loss.detach()

    def _codes(self, images: Tensor) -> Tensor:
        """Encode all images: (n, N), on the CPU."""
        model = self.generator.eval()
        return torch.cat([model.encode(as_input(x).to(self.device)).cpu() for x in torch.split(images, AT_ONCE)])

    def sample(self, labels_B: Tensor, rng: torch.Generator) -> Tensor:
        """Draw codes for the labels, and decode them."""
        prior, model = self.prior.eval(), self.generator.eval()
        parts = [model.decode(prior.sample(y.to(self.device), rng)) for y in torch.split(labels_B, AT_ONCE)]
        return torch.cat(parts).cpu()

    @torch.no_grad()
    def closest(self, x_BCHW: Tensor, labels_B: Tensor, look: Look) -> Tensor:
        """Encode and decode; it knows no other way, so labels and look do not matter."""
        model = self.generator.eval()
        parts = [model.decode(model.encode(x.to(self.device))) for x in torch.split(x_BCHW, AT_ONCE)]
        return torch.cat(parts).cpu()

    def state(self) -> StateDict:
        """Return both networks and both optimizers."""
        return nested(
            {
                "generator": to_arrays(self.generator),
                "prior": to_arrays(self.prior),
                "optimizer": optimizer_arrays(self.optimizer),
                "prior_optimizer": optimizer_arrays(self.prior_optimizer),
            }
        )

    def load_state(self, state: StateDict) -> None:
        """Restore both networks and both optimizers."""
        parts = unnested(state, only=("generator", "prior", "optimizer", "prior_optimizer"))
        load_arrays(self.generator, parts["generator"])
        load_arrays(self.prior, parts["prior"])
        load_optimizer_arrays(self.optimizer, parts["optimizer"])
        load_optimizer_arrays(self.prior_optimizer, parts["prior_optimizer"])
