"""CWT+Replay through real messages against Algorithm 1 as a plain loop, bit for bit."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from averaging import mean
from harness import same, write_shards
from replay_runs import JOB, SIZES, B, run
from torch.nn.functional import cross_entropy

from flwr_replay.config.compose import compose
from flwr_replay.generators.autoencoder import build_generator
from flwr_replay.models.zoo import backbone
from flwr_replay.rng import derived_seed
from flwr_replay.wire.weights import to_arrays

G = 4  # the generator's batch size
CODES = 32
LEARNING = [
    "generator.width=8",
    "generator.residual_width=2",
    "generator.dim=8",
    "generator.lr=0.01",
    f"generator.batch_size={G}",
]
LEARNING += [f"generator.codes={CODES}"]  # so that images have codes of their own
CONFIG = compose([*JOB, *LEARNING])
BUILD = backbone(CONFIG.model, CONFIG.task)
ALL = sum(SIZES.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hospitals")


@pytest.fixture(scope="module")
def shards(folder):
    """Images of four grey squares, which a small generator can tell apart."""
    torch.set_num_threads(1)
    folders = write_shards(folder, SIZES)
    for name, (_, y) in folders.items():
        path = folder / f"{name}.npz"
        arrays = dict(np.load(path))
        for images in (arrays["train_images"], arrays["test_images"]):
            images[:] = np.kron(images[:, ::4, ::4], np.ones((4, 4), np.uint8))
        np.savez(path, **arrays)
        folders[name] = torch.from_numpy(arrays["train_images"][:, None]) / 255, y
    return folders


@pytest.fixture(scope="module")
def learned(shards):
    return cache(lambda codes: generators(shards, codes))


def drawing(*purpose):
    return torch.Generator().manual_seed(derived_seed(0, *purpose))


def endless(m, size, draws):
    order = []
    while True:
        while len(order) < size:
            order += torch.randperm(m, generator=draws).tolist()
        yield order[:size]
        order = order[size:]


def images(decoder, e):
    """D(e), as bytes like real images."""
    return (decoder.decode(e) * 255).round().byte().float() / 255


def generators(shards, codes):
    """Lines 7-20 and 24-27; return the generator, e and the labels of e."""
    config = CONFIG.generator
    model = build_generator(config, 1, 8, derived_seed(0, "generator"))
    e = labels = None
    for name, (x_k, y_k) in shards.items():
        x_r = None if e is None else images(copy.deepcopy(model).eval(), e)  # of D_old, line 8
        optimizer = torch.optim.Adam(model.train().parameters(), lr=config.lr)
        for epoch in range(config.epochs):  # line 9
            draws = drawing(name, "generator", epoch)
            order, again = torch.randperm(len(y_k), generator=draws), x_r is not None and endless(len(e), G, draws)
            for i in range(max(1, len(y_k) // G)):
                x_U = x_k[order[i * G : (i + 1) * G]]
                x_U = torch.cat([x_r[next(again)], x_U]) if again else x_U  # lines 11-12
                optimizer.zero_grad()
                model.loss(x_U, draws)[0].backward()
                optimizer.step()  # line 18
        of_real = model.eval().encode(x_k)
        before = [] if e is None else [e if codes == "stale" else model.encode(x_r)]
        e = torch.cat([*before, of_real])  # line 19
        labels = y_k if labels is None else torch.cat([labels, y_k])
    if codes == "last-pass":
        e = torch.cat([model.encode(x) for x, _ in shards.values()])
    return model, e, labels


def update_classifier(model, shard, name, exchange, replays=None):
    """Lines 1-6."""
    x_k, y_k = shard
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    order = torch.randperm(len(y_k), generator=drawing(name, exchange))
    again = replays and endless(len(replays[1]), B, drawing(name, exchange, "replay"))
    for i in range(max(1, len(y_k) // B)):
        rows = order[i * B : (i + 1) * B]
        x_U, y_U = x_k[rows], y_k[rows]
        if again:
            chosen = next(again)
            x_U, y_U = torch.cat([replays[0][chosen], x_U]), torch.cat([replays[1][chosen], y_U])
        optimizer.zero_grad()
        cross_entropy(model(x_U), y_U).backward()
        optimizer.step()


def cyclic(shards, replays=None):
    model = BUILD(derived_seed(0, "model"))
    for exchange, name in enumerate("abcabc", 1):
        update_classifier(model, shards[name], name, exchange, replays)
    return to_arrays(model)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codes", ["paper", "stale", "last-pass"])
def test_cwt_with_replay_is_algorithm_1_bit_for_bit(folder, shards, learned, codes):
    ran = run(folder, *LEARNING, "strategy=cwt", "replay=vqvae2", f"replay.codes={codes}")
    model, e, labels = learned(codes)
    assert same(ran.visit("generator", 2), to_arrays(model))
    last = 3 if codes == "last-pass" else 2
    assert np.array_equal(ran.codes(last, CODES), e)
    assert len(e.unique(dim=0)) > ALL // 4
    assert np.array_equal(ran.visit("codes", last)["labels"], labels)
    assert same(ran.weights, cyclic(shards, (images(model.eval(), e), labels)))
    in_generator = 2 * (17 * G + 8 * 2 * G + 2 * G)  # the first institution alone has nothing to replay
    assert ran.result["examples-seen"] == in_generator + 2 * (4 * 2 * B + 2 * 2 * B + (B + 5))
    assert not ran.result["failures"]


def test_the_three_kinds_of_codes_are_as_many_and_differ(learned):
    codes_by_kind = {codes: learned(codes)[1] for codes in ("paper", "stale", "last-pass")}
    assert {codes: e.shape for codes, e in codes_by_kind.items()} == dict.fromkeys(codes_by_kind, (ALL, 5))
    assert not torch.equal(codes_by_kind["paper"], codes_by_kind["stale"])
    assert not torch.equal(codes_by_kind["paper"], codes_by_kind["last-pass"])
    of_c = slice(ALL - SIZES["c"], ALL)  # who was last has all codes from the last generator
    assert torch.equal(codes_by_kind["paper"][of_c], codes_by_kind["last-pass"][of_c])


@pytest.mark.sampled(2, of="slow replay")
def test_fedavg_with_replay_is_its_plain_loop(folder, shards, learned):
    ran = run(folder, *LEARNING, "strategy=fedavg", "replay=vqvae2")
    model, e, labels = learned("paper")
    replays = images(model.eval(), e), labels
    whole = BUILD(derived_seed(0, "model"))
    for exchange in (1, 2):
        trained = []
        for name, shard in shards.items():
            local = copy.deepcopy(whole)
            update_classifier(local, shard, name, exchange, replays)
            trained.append(local.state_dict())
        whole.load_state_dict(mean(trained, [len(y) for _, y in shards.values()]))
    assert same(ran.weights, to_arrays(whole))


def test_without_replay_cwt_is_as_before_bit_for_bit(folder, shards):
    ran = run(folder, "strategy=cwt", "replay=none", "replay.ratio=2", "replay.codes=stale")
    assert same(ran.weights, cyclic(shards))
    assert {entry["stage"] for entry in ran.ledger} == {"roll-call", "train", "evaluate"}
    assert "replayed" not in {entry["field"] for entry in ran.ledger}
    assert not (ran.folder / "replay").exists()
    kept = {path.name for name in SIZES for path in ran.state(name).iterdir()}
    assert kept == {"options.json", "fingerprints.json", "tests"}
