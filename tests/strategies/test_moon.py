"""MOON against a plain loop; without its term it is FedAvg."""

import copy

import pytest
import torch
from averaging import SIZES, assert_weights_close, local_sgd, rounds, run
from harness import same, write_shards
from torch.nn.functional import normalize

from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError
from flwr_replay.models.zoo import backbone
from flwr_replay.movements.base import Settings
from flwr_replay.strategies.moon import Moon, MoonConfig


def features(model, x):
    """Run all stages but the last, as the zoo's networks are made."""
    for stage in [*model.children()][:-1]:
        x = stage(x)
    return x


class Watched(torch.nn.Module):
    """Remembers what the head takes."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        self.x, self.z = x, features(self.model, x)
        return [*self.model.children()][-1](self.z)


def twin(shards, mu, temperature):
    last = {}

    def local(model, fixed, x, y, name, exchange):
        def penalty(watched):
            if name not in last:
                return 0.0
            with torch.no_grad():
                others = [normalize(features(model.eval(), watched.x).flatten(1)) for model in (fixed, last[name])]
            to_g, to_p = ((normalize(watched.z.flatten(1)) * other).sum(1) / temperature for other in others)
            return -mu * (to_g - torch.stack([to_g, to_p]).logsumexp(0)).mean()

        local_sgd(Watched(model), x, y, name, exchange, penalty=penalty)
        last[name] = copy.deepcopy(model)

    return rounds(shards, local)


@pytest.fixture
def shards(tmp_path):
    return write_shards(tmp_path, SIZES)


def test_it_is_the_papers_local_objective(tmp_path, shards):
    weights = run(tmp_path, "moon", "mu=5", "strategy.temperature=0.3")[0]
    assert_weights_close(weights, twin(shards, 5.0, 0.3))
    assert not same(weights, run(tmp_path, "fedavg")[0])


def test_without_the_term_it_is_fedavg_bit_for_bit(tmp_path, shards):
    assert same(run(tmp_path, "moon", "mu=0")[0], run(tmp_path, "fedavg")[0])


@pytest.mark.parametrize(("option", "value"), [("mu", -1.0), ("temperature", 0.0), ("temperature", float("nan"))])
def test_a_weight_and_a_temperature_are_in_range(option, value):
    with pytest.raises(ConfigError, match=f"strategy.{option}"):
        MoonConfig(**{option: value})


def test_a_model_without_a_linear_head_is_refused():
    with pytest.raises(ConfigError, match=r"the head must be a torch\.nn\.Linear"):
        Moon.check(MoonConfig(), Settings(model=lambda seed: torch.nn.Sequential(torch.nn.Conv2d(1, 3, 8))))


def test_a_model_of_which_only_the_head_trains_is_refused():
    config = compose(["strategy=moon", "task=digits", "model=gabor", "model.train=head"])
    with pytest.raises(ConfigError, match="nothing trains but the head"):
        Moon.check(config.strategy, Settings(model=backbone(config.model, config.task)))
