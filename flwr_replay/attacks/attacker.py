"""The attacker: messages and networks, auxiliary data with a name, a seed. Never an original.

It chooses α, steps and restarts by attacking auxiliary images that it has sent through the same model. Without
auxiliary images it takes the middle of what it would choose from.

`n` images behind a message, `m` auxiliary ones, `B` batch, `C` channels or classes, `H` height, `W` width.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flwr_replay.attacks.catalogue import ANALYTIC, DECODER, MATCHING, NEAREST, OPTIMISED, Attack
from flwr_replay.attacks.gradients import (
    Arrays,
    LocalSteps,
    Loss,
    change_of,
    first_input,
    has_linear_input,
    invert,
    label_counts,
)
from flwr_replay.attacks.latents import invert as invert_latents
from flwr_replay.attacks.latents import latents_of, learned_decoder, mixes, nearest_auxiliary
from flwr_replay.attacks.search import Search, tuned
from flwr_replay.config.sections import require
from flwr_replay.learning.latents import BLOCK
from flwr_replay.learning.training import torch_rng
from flwr_replay.models.layers import as_input

__all__ = ["Attacker", "Attempt", "Auxiliary", "head_bias"]

# On MNIST: shallow cuts want the first of these, deep ones the last. A rate of 0.1 is too small for all of them.
LATENT_SEARCHES = tuple(Search(alpha=alpha, lr=lr) for alpha, lr in ((1e-2, 0.3), (1e-1, 0.3), (5e-1, 1.0)))
CHANGE_SEARCHES = tuple(Search(alpha=alpha, lr=0.1, signs=True) for alpha in (1e-3, 1e-2, 1e-1))
TUNED_ON = 8  # auxiliary images
UNSEEN = 64  # images of noise that stand in for auxiliary ones where only predictions are needed


@dataclass(frozen=True)
class Auxiliary:
    """Data that the attacker has besides the messages."""

    source: str  # named in every result: a public folder, or another institution (collusion)
    images_mCHW: Tensor  # uint8 or in [0, 1]
    labels_m: Tensor


@dataclass(frozen=True)
class Attempt:
    """What an attack made of a message."""

    attack: Attack
    auxiliary: str  # whose data helped; "none"
    search: Search | None  # the settings chosen; none: there is nothing to choose
    images_nCHW: Tensor  # in [0, 1]
    seconds: float  # of this attack, its tuning or training included


class Attacker:
    """Runs the attacks that need choices; all others are single functions.

    Parameters
    ----------
    form : tuple of int
        (C, H, W) of an image.
    auxiliary : Auxiliary or None
        On the device of the messages.
    seed : int
        All attempts follow from it.
    latent_searches, change_searches : sequence of Search
        What to choose from.
    decoder_steps : int
        Batches on which a decoder learns.

    Raises
    ------
    ConfigError
        If the auxiliary images have another form.
    """

    def __init__(
        self,
        form: tuple[int, int, int],
        auxiliary: Auxiliary | None,
        seed: int,
        latent_searches: Sequence[Search] = LATENT_SEARCHES,
        change_searches: Sequence[Search] = CHANGE_SEARCHES,
        decoder_steps: int = 600,
    ) -> None:
        if auxiliary is not None:
            found = tuple(auxiliary.images_mCHW.shape[1:])
            require(
                found == form,
                f"auxiliary images must have the form of the institution's, {form}; got {found}: choose others",
            )
        self.form, self.auxiliary, self.seed = form, auxiliary, seed
        self.latent_searches, self.change_searches = latent_searches, change_searches
        self.decoder_steps = decoder_steps

    def latents(self, encoder: nn.Module, latents_n: Tensor, dtype: str = "float32") -> Iterator[Attempt]:
        """Attack latents in turn: latent matching, then with auxiliary data a look-up and a learned decoder.

        Parameters
        ----------
        encoder : nn.Module
            The stages up to the cut, in the mode in which the latents were made.
        latents_n : Tensor
            (n, ...) float32, unpacked; one batch of SplitNN's, if the encoder mixes its examples.
        dtype : str
            In which they travelled.
        """
        begun = time.perf_counter()
        search = self.latent_searches[len(self.latent_searches) // 2]
        batch, tuned_on = (len(latents_n), len(latents_n)) if mixes(encoder) else (BLOCK, TUNED_ON)
        if self.auxiliary:
            few = self.auxiliary.images_mCHW[:tuned_on]
            known = latents_of(encoder, few, dtype, batch)
            search = tuned(
                self.latent_searches, lambda one: invert_latents(encoder, known, self.form, one, self.seed), few
            )
        yield self._attempt(OPTIMISED, begun, invert_latents(encoder, latents_n, self.form, search, self.seed), search)
        if not self.auxiliary:
            return
        begun = time.perf_counter()
        images = self.auxiliary.images_mCHW
        known = latents_of(encoder, images, dtype, batch)
        yield self._attempt(NEAREST, begun, nearest_auxiliary(latents_n, known, images))
        begun = time.perf_counter()
        decoder = learned_decoder(known, images, self.decoder_steps, self.seed)
        yield self._attempt(DECODER, begun, decoder.images(latents_n))

    def labels(self, model: nn.Module, change: Arrays, examples: int, local: LocalSteps) -> Tensor:
        """Infer the labels behind a change of weights, (n,), sorted: their order is not to be had."""
        bias_C = change[head_bias(model)] / (local.steps * local.lr)
        if self.auxiliary:
            seen = as_input(self.auxiliary.images_mCHW[:: -(-len(self.auxiliary.images_mCHW) // UNSEEN)])
        else:
            seen = torch.rand(UNSEEN, *self.form, generator=torch_rng(self.seed, "noise")).to(bias_C.device)
        with torch.no_grad():
            shares_C = copy.deepcopy(model)(seen).softmax(1).mean(0)
        counts_C = label_counts(bias_C, examples, shares_C)
        return torch.arange(len(counts_C)).repeat_interleave(counts_C).to(bias_C.device)

    def changes(
        self, model: nn.Module, loss: Loss, change: Arrays, labels_n: Tensor, local: LocalSteps
    ) -> Iterator[Attempt]:
        """Attack a gradient or a change of weights in turn: analytically where that is exact, then by matching.

        Parameters
        ----------
        model : nn.Module
            The weights sent, in the mode in which institutions train.
        loss : callable
            From outputs and labels to their mean loss.
        change : mapping of str to Tensor
            θ sent − θ back by parameter name, or the gradient.
        labels_n : Tensor
            As they travelled, or from `labels`.
        local : LocalSteps
            The training that was asked for.
        """
        begun = time.perf_counter()
        if len(labels_n) == 1 and local.steps == 1 and has_linear_input(model):
            yield self._attempt(ANALYTIC, begun, first_input(model, change, self.form))
        begun = time.perf_counter()

        def attack(one: Search, of: Arrays, labels: Tensor) -> Tensor:
            return invert(model, loss, of, labels, self.form, local, one, self.seed)

        search = self.change_searches[len(self.change_searches) // 2]
        if self.auxiliary:
            few, few_labels = (x[: len(labels_n)] for x in (self.auxiliary.images_mCHW, self.auxiliary.labels_m))
            known = change_of(model, loss, as_input(few), few_labels, local)
            search = tuned(self.change_searches, lambda one: attack(one, known, few_labels), few)
        yield self._attempt(MATCHING, begun, attack(search, change, labels_n), search)

    def _attempt(self, attack: Attack, begun: float, images_nCHW: Tensor, search: Search | None = None) -> Attempt:
        source = self.auxiliary.source if self.auxiliary else "none"
        return Attempt(attack, source, search, images_nCHW, time.perf_counter() - begun)


def head_bias(model: nn.Module) -> str:
    """Return the name of the head's bias.

    Raises
    ------
    ConfigError
        If the model does not end in a linear layer with a bias.
    """
    name, last = [(name, layer) for name, layer in model.named_modules() if not list(layer.children())][-1]
    require(
        isinstance(last, nn.Linear) and last.bias is not None,
        f"labels are inferred from the bias of a linear head; got {last}: attack another field",
    )
    return f"{name}.bias"
