"""What is replayed when: every code once before any comes again, from memory or not, as many as the ratio says."""

import itertools

import numpy as np
import pytest
import torch
from harness import write_shards
from replay_runs import FEW, JOB, SIZES, B, K, N, run

from flwr_replay.config.compose import compose
from flwr_replay.generators.codes import pack_codes
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.generators.sampler import CodeSampler, CodeSource
from flwr_replay.institution.learner import mixed_batches
from flwr_replay.wire.weights import to_arrays


def rng():
    return torch.Generator().manual_seed(0)


def pairs(replay_plan, sizes=(7, 4)):
    """Return sources with decoders of their own; labels are numbers of codes, over all sources."""
    sources, before = [], 0
    for number, n in enumerate(sizes):
        model = replay_plan.fresh_generator().eval()
        for parameter in model.parameters():
            parameter.data.add_(0.1 * number)
        codes = torch.randint(K, (n, N), generator=rng())
        packed = pack_codes(codes.numpy(), K)
        sources.append((model, CodeSource(bytes([number]), to_arrays(model), packed, np.arange(before, before + n))))
        before += n
    return sources


def sampler(*options):
    replay_plan = ReplayPlan.of(compose([*JOB, "replay=vqvae2", *options]))
    return CodeSampler(pairs(replay_plan), replay_plan)


@pytest.mark.parametrize("size", [3, 11, 30])
def test_every_code_comes_once_before_any_comes_again(size):
    batches = list(itertools.islice(sampler().batches(size, rng()), 11))
    assert {len(images) for images, _ in batches} == {size}
    drawn = torch.cat([labels for _, labels in batches]).tolist()
    rounds = [drawn[i : i + 11] for i in range(0, len(drawn), 11)]
    assert all(sorted(pass_rows) == list(range(11)) for pass_rows in rounds)
    assert len(set(map(tuple, rounds))) > 1


def test_batches_from_a_later_one_on_are_the_same():
    whole = list(itertools.islice(sampler().batches(4, rng()), 9))
    later = list(itertools.islice(sampler().batches(4, rng(), first=5), 4))
    assert [labels.tolist() for _, labels in later] == [labels.tolist() for _, labels in whole[5:]]


def test_without_a_cache_the_images_are_the_same():
    cached, decoded = sampler(), sampler("replay.cache-mb=0")
    assert (cached.cached is None, decoded.cached is None) == (False, True)
    rows = torch.tensor([10, 0, 3, 8, 0])
    for image, again in zip(cached.take(rows), decoded.take(rows), strict=True):
        assert torch.equal(image, again)
    for (x, y), (x_, y_) in itertools.islice(zip(cached.batches(5, rng()), decoded.batches(5, rng()), strict=False), 6):
        assert torch.equal(x, x_)
        assert torch.equal(y, y_)


def test_every_sources_codes_meet_their_own_decoder():
    both = sampler()
    images, labels = both.take(torch.arange(11))
    assert labels.tolist() == list(range(11))
    for model, rows in zip(both.generators, (slice(0, 7), slice(7, 11)), strict=True):
        expected = model.decode(both.codes[rows].long())
        assert (images[rows] - expected).abs().max() <= 0.5 / 255 + 1e-6  # kept as bytes
    swapped = both.generators[1].decode(both.codes[:4].long())
    assert (images[:4] - swapped).abs().max() > 0.01


@pytest.mark.parametrize(("ratio", "beside"), [("0.5", 8), ("2", 32), ("0.01", 1), ("0.9", 14)])
def test_the_ratio_says_how_many_stand_beside_a_batch(ratio, beside):
    real = [(torch.full((n, 1, 8, 8), 2.0), torch.full((n,), 99)) for n in (B, 3)]
    for (x, y), (own, _) in zip(
        mixed_batches(iter(real), sampler(f"replay.ratio={ratio}"), B, rng()), real, strict=True
    ):
        beside = min(beside, 11)  # there are so many
        assert len(x) == len(y) == beside + len(own)
        assert (y[:beside] < 11).all()  # the replayed come first
        assert torch.equal(x[beside:], own)


def test_a_run_sees_as_many_examples_as_the_ratio_says(tmp_path):
    write_shards(tmp_path, SIZES)
    ran = run(tmp_path, "strategy=cwt", *FEW, "replay=vqvae2", "replay.ratio=0.5")
    alone = {"a": 4 * B, "b": 2 * B, "c": 5}
    beside = {"a": 4 * B // 2, "b": 2 * B // 2, "c": B // 2}
    in_generator = sum(alone.values()) + beside["b"] + beside["c"]
    assert ran.result["examples-seen"] == in_generator + sum(alone.values()) + sum(beside.values())


def test_where_fewer_are_replayed_than_a_batch_has_each_stands_beside_real_ones_once():
    few = sampler()  # 11 codes
    assert [few.beside(size) for size in (3, 11, 32)] == [3, 11, 11]
    (x_U, labels), *_ = mixed_batches(
        iter([(torch.zeros(32, *few.take(torch.tensor([0]))[0].shape[1:]), torch.full((32,), 99))]), few, 32, rng()
    )
    assert len(x_U) == 11 + 32
    assert sorted(labels.tolist()) == [*range(11), *[99] * 32]
