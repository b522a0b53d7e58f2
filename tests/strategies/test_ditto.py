"""Ditto against a plain loop; with λ = 0 its personal models are those of Local."""

import pytest
from averaging import JOB, SIZES, assert_weights_close, local_sgd, mean, run
from harness import same, write_shards
from hostile_server import HostileServer, refusal
from safetensors.numpy import load_file

from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError
from flwr_replay.models.zoo import backbone
from flwr_replay.payloads.ditto import EvaluatePersonal, TrainPersonal
from flwr_replay.rng import derived_seed
from flwr_replay.strategies.ditto import DittoConfig


def twin(shards, lam):
    """Return each institution's personal model."""
    config = compose(JOB)
    build = backbone(config.model, config.task)
    state = build(derived_seed(0, "model")).state_dict()
    own = dict.fromkeys(shards, state)
    for exchange in (1, 2, 3):
        trained = []
        for name, (x, y) in shards.items():
            common, personal, anchor = build(0), build(0), build(0)
            for model, of in ((common, state), (personal, own[name]), (anchor, state)):
                model.load_state_dict(of)

            def pull(model, anchor=anchor):
                pairs = zip(model.parameters(), anchor.parameters(), strict=True)
                return lam / 2 * sum(((p - q.detach()) ** 2).sum() for p, q in pairs)

            local_sgd(common, x, y, name, exchange)
            local_sgd(personal, x, y, name, exchange, penalty=pull)
            trained.append(common.state_dict())
            own[name] = personal.state_dict()
        state = mean(trained, [len(y) for _, y in shards.values()])
    return own


def newest_model(folder, strategy, name):
    [newest] = [*sorted((folder / strategy).glob(f"**/{name}/**/model-*.safetensors"))[-1:]]
    return load_file(newest)


@pytest.fixture
def shards(tmp_path):
    return write_shards(tmp_path, SIZES)


def test_it_is_the_papers_algorithm(tmp_path, shards):
    weights, method = run(tmp_path, "ditto", "lam=2")
    for name, personal in twin(shards, 2.0).items():
        assert_weights_close(
            newest_model(tmp_path, "ditto", name), {key: value.numpy() for key, value in personal.items()}
        )
    assert same(weights, run(tmp_path, "fedavg")[0]), "the global model is FedAvg's"
    assert "global-accuracy" in method.evaluated.metrics(method.task)


def test_without_the_pull_personal_models_are_those_of_local(tmp_path, shards):
    run(tmp_path, "ditto", "lam=0")
    run(tmp_path, "local", "optimizer_state=reset")
    for name in shards:
        assert same(newest_model(tmp_path, "ditto", name), newest_model(tmp_path, "local", name))


def test_an_institution_may_have_chosen_a_private_model_for_other_methods(tmp_path, shards):
    """A personal model stays near the common one, so it is the same network."""
    server = HostileServer(tmp_path, *JOB, "strategy=ditto", private_model="mlp")
    sent = {"arrays": server.weights, "run": "r", "exchange": 1}
    assert not refusal(server.send(TrainPersonal(**sent, lr=0.05, lam=1.0)))
    assert not refusal(server.send(EvaluatePersonal(**sent)))


@pytest.mark.parametrize("lam", [-1.0, float("inf"), float("nan")])
def test_lambda_is_finite_and_not_negative(lam):
    with pytest.raises(ConfigError, match="lam must be finite"):
        DittoConfig(lam=lam)
