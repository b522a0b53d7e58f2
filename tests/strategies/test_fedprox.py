"""FedProx against a plain loop; without its term it is FedAvg."""

import pytest
from averaging import JOB, SIZES, assert_weights_close, local_sgd, rounds, run
from harness import same, write_shards

from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError
from flwr_replay.models.zoo import backbone
from flwr_replay.rng import derived_seed


def twin(shards, mu):
    def local(model, fixed, *data):
        pairs = [*zip(model.parameters(), fixed.parameters(), strict=True)]
        local_sgd(model, *data, penalty=lambda _: mu / 2 * sum(((p - q.detach()) ** 2).sum() for p, q in pairs))

    return rounds(shards, local)


@pytest.fixture
def shards(tmp_path):
    return write_shards(tmp_path, SIZES)


def test_it_is_the_papers_local_objective(tmp_path, shards):
    weights = run(tmp_path, "fedprox", "mu=5")[0]
    assert_weights_close(weights, twin(shards, 5.0))
    assert not same(weights, run(tmp_path, "fedavg")[0])


def test_without_the_term_it_is_fedavg_bit_for_bit(tmp_path, shards):
    assert same(run(tmp_path, "fedprox", "mu=0")[0], run(tmp_path, "fedavg")[0])


def test_a_strong_term_holds_the_weights_near_where_they_began(tmp_path, shards):
    def moved(mu):
        config = compose(JOB)
        start = backbone(config.model, config.task)(derived_seed(0, "model")).state_dict()
        weights = run(tmp_path, "fedprox", f"mu={mu}", "rounds=1", "momentum=0")[0]
        return sum(float(((weights[n] - v.numpy()) ** 2).sum()) for n, v in start.items() if "running" not in n)

    assert moved(10) < moved(0.1)


@pytest.mark.parametrize("mu", ["-1", "inf", "nan"])
def test_mu_is_finite_and_not_negative(mu):
    with pytest.raises(ConfigError, match="mu must be finite"):
        compose(["strategy=fedprox", f"mu={mu}"])
