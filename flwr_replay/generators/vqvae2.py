"""A VQ-VAE-2 with a prior over its codes, as one image generator.

Source: Razavi et al. 2019 (arXiv 1906.00446), Algorithms 1-2: first the VQ-VAE-2 learns, then the prior learns the
codes of all images. To draw an image, the prior draws codes for a label, and the decoder makes the image of them.

Not in Pennisi et al. 2023, whose generator is StyleGAN2-ADA.
"""

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from flwr_replay.config.sections import PriorConfig
from flwr_replay.generators.autoencoder import VQVAE2, VQVAE2Config, build_generator, summed_loss
from flwr_replay.generators.base import AT_ONCE, ChargedSteps, ImageForm, ImageGenerator, Look, rows_of_step, step_rng
from flwr_replay.generators.priors import CodePrior, build_prior, summed_nats
from flwr_replay.models.layers import as_input, step
from flwr_replay.rng import derived_seed

__all__ = ["VQVAE2Config", "VQVAE2Images", "generator_steps", "image_generator", "prior_steps"]


def generator_steps(
    config: VQVAE2Config,
    model: VQVAE2,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, torch.Generator]],
    first: int,
    in_epoch: int,
    dp: ChargedSteps | None,
    num_replayed: int = 0,
) -> Iterator[tuple[Tensor | None, dict[str, Tensor]]]:
    """Take a generator's step on each batch of images in [0, 1], the replayed ones first, with its rng.

    Yielded are its loss, and the loss's terms; under DP neither. A batch is drawn just before its step. The rate is
    halved every `lr_halving` epochs of `in_epoch` steps; `first` is the number of the first step.
    """
    for at, (x_B, rng) in enumerate(batches, first):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * 0.5 ** (at // in_epoch // config.lr_halving if config.lr_halving else 0)
        if dp:
            example_losses = partial(summed_loss, model, rng)
            dp.step(model, optimizer, example_losses, (x_B,), config.batch_size, num_replayed)
            yield None, {}
        else:
            loss, terms = model.loss(x_B, rng)
            yield step(model, optimizer, loss), terms


def prior_steps(
    config: PriorConfig,
    prior: CodePrior,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor, torch.Generator]],
    dp: ChargedSteps | None,
) -> Iterator[Tensor | None]:
    """Take a prior's step on each batch of codes and labels, with its rng; yield its loss, under DP none."""
    device = next(prior.parameters()).device
    for codes_B, labels_B, rng in batches:
        draws = dp.uniform(len(codes_B), prior.draws) if dp else prior.uniform(len(codes_B), rng)
        batch = tuple(tensor.to(device) for tensor in (codes_B, labels_B, draws))
        if dp:
            dp.step(prior, optimizer, partial(summed_nats, prior), batch, config.batch_size)
            yield None
        else:
            yield step(prior, optimizer, prior.loss(*batch))


class VQVAE2Images(ImageGenerator):
    """First the generator's epochs, then the prior's; both have a rate of their own and Adam.

    Weights, orders and the codebooks' draws depend on the seed alone.
    """

    def __init__(
        self, config: VQVAE2Config, prior: PriorConfig, form: ImageForm, seed: int, device: torch.device
    ) -> None:
        self.config, self.prior_config, self.seed, self.device = config, prior, seed, device
        self.generator = build_generator(config, form.channels, form.size, derived_seed(seed, "generator")).to(device)
        self.prior = build_prior(prior, self.generator, form.classes, derived_seed(seed, "prior")).to(device)
        self.optimizer = torch.optim.Adam(self.generator.parameters(), lr=config.lr)
        self.prior_optimizer = torch.optim.Adam(self.prior.parameters(), lr=prior.lr)
        self.parts = {"generator": self.generator, "prior": self.prior}
        self.parts |= {"optimizer": self.optimizer, "prior_optimizer": self.prior_optimizer}

    def mechanisms(self, examples: int) -> dict[str, int]:
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
        n, config, prior = len(labels), self.config, self.prior_config
        middle = self.mechanisms(n)["generator"]
        first = range(steps.start, min(steps.stop, middle))
        second = range(max(steps.start, middle) - middle, steps.stop - middle)
        self.generator.train(), self.prior.train()

        def batches_of(own: range, batch_size: int, seed: int) -> Iterator[tuple[int, Tensor]]:
            return zip(own, dp.rows(n) if dp else (rows_of_step(at, n, batch_size, seed) for at in own), strict=False)

        of_images = (
            (as_input(images[rows.to(images.device)]).to(self.device), step_rng(self.seed, at))
            for at, rows in batches_of(first, config.batch_size, self.seed)
        )
        trained = generator_steps(
            config, self.generator, self.optimizer, of_images, first.start, max(1, n // config.batch_size), dp
        )
        losses = [loss for loss, _ in trained]
        if second:
            codes = self._codes(images)
            of_codes = (
                (codes[rows], labels[rows.to(labels.device)], step_rng(self.seed, at, "prior"))
                for at, rows in batches_of(second, prior.batch_size, derived_seed(self.seed, "prior"))
            )
            losses += prior_steps(prior, self.prior, self.prior_optimizer, of_codes, dp)
        counted = [loss for loss in losses if loss is not None]
        return {"loss": float(torch.stack(counted).mean()) if counted else 0.0}

    def _codes(self, images: Tensor) -> Tensor:
        """Encode all images: (n, N), on the CPU."""
        model = self.generator.eval()
        return torch.cat([model.encode(as_input(x).to(self.device)).cpu() for x in torch.split(images, AT_ONCE)])

    def sample(self, labels_B: Tensor, rng: torch.Generator) -> Tensor:
        """Draw codes for the labels, and decode them."""
        prior, model = self.prior.eval(), self.generator.eval()
        batches = [model.decode(prior.sample(y.to(self.device), rng)) for y in torch.split(labels_B, AT_ONCE)]
        return torch.cat(batches).cpu()

    @torch.no_grad()
    def closest(self, x_BCHW: Tensor, labels_B: Tensor, look: Look) -> Tensor:
        """Encode and decode; it knows no other way, so labels and look do not matter."""
        model = self.generator.eval()
        batches = [model.decode(model.encode(x.to(self.device))) for x in torch.split(x_BCHW, AT_ONCE)]
        return torch.cat(batches).cpu()


image_generator = VQVAE2Images  # builds it, as `SynthesisPlan.fresh` asks for
