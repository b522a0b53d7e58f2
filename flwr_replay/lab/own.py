"""Attacks of the user's own: `privacy attack RUN --attack mypkg:attack`.

    attack = Attack(gives="images", takes=("activations",), needs=("auxiliary", "network"), run=invert)

Its function is asked, by what it gives:

    membership   run(seen, images, labels, seed)  a number for each image: the larger, the surer that it is a member's
    images       run(seen, places, seed)          the images (n, C, H, W) in [0, 1] behind n places of what was sent
    labels       run(seen, places, seed)          the classes (n,) of these

Candidates for members are shuffled, as many others with the same labels among them. Places count the images behind an
answer; where these are mixed, as in a gradient, any order is right. A function that is no `Attack` gives membership.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from flwr_replay.attacks.attacker import Auxiliary
from flwr_replay.attacks.catalogue import Attack, Gives, Need
from flwr_replay.config.catalogue import code_of
from flwr_replay.config.own_code import import_own, users_code
from flwr_replay.config.sections import TaskConfig, one_of, require
from flwr_replay.errors import ConfigError, DataError
from flwr_replay.files.tensors import StateDict
from flwr_replay.lab.evidence import NO_MODEL, Answer, Exhibit
from flwr_replay.lab.trials import Trial
from flwr_replay.wire.fields import Meaning

__all__ = ["Seen", "asked", "own_attack", "seen_by", "seen_in"]


@dataclass(frozen=True)
class Seen:
    """What an attacker has seen of one field of an institution's answers.

    Attributes
    ----------
    sent, asked : list of dict of str to ndarray
        The field in each answer, latents unpacked; and all arrays of the request that it answers, empty where that was
        not recorded. For images and labels there is one answer, the one that is judged.
    model : nn.Module | None
        For membership the network in evaluation mode, with the weights of the last answer; None where the field is not
        all of them. For images and labels what had the weights when the answer was made: the encoder, the generator, or
        what trained, as the training began.
    auxiliary : Auxiliary | None
        The attacker's own images (`--aux`).
    told : list of dict of str to numbers or words
        What each request and answer says beside arrays: `lr`, `local-epochs`, `num-examples` …
    """

    sent: list[StateDict]
    asked: list[StateDict]
    model: nn.Module | None
    auxiliary: Auxiliary | None
    told: list[dict[str, Any]]


def own_attack(name: str) -> Attack:
    """Import an attack, a function's or one that a package brings; it gets that name.

    Raises
    ------
    ConfigError
        If there is none, or it says to take, need or give what is unknown.
    """
    imported = import_own("--attack", *code_of(name, "attack"))
    own = replace(imported, name=name) if isinstance(imported, Attack) else Attack(name, run=imported)
    for key, words, known in (("gives", [own.gives], Gives), ("takes", own.takes, Meaning), ("needs", own.needs, Need)):
        for word in words:
            one_of(f"{key} of --attack {name}", word, get_args(known))
    return own


def seen_by(
    own: Attack, exhibit: Exhibit, answers: Sequence[Answer], model: nn.Module | None, auxiliary: Auxiliary | None
) -> Seen:
    """Copy what an attack is shown; a DataError if that lacks what it needs."""
    if "auxiliary" in own.needs and auxiliary is None:
        raise DataError("it needs images of the attacker's own: give --aux")
    if "network" in own.needs and model is None:
        raise DataError(NO_MODEL)
    requests = [answer.request for answer in answers]
    told = [
        {**(request.scalars if request else {}), **answer.content.scalars}
        for request, answer in zip(requests, answers, strict=True)
    ]
    sent, arrays = [exhibit.arrays(each) for each in answers], [each.arrays if each else {} for each in requests]
    return deepcopy(Seen(sent, arrays, model, auxiliary, told))


def seen_in(own: Attack, trial: Trial, auxiliary: Auxiliary | None) -> Seen:
    """Copy what an attack on images or labels is shown."""
    sent, model = trial.shown()
    return replace(seen_by(own, trial.exhibit, [trial.answer], model, auxiliary), sent=[deepcopy(sent)])


def asked(own: Attack, seen: Seen, *question: Tensor, seed: int, task: TaskConfig) -> Tensor:
    """Return what the user's function says of n images or places: scores, float64, or classes, (n,), or images.

    Raises
    ------
    ConfigError
        If the function fails, or returns something else.
    """
    with users_code(ConfigError, f"--attack {own.name} failed"):
        guess = torch.as_tensor(own(seen, *question, seed)).detach().cpu()
    images, number, shape = own.gives == "images", len(question[0]), tuple(guess.shape)
    form = task.channels, task.size, task.size
    what = f"{number} images of form {form}" if images else f"{number} numbers"
    require(
        shape == ((number, *form) if images else (number,)) and not guess.is_complex(),
        f"--attack {own.name} must return {what}; got shape {shape} of {guess.dtype}",
    )
    if own.gives == "membership":
        return guess.double()
    if not images:
        whole = not guess.is_floating_point() and bool(((guess >= 0) & (guess < task.classes)).all())
        require(whole, f"--attack {own.name} must return classes, 0 to {task.classes - 1}; got {guess[:3].tolist()} …")
        return guess.long()
    require(
        bool(((guess >= 0) & (guess <= 1)).all()),
        f"--attack {own.name} must return images in [0, 1]; got {float(guess.min()):g} to {float(guess.max()):g}",
    )
    return guess.float()
