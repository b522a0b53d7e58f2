"""FedER through real messages against Pennisi et al. 2023, eq. 4, as a plain loop, bit for bit."""

import pytest
import torch
from harness import SHARDS, node_configs, run, same, write_shards
from safetensors.numpy import load_file
from torch.nn.functional import cross_entropy

from flwr_replay.config.compose import compose
from flwr_replay.models.zoo import backbone
from flwr_replay.rng import derived_seed
from flwr_replay.wire.records import opened
from flwr_replay.wire.weights import load_arrays, to_arrays

SIZES = {"a": 40, "b": 33, "c": 20}
B, E, LR, MOMENTUM, ROUNDS, BUFFER = 16, 2, 0.05, 0.9, 3, 12
JOB = ["strategy=feder", *SHARDS, "classes=3", "model=cnn", "model.width=4", "device=cpu"]
JOB += ["model.norm=batch"]  # under which real and synthetic examples in one batch would change each other
JOB += [f"batch_size={B}", f"lr={LR}", f"training.momentum={MOMENTUM}", f"rounds={ROUNDS}"]
JOB += [f"buffer={BUFFER}", f"local_epochs={E}"]
JOB += ["generator.width=4", "generator.codes=8", "generator.dim=4", "generator.epochs=1"]
JOB += ["prior.width=4", "prior.layers=1", "prior.epochs=1"]
CONFIG = compose(JOB)
BUILD = backbone(CONFIG.model, CONFIG.task)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("hospitals")
    return folder, write_shards(folder, SIZES)


def shuffles(n, times, *purpose):
    draws = torch.Generator().manual_seed(derived_seed(0, *purpose))
    return [torch.randperm(n, generator=draws) for _ in range(times)]


def eq_4(weights, shard, buffer, name, exchange):
    """Train for E passes on D_i and, in batches of their own, on the buffer, if there is one."""
    model = BUILD(0)
    load_arrays(model, weights)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    (x, y), steps = shard, len(shard[1]) // B
    if buffer:
        x_b, y_b = buffer
        order_b = torch.cat(shuffles(len(y_b), E * steps * B // len(y_b) + 1, name, exchange, "buffer"))
    for epoch, order in enumerate(shuffles(len(y), E, name, exchange)):
        for i in range(steps):
            rows, loss = order[i * B : (i + 1) * B], 0
            if buffer:  # first: running statistics of batch norm depend on the order
                rows_b = order_b[(epoch * steps + i) * B :][:B]
                loss = cross_entropy(model(x_b[rows_b]), y_b[rows_b])
            loss = loss + cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return to_arrays(model)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("memory", ["predecessor", "all"])
def test_a_model_is_trained_by_eq_4_on_its_predecessors_buffer_or_those_of_all_others(shards, tmp_path, memory):
    folder, data = shards
    ran = run(folder, [*JOB, f"memory={memory}"], node_configs(folder, tmp_path))
    files = sorted((ran.folder / "buffers").iterdir())
    buffers = {
        name: (torch.from_numpy(arrays["images"]) / 255, torch.from_numpy(arrays["labels"]))
        for name, arrays in zip(ran.grid.who("draw-buffer"), map(load_file, files), strict=True)
    }
    assert all(len(y) == BUFFER for _, y in buffers.values())

    fresh = to_arrays(BUILD(derived_seed(0, "model")))
    models = {name: eq_4(fresh, data[name], None, name, 1) for name in SIZES}
    for exchange in range(2, ROUNDS + 1):
        trained = {}
        for at, asked, _ in ran.grid.log:
            if at.stage == "train-with-buffers" and at.exchange == exchange:
                sent = opened(asked.content["arrays"])
                before = next((name for name, model in models.items() if same(model, sent)), None)  # whose it is
                assert before not in (None, at.name), f"round {exchange}, {at.name}: no other's model is that sent"
                sources = [before] if memory == "predecessor" else sorted({*SIZES} - {at.name})
                buffer = [torch.cat(tensors) for tensors in zip(*(buffers[name] for name in sources), strict=True)]
                trained[at.name] = eq_4(models[before], data[at.name], buffer, at.name, exchange)
        models = trained
    assert set(models) == set(SIZES)
    for name, model in models.items():
        assert same(model, load_file(ran.folder / "models" / f"{name}.safetensors")), name
