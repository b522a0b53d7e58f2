"""Was this patient among the training images? Attacks on membership, for each kind of numbers that tells.

The judge names candidates: training images, and as many test images of the same source and labels. The attacker scores
each. Test images of another source would make the attack seem better than it is.
"""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flwr_replay.attacks.attacker import Auxiliary
from flwr_replay.attacks.catalogue import LIRA, LOSS, PRIOR, RECONSTRUCTED, RELEASED, Attack
from flwr_replay.attacks.membership import (
    likelihood_scores,
    lira_scores,
    loss_scores,
    membership,
    nearest_scores,
    reference_models,
    task_scores,
)
from flwr_replay.errors import DataError
from flwr_replay.files.tensors import unnested
from flwr_replay.generators.autoencoder import VQVAE2
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.lab.evidence import Evidence, Exhibit
from flwr_replay.lab.judge import Candidates, Originals
from flwr_replay.lab.own import asked, seen_by
from flwr_replay.lab.trials import Question, failed
from flwr_replay.learning.tasks import make_task
from flwr_replay.learning.training import torch_rng
from flwr_replay.wire.weights import load_arrays

__all__ = ["by_function", "member_attacks"]

REFERENCES = 8  # models of the attacker's own
ENOUGH = 200  # auxiliary images to train them on
MOST_EPOCHS = 10


def member_attacks(
    exhibit: Exhibit,
    evidence: Evidence,
    originals: Originals,
    auxiliary: Auxiliary | None,
    seed: int,
    seconds: float,
) -> Iterator[Question]:
    """Yield attacks on membership, each to be called: those known for such numbers."""
    means, last = exhibit.means, exhibit.answers[-1]
    try:
        sides = originals.candidates(*originals.beside_others(seed))
    except DataError as error:
        if means in ("weights", "generator weights"):
            yield "membership", partial(failed, error)
        return
    model, task = _whole(exhibit, evidence), evidence.config.task
    if model:
        yield LOSS.name, lambda: _scored([task_scores(model, task, *side) for side in sides])
        enough = auxiliary is not None and len(auxiliary.labels_m) >= ENOUGH
        if auxiliary is not None and not enough:
            few = f"there are {len(auxiliary.labels_m)} auxiliary images; it needs {ENOUGH}"
            yield LIRA.name, partial(failed, DataError(few))
        elif auxiliary is not None and task.kind == "classification":
            yield LIRA.name, lambda: _by_references(model, evidence, exhibit, sides, auxiliary, seed, seconds)
    plan = ReplayPlan.of(evidence.config)
    if means == "generator weights" and exhibit.stage == "train-generator" and plan is not None:
        generator = plan.fresh_generator()
        load_arrays(generator, exhibit.arrays(last))
        yield RECONSTRUCTED.name, lambda: _by_reconstruction(generator.eval(), sides)
    if means == "generator weights" and exhibit.stage == "train-prior" and plan is not None and last.request:
        sent = unnested(last.request.arrays | exhibit.arrays(last), only=("generator", "prior"))
        generator = plan.fresh_generator()
        prior = plan.fresh_prior(generator)
        load_arrays(generator, sent["generator"])
        load_arrays(prior, sent["prior"])
        models = prior.eval(), generator.eval()
        yield PRIOR.name, lambda: _scored([likelihood_scores(*models, plan, *side) for side in sides])
    if means == "images" and exhibit.declared.kind == "synthetic" and auxiliary is not None:
        yield RELEASED.name, lambda: _by_distance(exhibit, auxiliary, sides)


def by_function(
    own: Attack, exhibit: Exhibit, evidence: Evidence, originals: Originals, auxiliary: Auxiliary | None, seed: int
) -> dict[str, Any]:
    """Ask a function of the user's; the order of the candidates tells it nothing."""
    sides = originals.candidates(*originals.beside_others(seed))
    seen = seen_by(own, exhibit, exhibit.answers, _whole(exhibit, evidence), auxiliary)
    x, y = (torch.cat(both) for both in zip(*sides, strict=True))
    order = torch.randperm(len(y), generator=torch_rng(seed, "candidates"))
    scores = asked(own, seen, x[order], y[order], seed=seed, task=evidence.config.task)
    return _scored(list(scores[order.argsort()].chunk(2)))


def _whole(exhibit: Exhibit, evidence: Evidence) -> nn.Module | None:
    """Return the network with the weights of the last answer; None where the field is not all of them."""
    model, released = evidence.model().eval(), exhibit.arrays(exhibit.answers[-1])
    names = model.state_dict().keys()
    if exhibit.means != "weights" or not names <= released.keys():
        return None
    load_arrays(model, {name: released[name] for name in names})  # a control may lie beside it
    return model


def _by_references(
    model: nn.Module,
    evidence: Evidence,
    exhibit: Exhibit,
    sides: tuple[Candidates, Candidates],
    auxiliary: Auxiliary,
    seed: int,
    seconds: float,
) -> dict[str, Any]:
    """Compare with models that the attacker has trained as long, without the candidates: offline LiRA."""
    task, training = make_task(evidence.config.task), evidence.config.training
    epochs = sum(int(each.request.scalars.get("local-epochs", 1)) if each.request else 1 for each in exhibit.answers)
    references = reference_models(
        evidence.model,
        task.loss,
        auxiliary.images_mCHW,
        auxiliary.labels_m,
        training,
        min(MOST_EPOCHS, epochs),
        int(exhibit.answers[-1].content.scalars["num-examples"]),
        REFERENCES,
        seed,
        seconds,
    )
    return _scored([lira_scores(model, references, *side) for side in sides]) | {"references": len(references)}


def _by_reconstruction(generator: VQVAE2, sides: tuple[Candidates, Candidates]) -> dict[str, Any]:
    """Take those that the generator reconstructs well for members."""

    def losses(x: Tensor, _: Tensor) -> Tensor:
        return (generator.decode(generator.encode(x)) - x).flatten(1).square().mean(1)

    return _scored([loss_scores(losses, *side) for side in sides])


def _by_distance(exhibit: Exhibit, auxiliary: Auxiliary, sides: tuple[Candidates, Candidates]) -> dict[str, Any]:
    """Take those near to synthetic images for members."""
    drawn = torch.from_numpy(np.concatenate([exhibit.array(answer) for answer in exhibit.answers]))
    return _scored([nearest_scores(drawn, auxiliary.images_mCHW, x) for x, _ in sides])


def _scored(scores: list[Tensor]) -> dict[str, Any]:
    return {"membership": asdict(membership(*scores))}
