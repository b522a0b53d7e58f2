"""The attacker: messages and networks, auxiliary data with a name, a seed. Never an original.

It chooses α, steps and restarts by attacking auxiliary images that it has sent through the same model. Without
auxiliary images it takes the middle of what it would choose from.

`n` images behind a message, `m` auxiliary ones, `B` batch, `C` channels or classes, `H` height, `W` width.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

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
    is_statistic,
    label_counts,
)
from flwr_replay.attacks.latents import invert as invert_latents
from flwr_replay.attacks.latents import latents_of, learned_decoder, mixes, nearest_auxiliary
from flwr_replay.attacks.search import Search, tuned
from flwr_replay.config.sections import require
from flwr_replay.learning.latents import ROWS_TOGETHER
from flwr_replay.learning.training import torch_rng
from flwr_replay.models.layers import as_input

__all__ = ["Attacker", "Attempt", "Auxiliary", "head_bias"]

# On MNIST: shallow cuts want the first of these, deep ones the last. A rate of 0.1 is too small for all of them.
LATENT_SEARCHES = tuple(
    Search(alpha=alpha, lr=lr) for alpha, lr in ((0.0, 0.3), (1e-3, 0.3), (1e-2, 0.3), (1e-1, 0.3), (5e-1, 1.0))
)
CHANGE_SEARCHES = tuple(Search(alpha=alpha, lr=0.1, signs=True) for alpha in (1e-3, 1e-2, 1e-1))
STATISTICS = 0.1  # weight of batch norm's statistics where they came back; the other choice is none
RESTARTS = 3  # each with a third of the steps; the other choice is one start
TUNED_ON = 8  # auxiliary images
SHORT = 8  # a choice is made with an eighth of the steps
PROBED = 10  # steps that are timed
MOST_STEPS = 2000  # of a search; the paper: 20,000
FEWEST_STEPS = 50  # of a search
FEWEST_SHORT = 25  # of one that chooses settings
MOST_TIMES, MOST_SECONDS = 10, 60.0  # above both there is no choice of settings, and then no search
DECODER_STEPS = 4000
UNSEEN = 64  # images of noise that stand in for auxiliary ones where only predictions are needed


@dataclass(frozen=True)
class Auxiliary:
    """Data that the attacker has besides the messages."""

    source: str  # named in every result: a public folder, or another institution (collusion)
    images_mCHW: Tensor  # uint8 or in [0, 1]
    labels_m: Tensor


@dataclass(frozen=True)
class Attempt:
    """An attack that can be tried: `images` tries it, and returns images (n, C, H, W) in [0, 1] with its settings."""

    attack: Attack
    images: Callable[[], tuple[Tensor, dict[str, float]]]


class Attacker:
    """Runs the attacks that need choices; all others are single functions.

    `form` is (C, H, W) of an image; auxiliary images of another form are a `ConfigError`, and lie on the device of the
    messages. All attempts follow from the seed. Each may take so many seconds, about: a search or a decoder's training
    takes as many steps.
    """

    def __init__(
        self,
        form: tuple[int, int, int],
        auxiliary: Auxiliary | None,
        seed: int,
        seconds: float = 60,
    ) -> None:
        if auxiliary is not None:
            shape = tuple(auxiliary.images_mCHW.shape[1:])
            require(
                shape == form,
                f"auxiliary images must have the form of the institution's, {form}; got {shape}: choose others",
            )
        self.form, self.auxiliary, self.seed, self.seconds = form, auxiliary, seed, seconds

    def latents(self, encoder: nn.Module, latents_n: Tensor, few: int, dtype: str = "float32") -> Iterator[Attempt]:
        """Attack latents: latent matching, then with auxiliary data a look-up and a learned decoder.

        The encoder is in the mode in which the latents (n, ...) were made. They are float32, unpacked, and travelled as
        `dtype`; one batch of SplitNN's, if the encoder mixes its examples. Latent matching looks for the first `few` of
        them; for all, if the encoder mixes them.
        """
        mixed = mixes(encoder)
        batch, tuned_on = (len(latents_n), len(latents_n)) if mixed else (ROWS_TOGETHER, TUNED_ON)

        def matched() -> tuple[Tensor, dict[str, float]]:
            def attack(search: Search, latents: Tensor = latents_n if mixed else latents_n[:few]) -> Tensor:
                return invert_latents(encoder, latents, self.form, search, self.seed)

            candidates = self._paced(LATENT_SEARCHES, attack, tuned_on / (len(latents_n) if mixed else few))
            search = candidates[len(candidates) // 2]
            if self.auxiliary and candidates[1:]:
                known = self.auxiliary.images_mCHW[:tuned_on]
                sent = latents_of(encoder, known, dtype, batch)
                search = _chosen(candidates, lambda candidate: attack(candidate, sent), known)
            return attack(search), _settings(search, candidates)

        yield Attempt(OPTIMISED, matched)
        if not self.auxiliary:
            return
        images = self.auxiliary.images_mCHW

        def decoded() -> tuple[Tensor, dict[str, float]]:
            known = latents_of(encoder, images, dtype, batch)
            each = seconds_of_a_step(lambda steps: learned_decoder(known, images, steps, self.seed), self.seconds)
            steps = affordable(each, self.seconds, DECODER_STEPS)
            return learned_decoder(known, images, steps, self.seed).images(latents_n), {"steps": steps}

        yield Attempt(
            NEAREST, lambda: (nearest_auxiliary(latents_n, latents_of(encoder, images, dtype, batch), images), {})
        )
        yield Attempt(DECODER, decoded)

    def labels(self, model: nn.Module, change: Arrays, examples: int, local: LocalSteps) -> Tensor:
        """Infer the labels behind a change of weights, (n,), sorted: their order is not to be had."""
        bias_C = local.gradients(model, change)[head_bias(model)]
        if self.auxiliary:
            seen = as_input(self.auxiliary.images_mCHW[:: -(-len(self.auxiliary.images_mCHW) // UNSEEN)])
        else:
            seen = torch.rand(UNSEEN, *self.form, generator=torch_rng(self.seed, "noise")).to(bias_C.device)
        with torch.no_grad():
            shares_C = copy.deepcopy(model)(seen).softmax(1).mean(0)
        counts_C = label_counts(bias_C, examples, shares_C)
        return torch.arange(len(counts_C)).repeat_interleave(counts_C).to(bias_C.device)

    def likely_labels(self, classes: int, examples: int, told: Tensor | None) -> tuple[Tensor, str]:
        """Guess the labels behind a change of weights that does not show the head's bias, (n,), sorted.

        They have the shares of `told`, labels that the institution has sent elsewhere, else of the auxiliary data, else
        equal ones; the text says which.
        """
        if told is not None:
            known, source = told, "the labels that the institution has sent in other messages"
        elif self.auxiliary:
            known, source = self.auxiliary.labels_m, "the labels of the attacker's own images"
        else:
            known, source = torch.arange(classes), "equal numbers of all classes"
        shares_C = torch.bincount(known.long(), minlength=classes) / len(known)
        counts_C = label_counts(torch.zeros(classes), examples, shares_C)
        return torch.arange(classes).repeat_interleave(counts_C), source

    def changes(
        self,
        model: nn.Module,
        loss: Loss,
        change: Arrays,
        labels_n: Tensor,
        local: LocalSteps,
        at_cut: bool = False,
    ) -> Iterator[Attempt]:
        """Attack a gradient or a change of weights in turn: analytically where that is exact, then by matching.

        The parameters are those of `flwr_replay.attacks.gradients.invert`. With `at_cut`, `labels_n` are not labels but
        the gradients at the cut that the server has sent, (n, ...).
        """
        if len(labels_n) == 1 and local.steps == 1 and has_linear_input(model):
            yield Attempt(ANALYTIC, lambda: (first_input(model, local.gradients(model, change), self.form), {}))

        def attack(search: Search, of: Arrays = change, labels: Tensor = labels_n) -> Tensor:
            return invert(model, loss, of, labels, self.form, local, search, self.seed)

        def matched() -> tuple[Tensor, dict[str, float]]:
            weights = (0.0, STATISTICS) if any(map(is_statistic, change)) else (0.0,)
            candidates = self._paced(
                [replace(search, statistics=weight) for search in CHANGE_SEARCHES for weight in weights], attack, 1.0
            )
            search = candidates[len(candidates) // 2]
            if self.auxiliary and candidates[1:] and len(self.auxiliary.labels_m) >= len(labels_n):
                few = self.auxiliary.images_mCHW[: len(labels_n)]
                own = labels_n if at_cut else self.auxiliary.labels_m[: len(labels_n)]
                simulated = change_of(model, loss, as_input(few), own, local)
                known = {name: array for name, array in simulated.items() if name in change}
                search = _chosen(candidates, lambda candidate: attack(candidate, known, own), few)
            return attack(search), _settings(search, candidates)

        yield Attempt(MATCHING, matched)

    def _paced(self, searches: Sequence[Search], attack: Callable[[Search], Tensor], share: float) -> list[Search]:
        """Give searches as many steps as the time allows, with the choice, on `share` images for each attacked.

        Return the middle one only where the fewest steps of the choice would take far longer than the attack may; raise
        `ConfigError` if the fewest steps of one search would.
        """
        each = seconds_of_a_step(lambda steps: attack(replace(searches[0], steps=steps)), self.seconds)
        most = max(MOST_TIMES * self.seconds, MOST_SECONDS)
        require(
            FEWEST_STEPS * each <= most,
            f"a search has {FEWEST_STEPS} steps at least, and one takes {each:.2g} s here; it may take {most:.0f} s: "
            "give more --minutes",
        )
        shorts = share * (len(searches) + 2) if self.auxiliary else 0.0  # as long as so many short searches
        if shorts * FEWEST_SHORT * each > most:
            searches, shorts = [searches[len(searches) // 2]], 0.0
        steps = affordable(each, self.seconds / (1 + shorts / SHORT), MOST_STEPS)
        return [replace(search, steps=steps) for search in searches]


def seconds_of_a_step(attack: Callable[[int], object], seconds: float) -> float:
    """Time a few steps of an attack, or one where these would take longer than the attack may."""
    begun = time.perf_counter()
    attack(1)  # not counted: the first steps are slower
    probed = PROBED if (time.perf_counter() - begun) * PROBED <= seconds else 1
    begun = time.perf_counter()
    attack(probed)
    return max(1e-6, (time.perf_counter() - begun) / probed)


def affordable(each: float, seconds: float, most: int) -> int:
    """Return how many steps of so many seconds fit the time; at least `FEWEST_STEPS`."""
    return int(max(FEWEST_STEPS, min(most, seconds / each)))


def _chosen(candidates: Sequence[Search], attack: Callable[[Search], Tensor], auxiliary: Tensor) -> Search:
    """Choose on auxiliary images, with fewer steps: first α and the like, then how many starts share them.

    Return the choice with all steps.
    """
    short = [replace(search, steps=max(FEWEST_SHORT, search.steps // SHORT)) for search in candidates]
    chosen = tuned(short, attack, auxiliary)
    best = tuned([chosen, replace(chosen, steps=chosen.steps // RESTARTS, restarts=RESTARTS)], attack, auxiliary)
    return replace(best, steps=candidates[0].steps // best.restarts)


def _settings(search: Search, candidates: Sequence[Search]) -> dict[str, float]:
    chosen = {"alpha": search.alpha, "steps": search.steps, "restarts": search.restarts, "candidates": len(candidates)}
    return {**chosen, "statistics": search.statistics} if search.statistics else chosen


def head_bias(model: nn.Module) -> str:
    """Return the name of the head's bias; raise `ConfigError` if the model does not end in a linear layer with one."""
    name, last = [(name, layer) for name, layer in model.named_modules() if not list(layer.children())][-1]
    require(
        isinstance(last, nn.Linear) and last.bias is not None,
        f"labels are inferred from the bias of a linear head; got {last}: attack another field",
    )
    return f"{name}.bias"
