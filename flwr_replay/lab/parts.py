"""Reconstruction from a part of the network: an encoder that came back alone, or SplitNN's half.

FedReplay's institution trains the whole network and returns the part before the cut: the local steps are simulated on
all of it, and the changes of that part are compared. SplitNN's institution trains the part before the cut on gradients
that the server has sent it, G, so each step moves it by -η G · ∂E(x)/∂θ_E, and no labels are needed.

`N` all images of an institution, `n` those behind an answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from flwr_replay.attacks.attacker import Attacker, Attempt
from flwr_replay.errors import RunError
from flwr_replay.lab.changes import OfChange
from flwr_replay.lab.evidence import Evidence, Exhibit, visit
from flwr_replay.lab.trials import drawn_rows
from flwr_replay.learning.training import held_out, late_steps, learning_rate, make_optimizer, step
from flwr_replay.models import split
from flwr_replay.wire.weights import load_arrays

__all__ = ["of_weights"]

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
        given_n = torch.cat(self.gradients)
        yield from attacker.changes(self.model, _product, change, given_n, self.local, at_cut=True)

    def anew(self, x: Tensor, y: Tensor) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Step on the recorded gradients, batch by batch."""
        model, seen = self.network(), list[Tensor]()
        optimizer = make_optimizer(model, self.training, self.lr)
        drawn = drawn_rows(len(y), self.batch_size, self.shuffle(self.exchange))
        for chosen, gradient in zip(drawn, self.gradients, strict=True):
            seen.append(chosen)
            late_steps(model, optimizer, [model(x[chosen])], [gradient])
        yield self.changed(model), torch.cat(seen)


def _product(activations_B: Tensor, gradients_B: Tensor) -> Tensor:
    """Return the number whose gradient at the activations is the given one: ⟨a, G⟩."""
    return (activations_B * gradients_B).sum()
