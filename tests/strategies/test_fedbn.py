"""FedBN against a plain loop; without batch norm it is FedAvg."""

import pytest
from averaging import JOB, SIZES, assert_weights_close, local_sgd, mean, run
from harness import same, write_shards
from safetensors.numpy import load_file

from flwr_replay.config.compose import compose
from flwr_replay.models.zoo import backbone
from flwr_replay.payloads.fedbn import of_norms, shared
from flwr_replay.rng import derived_seed
from flwr_replay.strategies.fedbn import FedBN
from flwr_replay.wire.records import opened


def twin(shards):
    """Return what is shared, and each institution's batch norm."""
    config = compose(JOB)
    build = backbone(config.model, config.task)
    state = build(derived_seed(0, "model")).state_dict()
    own = {name: of_norms(state) for name in shards}
    assert own["a"], "the network has batch norm"
    for exchange in (1, 2, 3):
        trained = []
        for name, (x, y) in shards.items():
            model = build(0)
            model.load_state_dict({**state, **own[name]})
            local_sgd(model, x, y, name, exchange)
            own[name] = {key: value.clone() for key, value in of_norms(model.state_dict()).items()}
            trained.append(shared(model.state_dict()))
        state = {**state, **mean(trained, [len(y) for _, y in shards.values()])}
    return state, own


def newest_model(folder, name):
    [newest] = [*sorted((folder / "fedbn").glob(f"**/{name}/**/model-*.safetensors"))[-1:]]
    return load_file(newest)


@pytest.fixture
def shards(tmp_path):
    return write_shards(tmp_path, SIZES)


def test_it_is_the_papers_algorithm_and_institutions_keep_the_model_that_they_test(tmp_path, shards):
    weights = run(tmp_path, "fedbn")[0]
    state, own = twin(shards)
    assert_weights_close(weights, {name: value.numpy() for name, value in state.items()})
    for name in shards:
        assert_weights_close(
            newest_model(tmp_path, name), {key: v.numpy() for key, v in {**state, **own[name]}.items()}
        )


def test_no_batch_norm_leaves_an_institution(tmp_path, shards, monkeypatch):
    sent = []

    def combine(self, answers):
        sent.extend(name for answer in answers for name in opened(answer.arrays))
        return combined(self, answers)

    combined = FedBN.combine
    monkeypatch.setattr(FedBN, "combine", combine)
    state, _ = run(tmp_path, "fedbn", "rounds=1")
    assert {*sent} == {*state} - {*of_norms(state)}


def test_without_batch_norm_it_is_fedavg_bit_for_bit(tmp_path, shards):
    assert same(run(tmp_path, "fedbn", "model.norm=group")[0], run(tmp_path, "fedavg", "model.norm=group")[0])
