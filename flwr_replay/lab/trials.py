"""Reconstruction: from what an institution sent to images, one trial for each kind of numbers.

A trial attacks (`attacks`) with what the server has, and lets the judge find the originals (`rows`). What kind of
numbers a field has, its declaration says; `flwr_replay.attacks.catalogue` says which attacks there are.

`N` all images of an institution, `n` those that are attacked, `M` auxiliary images, `C`, `H`, `W` of an image.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flwr_replay.attacks.codes import decoded
from flwr_replay.attacks.latents import invert, latents_of, learned_decoder, nearest_auxiliary
from flwr_replay.attacks.search import Search, tuned
from flwr_replay.errors import RunError
from flwr_replay.generators.codes import unpack_codes
from flwr_replay.lab.auxiliary import Auxiliary, spread
from flwr_replay.lab.evidence import NO_MODEL, Answer, Evidence, Exhibit
from flwr_replay.lab.judge import Originals, rows_behind
from flwr_replay.learning.latents import unpack
from flwr_replay.models import split
from flwr_replay.models.layers import as_input
from flwr_replay.wire.weights import load_arrays

__all__ = [
    "WEIGHTS",
    "Attempt",
    "Auxiliary",
    "Found",
    "OfActivations",
    "OfCodes",
    "OfImages",
    "Question",
    "Trial",
    "affordable",
    "spread",
]

MOST = 50  # images that a search attacks: as many as the paper (Qu et al. 2022, section 4.4.2)
LEARNED = 500  # images that are decoded at once
WEIGHTS = (0.0, 1e-4, 1e-3, 1e-2)  # α, of which the attacker chooses one by its own images
TRIED = 8  # auxiliary images on which it chooses


@dataclass(frozen=True)
class Found:
    """What an attack made of an answer.

    Attributes
    ----------
    places_n : Tensor
        Which of the images behind the answer these claim to be.
    batch : int
        How many images were mixed in what was sent, so that their order is unknown; 1: none.
    """

    images_nCHW: Tensor
    places_n: Tensor
    batch: int = 1
    settings: dict[str, Any] = field(default_factory=dict)


Attempt = tuple[str, Callable[[], Found]]  # an attack by name
Question = tuple[str, Callable[[], dict[str, Any]]]  # an attack that gives no images


class Trial:
    """Attacks on one field of one institution's answers.

    Parameters
    ----------
    exhibit : Exhibit
        The field.
    evidence : Evidence
        What else the server has.
    """

    def __init__(self, exhibit: Exhibit, evidence: Evidence) -> None:
        self.exhibit, self.evidence = exhibit, evidence

    def attacks(self, auxiliary: Auxiliary | None, seconds: float, seed: int) -> Iterator[Attempt]:
        """Yield the attacks by name, each to be called; each may take so many seconds."""
        raise NotImplementedError

    def rows(self, originals: Originals) -> Tensor:
        """Return which original is behind each image of the answer that was attacked."""
        raise NotImplementedError

    @property
    def values_per_pixel(self) -> float:
        """Numbers sent for each number of an image."""
        raise NotImplementedError

    def with_request(self) -> Answer:
        """Return the first answer whose request was recorded, too."""
        for answer in self.exhibit.answers:
            if answer.request is not None:
                return answer
        raise RunError(NO_MODEL)


class OfActivations(Trial):
    """Latents, or activations at the cut, with the encoder that the request brought: eq. 2 of Qu et al."""

    def __init__(self, exhibit: Exhibit, evidence: Evidence) -> None:
        super().__init__(exhibit, evidence)
        self.answer = self.with_request()
        request = self.answer.request
        assert request is not None
        whole = evidence.model()
        self.encoder, _ = split(whole, str(request.scalars.get("cut", "")))
        if not self.encoder.state_dict().keys() <= request.arrays.keys():
            raise RunError(NO_MODEL)
        load_arrays(self.encoder, {name: request.arrays[name] for name in self.encoder.state_dict()})
        self.encoder.train(exhibit.stage != "extract")  # FedReplay encodes in evaluation mode, SplitNN while it trains
        values = exhibit.array(self.answer)
        self.dtype = values.dtype.name
        self.sent_n = torch.from_numpy(unpack(values, self.answer.content.arrays.get("scales")))

    def attacks(self, auxiliary: Auxiliary | None, seconds: float, seed: int) -> Iterator[Attempt]:
        """Search by optimisation; with auxiliary images also a look-up and a learned decoder."""
        few, many = spread(len(self.sent_n), MOST), spread(len(self.sent_n), LEARNED)
        form = self.evidence.form

        def optimised() -> Found:
            def attack(latents: Tensor, search: Search) -> Tensor:
                return invert(self.encoder, latents, form, search, seed)

            search = Search(steps=affordable(lambda steps: attack(self.sent_n[few], Search(steps=steps)), seconds))
            if auxiliary is not None:
                known = auxiliary.x_MCHW[:TRIED]
                sent = latents_of(self.encoder, known, self.dtype)
                short = [Search(alpha=alpha, steps=max(50, search.steps // 8)) for alpha in WEIGHTS]
                best = tuned(short, lambda one: attack(sent, one), known)
                search = Search(alpha=best.alpha, steps=search.steps)
            images = attack(self.sent_n[few], search)
            said = {"alpha": search.alpha, "steps": search.steps, "restarts": search.restarts}
            return Found(images, few, settings=said)

        def looked_up() -> Found:
            assert auxiliary is not None
            known = latents_of(self.encoder, auxiliary.x_MCHW, self.dtype)
            images = nearest_auxiliary(self.sent_n[many], known, auxiliary.x_MCHW)
            return Found(images, many)

        def learned() -> Found:
            assert auxiliary is not None
            known = latents_of(self.encoder, auxiliary.x_MCHW, self.dtype)

            def train(steps: int) -> Any:
                return learned_decoder(known, auxiliary.x_MCHW, steps, seed)

            steps = affordable(train, seconds, most=4000)
            images = train(steps).images(self.sent_n[many])
            return Found(images, many, settings={"steps": steps})

        yield "search (eq. 2)", optimised
        if auxiliary is not None:
            yield "nearest auxiliary image", looked_up
            yield "learned decoder", learned

    def rows(self, originals: Originals) -> Tensor:
        """Find each row's original by encoding all of them."""
        return rows_behind(self.sent_n, lambda: latents_of(self.encoder, originals.x_NCHW, self.dtype))

    @property
    def values_per_pixel(self) -> float:
        """Latents for each number of an image."""
        return self.sent_n[0].numel() / int(np.prod(self.evidence.form))


class OfCodes(Trial):
    """Codes of a VQ-VAE-2, with the generator that the request brought."""

    def __init__(self, exhibit: Exhibit, evidence: Evidence) -> None:
        super().__init__(exhibit, evidence)
        self.answer, plan = self.with_request(), evidence.replay_plan()
        request = self.answer.request
        assert request is not None
        assert plan is not None
        self.generator = plan.fresh_generator().eval()
        load_arrays(self.generator, request.arrays)
        self.packed = exhibit.array(self.answer)
        self.plan = plan

    def attacks(self, auxiliary: Auxiliary | None, seconds: float, seed: int) -> Iterator[Attempt]:
        """Decode; nothing has to be guessed."""
        many = spread(len(self.packed), LEARNED)

        def as_replayed() -> Found:
            images = decoded(self.generator, self.packed[many.numpy()])[:, : self.plan.channels]
            return Found(images, many)

        yield "decoder that travelled", as_replayed

    def rows(self, originals: Originals) -> Tensor:
        """Find each row's original by encoding all of them; replayed images of others are behind some rows."""
        x, y = originals.x_NCHW, originals.y_N
        parts = zip(torch.split(x, self.plan.at_once), torch.split(y, self.plan.at_once), strict=True)
        with torch.no_grad():
            codes = torch.cat([self.generator.encode(self.plan.generator_input(*part)).cpu() for part in parts])
        size = self.generator.codes_per_image, self.generator.codebook_size
        sent = torch.from_numpy(unpack_codes(self.packed, *size))
        return rows_behind(sent, lambda: codes)

    @property
    def values_per_pixel(self) -> float:
        """Bytes for each number of an image."""
        return float(self.packed.shape[1] / np.prod(self.evidence.form))


class OfImages(Trial):
    """Examples as they are, as FedAvg+Share sends them: nothing is left to attack."""

    def __init__(self, exhibit: Exhibit, evidence: Evidence) -> None:
        super().__init__(exhibit, evidence)
        self.sent_n = as_input(torch.from_numpy(np.ascontiguousarray(exhibit.array(exhibit.answers[0]))))

    def attacks(self, auxiliary: Auxiliary | None, seconds: float, seed: int) -> Iterator[Attempt]:
        """Look at them."""
        few = spread(len(self.sent_n), LEARNED)
        yield "look at them", lambda: Found(self.sent_n[few], few)

    def rows(self, originals: Originals) -> Tensor:
        """Find each image among the originals."""
        return rows_behind(self.sent_n, lambda: originals.x_NCHW)

    @property
    def values_per_pixel(self) -> float:
        """One."""
        return 1.0


def affordable(attack: Callable[[int], Any], seconds: float, most: int = 2000, probe: int = 10) -> int:
    """Return how many steps an attack can take in so many seconds, by timing a few."""
    attack(1)
    begun = time.monotonic()
    attack(probe)
    each = max(1e-6, (time.monotonic() - begun) / probe)
    return int(max(50, min(most, seconds / each)))
