"""Reconstruction from a gradient, or from the change between the weights that were sent and those that came back.

The network may have come back in part: an encoder alone, or SplitNN's half. FedReplay's institution trains the whole
network and returns the part before the cut: the local steps are simulated on all of it, and the changes of that part
are compared. SplitNN's institution trains the part before the cut on gradients that the server has sent it, G, so each
step moves it by -η G · ∂E(x)/∂θ_E, and no labels are needed.

`N` all images of an institution, `n` those behind an answer, `C` classes.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn

from flwr_replay.attacks.attacker import Attacker, Attempt
from flwr_replay.attacks.catalogue import LAST, MATCHING
from flwr_replay.attacks.gradients import LocalSteps, change_of, is_statistic
from flwr_replay.data.dealt import names_of
from flwr_replay.errors import DataError, RunError
from flwr_replay.files.tensors import StateDict
from flwr_replay.lab.evidence import ALL, NO_MODEL, UNKNOWN_NETWORK, Answer, Evidence, Exhibit, begun_with, visit
from flwr_replay.lab.judge import NEAR, OTHERS, Originals, OtherOriginals, check_replay, same_data
from flwr_replay.lab.trials import Trial, drawn_rows
from flwr_replay.learning.tasks import make_task
from flwr_replay.learning.training import (
    at_once,
    balanced_rows,
    held_out,
    iterations,
    late_steps,
    learning_rate,
    make_optimizer,
    torch_rng,
)
from flwr_replay.models import split
from flwr_replay.models.layers import step
from flwr_replay.wire.recording import Recorded
from flwr_replay.wire.weights import load_arrays

__all__ = ["NOT_ANEW", "OfChange", "of_weights"]

MOST_BEHIND = 128  # images behind one answer that a search looks for
PLAIN = ("fedavg", "fedavgm", "fedsgd", "cwt")  # methods whose first visit is nothing but the steps simulated here
ROWS_AT_ONCE = 256  # examples whose gradient FedSGD computes at once
MOST_STEPS = 64  # of local training that are simulated
NOT_ANEW = (
    "A digest proves the originals; what was sent could not be computed anew from them, for the method adds something, "
    "or other threads and many steps give other digits"
)
OTHER_OPTIMIZER = "The institution's optimizer was {}; the search has simulated steps of plain SGD."
UNKNOWN_TEACHER = (
    "What the private model adds to the loss, the attacker does not know; it has simulated the cross entropy alone."
)


class OfChange(Trial):
    """A gradient, or weights that came back: eq. 1 of Qu et al., with local steps simulated.

    With `last` the last answer is attacked whose training began with weights that the server knows; else the first.
    """

    plain = True  # trained as simulated here, if the method is one of `PLAIN`

    def __init__(self, exhibit: Exhibit, evidence: Evidence, last: bool = False) -> None:
        super().__init__(exhibit, evidence)
        self.last_one = last
        self.answer, self.request, self.begun = self._begun(reversed(exhibit.answers) if last else exhibit.answers)
        self.training = evidence.config.training
        self.task, self.model = make_task(evidence.config.task), self.network()
        back = {name: torch.from_numpy(array) for name, array in exhibit.arrays(self.answer).items()}
        sent = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        if not sent.keys() & back.keys():
            raise RunError(UNKNOWN_NETWORK)
        self.gradient = exhibit.declared.means == "gradient"
        self.change = {name: back[name] if self.gradient else sent[name] - back[name] for name in sent if name in back}
        self.whole = [*sent][-1] in self.change  # so that it shows the head's bias
        self.statistics = {name: array for name, array in back.items() if is_statistic(name)}
        self.examples = int(self.answer.content.scalars["num-examples"])
        self.exchange = int(self.request.scalars.get("server-round", 0))
        self.lr = float(self.request.scalars.get("lr", 1.0))
        self.passes = self.passes_made()
        size = min(self.batch_size, self.examples)
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
                pull=float(self.request.scalars.get("proximal-mu") or 0.0),
            )
        self.places_n = torch.arange(self.mixed)

    @property
    def batch_size(self) -> int:
        """Return the institution's batch size; a simulation's options say which it was dealt."""
        sizes, config = self.training.batch_sizes, self.evidence.config
        if not sizes or not config.nodes or config.clinics or self.exhibit.institution == ALL:
            return self.training.batch_size  # in a deployment each has its own
        names = names_of(config.task, config.partition, config.nodes, config.seed)
        return sizes[names.index(self.exhibit.institution) % len(sizes)]

    def add(self, note: str) -> None:
        """Add a sentence to the note, once."""
        if note not in self.note:
            self.note = f"{self.note} {note}".strip()

    def _begun(self, answers: Iterable[Answer]) -> tuple[Answer, Recorded, StateDict]:
        """Return the first of these answers with its request and the weights with which its training began."""
        recorded = [(answer, answer.request) for answer in answers if answer.request is not None]
        for answer, request in recorded:
            if begun := begun_with(answer, self.evidence):
                return answer, request, begun
        raise RunError(UNKNOWN_NETWORK if recorded else NO_MODEL)

    def network(self) -> nn.Module:
        """Return what trained, with the weights with which it began, in training mode."""
        model = self.evidence.model()
        if not model.state_dict().keys() <= self.begun.keys():
            raise RunError(UNKNOWN_NETWORK)
        load_arrays(model, {name: self.begun[name] for name in model.state_dict()})
        return model.train()

    def passes_made(self) -> int:
        """Return how many passes over the examples are behind the answer."""
        return int(self.request.scalars.get("local-epochs", 1))

    def last(self) -> Self | None:
        """Return the trial of the last answer; None if there is only one that can be attacked."""
        other = type(self)(self.exhibit, self.evidence, last=True) if self.exhibit.means == "weights" else self
        return None if other.answer.file == self.answer.file else other

    @property
    def values_per_pixel(self) -> float:
        """Weights for each number of all images behind the answer."""
        channels, height, width = self.evidence.form
        return sum(array.numel() for array in self.change.values()) / (self.mixed * channels * height * width)

    def shown(self) -> tuple[StateDict, nn.Module]:
        """Return what came back, and what trained, as it began."""
        return self.exhibit.arrays(self.answer), self.model

    def labels_n(self, attacker: Attacker) -> Tensor:
        """Infer the labels behind the answer, of a task with classes; sorted, since their order is not to be had."""
        if self.evidence.config.task.kind != "classification":
            raise RunError(f"labels are inferred for classes; the task's kind is {self.evidence.config.task.kind}")
        if self.whole:
            return attacker.labels(self.model, self.change, self.mixed, self.local)
        sent = [exhibit for exhibit in self.evidence.sent if exhibit.institution == self.exhibit.institution]
        labels = [exhibit for exhibit in sent if exhibit.means == "labels" and exhibit.declared.kind != "synthetic"]
        known = torch.cat([torch.tensor(labels[0].array(answer)) for answer in labels[0].answers]) if labels else None
        labels_n, source = attacker.likely_labels(self.evidence.config.task.classes, self.mixed, known)
        self.add(f"The head did not come back; labels were guessed by {source}.")
        return labels_n

    def attempts(self, attacker: Attacker) -> Iterator[Attempt]:
        """Solve a linear first layer exactly where one image is behind the answer; search where few images are."""
        if self.mixed > MOST_BEHIND or self.local.steps > MOST_STEPS:
            raise RunError(
                f"{self.mixed} images and {self.local.steps} steps are behind each answer; a search looks for at most "
                f"{MOST_BEHIND} images and {MOST_STEPS} steps. That none was tried proves nothing"
            )
        for attempt in self.tried(attacker, self.change | self.statistics):
            if not self.last_one:
                yield attempt
            elif attempt.attack is MATCHING:
                yield replace(attempt, attack=LAST)

    def tried(self, attacker: Attacker, change: dict[str, Tensor]) -> Iterator[Attempt]:
        """Yield the attacks on the change and batch norm's statistics."""
        if self.request.scalars.get("beta"):
            self.add(UNKNOWN_TEACHER)
        if self.training.optimizer != "sgd" and not self.gradient:
            self.add(OTHER_OPTIMIZER.format(self.training.optimizer))
        labels_n = self.labels_n(attacker)
        yield from attacker.changes(self.model, self.task.loss, change, labels_n, self.local)

    def rows(self, originals: Originals) -> Tensor | None:
        """Train on the originals anew, and return those that were used.

        Where that gives something else, or noise is secret, a digest that was written during the run must be theirs.
        """
        config, number = self.evidence.config, len(originals.y_N)
        same = same_data(originals, self.evidence.digests(self.exhibit.institution))
        check_replay(config)
        if config.privacy.mechanisms:
            if not same:
                raise DataError("the answer has secret noise, so originals cannot be checked by computing it anew")
            return torch.arange(number) if self.local.batch_size == number else None  # else Poisson batches
        plain = self.plain and config.strategy.name in PLAIN and not self.last_one
        kept_n = self.kept(number)
        if len(kept_n) != self.examples:
            counts = f"{len(kept_n)} examples, the message says {self.examples}"
            if plain and not same:
                raise OtherOriginals(f"{OTHERS}: {counts}")
            raise DataError(f"{OTHERS}, or others' examples were added: {counts}")
        x, y = originals.x_NCHW[kept_n], originals.y_N[kept_n]
        came = torch.cat([array.flatten() for array in self.change.values()])
        for anew, rows in self.anew(x, y):
            again = torch.cat([anew[name].flatten() for name in self.change])
            if (again - came).norm() <= NEAR * came.norm():
                return kept_n[rows]
        if plain and not same and self.training.augment == "none":
            raise OtherOriginals(f"{OTHERS}: give the data of the run, as they were when it ran")
        if not same:
            raise DataError(f"{OTHERS}, or {config.strategy.name} trains otherwise than FedAvg")
        self.add(f"{NOT_ANEW}.")
        return kept_n if self.mixed == len(kept_n) else None

    def kept(self, number: int) -> Tensor:
        """Return which of an institution's examples it trains on."""
        return torch.arange(number)

    def anew(self, x: Tensor, y: Tensor) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield what may have come back, computed anew from all examples, and the rows that were used."""
        yield (self._gradient_anew(x, y), torch.arange(len(y))) if self.gradient else self._trained_anew(x, y)

    def _gradient_anew(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Add up the gradients of batches, as FedSGD's institutions do."""
        once = self.evidence.config.features_once  # then institutions had features of them
        number = math.ceil(len(x) / at_once(x, ROWS_AT_ONCE, None if once else self.model))
        batches = list(zip(torch.chunk(x, number), torch.chunk(y, number), strict=True))
        steps = [(len(b) / len(y), change_of(self.model, self.task.loss, a, b, LocalSteps())) for a, b in batches]
        return {name: sum((share * step[name] for share, step in steps), torch.tensor(0.0)) for name in self.change}

    def _trained_anew(self, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Train as FedAvg's and CWT's institutions do; return the change of weights, and the rows of the first pass."""
        model, shuffle = self.network(), self.shuffle(self.exchange)
        optimizer = make_optimizer(model, self.training, self.lr)
        seen: list[Tensor] = []
        for _ in range(self.passes):
            among = balanced_rows(y, shuffle) if self.training.batches == "balanced" else None
            for chosen in drawn_rows(len(y), self.batch_size, shuffle, among=among):
                seen.append(chosen)
                step(model, optimizer, self.task.loss(model(x[chosen]), y[chosen]))
        return self.changed(model), torch.cat(seen)[: self.mixed]

    def shuffle(self, *purpose: object) -> torch.Generator:
        """Return the institution's own random stream for a purpose, as its client draws it."""
        return torch_rng(self.evidence.config.seed, self.exhibit.institution, *purpose)

    def changed(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the change of a network's weights since the training began."""
        return {name: torch.from_numpy(self.begun[name]) - p.detach() for name, p in model.named_parameters()}


AT_MOST = "Training did not stop early: the best weights may be of fewer epochs than the search has simulated."
ONE_RATE = "The learning rate fell during the training; the search has simulated the first one."


def of_weights(exhibit: Exhibit, evidence: Evidence) -> OfChange:
    """Return the trial of weights that came back: of all, of an encoder, or of SplitNN's half."""
    request = exhibit.answers[0].request
    if request and "gradients" in request.arrays:
        return OfHalf(exhibit, evidence)
    return (OfEncoder if request and "max-epochs" in request.scalars else OfChange)(exhibit, evidence)


class OfEncoder(OfChange):
    """FedReplay's encoder: epochs on all examples but those held out; the weights of the best one came back."""

    plain = False

    def passes_made(self) -> int:
        """Return the epochs behind the weights: where training stopped early, the last ones are not."""
        epochs, most = int(self.answer.content.scalars["epochs"]), int(self.request.scalars["max-epochs"])
        if epochs == most > 1:
            self.add(AT_MOST)
        if self.training.lr_step and epochs > self.training.lr_step:
            self.add(ONE_RATE)
        return epochs if epochs == most else epochs - int(self.request.scalars["patience"])

    def kept(self, number: int) -> Tensor:
        """Return the rows that are not held out, in their order; all, if the data set has a validation split."""
        if number == self.examples:
            return torch.arange(number)
        return held_out(number, self.shuffle("held out"))[0]

    def anew(self, x: Tensor, y: Tensor) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Train anew; yield the change after each epoch, since the best of the last ones is not known."""
        model, seen = self.network(), list[Tensor]()
        optimizer = make_optimizer(model, self.training, self.lr)
        for epoch in range(int(self.answer.content.scalars["epochs"])):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(replace(self.training, lr=self.lr), epoch)
            for chosen in drawn_rows(len(y), self.batch_size, self.shuffle("encoder", epoch)):
                seen.append(chosen)
                step(model, optimizer, self.task.loss(model(x[chosen]), y[chosen]))
            yield self.changed(model), torch.cat(seen)[: self.mixed]


class OfHalf(OfChange):
    """SplitNN's part before the cut, after a visit in which every batch was a message of its own."""

    plain = False

    def __init__(self, exhibit: Exhibit, evidence: Evidence, last: bool = False) -> None:
        super().__init__(exhibit, evidence, last)
        requests = [answer.request for answer in visit(self.answer, evidence) if answer.request]
        if (batches := int(self.request.scalars["micro-batches"])) > 1:
            raise RunError(f"a search steps after each batch; with micro-batches={batches} the institution steps later")
        self.gradients = [torch.tensor(sent.arrays["gradients"]) for sent in requests if "gradients" in sent.arrays]
        if len(self.gradients) != self.local.steps:
            raise RunError(
                f"the change is of {self.local.steps} steps; the gradients of {len(self.gradients)} were recorded: "
                "record with a larger record-mb"
            )
        self.mixed, self.whole = sum(map(len, self.gradients)), False
        self.local = replace(self.local, batch_size=len(self.gradients[0]))
        self.places_n = torch.arange(self.mixed)

    def network(self) -> nn.Module:
        """Return the part before the cut, with the weights with which the visit began."""
        encoder, _ = split(self.evidence.model(), str(self.request.scalars["cut"]))
        load_arrays(encoder, {name: self.begun[name] for name in encoder.state_dict()})
        return encoder.train()

    def tried(self, attacker: Attacker, change: dict[str, Tensor]) -> Iterator[Attempt]:
        """Search with the gradients that the server has sent in place of labels."""
        given_n = torch.cat(self.gradients)  # G is the gradient at the activations a of the number ⟨a, G⟩
        yield from attacker.changes(self.model, lambda a, g: (a * g).sum(), change, given_n, self.local, at_cut=True)

    def anew(self, x: Tensor, y: Tensor) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Step on the recorded gradients, batch by batch."""
        model, seen = self.network(), list[Tensor]()
        optimizer = make_optimizer(model, self.training, self.lr)
        drawn = drawn_rows(len(y), self.batch_size, self.shuffle(self.exchange))
        for chosen, gradient in zip(drawn, self.gradients, strict=True):
            seen.append(chosen)
            late_steps(model, optimizer, [model(x[chosen])], [gradient])
        yield self.changed(model), torch.cat(seen)
