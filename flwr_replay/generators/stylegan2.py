"""StyleGAN2-ADA (Karras et al. 2020, arXiv 1912.04958 and 2006.06676), class-conditional, trained by one institution.

Source: Pennisi et al. 2023, section III-B, eq. 1-2, and section IV-B.2.
Idea: a generator G makes images of latents and labels; a discriminator D learns to tell them from the real ones.

    for each step:
        D: softplus(D(G(z, y), y)) + softplus(−D(x, y)), every 16 steps + γ/2 ‖∇D(x)‖²      non-saturating; R1
           with dp=generator by DP-SGD on x, without R1; G learns from D alone, so it is as private as D
        G: softplus(−D(G(z, y), y)), every 4 steps + (‖Jᵀ noise‖ − a)²                      path length
        in the second phase of training: + λ · privacy loss of G's images without per-pixel noise   `privacy_loss.py`
        running means of G's weights; ADA's p

Deviations: ADA has fewer kinds of change (`ada.py`). R1's gradient is that at the augmented images: PyTorch has no
second derivative of its sampling. The mapping's lower learning rate is one of its own in Adam, which is the same, since
Adam does not see the scale of a parameter's gradient. Images are resized by means and bilinear interpolation. Eq. 2 of
the paper lacks the logarithm. Images whose size is no power of two are padded with their border, and cropped. Under DP
there is no deviation over a batch, R1, ADA or privacy loss.

`n` images of an institution, `B` batch, `C` channels, `H` height, `W` width, `Z` latents.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_replay.config.sections import (
    FRACTION,
    NOT_NEGATIVE_FINITE,
    POSITIVE,
    WIDTH,
    GeneratorConfig,
    PriorConfig,
    one_of,
    require,
    within,
)
from flwr_replay.files.tensors import nested, unnested
from flwr_replay.generators.ada import adapted, augmented
from flwr_replay.generators.base import AT_ONCE, ChargedSteps, ImageForm, ImageGenerator, Look, rows_of_step, step_rng
from flwr_replay.generators.perceptual import LocalFeatures, LpipsFeatures
from flwr_replay.generators.privacy_loss import KINDS, PrivacyLoss
from flwr_replay.generators.style_layers import Discriminator, StyleGenerator
from flwr_replay.models.layers import as_input
from flwr_replay.models.seeding import seeded
from flwr_replay.rng import derived_seed
from flwr_replay.wire.records import StateDict
from flwr_replay.wire.weights import load_arrays, to_arrays

__all__ = ["StyleGAN2", "StyleGAN2Config", "networks"]

PATH_EVERY, ADA_EVERY = 4, 4  # steps
BETAS = (0.0, 0.99)  # of Adam
PATH_DECAY, PATH_WEIGHT = 0.01, 2.0
PROJECTION_STEPS, PROJECTION_RATE, MEAN_OF = 200, 0.05, 1024  # Adam's, and styles in a class's mean
MOST = 100_000_000  # steps


@dataclass(frozen=True, kw_only=True)
class StyleGAN2Config(GeneratorConfig):
    """StyleGAN2-ADA and its training (Pennisi et al. 2023, section IV-B.2)."""

    length: ClassVar[str] = "generator.steps"

    latents: int = 512  # Z
    mapping: int = 8  # layers of the mapping network
    mapping_rate: float = 0.01  # its learning rate, in units of lr
    width: int = 64  # channels at full size, doubled per halving
    max_width: int = 512  # channels at most
    residual: bool = True  # shortcuts in the discriminator
    lr: float = 0.0025  # of Adam
    steps: int = 800_000
    deviation: bool = True  # whether the discriminator sees how far the examples of a batch deviate
    r1: float = 0.0  # γ; 0: 0.0002 times pixels over the batch size
    r1_every: int = 16  # steps between two of R1; 0: none
    path_length: bool = True
    ema_images: int = 10_000  # images in which an image's share of the running means halves
    ada_images: int = 500_000  # images in which p rises from 0 to 1 at most; 0: no augmentation
    condition_from: float = 0.0  # share of the training after which the label's weight begins to rise from 0 …
    condition_to: float = 0.0  # … and the one after which it is 1; 0: it is 1 from the start
    privacy_loss: str = "nearest"  # none | nearest | pairs | printed
    privacy_steps: int = 150_000  # steps with it, after the others
    privacy_weight: float = 1.0  # λ; the paper has none
    perceptual_weights: str = ""  # a file with AlexNet or VGG-16, for LPIPS; empty: features of the own task

    def __post_init__(self) -> None:
        super().__post_init__()
        within("generator.", self, latents=(1, WIDTH), mapping=(1, 100), width=(1, WIDTH), max_width=(1, WIDTH))
        within("generator.", self, mapping_rate=POSITIVE, r1=NOT_NEGATIVE_FINITE, r1_every=(0, MOST), steps=(1, MOST))
        within("generator.", self, ema_images=(1, MOST), ada_images=(0, MOST), condition_from=FRACTION)
        one_of("generator.privacy-loss", self.privacy_loss, KINDS)
        within("generator.", self, privacy_steps=(1, MOST), privacy_weight=NOT_NEGATIVE_FINITE)
        require(
            self.condition_from <= self.condition_to <= 1,
            f"generator.condition-to lies between condition-from and 1; got {self.condition_from} and "
            f"{self.condition_to}",
        )

    @property
    def keeps_distance(self) -> bool:
        """Whether there is a second phase of the training."""
        return self.privacy_loss != "none" and not self.checkpoint

    @property
    def dp_steps(self) -> int:
        """Of the discriminator, the only network that sees images."""
        return self.steps

    @property
    def dp_fault(self) -> str:
        """All that mixes the examples of a batch, or depends on them without noise, must be off."""
        got = self.deviation, self.r1_every, self.ada_images, self.privacy_loss
        if got == (False, 0, 0, "none"):
            return ""
        return (
            "under differential privacy a discriminator learns from each real image by itself, and its scores of real "
            "images are secret; got generator.deviation={}, r1-every={}, ada-images={}, privacy-loss={}: set "
            "generator.deviation=false generator.r1-every=0 generator.ada-images=0 generator.privacy-loss=none"
        ).format(*got)


def image_generator(
    config: StyleGAN2Config, prior: PriorConfig, form: ImageForm, seed: int, device: torch.device
) -> StyleGAN2:
    """Build a StyleGAN2, which needs no prior."""
    return StyleGAN2(config, form, seed, device)


def networks(config: StyleGAN2Config, form: ImageForm) -> tuple[StyleGenerator, Discriminator]:
    """Build the generator and the discriminator."""
    images, widths = (form.classes, form.channels, _side(form)), (config.width, config.max_width)
    generator = StyleGenerator(config.latents, config.mapping, *images, *widths)
    return generator, Discriminator(*images, *widths, config.residual, config.deviation)


def _side(form: ImageForm) -> int:
    return max(8, 1 << (form.size - 1).bit_length())


class StyleGAN2(ImageGenerator):
    """Generator, discriminator, running means, both optimizers, and ADA's p.

    Weights and all draws depend on the seed and the step alone.
    """

    def __init__(self, config: StyleGAN2Config, form: ImageForm, seed: int, device: torch.device) -> None:
        self.config, self.form, self.seed, self.device = config, form, seed, device
        side = _side(form)
        self.before, self.after = (side - form.size) // 2, (side - form.size + 1) // 2
        with seeded(derived_seed(seed, "stylegan2")), torch.device("cpu"):
            self.generator, self.discriminator = networks(config, form)
        self.privacy: PrivacyLoss | None = None  # made when its steps begin
        # Half as fast again on a CPU as the other order.
        self.generator.to(device).to(memory_format=torch.channels_last)
        self.discriminator.to(device).to(memory_format=torch.channels_last)
        file, look_seed = config.perceptual_weights, derived_seed(seed, "look")
        self.look = (LpipsFeatures(file, form) if file else LocalFeatures(form, look_seed)).to(device)
        self.running = deepcopy(self.generator).requires_grad_(False)
        mapping = [*self.generator.mapping.parameters()]
        others = [p for name, p in self.generator.named_parameters() if not name.startswith("mapping.")]
        self.optimizer = self._adam([{"params": others}, {"params": mapping}], PATH_EVERY * config.path_length)
        self.optimizer.param_groups[1]["lr"] *= config.mapping_rate
        self.d_optimizer = self._adam([{"params": [*self.discriminator.parameters()]}], config.r1_every)
        self.r1 = config.r1 or 0.0002 * side**2 / config.batch_size
        self.parts = {"generator": self.generator, "discriminator": self.discriminator, "running": self.running}
        self.parts |= {"optimizer": self.optimizer, "d_optimizer": self.d_optimizer}
        self.p, self.signs, self.path_mean = 0.0, 0.0, 0.0

    def _adam(self, groups: list[dict[str, list[nn.Parameter]]], every: int) -> torch.optim.Adam:
        """Return Adam, corrected for a regulariser that acts every so many steps (1912.04958, appendix B)."""
        c = every / (every + 1) if every else 1.0
        return torch.optim.Adam(groups, lr=self.config.lr * c, betas=(BETAS[0] ** c, BETAS[1] ** c), eps=1e-8)

    def mechanisms(self, examples: int) -> dict[str, int]:
        """Return the steps without and with privacy loss, however many images there are."""
        return {"generator": self.config.steps + self.config.privacy_steps * self.config.keeps_distance}

    # --- training -----------------------------------------------------------------------------------------------------

    def train(
        self,
        images: Tensor,
        labels: Tensor,
        steps: range,
        dp: ChargedSteps | None = None,
        classes: Tensor | None = None,
    ) -> dict[str, float]:
        """Make steps of both networks' training."""
        if dp:
            assert classes is not None
            self._train_under_dp(images, labels, steps, dp, classes)
            return {"loss": 0.0}
        recorded: defaultdict[str, list[Tensor]] = defaultdict(list)
        for step in steps:
            rows = rows_of_step(step, len(labels), self.config.batch_size, self.seed).to(images.device)
            x_BCHW = self._padded(as_input(images[rows]).to(self.device) * 2 - 1)
            y_B, rng = labels[rows.to(labels.device)].to(self.device), step_rng(self.seed, step)
            recorded["discriminator"].append(self._discriminator_step(step, x_BCHW, y_B, rng))
            second = step >= self.config.steps and self.config.keeps_distance
            nearness = partial(self._privacy_loss(images, labels), rows_B=rows.to(self.device)) if second else None
            for name, value in self._generator_step(step, y_B, rng, nearness).items():
                recorded[name].append(value)
            self._average(step)
            if (step + 1) % ADA_EVERY == 0 and self.config.ada_images:
                self.p = adapted(self.p, self.signs / ADA_EVERY, ADA_EVERY * len(y_B), self.config.ada_images)
                self.signs = 0.0
        means = {name: float(torch.stack(values).mean()) for name, values in recorded.items()}
        return {"loss": 0.0, "p": self.p} | means | ({"margin": self.privacy.margin} if self.privacy else {})

    def _train_under_dp(self, images: Tensor, labels: Tensor, steps: range, dp: ChargedSteps, classes: Tensor) -> None:
        """Make steps of which D's are taken by DP-SGD; fakes are public, and so are their labels."""
        b = self.config.batch_size
        for step, rows in zip(steps, dp.rows(len(labels)), strict=True):
            rng, weight = step_rng(self.seed, step), self.label_weight(step)
            x_BCHW = self._padded(as_input(images[rows.to(images.device)]).to(self.device) * 2 - 1)
            y_B = labels[rows.to(labels.device)].to(self.device)
            fake_y_B = classes[torch.randint(len(classes), (b,), generator=rng)].to(self.device)
            with torch.no_grad():
                w_BZ = self.generator.styles(self._latents(b, rng), fake_y_B, weight)
                fake_BCHW = self.generator.synthesis(w_BZ, rng)
            signs = torch.cat([-x_BCHW.new_ones(b), x_BCHW.new_ones(len(y_B))])
            batch = torch.cat([fake_BCHW, x_BCHW]), torch.cat([fake_y_B, y_B]), signs
            dp.step(self.discriminator, self.d_optimizer, partial(self._adversarial_losses, weight), batch, b, b)
            self._generator_step(step, fake_y_B, rng, None)
            self._average(step)

    def _adversarial_losses(self, weight: float, x_BCHW: Tensor, y_B: Tensor, signs_B: Tensor) -> Tensor:
        """Return eq. 1's losses for D, one for each image; the sign is 1 of a real one, and -1 of a fake."""
        return F.softplus(-signs_B * self.discriminator(x_BCHW, y_B, weight))

    def _privacy_loss(self, images: Tensor, labels: Tensor) -> PrivacyLoss:
        """Return the privacy loss on these images; local features learn them when it is first needed."""
        if self.privacy is None:
            if isinstance(self.look, LocalFeatures) and not self.look.learned:
                self.look.learn(images, labels)
            self.privacy = PrivacyLoss(self.config.privacy_loss, self.look, images, self.device)
        return self.privacy

    def _discriminator_step(self, step: int, x_BCHW: Tensor, y_B: Tensor, rng: torch.Generator) -> Tensor:
        """Eq. 1 for D, non-saturating, with R1 every 16 steps."""
        weight = self.label_weight(step)
        with torch.no_grad():
            fake = self.generator.synthesis(self.generator.styles(self._latents(len(y_B), rng), y_B, weight), rng)
        fake, real = augmented(fake, self.p, rng), augmented(x_BCHW, self.p, rng).detach()
        regularised = bool(self.config.r1_every) and step % self.config.r1_every == 0
        real.requires_grad_(regularised)
        scores_B = self.discriminator(real, y_B, weight)
        loss = F.softplus(self.discriminator(fake, y_B, weight)).mean() + F.softplus(-scores_B).mean()
        reported = loss.detach()
        if regularised:
            loss = loss + self.config.r1_every * self.r1 / 2 * gradient_penalty(scores_B, real)
        self.d_optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.d_optimizer.step()
        self.signs += float(scores_B.detach().sign().mean())
        return reported

    def _generator_step(
        self, step: int, y_B: Tensor, rng: torch.Generator, nearness: Callable[[Tensor], Tensor] | None
    ) -> dict[str, Tensor]:
        """Eq. 1 for G, non-saturating, with the path length every 4 steps, and the privacy loss if there is one."""
        weight = self.label_weight(step)
        w_BZ = self.generator.styles(self._latents(len(y_B), rng), y_B, weight)
        fake = self.generator.synthesis(w_BZ, rng)
        self.discriminator.requires_grad_(False)
        loss = F.softplus(-self.discriminator(augmented(fake, self.p, rng), y_B, weight)).mean()
        reported = {"loss": loss.detach()}
        if nearness is not None:
            # With its per-pixel noise the generator would keep the distance by adding noise.
            near = nearness(self._shown(self.generator.synthesis(w_BZ, None)))
            loss, reported["privacy"] = loss + self.config.privacy_weight * near, near.detach()
        if self.config.path_length and step % PATH_EVERY == 0:
            half_B = y_B[: max(1, len(y_B) // 2)]
            half_BZ = self.generator.styles(self._latents(len(half_B), rng), half_B, weight)
            lengths_B = path_lengths(self.generator.synthesis(half_BZ, rng), half_BZ, rng)
            self.path_mean += PATH_DECAY * (float(lengths_B.detach().mean()) - self.path_mean)
            loss = loss + PATH_EVERY * PATH_WEIGHT * (lengths_B - self.path_mean).square().mean()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.discriminator.requires_grad_(True)
        return reported

    def label_weight(self, step: int) -> float:
        """Return the label's weight (gradual conditioning, Shahbazi et al. 2022, arXiv 2201.06578)."""
        first, last = (share * self.config.steps for share in (self.config.condition_from, self.config.condition_to))
        return 1.0 if step >= last else max(0.0, (step - first) / (last - first))

    def _average(self, step: int) -> None:
        """Move the running means; at first they are short, a twentieth of the images so far."""
        images = min(self.config.ema_images, (step + 1) * self.config.batch_size * 0.05)
        keep = 0.5 ** (self.config.batch_size / max(images, 1e-8))
        with torch.no_grad():
            for mean, value in zip(self.running.parameters(), self.generator.parameters(), strict=True):
                mean.lerp_(value, 1 - keep)

    def _latents(self, n: int, rng: torch.Generator) -> Tensor:
        return torch.randn(n, self.config.latents, generator=rng).to(self.device)

    def _padded(self, x_BCHW: Tensor) -> Tensor:
        return F.pad(x_BCHW, (self.before, self.after) * 2, mode="replicate") if self.before + self.after else x_BCHW

    def _shown(self, images_BCHW: Tensor) -> Tensor:
        """Crop padded images in about [-1, 1] to images in [0, 1]."""
        kept = slice(self.before, self.before + self.form.size)
        return ((images_BCHW[..., kept, kept] + 1) / 2).clamp(0, 1)

    # --- sampling and state -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(self, labels_B: Tensor, rng: torch.Generator) -> Tensor:
        """Draw images by the running means."""
        batches = []
        for y in torch.split(labels_B.to(self.device), AT_ONCE):
            images = self.running.synthesis(self.running.styles(self._latents(len(y), rng), y), rng)
            batches.append(self._shown(images).cpu())
        return torch.cat(batches)

    def closest(self, x_BCHW: Tensor, labels_B: Tensor, look: Look) -> Tensor:
        """Project: move styles from the class's mean until the image, without noise, looks like the given one.

        Source: Karras et al. 2020 (1912.04958), section 5 and appendix D; Pennisi et al. 2023, section IV-C.2. There
        the latent also gets noise, and the noise maps are moved too.
        """
        shown, rng = [], step_rng(self.seed, 0, "closest")
        for x, y in zip(torch.split(x_BCHW, AT_ONCE), torch.split(labels_B, AT_ONCE), strict=True):
            target_BF = look.embed(x.to(self.device))
            with torch.no_grad():
                z_MZ = self._latents(MEAN_OF, rng)
                mean_of = {
                    int(k): self.running.styles(z_MZ, y.new_full((MEAN_OF,), k).to(self.device)).mean(0) for k in y
                }
            w_BZ = torch.stack([mean_of[int(k)] for k in y]).requires_grad_(True)
            optimizer = torch.optim.Adam([w_BZ], lr=PROJECTION_RATE)
            for _ in range(PROJECTION_STEPS):
                made_BF = look.embed(self._shown(self.running.synthesis(w_BZ, None)))
                optimizer.zero_grad()
                (made_BF - target_BF).square().sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            shown.append(self._shown(self.running.synthesis(w_BZ, None)).detach().cpu())
        return torch.cat(shown)

    def state(self) -> StateDict:
        """Return networks, running means, optimizers and numbers."""
        numbers = torch.tensor([self.p, self.signs, self.path_mean], dtype=torch.float64).numpy()
        look = {"look": to_arrays(self.look)} if isinstance(self.look, LocalFeatures) and self.look.learned else {}
        return super().state() | nested({"numbers": {"all": numbers}} | look)

    def load_state(self, state: StateDict) -> None:
        """Restore what `state` returned."""
        groups = unnested(state)
        super().load_state(nested({name: groups[name] for name in self.parts}))
        self.p, self.signs, self.path_mean = map(float, groups["numbers"]["all"])
        if isinstance(self.look, LocalFeatures) and "look" in groups:
            load_arrays(self.look, groups["look"])
            self.look.freeze()


def gradient_penalty(scores_B: Tensor, x_BCHW: Tensor) -> Tensor:
    """Return the mean over the batch of ‖∂ score / ∂ x‖², differentiable (Mescheder et al. 2018, R1)."""
    (gradient,) = torch.autograd.grad(scores_B.sum(), x_BCHW, create_graph=True)
    return gradient.square().sum((1, 2, 3)).mean()


def path_lengths(images_BCHW: Tensor, w_BZ: Tensor, rng: torch.Generator) -> Tensor:
    """Return ‖Jᵀ noise‖ (B,) for the Jacobian J of images by styles, differentiable (1912.04958, section 3.2)."""
    noise = torch.randn(images_BCHW.shape, generator=rng, dtype=images_BCHW.dtype).to(images_BCHW.device)
    scaled = noise / (images_BCHW.shape[2] * images_BCHW.shape[3]) ** 0.5
    (gradient,) = torch.autograd.grad((images_BCHW * scaled).sum(), w_BZ, create_graph=True)
    return gradient.square().sum(1).add(1e-16).sqrt()
