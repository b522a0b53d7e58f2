"""FedAvgM against a plain loop; without momentum it is FedAvg."""

import harness
import numpy as np
import pytest
from averaging import JOB, SIZES, assert_weights_close, local_sgd, mean, run
from flwr.app import Array
from harness import node_configs, same, write_shards
from safetensors.numpy import load_file

from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError
from flwr_replay.models.zoo import backbone
from flwr_replay.rng import derived_seed


def twin(shards, beta):
    config = compose(JOB)
    build = backbone(config.model, config.task)
    model = build(derived_seed(0, "model"))
    weights = {name for name, _ in model.named_parameters()}
    state, velocity = {name: v.double() for name, v in model.state_dict().items()}, dict.fromkeys(weights, 0.0)
    for exchange in (1, 2, 3):
        trained = []
        for name, (x, y) in shards.items():
            model = build(0)
            model.load_state_dict(state)
            local_sgd(model, x, y, name, exchange)
            trained.append(model.state_dict())
        averaged = mean(trained, [len(y) for _, y in shards.values()])
        for name in weights:
            velocity[name] = beta * velocity[name] + (state[name] - averaged[name])
            averaged[name] = state[name] - velocity[name]
        state = averaged
    return {name: value.numpy() for name, value in state.items()}


@pytest.fixture
def shards(tmp_path):
    return write_shards(tmp_path, SIZES)


def test_the_server_follows_a_momentum_of_its_updates(tmp_path, shards):
    assert_weights_close(run(tmp_path, "fedavgm")[0], twin(shards, 0.9))


def test_without_momentum_it_is_fedavg_bit_for_bit(tmp_path, shards):
    assert same(run(tmp_path, "fedavgm", "server-momentum=0")[0], run(tmp_path, "fedavg")[0])


def test_no_variance_becomes_negative_however_strong_the_momentum(tmp_path, shards):
    weights = run(tmp_path, "fedavgm", "server-momentum=0.99", "rounds=8")[0]
    variances = [array for name, array in weights.items() if name.endswith("running_var")]
    assert variances
    assert all(np.isfinite(array).all() and (array > 0).all() for array in variances)


@pytest.mark.parametrize("beta", ["-0.1", "1"])
def test_momentum_lies_in_its_range(beta):
    with pytest.raises(ConfigError, match="server-momentum lies in"):
        compose(["strategy=fedavgm", f"server-momentum={beta}"])


@pytest.mark.parametrize(
    "options", [["strategy=fedavgm"], ["strategy=fedsgd", "lr=1.0"], ["strategy=avgpush"], ["strategy=cwt"]]
)
def test_answers_that_are_accepted_carry_no_weight_beyond_what_institutions_accept(tmp_path, options):
    """By momentum, or as others train on, one institution could end the run for all; equal biases harm nobody."""
    write_shards(tmp_path, SIZES)

    def after(grid, message, reply):
        if grid.asked[-1].name == "b" and "arrays" in reply.content:
            bias = [*reply.content["arrays"]][-1]
            reply.content["arrays"][bias] = Array(np.full(3, -1e6 if "fedsgd" in options[0] else 1e6, np.float32))

    job = [*JOB, "model=mlp", *options, "rounds=6"]
    ran = harness.run(tmp_path, job, node_configs(tmp_path, tmp_path / "state"), after=after)
    assert not ran.result["failures"]
    for file in ran.folder.glob("models/*.safetensors"):
        [*_, bias] = load_file(file).values()
        assert np.abs(bias).max() <= 5e5
