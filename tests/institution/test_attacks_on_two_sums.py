"""A masked run with replay=statistics has two sums, of features and of weights: neither helps to read the other."""

import re
from dataclasses import replace

import numpy as np
import pytest
from harness import SHARDS, write_shards
from hostile_server import HostileServer, refusal, weights
from sealed_runs import pinned_keys

from flwr_replay.memory import forget
from flwr_replay.payloads.common import Train
from flwr_replay.payloads.fedstats import KeepDraws, Summarise, pairs_of
from flwr_replay.wire.masked import MASKED

F, ABC = 9 * 7 * 7, "abc"
JOB = [*SHARDS, "classes=3", "model=gabor", "model.train=head", "device=cpu", "strategy=fedavg", "replay=statistics"]
SHARED = ["dp=statistics", "noise=shared", "privacy.sigma=1", "delta=0.001", "colluders=0", "nodes=3"]
RIGHT = {"arrays": {}, "clip": 10.0, "products": pairs_of(F), "sums": 3 * (1 + F), "total": 120}


@pytest.fixture(params=[[], SHARED], ids=["no noise", "shared noise"])
def servers(request, tmp_path):
    write_shards(tmp_path, dict.fromkeys(ABC, 40))
    options, own = [*JOB, "masked=true", *request.param], pinned_keys(tmp_path, ABC)
    return [HostileServer(tmp_path, *options, name=name, **own[name]) for name in ABC]


def sum_of_answers(servers, exchange=1, odd=()):
    """Return the sum of what all send; the last one is asked something else."""
    about = {"run": "r", "exchange": exchange, **RIGHT}
    return added_answers(servers, [Summarise(**about), Summarise(**about), Summarise(**about | dict(odd))])


def train_request(servers, exchange):
    return Train(run="r", exchange=exchange, arrays=servers[0].weights, lr=0.1, total=120, replayed=7)


def trained(servers, exchange):
    """Return the masks' check of a sum of weights; it is 0 if they cancel."""
    return added_answers(servers, [train_request(servers, exchange)] * 3)[MASKED]


def added_answers(servers, requests):
    answers = [weights(server.send(request)) for server, request in zip(servers, requests, strict=True)]
    return {name: sum(answer[name] for answer in answers).view(np.int64) for name in min(answers, key=len)}


def give_draws(servers, exchange, *means):
    for server, mean in zip(servers, means, strict=True):
        drawn = {"means": np.full((3, F), mean, np.float32), "factor": np.eye(F, dtype=np.float32)}
        drawn["counts"] = np.array([5, 0, 2])
        assert not refusal(server.send(KeepDraws(run="r", exchange=exchange, arrays=drawn)))


def charged(server, run="r"):
    return [charge["steps"] for charge in server.charges(run)]


def test_each_sum_is_under_its_own_masks(servers):
    noise = "noise=shared" in servers[0].options
    first = sum_of_answers(servers)
    assert not first[MASKED].any()
    give_draws(servers, 1, 1, 1, 1)
    assert not trained(servers, 1).any()
    again, later = sum_of_answers(servers), sum_of_answers(servers, 2)  # the same bytes; other masks, and the same sum
    assert all((again[name] == first[name]).all() for name in first)
    for name, whole in first.items():
        np.testing.assert_allclose(later[name], whole, atol=0 if noise else 3)
    assert not trained(servers, 2).any()
    assert "an exchange has one answer" in refusal(
        servers[2].send(Summarise(run="r", exchange=2, **RIGHT | {"total": 121}))
    )
    assert charged(servers[2]) == ([1, 0, 0] if noise else [])


def test_masks_cancel_only_if_all_have_learned_from_the_same_draws(servers):
    """Draws that leave the others' weights where they are would show what one learns; later from its momentum."""
    give_draws(servers, 1, 1, 1, 1)
    assert not trained(servers, 1).any()  # sums of features are not needed first
    give_draws(servers, 2, 1, 1, 9)
    assert trained(servers, 2).any()
    give_draws(servers, 3, 1, 1, 1)
    assert trained(servers, 3).any()
    give_draws(servers, 3, 9, 1, 1)
    assert "an exchange has one answer" in refusal(servers[0].send(train_request(servers, 3)))
    assert not sum_of_answers(servers, 3)[MASKED].any()


@pytest.mark.parametrize("odd", [{"total": 121}, {"products": 0}, {"exchange": 2}, {"run": "s"}])
def test_a_split_cohort_gives_nothing_to_read_and_is_charged_once(servers, odd):
    read = sum_of_answers(servers, odd=odd)
    assert read[MASKED].all()
    for whole in read.values():
        assert np.abs(whole.astype(float)).max() > 2**45  # uniform in 64 bits; a sum as it is lies below
    told = servers[2].send(Summarise(run=odd.get("run", "r"), exchange=odd.get("exchange", 1), **RIGHT))
    assert ("an exchange has one answer" in refusal(told)) == ("total" in odd or "products" in odd)
    for other in ({"clip": 9.0}, {"sums": 0}, {"sums": 3 * F}, {"cohort": ["a", "c"], "spare": 0}, {"spare": 1}):
        assert refusal(servers[2].send(Summarise(run="other", **RIGHT | other)))
    assert not charged(servers[2], "other")
    assert sum(charged(servers[2], odd.get("run", "r"))) == ("noise=shared" in servers[2].options)


@pytest.mark.parametrize("asked_again", ["sums", "weights"])
def test_two_sums_do_not_show_who_has_come_between(servers, tmp_path, asked_again):
    """Where a hospital goes on with one patient more, the difference would be this patient's features."""
    sum_of_answers(servers)
    give_draws(servers, 1, 1, 1, 1)
    trained(servers, 1)
    with np.load(tmp_path / "c.npz") as stored:
        arrays = {name: np.concatenate([array, array[-1:]]) for name, array in stored.items()}
    np.savez(tmp_path / "c.npz", **arrays)
    forget()
    later = Summarise(run="r", exchange=2, **RIGHT | {"total": 121})
    request = later if asked_again == "sums" else replace(train_request(servers, 2), total=121)
    assert re.search("examples.* others than when .* began", refusal(servers[2].send(request)))
