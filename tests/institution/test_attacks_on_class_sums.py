"""Attacks on dp=statistics by a server that sends what it likes, and what a careless hospital may lose or damage."""

import shutil
from functools import partial

import numpy as np
import pytest
from harness import SHARDS, write_shards
from hostile_server import HostileServer, at_the_same_time, metrics, refusal, weights

from flwr_replay.clients.fedstats import FedStatsClient
from flwr_replay.errors import RunError
from flwr_replay.institution.budget import PrivacyBudget
from flwr_replay.memory import forget
from flwr_replay.payloads.common import RollCall, Train
from flwr_replay.payloads.fedstats import PRODUCTS, ClassSums, Summarise, pairs_of
from flwr_replay.privacy.accounting import noise_for
from flwr_replay.wire.records import opened

N, WIDTH, HEAD = 40, 64, ("head.fc.weight", "head.fc.bias")
PAIRS = pairs_of(WIDTH)
PLAIN = [*SHARDS, "classes=3", "model=mlp", f"model.width={WIDTH}", "device=cpu", "strategy=fedstats"]
NOISY = [*PLAIN, "dp=statistics", "privacy.target-epsilon=2", "delta=0.001"]
SIGMA = noise_for(2, 0.001, [(1.0, 1)])
MADE, AGAIN = ("statistics", 1), ("statistics", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    write_shards(folder, {"a": N})
    return folder


@pytest.fixture
def server(folder):
    return HostileServer(folder, *NOISY)


def ask_sums(server, run, change=None, **options):
    return server.send(Summarise(arrays={**server.weights, **(change or {})}, run=run, **{"clip": 10.0, **options}))


def scaled_weights(server, name, by):
    return {name: server.weights[name] * np.float32(by)}


def charged(server, run):
    return [(charge["mechanism"], charge["steps"]) for charge in server.charges(run)]


def head_sums(reply):
    return [weights(reply)[name] for name in HEAD]


def same(left, right):
    return all(a.tobytes() == b.tobytes() for a, b in zip(head_sums(left), head_sums(right), strict=True))


def kept_file(server, run):
    [file] = (server.state / "runs" / run).glob("class-sums-*.safetensors")
    return file


# --- what leaves ------------------------------------------------------------------------------------------------------


def test_what_leaves_has_the_noise_that_was_charged_and_nothing_else_depends_on_examples(server, folder):
    asked = {"products": PAIRS}
    plain, reply = ask_sums(HostileServer(folder, *PLAIN), "plain", **asked), ask_sums(server, "noisy", **asked)
    (of_sums, of_numbers), told = (
        [(n - p) * N for n, p in zip(head_sums(reply), head_sums(plain), strict=True)],
        metrics(reply),
    )
    of_products = (weights(reply)[PRODUCTS] - weights(plain)[PRODUCTS]) * N
    assert of_products.shape == (PAIRS,)
    assert of_products.std() == pytest.approx(SIGMA, rel=0.05)
    assert of_sums.std() == pytest.approx(SIGMA, rel=0.15)
    assert np.abs(of_numbers).max() > 0.01
    assert charged(server, "noisy") == [MADE]
    assert set(told) == {"num-examples", "examples-seen", "num-steps", "epsilon", "delta"}
    assert (told["num-examples"], told["examples-seen"], told["num-steps"]) == (N, N, 0)
    assert 1.99 < told["epsilon"] <= 2
    assert told["delta"] == 0.001
    others = {name: array for name, array in weights(reply).items() if name not in (*HEAD, PRODUCTS)}
    assert all(array.tobytes() == server.weights[name].tobytes() for name, array in others.items())
    protection = {row["field"]: row["protection"] for row in server.ledger if row["run"] == "noisy"}
    assert protection["arrays"] == "(2, 0.001)-DP"
    assert protection["num-examples"] == "declared public"


# --- what is asked again ----------------------------------------------------------------------------------------------


def test_whatever_is_asked_again_leaves_as_the_same_bytes(server):
    """In the same exchange, another, after a restart, and with another head, as a server has it after it has pooled."""
    first = ask_sums(server, "again")
    for change in ({}, {"exchange": 7}, {}, {"change": scaled_weights(server, HEAD[0], 3), "exchange": 2}):
        forget()
        reply = ask_sums(server, "again", **change)
        assert same(first, reply)
        assert metrics(reply)["epsilon"] == metrics(first)["epsilon"] <= 2
    assert charged(server, "again") == [MADE, *[AGAIN] * 4]


def test_other_sums_do_not_leave_in_the_same_run(server, folder):
    ask_sums(server, "others")
    for name in set(server.weights) - set(HEAD):
        assert "once in a run, by one encoder" in refusal(
            ask_sums(server, "others", scaled_weights(server, name, 1.001))
        )
    assert "once in a run, by one encoder" in refusal(ask_sums(server, "others", products=PAIRS))
    reply = ask_sums(HostileServer(folder, *PLAIN), "others")
    assert "a run keeps its options" in refusal(reply)
    assert not weights(reply)
    assert charged(server, "others") == [MADE]


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan"), float("inf"), 1e300, 9.0])
@pytest.mark.parametrize("guarded", [True, False])
def test_another_clip_is_refused(server, monkeypatch, clip, guarded):
    run = f"clip {clip}{guarded}".replace("+", "")
    if not guarded:
        monkeypatch.setattr("flwr_replay.institution.guard._check_options_kept", lambda *_: None)
    ask_sums(server, run)
    reply = ask_sums(server, run, clip=clip)
    assert refusal(reply)
    assert not weights(reply)
    assert charged(server, run) == [MADE]


@pytest.mark.parametrize("products", [1, PAIRS - 1, PAIRS + 1, 10**9, 10**15])
def test_products_that_the_features_do_not_have_are_refused(server, products):
    reply = ask_sums(server, "products", products=products)
    wanted = f"64 features have {PAIRS:,} products" if products < 1e7 else "ask for products from 0 to 1e+07"
    assert wanted in refusal(reply)
    assert not weights(reply)
    assert charged(server, "products") == []


def test_where_the_run_says_class_means_nobody_asks_for_products(folder):
    server = HostileServer(folder, *NOISY, "strategy.head=means")
    assert "products is 0, it asks for 2080" in refusal(ask_sums(server, "means", products=PAIRS))
    assert charged(server, "means") == []
    assert PRODUCTS not in weights(ask_sums(server, "means"))


def test_a_policy_counts_products_before_they_are_made(folder):
    server = HostileServer(folder, *NOISY, policy="max-upload-mb: 0.04")  # weights have 35 kB, products 8
    assert "what is asked for beside it" in refusal(ask_sums(server, "upload", products=PAIRS))
    assert charged(server, "upload") == []
    assert not refusal(ask_sums(server, "upload"))


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38, "shape", "none", "name", "integers"])
def test_weights_that_cannot_be_are_refused_alike_whatever_the_examples(server, value):
    arrays, name = dict(server.weights), "hidden1.fc.weight"
    if value == "none":
        arrays = {key: array for key, array in arrays.items() if key not in HEAD}
    elif value == "name":
        arrays["more"] = arrays[name]
    elif value == "shape":
        arrays[HEAD[0]] = arrays[HEAD[0]][:2]
    else:
        arrays[name] = arrays[name].astype(int) if value == "integers" else np.full_like(arrays[name], value)
    for run in ("strange", "noisy"):
        reply = server.send(Summarise(arrays=arrays, run=run, clip=10.0))
        assert refusal(reply)
        assert not weights(reply)
    assert charged(server, "strange") == []


def test_two_servers_at_the_same_time_get_one_upload(folder, monkeypatch):
    asking = (partial(ask_sums, HostileServer(folder, *NOISY), "race") for _ in range(2))
    replies = at_the_same_time(monkeypatch, FedStatsClient, "summed", *asking)
    assert same(*replies)
    assert charged(HostileServer(folder, *NOISY), "race") == [MADE, AGAIN]


# --- a careless hospital ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["removed", "cut", "empty", "moved"])
def test_lost_or_damaged_sums_are_not_made_anew(server, damage):
    run = f"file {damage}"
    ask_sums(server, run)
    file, content = kept_file(server, run), kept_file(server, run).read_bytes()
    if damage == "removed":
        file.unlink()
    elif damage == "moved":  # from another run, with noise of its own
        ask_sums(server, "source")
        shutil.copy(kept_file(server, "source"), file)
    else:
        file.write_bytes(content[: len(content) // 2 if damage == "cut" else 0])
    forget()
    reply = ask_sums(server, run)
    assert refusal(reply)
    assert not weights(reply)
    assert charged(server, run) == [MADE]


def test_a_lost_account_releases_no_second_noise(server):
    """The server says that nothing was stated; what it gets are the bytes that it has, charged once more."""
    first = ask_sums(server, "lost account")
    (server.state / "runs" / "lost account" / "privacy.jsonl").unlink()
    forget()
    assert "missing or an older copy" in refusal(ask_sums(server, "lost account", stated=2.0))
    assert "once in a run, by one encoder" in refusal(
        ask_sums(server, "lost account", scaled_weights(server, "hidden1.fc.bias", 2))
    )
    assert same(first, ask_sums(server, "lost account"))
    assert charged(server, "lost account") == [MADE]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_around_the_charge_releases_one_noise(server, monkeypatch, when):
    run, charge = f"crash {when}", PrivacyBudget.charge

    def crashes(self, *about):
        if when == "after":
            charge(self, *about)
        raise RunError("the power is gone")

    monkeypatch.setattr(PrivacyBudget, "charge", crashes)
    assert not weights(ask_sums(server, run))
    monkeypatch.setattr(PrivacyBudget, "charge", charge)
    forget()
    assert same(ask_sums(server, run), ask_sums(server, run))
    assert charged(server, run) == [MADE, AGAIN, *[AGAIN] * (when == "after")]


# --- what else is refused ---------------------------------------------------------------------------------------------


def test_the_guard_keeps_back_sums_that_nobody_charged_for(server, monkeypatch):
    def summarise(self, request):
        return ClassSums(arrays=opened(request.arrays), num_examples=N, examples_seen=N, num_steps=0, **stated)

    monkeypatch.setattr(FedStatsClient, "summarise", summarise)
    stated = {"epsilon": 2.0, "delta": 0.001}
    reply = ask_sums(server, "uncharged")
    assert "only if its statistics has been charged" in refusal(reply)
    assert not weights(reply)
    assert "Trained.arrays would: refused" in refusal(
        server.send(Train(arrays=server.weights, run="uncharged", lr=0.1))
    )


@pytest.mark.parametrize(
    ("policy", "options", "line"),
    [
        ("strategies: [fedavg]", [], "policy allows strategies fedavg"),
        ("kinds: [statistic]", [], "is model"),
        ("{max-epsilon: 1, max-delta: 0.01}", [], "has epsilon 2"),
        ("max-delta: 1.0e-5", [], "delta <= 1e-05"),
        ("masked: true", [], "masked=true"),
        ("", ["masked=true"], "pinned keys"),
        ("", ["delta=0.5"], "at most one over the number"),
        ("", ["privacy.target-epsilon=0", "privacy.sigma=0.1", "privacy.epsilon=1"], "would make"),
    ],
)
def test_policy_and_budget_hold(folder, policy, options, line):
    server, run = HostileServer(folder, *NOISY, *options, policy=policy), f"policy {line[:6]} {len(line)}"
    replies = [ask_sums(server, run), server.send(RollCall(strategy="fedstats", run=run, stages=["summarise"]))]
    assert line in refusal(replies[0])
    assert all(refusal(reply) and not weights(reply) for reply in replies)
    assert charged(server, run) == []
