"""The contracts of partitions and attacks of one's own."""

from collections.abc import Sequence
from copy import deepcopy

import numpy as np
import torch
from torch import nn

from flwr_replay.attacks.attacker import Auxiliary
from flwr_replay.attacks.gradients import LocalSteps, change_of
from flwr_replay.attacks.latents import latents_of
from flwr_replay.config.catalogue import code_of
from flwr_replay.config.compose import compose
from flwr_replay.config.own_code import allow
from flwr_replay.config.sections import require
from flwr_replay.data import Dataset, Examples, partition
from flwr_replay.data.partitions import DEALERS
from flwr_replay.files.tensors import StateDict, digest
from flwr_replay.lab.own import Seen, asked, own_attack
from flwr_replay.learning.tasks import make_task
from flwr_replay.learning.training import torch_rng
from flwr_replay.models import split
from flwr_replay.models.zoo import backbone
from flwr_replay.wire.fields import Meaning
from flwr_replay.wire.weights import to_arrays

__all__ = ["check_attack", "check_partition"]


def check_partition(choice: str, overrides: Sequence[str] = ()) -> None:
    """Check one partition, on 600 labels of ten classes.

    Parameters
    ----------
    choice : str
        As `partition=` takes it: `mypkg:deal`, or a name that a package brings.
    overrides : sequence of str
        Further options: `partition.size=50`.

    Raises
    ------
    AssertionError
        If one seed does not deal alike twice, or an institution gets nothing.
    ConfigError
        If an example is dealt twice, what is dealt is no array of indices, or the names are not each institution's.
    """
    config = compose([f"partition={choice}", *overrides])
    allow(config.own_code)  # whoever checks it has named it
    examples = Examples(np.zeros((600, 1, 1, 1), np.uint8), np.repeat(np.arange(10), 60))
    data = Dataset("labels", examples, examples)
    for nodes in (2, 5):
        first, again = (DEALERS[config.partition.name](data, config.partition, nodes, 0) for _ in range(2))
        alike = [np.array_equal(a, b) for a, b in zip(first.shards, again.shards, strict=True)]
        assert all([*alike, first.names == again.names]), (
            "one seed must deal alike: draw from np.random.default_rng(seed)"
        )
        assert all(len(shard) for shard in first.shards), f"each of {nodes} institutions must get examples"
        partition(data, config.partition, nodes, 0)


def check_attack(choice: str) -> None:
    """Check one attack, on 40 images and what a small network makes of them.

    Parameters
    ----------
    choice : str
        As `privacy attack --attack` takes it: `mypkg:attack`, or a name that a package brings.

    Raises
    ------
    AssertionError
        If one seed does not give the same twice, a score is not finite, or what the attack got is changed.
    ConfigError
        If it returns something else than it says to give, or takes nothing that can be made here.
    """
    allow(code_of(choice, "attack"))  # whoever checks it has named it
    own, config = own_attack(choice), compose(["task=digits", "model=cnn", "model.width=4"])
    images, labels = torch.rand(40, 1, 8, 8, generator=torch_rng(0, "images")), torch.arange(40) % 10
    model, known = backbone(config.model, config.task)(0).eval(), Auxiliary("of the check", images[::2], labels[::2])
    weights, (encoder, _) = to_arrays(model), split(model, next(iter(dict(model.named_children()))))
    change = change_of(model, make_task(config.task).loss, images, labels, LocalSteps())
    made: dict[Meaning, tuple[StateDict, nn.Module]] = {
        "weights": (weights, model),
        "gradient": ({name: array.numpy() for name, array in change.items()}, model),
        "activations": ({"latents": latents_of(encoder, images).numpy()}, encoder),
        "images": ({"images": images.numpy()}, model),
    }
    means = next((each for each in made if not own.takes or each in own.takes), None)
    require(means is not None, f"check_attack has {', '.join(made)}; {choice} takes {', '.join(own.takes)}")
    sent, network = made[means or "weights"]
    places, told = torch.arange(len(labels)), {"lr": 1.0, "num-examples": len(labels)}
    question = (images, labels) if own.gives == "membership" else (places,)
    answer = {"images": images.numpy(), "labels": labels.numpy(), "places": places.numpy(), **sent}
    before, seen = digest(answer), [Seen([sent], [weights], deepcopy(network), known, [told]) for _ in range(2)]
    first, again = (asked(own, shown, *question, seed=0, task=config.task) for shown in seen)
    assert digest(answer) == before, "an attack must leave messages and images as they are"
    assert bool(first.isfinite().all()), "each score must be finite"
    assert torch.equal(first, again), "one seed must give the same: draw from generators of the seed"
