"""Reconstruction from a gradient, or from the change between the weights that were sent and those that came back.

`N` all images of an institution, `n` those behind an answer, `C` classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from flwr_replay.attacks.attacker import Attacker, Attempt
from flwr_replay.attacks.gradients import LocalSteps, change_of, is_statistic
from flwr_replay.errors import DataError, RunError
from flwr_replay.lab.evidence import UNKNOWN_NETWORK, Answer, Evidence, Exhibit
from flwr_replay.lab.judge import NEAR, OTHERS, Originals, OtherOriginals, check_replay
from flwr_replay.lab.trials import Trial
from flwr_replay.learning.tasks import make_task
from flwr_replay.learning.training import at_once, batches, iterations, make_optimizer, step, torch_rng
from flwr_replay.wire.recording import Recorded
from flwr_replay.wire.weights import load_arrays, to_arrays

__all__ = ["OfChange"]

MOST_BEHIND = 128  # images behind one answer that a search looks for
PLAIN = ("fedavg", "fedavgm", "fedsgd", "cwt")  # methods whose first visit is nothing but the steps simulated here
BLOCK = 256  # examples whose gradient FedSGD computes at once
MOST_STEPS = 64  # of local training that are simulated


class OfChange(Trial):
    """A gradient, or weights that came back: eq. 1 of Qu et al., with local steps simulated."""

    def __init__(self, exhibit: Exhibit, evidence: Evidence) -> None:
        super().__init__(exhibit, evidence)
        config = evidence.config
        self.answer, self.request, self.begun = self._begun(exhibit, evidence)
        request, self.training = self.request, config.training
        self.model, self.task = evidence.model(), make_task(config.task)
        parameters = dict(self.model.named_parameters())
        back = {name: torch.from_numpy(array) for name, array in exhibit.arrays(self.answer).items()}
        if not parameters.keys() <= self.begun.keys():
            raise RunError(UNKNOWN_NETWORK)
        if not parameters.keys() <= back.keys():
            raise RunError(
                "only a part of the network came back; a search needs the change of all of it. What the part makes of "
                "the same images travels, too, and is attacked"
            )
        load_arrays(self.model, {name: self.begun[name] for name in self.model.state_dict()})
        self.model.train()
        sent = {name: parameter.detach() for name, parameter in parameters.items()}
        self.gradient = exhibit.declared.means == "gradient"
        self.change = {name: back[name] if self.gradient else sent[name] - back[name] for name in sent}
        self.statistics = {name: array for name, array in back.items() if is_statistic(name)}
        self.examples = int(self.answer.content.scalars["num-examples"])
        self.lr = float(request.scalars.get("lr", 1.0))
        self.passes = int(request.scalars.get("local-epochs", 1))
        size = min(self.training.batch_size, self.examples)
        self.local = LocalSteps()
        self.mixed = self.examples  # all of them in one gradient
        if not self.gradient:
            a_pass = iterations(self.examples, size)
            self.mixed = a_pass * size
            self.local = LocalSteps(
                steps=self.passes * a_pass,
                batch_size=size,
                lr=self.lr,
                momentum=self.training.momentum if self.training.optimizer == "sgd" else 0.0,
                weight_decay=self.training.weight_decay,
            )
        self.places_n = torch.arange(self.mixed)

    def _begun(self, exhibit: Exhibit, evidence: Evidence) -> tuple[Answer, Recorded, Mapping[str, NDArray[Any]]]:
        """Return an answer with its request and the weights with which its training began.

        The request brings them; an institution of a gossip begins its first training with fresh ones, whose seed the
        server has told it.
        """
        first = exhibit.answers[0]
        if first.request and not first.request.arrays and not first.request.scalars.get("continues", True):
            return first, first.request, to_arrays(evidence.model(int(first.request.scalars["init-seed"])))
        answer, request = self.with_network()
        return answer, request, request.arrays

    @property
    def values_per_pixel(self) -> float:
        """Weights for each number of all images behind the answer."""
        channels, height, width = self.evidence.form
        return sum(one.numel() for one in self.change.values()) / (self.mixed * channels * height * width)

    def labels_n(self, attacker: Attacker) -> Tensor:
        """Infer the labels behind the answer; sorted, since their order is not to be had.

        Raises
        ------
        ConfigError
            If the model has no linear head with a bias.
        RunError
            If the task has no classes.
        """
        if self.evidence.config.task.kind != "classification":
            raise RunError(f"labels are inferred for classes; the task's kind is {self.evidence.config.task.kind}")
        return attacker.labels(self.model, self.change, self.mixed, self.local)

    def attempts(self, attacker: Attacker) -> Iterator[Attempt]:
        """Solve a linear first layer exactly where one image is behind the answer, and search.

        Raises
        ------
        RunError
            If too many images or steps are behind it.
        """
        if self.mixed > MOST_BEHIND or self.local.steps > MOST_STEPS:
            raise RunError(
                f"{self.mixed} images and {self.local.steps} steps are behind each answer; a search looks for at most "
                f"{MOST_BEHIND} images and {MOST_STEPS} steps. That none was tried proves nothing"
            )
        labels_n = self.labels_n(attacker)
        yield from attacker.changes(self.model, self.task.loss, self.change | self.statistics, labels_n, self.local)

    def rows(self, originals: Originals) -> Tensor:
        """Train on the originals anew, and return those that were used.

        Raises
        ------
        DataError
            If that gives something else, or cannot: noise is secret.
        """
        x, y = originals.x_NCHW, originals.y_N
        if self.evidence.config.privacy.mechanisms:
            raise DataError("the answer has secret noise, so originals cannot be checked by computing it anew")
        check_replay(self.evidence.config)
        plain = self.evidence.config.strategy.name in PLAIN
        if len(y) != self.examples:
            number = f"{len(y)} examples, the message says {self.examples}"
            if plain:
                raise OtherOriginals(f"{OTHERS}: {number}")
            raise DataError(f"{OTHERS}, or others' examples were added: {number}")
        if self.gradient:
            anew, rows = self._gradient_anew(x, y), torch.arange(len(y))
        else:
            anew, rows = self._trained_anew(x, y)
        names = list(self.change)
        right, found = (torch.cat([one[name].flatten() for name in names]) for one in (self.change, anew))
        if not bool((found - right).norm() <= NEAR * right.norm()):
            if plain and self.training.augment == "none" and not self.training.batch_sizes:
                raise OtherOriginals(f"{OTHERS}: give the data of the run, as they were when it ran")
            raise DataError(f"{OTHERS}, or {self.evidence.config.strategy.name} trains otherwise than FedAvg")
        return rows

    def _gradient_anew(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Add up the gradients of blocks, as FedSGD's institutions do."""
        number = math.ceil(len(x) / at_once(x, BLOCK))
        blocks = list(zip(torch.chunk(x, number), torch.chunk(y, number), strict=True))
        parts = [(len(b) / len(y), change_of(self.model, self.task.loss, a, b, LocalSteps())) for a, b in blocks]
        return {name: sum((share * one[name] for share, one in parts), torch.tensor(0.0)) for name in self.change}

    def _trained_anew(self, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Train as FedAvg's and CWT's institutions do; return the change of weights, and the rows of the first pass."""
        model, seed = self.evidence.model(), self.evidence.config.seed
        load_arrays(model, {name: self.begun[name] for name in model.state_dict()})
        optimizer = make_optimizer(model.train(), self.training, self.lr)
        server_round = int(self.request.scalars.get("server-round", 0))
        shuffle = torch_rng(seed, self.exhibit.institution, server_round)
        numbered = torch.arange(len(y))
        seen: list[Tensor] = []
        for _ in range(self.passes):
            for rows, _ in batches(numbered[:, None], numbered, self.training.batch_size, shuffle):
                chosen = rows[:, 0].long()
                seen.append(chosen)
                step(model, optimizer, self.task.loss(model(x[chosen]), y[chosen]))
        sent = {name: torch.from_numpy(self.begun[name]) for name, _ in model.named_parameters()}
        anew = {name: sent[name] - parameter.detach() for name, parameter in model.named_parameters()}
        return anew, torch.cat(seen)[: self.mixed]
