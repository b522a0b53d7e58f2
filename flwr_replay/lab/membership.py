"""Was this patient among the training images? Attacks on membership, for each kind of numbers that tells.

The judge names candidates: training images, and as many test images of the same source and labels. The attacker scores
each. Test images of another source would make the attack seem better than it is.

`privacy attack RUN --attack mypkg:attack` asks a function of the user's own who was in the training:

    def attack(seen: Seen, images: Tensor, labels: Tensor, seed: int) -> n numbers

The images are of members and of as many others with the same labels, shuffled; the larger an image's number, the surer
the attacker is that it is a member's.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flwr_replay.attacks.attacker import Auxiliary
from flwr_replay.attacks.catalogue import LIRA, LOSS, PRIOR, RECONSTRUCTED, RELEASED
from flwr_replay.attacks.membership import (
    likelihood_scores,
    lira_scores,
    loss_scores,
    membership,
    nearest_scores,
    reference_models,
    task_scores,
)
from flwr_replay.config.parts import import_part, users_code
from flwr_replay.config.sections import require
from flwr_replay.errors import ConfigError, DataError
from flwr_replay.files.tensors import StateDict, unnested
from flwr_replay.generators.autoencoder import VQVAE2
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.lab.evidence import Evidence, Exhibit
from flwr_replay.lab.judge import Originals
from flwr_replay.lab.trials import Question
from flwr_replay.learning.tasks import make_task
from flwr_replay.learning.training import torch_rng
from flwr_replay.wire.weights import load_arrays

__all__ = ["Seen", "member_attacks", "own_scores"]

FEWEST = 20  # members, and others, below which an interval says nothing
REFERENCES = 8  # models of the attacker's own
ENOUGH = 200  # auxiliary images to train them on
MOST_EPOCHS = 10
Candidates = tuple[Tensor, Tensor]  # images and labels


def member_attacks(
    exhibit: Exhibit,
    evidence: Evidence,
    originals: Originals,
    auxiliary: Auxiliary | None,
    seed: int,
    seconds: float,
    own: str = "",
) -> Iterator[Question]:
    """Yield attacks on membership, each to be called: `own`, and those known for such numbers."""
    rows, other_rows = originals.beside_others(seed)
    members = originals.x_NCHW[rows], originals.y_N[rows]
    sides = members, (originals.others_NCHW[other_rows], originals.other_y[other_rows])
    means, last = exhibit.means, exhibit.answers[-1]
    if len(sides[0][1]) < FEWEST:
        if own or means in ("weights", "generator weights"):
            yield (
                own or "membership",
                partial(_too_few, len(sides[0][1]), "training images with as many others of equal labels", FEWEST),
            )
        return
    model, task = evidence.model().eval(), evidence.config.task
    names, released = model.state_dict().keys(), exhibit.arrays(last)
    whole = means == "weights" and names <= released.keys()  # perhaps with a control or an optimizer's state beside it
    if whole:
        load_arrays(model, {name: released[name] for name in names})
    if own:
        yield own, lambda: _by_function(own, exhibit, model if whole else None, auxiliary, sides, seed)
    elif whole:
        yield LOSS.name, lambda: _scored([task_scores(model, task, *side) for side in sides])
        enough = auxiliary is not None and len(auxiliary.labels_m) >= ENOUGH
        if auxiliary is not None and not enough:
            yield LIRA.name, partial(_too_few, len(auxiliary.labels_m), "auxiliary images", ENOUGH)
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


def _too_few(number: int, what: str, fewest: int) -> dict[str, Any]:
    raise DataError(f"there are {number} {what}; it needs {fewest}")


def _by_function(
    name: str,
    exhibit: Exhibit,
    model: nn.Module | None,
    auxiliary: Auxiliary | None,
    sides: tuple[Candidates, Candidates],
    seed: int,
) -> dict[str, Any]:
    """Ask a function of the user's; the order of the candidates tells it nothing."""
    requests = [answer.request.arrays if answer.request else {} for answer in exhibit.answers]
    sent, asked = deepcopy([exhibit.arrays(answer) for answer in exhibit.answers]), deepcopy(requests)
    x, y = (torch.cat(both) for both in zip(*sides, strict=True))
    order = torch.randperm(len(y), generator=torch_rng(seed, "candidates"))
    scores = own_scores(name, Seen(sent, asked, model, auxiliary), x[order], y[order], seed)
    return _scored(list(scores[order.argsort()].chunk(2)))


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


@dataclass(frozen=True)
class Seen:
    """What an attacker has seen of one field of an institution's answers.

    Attributes
    ----------
    sent, asked : list of dict of str to ndarray
        The field in each answer, and all arrays of the request that it answers; empty where that was not recorded.
    model : nn.Module | None
        The network in evaluation mode, with the weights of the last answer; None where the field is not all of them.
    auxiliary : Auxiliary | None
        The attacker's own images (`--aux`).
    """

    sent: list[StateDict]
    asked: list[StateDict]
    model: nn.Module | None
    auxiliary: Auxiliary | None


def own_scores(name: str, seen: Seen, images_n: Tensor, labels_n: Tensor, seed: int) -> Tensor:
    """Return what the user's function says of each image, float64 (n,).

    Raises
    ------
    ConfigError
        If the function cannot be imported, fails, or returns something else.
    """
    attack = import_part("--attack", name)
    with users_code(ConfigError, f"--attack {name} failed"):
        scores = torch.as_tensor(attack(seen, images_n, labels_n, seed)).detach().double().cpu()
    shape = tuple(scores.shape)
    require(shape == (len(labels_n),), f"--attack {name} must return {len(labels_n)} numbers; got shape {shape}")
    return scores
