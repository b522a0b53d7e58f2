"""Qu et al. 2022, Algorithm 2, in plain PyTorch, slowly: what the tests of FedReplay compare with."""

from collections import OrderedDict

import numpy as np
import torch
from harness import SHARDS
from torch import nn
from torch.nn.functional import cross_entropy

from flwr_replay.config.compose import compose
from flwr_replay.models.zoo import backbone
from flwr_replay.rng import derived_seed

B, LR = 16, 0.05
JOB = ["strategy=fedreplay", *SHARDS, "classes=3", "model=cnn", "model.width=4", "rounds=2"]
JOB += ["encoder-epochs=4", "patience=2", f"batch_size={B}", f"lr={LR}", "device=cpu", "evaluate-every=2"]


def network(*options, purpose="model"):
    config = compose([*JOB, *options])
    return backbone(config.model, config.task)(derived_seed(0, purpose))


def cut_after(model, cut):
    stages = list(model.named_children())
    first = [name for name, _ in stages].index(cut) + 1
    return nn.Sequential(OrderedDict(stages[:first])), nn.Sequential(OrderedDict(stages[first:]))


def descend(model, x, y, order, optimizer, lr=LR):
    size = min(B, len(y))
    optimizer.param_groups[0]["lr"] = lr
    for i in range(max(1, len(y) // B)):
        rows = order[i * size : (i + 1) * size]
        optimizer.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()


def shuffled(n, *purpose):
    return torch.randperm(n, generator=torch.Generator().manual_seed(derived_seed(0, *purpose)))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def stage_1(x, y, name, cut, epochs=4, patience=2, fall=1.0):
    """Train the whole backbone at one institution; the best epoch on the tenth that is held out counts."""
    model = network()
    order = shuffled(len(y), name, "held out")
    held, kept = order[: len(y) // 10], order[len(y) // 10 :]
    optimizer, losses, states = sgd(model), [], []
    while len(losses) < epochs and (not losses or len(losses) - 1 - int(np.argmin(losses)) < patience):
        order = shuffled(len(kept), name, "encoder", len(losses))
        descend(model.train(), x[kept], y[kept], order, optimizer, LR * fall ** len(losses))
        losses.append(cross_entropy(model.eval()(x[held]), y[held]).item())
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    model.load_state_dict(states[int(np.argmin(losses))])
    return cut_after(model, cut)[0], len(losses)


def stage_2(encoder, shards):
    """Encode every institution's images, by name."""
    with torch.no_grad():
        return {name: (encoder.eval()(x), y) for name, (x, y) in sorted(shards.items())}


def stage_3(unions, *options, cut="conv1", fall=1.0):
    """Train a fresh primary, one epoch on the union of each round."""
    _, primary = cut_after(network(*options, purpose="primary"), cut)
    optimizer = sgd(primary)
    for exchange, union in enumerate(unions, start=1):
        e, y = (torch.cat(column) for column in zip(*union.values(), strict=True))
        descend(primary, e, y, shuffled(len(y), "primary", exchange), optimizer, LR * fall ** (exchange - 1))
    return primary
