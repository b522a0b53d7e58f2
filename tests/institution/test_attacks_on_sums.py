"""Attacks on masked sums: a server that makes trainings diverge, or updates round to zero, reads no single weights."""

from itertools import combinations

import numpy as np
import pytest
from flwr.app import Message
from harness import write_shards
from hostile_server import HostileServer, metrics, refusal, weights
from sealed_runs import SMALL, pinned_keys

from flwr_replay.ciphers.masking import Masking
from flwr_replay.institution.node import institution_of
from flwr_replay.payloads.common import Train
from flwr_replay.payloads.fedsgd import Differentiate
from flwr_replay.wire.masked import MASKED, mean_of

EQUAL, UNEQUAL = (40, 40, 40, 40), (400, 41, 40, 90)
NORM = {"norm.running_mean": 1e3, "norm.running_var": 1e8}
READ = 1e-6  # an error of a weight


def institutions(folder, names, sizes, strategy="fedavg"):
    """Return real institutions of a masked run, by name, each with the run's options."""
    write_shards(folder, dict(zip(names, sizes, strict=False)))
    own = pinned_keys(folder, names)
    servers = [HostileServer(folder, *SMALL, f"strategy={strategy}", "masked=true", name=n, **own[n]) for n in names]
    return {name: institution_of(s.grid.contexts[2]) for name, s in zip(names, servers, strict=True)}


def request(crowd, theta, exchange=1, run="r", **other):
    config = next(iter(crowd.values()))[1]
    n = sum(sizes_of(crowd).values())
    asked = {"arrays": theta, "run": run, "exchange": exchange, "total": n} | other
    return Differentiate(**asked) if config.strategy.name == "fedsgd" else Train(lr=0.1, **asked)


def sizes_of(crowd):
    return {name: len(institution.train) for name, (institution, _) in crowd.items()}


def computable_sums(crowd, asked, trained):
    """Put what each institution has trained under its masks; return the sums that the server can compute."""
    replies = []
    for name, (institution, config) in crowd.items():
        masking, message = Masking(institution, config, asked.run), Message(asked.encode(), 2, "train")
        n = len(institution.train)
        with masking.alone():
            masking.opened(message, type(asked))
            answer = asked.answer(arrays=trained[name], num_examples=n, examples_seen=n, num_steps=0)
            reply = Message(answer.encode(), reply_to=message)
            masking.closed(reply, type(answer), asked.exchange)
        replies.append(weights(reply))
    with np.errstate(over="ignore"):
        return {name: sum(reply[name] for reply in replies) for name in replies[0]}


def theta_of(crowd, norm):
    """Return what each institution has trained: weights that nobody knows."""
    rng = np.random.default_rng(0)
    scales = {"w": 1.0, "b": 0.01} | (NORM if norm else {})
    weights = {name: {key: np.float32(rng.normal(0, scale, 20)) for key, scale in scales.items()} for name in crowd}
    for arrays in weights.values():  # a variance is never negative
        arrays |= {key: np.abs(arrays[key]) for key in arrays if key.endswith("running_var")}
    return {
        name: arrays | ({"norm.num_batches_tracked": np.array(3)} if norm else {}) for name, arrays in weights.items()
    }


def read_of(answer, sizes, trained, key="w"):
    """Return the sets of institutions whose weights' sum is in what the server has, at whatever scale it tries."""
    some = [names for k in range(1, len(sizes) + 1) for names in combinations(sizes, k)]
    scales = 2.0 ** np.arange(8, 64)[:, None] * np.array([1.0, 1 / sum(sizes.values())])
    guesses = answer[f"{key}.masked"].view(np.int64) / scales.reshape(-1, 1)
    wanted = {names: sum(sizes[name] * trained[name][key].astype(float) for name in names) for names in some}
    return {
        "".join(names)
        for names in some
        if (np.abs(guesses - wanted[names]).max(1) < READ * sum(sizes[name] for name in names)).any()
    }


@pytest.mark.parametrize(
    ("strategy", "names", "sizes", "norm"),
    [
        ("fedavg", "abc", UNEQUAL, True),
        ("fedavg", "abcd", EQUAL, False),
        ("fedprox", "abc", EQUAL, True),
        ("fedavgm", "abc", UNEQUAL, False),
        ("fedsgd", "abc", EQUAL, False),
        ("fedsgd", "abcd", UNEQUAL, True),
    ],
)
def test_whoever_diverges_nobody_elses_weights_are_left_in_the_sum(tmp_path, strategy, names, sizes, norm):
    """Zeros under the masks of those that diverge would leave the sum of the others, or of one."""
    crowd = institutions(tmp_path, names, sizes, strategy)
    trained = theta_of(crowd, norm)
    like = trained["a"]
    answer = computable_sums(crowd, request(crowd, like), trained)
    assert read_of(answer, sizes_of(crowd), trained) == {names}
    assert not answer[MASKED].any()
    wrong = iter([np.nan, np.inf, 2.0**20, -1e9, 3e38] * 4)
    for k in range(1, len(names) + 1):
        for some in combinations(names, k):
            value = next(wrong)
            spoiled = trained | {
                name: trained[name] | {"b": np.where(np.arange(20) == 3, np.float32(value), trained[name]["b"])}
                for name in some
            }
            answer = computable_sums(crowd, request(crowd, like, run=f"r{''.join(some)}"), spoiled)
            assert not read_of(answer, sizes_of(crowd), trained)
            assert answer[MASKED][0] > len(names)  # nor how many they were
            assert answer[MASKED][1] == 0


def test_a_run_says_once_that_weights_have_diverged(tmp_path):
    """Otherwise each message would say a bit of the largest number of any institution."""
    crowd = institutions(tmp_path, "abc", EQUAL)
    trained = theta_of(crowd, norm=False)
    spoiled = trained | {"b": {"w": trained["b"]["w"], "b": np.full(20, np.nan, np.float32)}}
    first = computable_sums(crowd, request(crowd, trained["a"]), spoiled)
    again = computable_sums(crowd, request(crowd, trained["a"]), trained)  # as after a crash: the same bytes
    assert all((first[name] == again[name]).all() for name in first)
    for exchange, weights_of in ((2, trained), (3, spoiled)):
        answer = computable_sums(crowd, request(crowd, trained["a"], exchange), weights_of)
        assert answer[MASKED].all()
        assert not read_of(answer, sizes_of(crowd), trained)


def test_what_rounds_to_zero_leaves_nobody_elses_update(tmp_path):
    """Sums of 0.6 tell the same whether they are one institution's, or of 0.2 of each: of a step of the fixed point.

    If each were rounded alike, updates at smaller and smaller learning rates would show each institution's.
    """
    crowd, n = institutions(tmp_path, "abc", EQUAL), 20000
    counts = []
    for exchange, shares in enumerate(((0.6, 0.0, 0.0), (0.2, 0.2, 0.2), (-0.4, 0.9, 0.1)), 1):
        trained = {
            name: {"w": np.full(n, share * 3 * 2.0**-43, np.float32)} for name, share in zip("abc", shares, strict=True)
        }
        array = computable_sums(crowd, request(crowd, trained["a"], exchange), trained)["w.masked"].view(np.int64)
        assert abs(array.mean() - 0.6) < 0.03
        counts.append(np.bincount(array + 3, minlength=8))
    assert counts[0].max() < n
    for array in counts[1:]:
        assert np.abs(array - counts[0]).max() < 6 * np.sqrt(n)


def test_the_mean_is_that_of_all_whatever_total_the_server_says(tmp_path):
    """It scales all alike; what is not told to all gives nothing."""
    crowd = institutions(tmp_path, "abc", UNEQUAL)
    trained = theta_of(crowd, norm=True)
    sizes = sizes_of(crowd)
    answer = computable_sums(crowd, request(crowd, trained["a"]), trained)
    wanted = {
        key: sum(n * trained[name][key] for name, n in sizes.items()) / sum(sizes.values()) for key in trained["a"]
    }
    for key, array in mean_of(answer, trained["a"]).items():
        np.testing.assert_allclose(array, wanted[key], rtol=1e-6)
    for exchange, total in ((2, 400), (3, 10**9), (4, 2**62)):
        assert read_of(
            computable_sums(crowd, request(crowd, trained["a"], exchange, total=total), trained),
            sizes_of(crowd),
            trained,
        ) <= {"abc"}


# --- servers that send to institutions' ClientApps -------------------------------------------------------------------


def servers(folder, sizes, *options, names="abc"):
    write_shards(folder, dict(zip(names, sizes, strict=False)))
    own = pinned_keys(folder, names)
    return [HostileServer(folder, *SMALL, *options, "masked=true", name=n, **own[n]) for n in names]


@pytest.mark.parametrize("strategy", ["fedavg", "fedprox", "fedavgm"])
def test_weight_decay_makes_the_larger_ones_diverge_and_nothing_is_left_of_the_smallest(tmp_path, strategy):
    """A weight without a gradient grows by |1 - lr · decay| in each step, and steps follow from public numbers."""
    sizes, options = {"a": 40, "b": 160, "c": 200}, [f"strategy={strategy}", "training.weight_decay=3", "momentum=0"]
    several = servers(tmp_path, sizes.values(), *options)
    plain = [HostileServer(tmp_path, *SMALL, *options, name=name) for name in sizes]
    theta = {name: np.zeros_like(array) for name, array in several[0].weights.items()}
    *_, dead, bias = theta  # with zeros before it the last layer's weight has no gradient, its bias has one
    theta[dead][:] = 6e4

    def answers(of, **asked):
        return [weights(institution.send(Train(arrays=theta, exchange=1, lr=1.0, **asked))) for institution in of]

    trained = dict(zip(sizes, answers(plain, run="plain"), strict=True))
    assert np.abs(trained["a"][dead]).max() < 2**20 < np.abs(trained["b"][dead]).max()
    replies = answers(several, run="r", total=400)
    answer = {name: sum(reply[name] for reply in replies) for name in replies[0]}
    assert not read_of(answer, sizes, trained, bias)
    assert answer[MASKED][0] > 3
    assert answer[MASKED][1] == 0


BEYOND = {"weights": 1.1e6, "statistics": 1.1e9, "counts": 2 * 10**9}


@pytest.mark.parametrize("what", BEYOND)
def test_what_leaves_no_room_for_a_training_is_refused_by_all_alike(tmp_path, what):
    """By the request alone: what is refused by some only would tell of their data."""
    several = servers(tmp_path, UNEQUAL, "strategy=fedavg", "model=resnet34", "model.width=2", "model.norm=batch")
    ends = {"weights": ".weight", "statistics": "running_mean", "counts": "num_batches_tracked"}[what]
    theta = {name: array.copy() for name, array in several[0].weights.items()}
    name = next(name for name in theta if name.endswith(ends))
    theta[name] = np.full_like(theta[name], BEYOND[what])
    reasons = {refusal(s.send(Train(arrays=theta, run="r", exchange=1, lr=0.1, total=1000))) for s in several}
    [line] = reasons
    assert name in line
    assert "under masks weights must be finite and at most" in line


def test_no_total_of_examples_is_below_ones_own(tmp_path):
    several = servers(tmp_path, EQUAL, "strategy=fedavg")
    for total in (None, 0, 39):
        asked = Train(arrays=several[0].weights, run="r", exchange=1, lr=0.1, total=total)
        assert "how many examples all institutions have" in refusal(several[0].send(asked))
    asked = Train(arrays=several[0].weights, run="r", exchange=1, lr=0.1, total=40)
    assert metrics(several[0].send(asked))
