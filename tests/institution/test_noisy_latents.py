"""Attacks on dp=latents by a server that sends what it likes: no sequence of messages exceeds the account."""

import shutil
from functools import partial

import numpy as np
import pytest
from harness import SHARDS, write_shards
from hostile_server import HostileServer, at_the_same_time, metrics, refusal, weights

from flwr_replay.clients.fedreplay import FedReplayClient
from flwr_replay.errors import RunError
from flwr_replay.institution.budget import PrivacyBudget
from flwr_replay.institution.noisy import NoisyUpload
from flwr_replay.institution.policy import read_policy
from flwr_replay.memory import forget
from flwr_replay.payloads.common import RollCall
from flwr_replay.payloads.fedreplay import Encode, Extract, Latents
from flwr_replay.privacy.gaussian import gaussian_noise

N, WIDTH, BIG = 40, 64, 10**6
TASK = [*SHARDS, "classes=3", "model=mlp", f"model.width={WIDTH}", "batch_size=16", "device=cpu"]
PLAIN = [*TASK, "strategy=fedreplay", "encoder=random", "upload-views=2"]
NOISY = [*PLAIN, "dp=latents", "latent-clip=3", "latent-epsilon=8", "label-epsilon=2", "delta=0.001"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    write_shards(folder, {"a": N})
    return folder


@pytest.fixture
def server(folder):
    return HostileServer(folder, *NOISY)


def ask_latents(server, run, first=0, chunk=BIG, change=1.0, cut="hidden1", **options):
    before = ("hidden1",) if cut == "hidden1" else ("hidden1", "hidden2")
    arrays = {name: array * change for name, array in server.weights.items() if name.startswith(before)}
    asked = {"cut": cut, "latent_dtype": "float32", "views": 2, **options}
    return server.send(Extract(arrays=arrays, run=run, first=first, chunk_bytes=chunk, **asked))


def charged(server, run):
    return [(charge["mechanism"], charge["steps"], charge["label_epsilon"]) for charge in server.charges(run)]


UPLOAD, AGAIN = ("latents", 2, 2.0), ("latents", 0, 0.0)


# --- what leaves ------------------------------------------------------------------------------------------------------


def test_what_leaves_has_the_noise_that_was_charged(server, folder):
    plain = weights(ask_latents(HostileServer(folder, *PLAIN), "plain"))
    reply = ask_latents(server, "noisy")
    arrays, told = weights(reply), metrics(reply)
    norms = np.linalg.norm(plain["latents"], axis=1, keepdims=True)
    noise = arrays["latents"] - plain["latents"] * np.minimum(1, 3 / norms)
    sigma = gaussian_noise(8.0, 0.001) * np.sqrt(2)
    assert noise.std() == pytest.approx(2 * 3 * sigma, rel=0.05)
    assert noise[:N].std() == pytest.approx(noise[N:].std(), rel=0.1)
    assert arrays["labels"][:N].tolist() == arrays["labels"][N:].tolist()  # one answer for all views of an example
    assert arrays["labels"].tolist() != plain["labels"].tolist()
    assert charged(server, "noisy") == [UPLOAD]
    assert (told["epsilon"], told["delta"]) == (pytest.approx(10), 0.001)
    assert told["epsilon"] <= 10
    protection = {row["field"]: row["protection"] for row in server.ledger if row["run"] == "noisy"}
    assert protection["latents"] == protection["labels"] == "(10, 0.001)-DP of each replaced example"
    assert protection["num-examples"] == "declared public"


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_rounding_comes_after_the_noise(folder, dtype):
    server = HostileServer(folder, *NOISY, f"latent-dtype={dtype}")
    arrays = weights(ask_latents(server, dtype, latent_dtype=dtype))
    scale = arrays["scales"][:, None] if dtype == "int8" else 1
    assert (arrays["latents"].astype(np.float32) * scale).std() == pytest.approx(
        2 * 3 * gaussian_noise(8.0, 0.001) * np.sqrt(2), rel=0.05
    )
    assert charged(server, dtype) == [UPLOAD]


# --- what is asked again ----------------------------------------------------------------------------------------------


def test_whatever_is_asked_again_leaves_as_the_same_bytes_after_a_restart_too(server):
    whole = weights(ask_latents(server, "again"))
    replies = []
    for first, chunk in [(0, BIG), (7, 20_000), (50, 12_000), (79, BIG), (0, 3_000)]:
        forget()  # a new process
        replies.append(weights(ask_latents(server, "again", first, chunk)))
        rows = slice(first, first + len(replies[-1]["labels"]))
        assert replies[-1]["latents"].tobytes() == whole["latents"][rows].tobytes()
        assert replies[-1]["labels"].tobytes() == whole["labels"][rows].tobytes()
    assert len({len(reply["labels"]) for reply in replies}) > 3
    assert charged(server, "again") == [UPLOAD, *[AGAIN] * 5]
    assert metrics(ask_latents(server, "again"))["epsilon"] <= 10


@pytest.mark.parametrize(
    ("run", "change", "line"),
    [
        ("encoder", {"change": 1.001}, "once in a run, by one encoder"),
        ("cut", {"cut": "hidden2"}, "once in a run, by one encoder"),
        ("views", {"views": 3}, "asks for what its run says"),
        ("dtype", {"latent_dtype": "int8"}, "asks for what its run says"),
        ("before", {"first": -1}, "Extract.first must be int, finite, and not negative"),
        ("behind", {"first": 80}, "an upload has rows 0 to 80"),
    ],
)
def test_another_upload_of_the_same_run_does_not_leave(server, run, change, line):
    ask_latents(server, run)
    reply = ask_latents(server, run, **change)
    assert line in refusal(reply)
    assert not weights(reply)
    assert charged(server, run) == [UPLOAD]


def test_more_views_than_the_noise_is_for_do_not_leave_without_a_guard_either(server, monkeypatch):
    monkeypatch.setattr("flwr_replay.institution.guard._check_options_kept", lambda *_: None)
    reply = ask_latents(server, "more views", views=3)
    assert "the noise of 2 rows for each example; the server asks for 120 rows" in refusal(reply)
    assert not weights(reply)


def test_two_encoders_at_the_same_time_make_one_upload(folder, monkeypatch):
    """Each of two processes finds nothing charged; without a lock the second's upload would lie there uncharged."""
    servers = [HostileServer(folder, *NOISY) for _ in range(2)]
    asking = (partial(ask_latents, server, "race", change=by) for server, by in zip(servers, (1.0, 1.001), strict=True))
    replies = at_the_same_time(monkeypatch, NoisyUpload, "_made", *asking)
    again = [ask_latents(servers[0], "race", change=change) for change in (1.0, 1.001)]
    assert sorted(bool(weights(reply)) for reply in replies) == [False, True]
    assert [bool(weights(reply)) for reply in again] == [bool(weights(reply)) for reply in replies]
    assert charged(servers[0], "race") == [UPLOAD, AGAIN]


def test_a_lost_upload_is_not_made_anew(server):
    ask_latents(server, "lost")
    shutil.rmtree(server.state / "runs" / "lost" / "noisy-latents")
    reply = ask_latents(server, "lost")
    assert "or they are gone" in refusal(reply)
    assert charged(server, "lost") == [UPLOAD]


def test_a_crash_before_the_charge_costs_nothing_and_what_it_left_never_leaves(server, monkeypatch):
    kept, charge = [], PrivacyBudget.charge

    def crashes(self, *about):
        [latents] = (server.state / "runs" / "crash" / "noisy-latents").glob("*/latents.npy")
        kept.append(np.load(latents))
        raise RunError("the power is gone")

    monkeypatch.setattr(PrivacyBudget, "charge", crashes)
    assert not weights(ask_latents(server, "crash"))
    monkeypatch.setattr(PrivacyBudget, "charge", charge)
    again = weights(ask_latents(server, "crash"))["latents"]
    assert kept[0].shape == again.shape
    assert np.abs(kept[0] - again).mean() > 1
    assert charged(server, "crash") == [UPLOAD]


def test_an_account_that_says_less_than_was_stated_releases_nothing(server):
    reply = ask_latents(server, "older", stated=10.0)
    assert "it is missing or an older copy" in refusal(reply)
    assert not weights(reply)


# --- what else is refused ---------------------------------------------------------------------------------------------


def test_the_guard_keeps_back_rows_that_nobody_charged_for(server, monkeypatch):
    def extract(self, request):
        rows = np.zeros((80, WIDTH), np.float32), np.zeros(80, np.int64)
        about = {"num_examples": N, "first": 0, "total": 80, "raw_bytes": 1, "epsilon": 10.0, "delta": 0.001}
        return Latents(latents=rows[0], labels=rows[1], **about)

    monkeypatch.setattr(FedReplayClient, "extract", extract)
    reply = ask_latents(server, "uncharged")
    assert "only if its latents has been charged" in refusal(reply)
    assert not weights(reply)


def test_no_institution_trains_an_encoder_that_the_run_says_is_random(server):
    request = {"cut": "hidden1", "lr": 0.1, "max_epochs": 1, "patience": 3}
    reply = server.send(Encode(arrays=server.weights, run="encode", **request))
    assert "no institution trains the encoder" in refusal(reply)
    assert not weights(reply)


def test_a_policy_adds_all_runs_up(folder):
    policy = "{max-local-epsilon: 15, max-delta: 0.001}"
    server = HostileServer(folder, *NOISY, policy=policy, name="a")
    plain = HostileServer(folder, *PLAIN, policy=policy)
    reply = ask_latents(plain, "plain under policy")
    assert "local epsilon <= 15; Latents.latents has no differential privacy" in refusal(reply)
    call = RollCall(strategy="fedreplay", run="called", stages=["extract", "evaluate"])
    assert "local epsilon <= 15" in refusal(plain.send(call))
    assert not refusal(server.send(call))
    too_much = HostileServer(folder, *NOISY, "latent-epsilon=14", policy=policy)
    assert "local epsilon <= 15; Latents.latents has epsilon 16" in refusal(ask_latents(too_much, "too much"))
    shutil.rmtree(server.state / "runs")  # of the other tests
    assert weights(ask_latents(server, "first run"))
    assert weights(ask_latents(server, "first run"))
    reply = ask_latents(server, "second run")
    assert "all runs have local epsilon <= 15 together; with this run they would have 1" in refusal(reply)
    assert not weights(reply)
    assert charged(server, "second run") == []


def test_where_a_policy_limits_epsilon_no_server_chooses_the_delta(folder, tmp_path):
    """At δ = 1/|D| the same ε needs far less noise, and may publish one of |D| patients."""
    for delta, refused in (("delta=0", True), ("delta=0.001", True), ("delta=0.00001", False)):
        server = HostileServer(folder, *NOISY, delta, policy="max-local-epsilon: 15")
        shutil.rmtree(server.state / "runs", ignore_errors=True)  # of the other tests
        reply = ask_latents(server, f"chosen {delta[6:]}")
        assert ("policy asks for delta <= 1e-05" in refusal(reply)) == refused
        assert bool(weights(reply)) == (not refused)
    (tmp_path / "policy.yaml").write_text("max-epsilon: 8")
    assert read_policy(tmp_path / "policy.yaml").max_delta == 1e-5
