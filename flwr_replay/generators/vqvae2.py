"""A VQ-VAE-2 with a prior over its codes, as one image generator.

Source: Razavi et al. 2019 (arXiv 1906.00446), Algorithms 1-2: first the VQ-VAE-2 learns, then the prior learns the
codes of all images. To draw an image, the prior draws codes for a label, and the decoder makes the image of them.

Not in Pennisi et al. 2023, whose generator is StyleGAN2-ADA.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from flwr_replay.config.sections import PriorConfig
from flwr_replay.files.tensors import nested, unnested
from flwr_replay.generators.autoencoder import VQVAE2Config, build_generator, summed_loss
from flwr_replay.generators.base import AT_ONCE, ChargedSteps, ImageForm, ImageGenerator, Look, rows_of_step, step_rng
from flwr_replay.generators.priors import build_prior, summed_nats
from flwr_replay.models.layers import as_input
from flwr_replay.rng import derived_seed
from flwr_replay.wire.records import StateDict
from flwr_replay.wire.weights import load_arrays, load_optimizer_arrays, optimizer_arrays, to_arrays

__all__ = ["VQVAE2Config", "VQVAE2Images", "image_generator"]


def image_generator(
    config: VQVAE2Config, prior: PriorConfig, form: ImageForm, seed: int, device: torch.device
) -> ImageGenerator:
    """Build a VQ-VAE-2 with a prior that draws its codes."""
    return VQVAE2Images(config, prior, form, seed, device)


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

    def parts(self, examples: int) -> dict[str, int]:
        """Return the batches of all epochs of both."""
        generator, prior = self.config, self.prior_config
        return {
            "generator": generator.epochs * max(1, examples // generator.batch_size),
            "prior": prior.epochs * max(1, examples // prior.batch_size),
        }

    def train(
        self,
        images: Tensor,
        labels: Tensor,
        steps: range,
        dp: ChargedSteps | None = None,
        classes: Tensor | None = None,
    ) -> dict[str, float]:
        """Make steps of the generator's training, or of the prior's once the generator is complete."""
        middle, losses, codes = self.parts(len(labels))["generator"], list[Tensor](), None
        rows = dp.rows(len(labels)) if dp else None
        for step in steps:
            if step < middle:
                losses += self._generator_step(images, step, dp, rows)
                continue
            codes = self._codes(images) if codes is None else codes
            losses += self._prior_step(codes, labels, step - middle, dp, rows)
        return {"loss": float(torch.stack(losses).mean())} if losses else {"loss": 0.0}

    def _generator_step(
        self, images: Tensor, step: int, dp: ChargedSteps | None, drawn: Iterator[Tensor] | None
    ) -> list[Tensor]:
        config, n = self.config, len(images)
        epoch = step // max(1, n // config.batch_size)
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr * 0.5 ** (epoch // config.lr_halving if config.lr_halving else 0)
        rows = next(drawn) if drawn else rows_of_step(step, n, config.batch_size, self.seed)
        x_BCHW, rng = as_input(images[rows.to(images.device)]).to(self.device), step_rng(self.seed, step)
        if dp:
            losses = partial(summed_loss, self.generator.train(), rng)
            dp.step(self.generator, self.optimizer, losses, (x_BCHW,), config.batch_size)
            return []
        loss, _ = self.generator.train().loss(x_BCHW, rng)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return [loss.detach()]

    def _prior_step(
        self, codes: Tensor, labels: Tensor, step: int, dp: ChargedSteps | None, drawn: Iterator[Tensor] | None
    ) -> list[Tensor]:
        n, b = len(labels), self.prior_config.batch_size
        rows = next(drawn) if drawn else rows_of_step(step, n, b, derived_seed(self.seed, "prior"))
        own = step_rng(self.seed, step, "prior")
        draws = dp.uniform(len(rows), self.prior.draws) if dp else self.prior.uniform(len(rows), own)
        batch = tuple(part.to(self.device) for part in (codes[rows], labels[rows.to(labels.device)], draws))
        if dp:
            losses = partial(summed_nats, self.prior.train())
            dp.step(self.prior, self.prior_optimizer, losses, batch, b)
            return []
        loss = self.prior.train().loss(*batch)
        self.prior_optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.prior_optimizer.step()
        return [loss.detach()]

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
