"""Reconstruction: from what an institution sent to images, one trial for each kind of numbers.

A trial attacks with what the server has (`attempts`), and computes anew what was sent for the judge (`rows`). What kind
of numbers a field has, its declaration says; `flwr_replay.lab.registry` has the attacks on each.

`N` all images of an institution, `n` those that are attacked, `C`, `H`, `W` of an image.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flwr_replay.attacks.attacker import Attacker, Attempt
from flwr_replay.attacks.catalogue import DECODED, LOOKED_AT
from flwr_replay.attacks.latents import decoded, latents_of, mixes
from flwr_replay.errors import DataError, FlwrReplayError, RunError
from flwr_replay.files.tensors import StateDict
from flwr_replay.generators.codes import unpack_codes
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.lab.evidence import NO_MODEL, UNKNOWN_NETWORK, Answer, Evidence, Exhibit
from flwr_replay.lab.judge import Originals, check_anew, check_replay, rows_behind, rows_in_order, same_data
from flwr_replay.learning.latents import unpack
from flwr_replay.learning.training import batches, torch_rng
from flwr_replay.models import split
from flwr_replay.models.layers import as_input
from flwr_replay.models.zoo import frozen_before
from flwr_replay.wire.recording import Recorded
from flwr_replay.wire.weights import load_arrays

__all__ = ["OfActivations", "OfCodes", "OfImages", "Question", "Trial", "drawn_rows", "failed"]

MOST = 50  # images that a search looks for: as many as the paper's (Qu et al. 2022, section 4.4.2)
AT_ONCE = 500  # images that are decoded or looked up


Question = tuple[str, Callable[[], dict[str, Any]]]  # an attack by name, and the call that tries it


def failed(error: FlwrReplayError) -> dict[str, Any]:
    """Raise the error for which an attack cannot be tried."""
    raise error


class Trial(ABC):
    """Attacks on one field of one institution's answers."""

    mixed = 1  # how many images are mixed in what was sent, so that their order is unknown
    note = ""  # a sentence on what the attacker had to guess or leave out
    places_n: Tensor  # the images behind the answer that are attacked: an attempt returns the first of these
    answer: Answer  # the one that is attacked

    def __init__(self, exhibit: Exhibit, evidence: Evidence) -> None:
        self.exhibit, self.evidence = exhibit, evidence

    @abstractmethod
    def attempts(self, attacker: Attacker) -> Iterator[Attempt]:
        """Yield the attacks that can be tried."""

    @abstractmethod
    def rows(self, originals: Originals) -> Tensor | None:
        """Return which original is behind each image of the answer; None: some of them, and which is a secret.

        Raises `DataError` if what was sent, computed anew from the originals, is something else.
        """

    def shown(self) -> tuple[StateDict, nn.Module | None]:
        """Return what an attack of the user's own sees: what was sent, and the network that made it."""
        return self.exhibit.arrays(self.answer), None

    def last(self) -> Trial | None:
        """Return a trial of the last answer; None where the first is as good, or the only one."""
        return None

    @property
    @abstractmethod
    def values_per_pixel(self) -> float:
        """Numbers sent for each number of an image."""

    def with_network(self, fixed: bool = False) -> tuple[Answer, Recorded]:
        """Return the first answer whose request was recorded and brought a network; raise `RunError` without one.

        A `fixed` network everyone has beforehand, so that no request brings it.
        """
        recorded = [(answer, answer.request) for answer in self.exhibit.answers if answer.request is not None]
        for answer, request in recorded:
            if request.arrays or fixed:
                return answer, request
        raise RunError(UNKNOWN_NETWORK if recorded else NO_MODEL)

    def some_of(self, number: int) -> Tensor:
        """Return the places of some images, drawn at random."""
        rng = torch_rng(self.evidence.config.seed, "attacked", self.exhibit.institution)
        return torch.randperm(number, generator=rng)[:AT_ONCE]


def drawn_rows(
    number: int, batch_size: int, shuffle: torch.Generator, only: slice = slice(None), among: Tensor | None = None
) -> Iterator[Tensor]:
    """Yield the rows of the batches of one pass over so many examples, as `flwr_replay.learning.training.batches`."""
    numbered = torch.arange(number)
    for rows, _ in batches(numbered[:, None], numbered, batch_size, shuffle, only, among):
        yield rows[:, 0].long()


class OfActivations(Trial):
    """Latents, or activations at the cut, with the encoder that the request brought, or that never trains."""

    def __init__(self, exhibit: Exhibit, evidence: Evidence) -> None:
        super().__init__(exhibit, evidence)
        config = evidence.config
        fixed = frozen_before(config.model, config.task, getattr(config.strategy, "cut", ""))
        self.answer, self.request = self.with_network(fixed)
        request = self.request
        self.encoder, _ = split(evidence.model(), str(request.scalars.get("cut", "")))
        if not self.encoder.state_dict().keys() <= request.arrays.keys():
            raise RunError(UNKNOWN_NETWORK)
        load_arrays(self.encoder, {name: request.arrays[name] for name in self.encoder.state_dict()})
        self.encoder.train(exhibit.stage != "extract")  # FedReplay encodes in evaluation mode, SplitNN while it trains
        values = exhibit.array(self.answer)
        self.dtype = values.dtype.name
        sent_n = torch.from_numpy(unpack(values, self.answer.content.arrays.get("scales")))
        scalars = self.answer.content.scalars  # only rows of images as they are: further views of them follow
        self.sent_n = sent_n[: max(0, int(scalars["num-examples"]) - int(scalars.get("first", 0)))]
        self.places_n = self.some_of(len(self.sent_n))
        if mixes(self.encoder):  # batch norm in training: a batch as it was, the first
            self.places_n = torch.arange(min(len(self.sent_n), evidence.config.training.batch_size))

    def shown(self) -> tuple[StateDict, nn.Module]:
        """Return the latents of images as they are, unpacked, and the encoder."""
        return {self.exhibit.field: self.sent_n.numpy()}, self.encoder

    def attempts(self, attacker: Attacker) -> Iterator[Attempt]:
        """Search for some; with auxiliary images look up and decode many."""
        yield from attacker.latents(self.encoder, self.sent_n[self.places_n], MOST, self.dtype)

    def rows(self, originals: Originals) -> Tensor:
        """Find each row's original by encoding all of them; under local DP row i is the institution's i-th image."""
        if "latents" in self.evidence.config.privacy.mechanisms:
            scalars = self.answer.content.scalars
            first, number = int(scalars["first"]), int(scalars["num-examples"])
            if same_data(originals, self.evidence.digests(self.exhibit.institution)):
                return first + torch.arange(len(self.sent_n))
            return rows_in_order(
                self.sent_n, first, number, partial(latents_of, self.encoder, originals.x_NCHW, "float32")
            )
        if self.exhibit.stage != "extract":
            return self._rows_of_batches(originals)
        return rows_behind(self.sent_n, lambda: latents_of(self.encoder, originals.x_NCHW, self.dtype))

    def _rows_of_batches(self, originals: Originals) -> Tensor:
        """Draw SplitNN's batches anew, and check that they give these activations."""
        check_replay(self.evidence.config)
        if self.evidence.config.training.changes:
            raise DataError("institutions trained on images that were changed at random, which the judge does not have")
        config, exchange = self.evidence.config, int(self.request.scalars.get("server-round", 0))
        shuffle = torch_rng(config.seed, self.exhibit.institution, exchange)
        group, together = (int(self.request.scalars[name]) for name in ("group", "micro-batches"))
        first = slice(group * together, (group + 1) * together)
        drawn = list(drawn_rows(len(originals.y_N), config.training.batch_size, shuffle, first))
        with torch.no_grad():
            anew = torch.cat([copy.deepcopy(self.encoder)(originals.x_NCHW[rows]) for rows in drawn])
        check_anew(self.sent_n, anew[: len(self.sent_n)])
        return torch.cat(drawn)[: len(self.sent_n)]

    @property
    def values_per_pixel(self) -> float:
        """Latents for each number of an image."""
        return self.sent_n[0].numel() / int(np.prod(self.evidence.form))


class OfCodes(Trial):
    """Codes of a VQ-VAE-2, with the generator that the request brought."""

    def __init__(self, exhibit: Exhibit, evidence: Evidence) -> None:
        super().__init__(exhibit, evidence)
        (self.answer, request), plan = self.with_network(), ReplayPlan.of(evidence.config)
        assert plan is not None
        self.plan, self.generator = plan, plan.fresh_generator().eval()
        load_arrays(self.generator, request.arrays)
        self.packed = exhibit.array(self.answer)
        self.places_n = self.some_of(len(self.packed))

    def shown(self) -> tuple[StateDict, nn.Module]:
        """Return the packed codes and the generator."""
        return self.exhibit.arrays(self.answer), self.generator

    def attempts(self, attacker: Attacker) -> Iterator[Attempt]:
        """Decode; nothing has to be guessed."""
        packed, channels = self.packed[self.places_n.numpy()], self.plan.channels
        yield Attempt(DECODED, lambda: (decoded(self.generator, packed)[:, :channels], {}))

    def rows(self, originals: Originals) -> Tensor:
        """Find each row's original by encoding all of them; -1 for those of others, which replay has put there."""
        batches = (torch.split(array, self.plan.at_once) for array in (originals.x_NCHW, originals.y_N))
        with torch.no_grad():
            codes = [self.generator.encode(self.plan.generator_input(x, y)) for x, y in zip(*batches, strict=True)]
        size = self.generator.codes_per_image, self.generator.codebook_size
        codes_n = torch.from_numpy(unpack_codes(self.packed, *size))
        return rows_behind(codes_n, partial(torch.cat, codes), others=True, near=0.0)

    @property
    def values_per_pixel(self) -> float:
        """Bytes for each number of an image."""
        return float(self.packed.shape[1] / np.prod(self.evidence.form))


class OfImages(Trial):
    """Examples as they are, as FedAvg+Share sends them: nothing is left to attack."""

    def __init__(self, exhibit: Exhibit, evidence: Evidence) -> None:
        super().__init__(exhibit, evidence)
        self.answer = exhibit.answers[0]
        self.sent_n = as_input(torch.from_numpy(np.ascontiguousarray(exhibit.array(self.answer))))
        self.places_n = self.some_of(len(self.sent_n))

    def attempts(self, attacker: Attacker) -> Iterator[Attempt]:
        """Look at them."""
        yield Attempt(LOOKED_AT, lambda: (self.sent_n[self.places_n], {}))

    def rows(self, originals: Originals) -> Tensor:
        """Find each image among the originals."""
        return rows_behind(self.sent_n, lambda: originals.x_NCHW)

    @property
    def values_per_pixel(self) -> float:
        """One."""
        return 1.0
