"""Attacks on sums: gradients and sums of features over all images, of one institution, or under masks of all.

What the server reads under masks is made of the recorded answers as it makes it; then the sum is the answer of one that
has all images. Whoever asks about an image knows all others, in the worst case: `flwr_replay.attacks.sums`. An image
that is alone in its class leaves as its features, unless there is noise.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import sqrt
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from flwr_replay.attacks.catalogue import ALONE, RATIO
from flwr_replay.attacks.intervals import share
from flwr_replay.attacks.membership import membership
from flwr_replay.attacks.sums import allowed, log_ratio
from flwr_replay.ciphers.recovery import strip
from flwr_replay.config.privacy import ON_SUMS
from flwr_replay.config.run import RunConfig
from flwr_replay.errors import DataError, RunError
from flwr_replay.lab.evidence import ALL, NO_MODEL, Answer, Evidence, Exhibit
from flwr_replay.lab.judge import Originals
from flwr_replay.lab.trials import Question
from flwr_replay.learning.heads import features_of, linear_head
from flwr_replay.learning.tasks import make_task
from flwr_replay.learning.training import at_once
from flwr_replay.models.layers import as_input
from flwr_replay.payloads.common import Unmask
from flwr_replay.payloads.fedstats import PRODUCTS, SUMS
from flwr_replay.privacy.bounds import guessed, lower_bound
from flwr_replay.privacy.dpsgd import clipped_sums
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.privacy.sums import class_sums, packed
from flwr_replay.rng import derived_rng
from flwr_replay.wire.masked import add, mean_of, sums_of
from flwr_replay.wire.payload import REQUESTS
from flwr_replay.wire.recording import Recorded
from flwr_replay.wire.weights import load_arrays

__all__ = ["sum_attacks", "summed"]

MOST = 500  # members, and as many others
AMONG = 1000  # images, of which one is looked for
GUESSED = (0.02, 0.05, 0.1, 0.2, 0.4, 1.0)  # shares of those asked about, fixed before any attack


def summed(exhibits: Sequence[Exhibit], config: RunConfig, answers: Sequence[Answer] = ()) -> list[Exhibit]:
    """Return what the server reads of answers under masks: the mean of each exchange that all have answered.

    `answers` are all of the run; where some institutions may be missing, keys of masks are among them.

    Raises
    ------
    RunError
        If there is none, or they are no sums over images.
    """
    sums: list[Exhibit] = []
    told: dict[int, list[Answer]] = {}
    for answer in answers:
        if answer.content.about["stage"] == Unmask.stage_name and answer.request:
            told.setdefault(answer.request.scalars["server-round"], []).append(answer)
    for stage, field in dict.fromkeys((exhibit.stage, exhibit.field) for exhibit in exhibits):
        same = [exhibit for exhibit in exhibits if (exhibit.stage, exhibit.field) == (stage, field)]
        if same[0].means not in ("gradient", "class sums"):
            raise RunError(
                f"attacks under masks are on sums over images, of fedsgd and fedstats; strategy={config.strategy.name} "
                "averages models: run again with masked=false"
            )
        by_exchange: dict[int, dict[str, Answer]] = {}
        for exhibit in same:
            for answer in exhibit.answers:
                if answer.request is None:
                    raise RunError(NO_MODEL)
                by_exchange.setdefault(answer.request.scalars["server-round"], {})[exhibit.institution] = answer
        read = [made for at, by in by_exchange.items() if (made := _sum(stage, by, told.get(at, []), config))]
        if not read:
            raise RunError(
                "a sum under masks needs the answers of all institutions to one exchange; no such exchange was "
                "recorded: give the server's run directory, of a run with record=all"
            )
        sums.append(replace(same[0], institution=ALL, answers=read))
    return sums


def _sum(stage: str, by_name: Mapping[str, Answer], told: Sequence[Answer], config: RunConfig) -> Answer | None:
    """Add up the answers of an exchange; None if their masks do not cancel. The units are those without masks.

    Given are the answers by institution, and those that tell keys of their masks, if any.
    """
    survivors = told[0].request.scalars["survivors"] if told and told[0].request else [*by_name]
    answers = [answer for name, answer in by_name.items() if name in survivors]
    asked, total = answers[0].request, dict[str, Any]()
    assert asked is not None
    form = {**asked.arrays, **REQUESTS[stage].added(asked.scalars)}
    for answer in answers:
        add(answer.content.arrays, to=total)
    if told and len(answers) == len(survivors):
        points = {name: bytes.fromhex(by_name[name].content.scalars["points"]) for name in survivors}
        shares = {a.content.about["institution"]: bytes.fromhex(a.content.scalars["shares"]) for a in told}
        strip(total, asked.scalars["cohort"], points, shares)
    sizes = [int(answer.content.scalars["num-examples"]) for answer in answers]
    try:
        if (plan := PrivacyPlan.of(config)) and plan.institutions:
            [mechanism] = plan.mechanisms
            step = plan.step(mechanism, sum(sizes), sum(array.size for array in form.values()))
            scale = step * plan.config.clip_of(mechanism) / sum(sizes)
            arrays: dict[str, Any] = {name: whole * scale for name, whole in sums_of(total, form).items()}
        else:
            arrays = mean_of(total, like=form)
    except RunError:
        return None
    first = answers[0].content
    scalars = {**first.scalars, "num-examples": sum(sizes), "sizes": sizes}
    return replace(answers[0], content=Recorded({**first.about, "institution": ALL}, arrays, scalars))


@dataclass(frozen=True)
class Release:
    """A sum that was released, and what images add to it, in units of what one adds at most."""

    sums_d: Tensor
    added: Callable[[Tensor, Tensor], Tensor]  # by images (n, C, H, W) and labels (n,) together, (d,), float64
    sigma: float  # of its noise
    by_class: int  # how many of its first numbers are by class; 0: none

    @classmethod
    def of(cls, exhibit: Exhibit, answer: Answer, evidence: Evidence) -> Self:
        """Read an answer; a RunError if its request was not recorded."""
        frozen = SUMS in answer.content.arrays  # of an encoder that everyone has
        if answer.request is None or not (frozen or answer.request.arrays):
            raise RunError(NO_MODEL)
        plan, scalars, model = PrivacyPlan.of(evidence.config), answer.content.scalars, evidence.model()
        if not frozen:
            load_arrays(model, answer.request.arrays)
        gradient = exhibit.means == "gradient"
        mechanism = ON_SUMS[1] if gradient else ON_SUMS[0]
        clip = plan.config.clip_of(mechanism) if plan else 1.0
        if gradient:
            task, doubles = make_task(evidence.config.task), model.double()
            names = [name for name, parameter in doubles.named_parameters() if parameter.requires_grad]

            def added(x: Tensor, y: Tensor) -> Tensor:
                def losses(x_B: Tensor, y_B: Tensor) -> Tensor:
                    return task.losses(doubles(x_B), y_B)

                sums, _ = clipped_sums(doubles, losses, (as_input(x).double(), y), clip)
                return torch.cat([of.flatten() for of in sums]) / clip
        else:
            head, layer = linear_head(model)
            norm, asked = float(answer.request.scalars["clip"]), PRODUCTS in answer.content.arrays
            names = [*([SUMS] if frozen else [f"{head}.weight", f"{head}.bias"]), *([PRODUCTS] if asked else [])]

            def added(x: Tensor, y: Tensor) -> Tensor:
                batches = torch.split(as_input(x), at_once(x, 256, model))
                features_NF = torch.cat([features_of(model, x_B, first=frozen) for x_B in batches]).float()
                sums, products = class_sums(features_NF, y, torch.arange(len(y)), layer.out_features, norm, asked)
                by_class = [sums.flatten()] if frozen else [sums[:, 1:].flatten(), sums[:, 0]]
                return torch.cat([*by_class, packed(products)])

        flat = torch.cat(
            [torch.from_numpy(np.asarray(answer.content.arrays[name])).double().flatten() for name in names]
        )
        sizes = scalars.get("sizes", [scalars["num-examples"]])
        sigma = sqrt(sum(plan.share(mechanism, n) ** 2 for n in sizes)) if plan else 0.0
        size = 0 if gradient else answer.content.arrays[SUMS].size if frozen else layer.weight.numel() + len(layer.bias)
        return cls(flat * scalars["num-examples"] / clip, added, sigma, size)


def sum_attacks(exhibit: Exhibit, evidence: Evidence, originals: Originals, seed: int) -> Iterator[Question]:
    """Yield the attacks on sums over images: on membership where they have noise, and on who is alone in a class."""
    if exhibit.means not in ("gradient", "class sums") or evidence.config.task.kind != "classification":
        return
    if {*evidence.config.privacy.mechanisms} & {*ON_SUMS}:
        yield RATIO.name, partial(_by_ratio, exhibit, evidence, originals, seed)
    if exhibit.means == "class sums":
        yield ALONE.name, partial(_alone, exhibit, evidence, originals, seed)


def _by_ratio(exhibit: Exhibit, evidence: Evidence, originals: Originals, seed: int) -> dict[str, Any]:
    """Score members and others by what all releases show of each, all others being known."""
    if originals.by_patient:
        raise DataError("the data name patients, whose images are clipped together; this attack asks about single ones")
    drawn = derived_rng(seed, "asked about")
    rows, others = (side[drawn.permutation(len(side))[:MOST]] for side in originals.beside_others(seed))
    sides = originals.candidates(rows, others)
    scores, noise = torch.zeros(2, len(rows), dtype=torch.float64), []
    for answer in exhibit.answers:
        release = Release.of(exhibit, answer, evidence)
        rest_d = release.sums_d - release.added(originals.x_NCHW, originals.y_N)  # all images are known: noise is left
        noise.append(float(rest_d.square().mean().sqrt()) / release.sigma)
        for side, (x, y) in enumerate(sides):
            for i in range(len(y)):
                v_d = release.added(x[i : i + 1], y[i : i + 1])
                scores[side, i] += log_ratio(rest_d + v_d if side == 0 else rest_d, v_d, release.sigma)
    stated = exhibit.answers[-1].content.scalars
    was_in = np.arange(2) == 0
    tried = [
        guessed(scores.flatten().numpy(), was_in.repeat(len(rows)), max(2, round(fraction * scores.numel())))
        for fraction in GUESSED
    ]
    return {
        "membership": asdict(membership(*scores)),
        "stated": {"epsilon": stated["epsilon"], "delta": stated["delta"]},
        "allowed": allowed(stated["epsilon"], stated["delta"]),
        "shown": lower_bound(tried, stated["delta"])[0],  # of epsilon
        "noise": float(np.mean(noise)),  # as a share of what it should be
    }


def _alone(exhibit: Exhibit, evidence: Evidence, originals: Originals, seed: int) -> dict[str, Any]:
    """Look among many for each image that is alone in its class, by the class's sum of features."""
    release = Release.of(exhibit, exhibit.answers[-1], evidence)
    counts_C = torch.bincount(originals.y_N, minlength=evidence.config.task.classes)
    lone_C = torch.nonzero(counts_C == 1).flatten().tolist()
    if not lone_C:
        raise DataError(
            "no class has one image only; of sums over several images without noise no attack is known here"
        )
    alone = [int(torch.nonzero(originals.y_N == c)) for c in lone_C]
    pool = torch.cat([originals.x_NCHW, originals.others_NCHW])
    rest = np.setdiff1d(np.arange(len(pool)), alone)
    drawn = derived_rng(seed, "among").permutation(rest)[: AMONG - len(alone)]
    among = torch.from_numpy(np.concatenate([alone, drawn]))
    right = 0
    for i, c in enumerate(lone_C):
        labels = torch.tensor([c])
        each = (release.added(pool[j : j + 1], labels)[: release.by_class].clone() for j in among.tolist())
        v_nd = torch.stack([*each])  # copies: a view would keep the products of all in memory
        places_d = v_nd.abs().sum(0) > 0  # of this class
        right += int((v_nd - release.sums_d[: release.by_class])[:, places_d].square().sum(1).argmin()) == i
    return {"alone": asdict(share(right, len(alone))), "number": len(alone), "among": len(among)}
