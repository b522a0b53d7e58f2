"""Attacks on noise that institutions share under masks: by the server, by institutions that help it, by both."""

import math
from dataclasses import replace

import numpy as np
import peers
import pytest
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from harness import write_shards
from hostile_server import HostileServer, metrics, refusal, weights
from scipy.stats import norm
from sealed_runs import SMALL, pinned_keys

from flwr_replay.ciphers.masking import Masking
from flwr_replay.clients.fedavg import FedAvgClient
from flwr_replay.clients.fedsgd import FedSGDClient
from flwr_replay.clients.fedstats import FedStatsClient
from flwr_replay.clients.fml import FMLClient
from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError, FlwrReplayError, RunError
from flwr_replay.institution.budget import PrivacyBudget
from flwr_replay.memory import forget
from flwr_replay.payloads.common import RollCall, Train
from flwr_replay.payloads.fedsgd import Differentiate
from flwr_replay.payloads.fedstats import Summarise, pairs_of
from flwr_replay.payloads.mutual import TrainMutually
from flwr_replay.privacy.accounting import noise_for
from flwr_replay.privacy.claims import sentence
from flwr_replay.privacy.discrete import BITS
from flwr_replay.privacy.gaussian import gaussian_epsilon, gaussian_noise
from flwr_replay.privacy.noise import noise_of, shown_noise
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.wire.masked import MASKED
from flwr_replay.wire.records import config_in, opened

NAMES, N, DELTA = "abcd", 40, 0.001
SHARED = [*SMALL, "masked=true", "privacy.noise=shared", "nodes=4", "privacy.colluders=1", f"delta={DELTA}"]
GRADIENT = [*SHARED, "strategy=fedsgd", "dp=gradient", "privacy.target-epsilon=2", "rounds=5"]
STATISTICS = [*SHARED, "strategy=fedstats", "dp=statistics", "privacy.target-epsilon=2"]
UPDATE = [*SHARED, "strategy=fedavg", "dp=update", "privacy.target-epsilon=2", "rounds=5", "lr=0.5"]
PROXY = [*UPDATE, "strategy=fml"]
ALL = [GRADIENT, STATISTICS, UPDATE, PROXY]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    write_shards(folder, dict.fromkeys(NAMES, N))
    pinned_keys(folder, NAMES)
    return folder


def server_of(folder, *options, name="a", policy=""):
    return HostileServer(folder, *options, name=name, policy=policy, **pinned_keys(folder, NAMES)[name])


def ask_gradients(server, run, exchange=1, scale=1.0, lr=0.5, **other):
    theta = {name: (scale * of).astype(of.dtype) for name, of in server.weights.items()}
    asked = {"arrays": theta, "run": run, "exchange": exchange, "total": len(NAMES) * N} | other
    if server.config.strategy.name == "fedsgd":
        return server.send(Differentiate(**asked))
    if server.config.strategy.name == "fml":
        pair = server.config.strategy.instructions(server.config.training, lr) | {"private_seed": 1, "lr": lr}
        return server.send(TrainMutually(**pair | asked))
    if server.config.strategy.name != "fedstats":
        mu = getattr(server.config.strategy, "mu", None)
        return server.send(Train(**asked | {"lr": lr, "proximal_mu": mu}))
    products = pairs_of(server.weights["head.fc.weight"].shape[1])
    return server.send(Summarise(clip=10.0, products=products, **asked))


def asked_all(folder, options, run, exchange=1, **other):
    """Return all institutions' answers to one request."""
    replies = [ask_gradients(server_of(folder, *options, name=name), run, exchange, **other) for name in NAMES]
    assert not any(map(refusal, replies))
    return [weights(reply) for reply in replies]


def readable_sums(answers):
    """Return what the server can read: the masks' check, and all whole numbers."""
    with np.errstate(over="ignore"):
        total = {name: sum(answer[name] for answer in answers).view(np.int64) for name in answers[0]}
    return total.pop(MASKED), np.concatenate([of.ravel() for of in total.values()])


def same(left, right):
    return all(left[name].tobytes() == right[name].tobytes() for name in left | right)


def stage_of(message):
    return config_in(message.content).get("stage") if message.has_content() else ""


def charged_steps(server, run):
    return [(charge["mechanism"], charge["steps"]) for charge in server.charges(run)]


# --- the sum, and who helps the server --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ALL)
@pytest.mark.parametrize("colluders", [0, 1, 2])
def test_the_sum_has_its_noise_once_also_without_the_shares_of_those_who_help(folder, options, colluders):
    """They can subtract their own numbers, and with their keys nothing but masks among the others is left."""
    options = [*options, f"privacy.colluders={colluders}", "model.width=64"]
    first, second = (
        readable_sums(asked_all(folder, options, f"{run}{colluders}{len(options)}")) for run in ("one", "other")
    )
    assert not first[0].any()
    assert not second[0].any()
    moved = (first[1] - second[1])[first[1] != second[1]] / 2**0.5  # the same data and weights: what differs is noise
    assert len(moved) > 190
    assert moved.std() == pytest.approx(2**BITS * math.sqrt(len(NAMES)), rel=0.2)
    plan = PrivacyPlan.of(compose(options))
    sigma = noise_for(2, DELTA, [(1.0, 1 if "dp=statistics" in options else 5)])
    honest = 2**BITS * math.sqrt(len(NAMES) - colluders) * plan.step(*plan.mechanisms, N, len(first[1]))
    assert sigma < honest < 1.001 * sigma
    left = len(NAMES) - max(1, colluders)  # shares that another institution, which knows its own, does not know
    known = gaussian_epsilon(math.sqrt((len(NAMES) - colluders) / left) / gaussian_noise(2, DELTA), DELTA)
    assert plan.among(2, DELTA) == pytest.approx(known, rel=1e-6)
    assert ("epsilon against another of them" in (shown := shown_noise(noise_of(plan, N)))) == (not colluders)
    assert ("noise 2 C sigma" in shown) == ("dp=update" in options)
    assert ("against it a larger epsilon counts" in sentence(plan, {})) == (not colluders)


@pytest.mark.parametrize("options", ALL)
def test_what_is_stated_of_the_sum_and_of_one_alone_is_so(folder, options):
    server, run = server_of(folder, *options), f"stated {len(options)}"
    told = metrics(ask_gradients(server, run))
    sigma = noise_for(2, DELTA, [(1.0, 1 if options is STATISTICS else 5)])

    def delta_of(epsilon, mu):  # Balle and Wang 2018
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)

    assert delta_of(told["epsilon"], 1 / sigma) == pytest.approx(DELTA, rel=1e-6)
    [line] = {row["protection"] for row in server.ledger if row["run"] == run and row["field"] == "arrays"}
    unit = " of a whole institution" * ("dp=update" in options)
    of_sum, alone = line.split(f"-DP{unit} in the sum of 4, 1 of whom may help the server; alone ")
    assert float(of_sum[1:].split(",")[0]) >= told["epsilon"]
    alone = float(alone.removesuffix(", masked"))
    assert 0 < delta_of(alone, math.sqrt(3) / sigma) <= DELTA < delta_of(0.97 * alone, math.sqrt(3) / sigma)


# --- other requests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ALL)
@pytest.mark.parametrize("other", [{"scale": 1.5}, {"total": 161}, {"run": ""}, {"exchange": 2}])
def test_a_split_cohort_gives_nothing_to_read(folder, options, other):
    run = f"split{len(options)}{min(other)}"
    other = {name: f"{run} other" if name == "run" else value for name, value in other.items()}
    answers = [weights(ask_gradients(server_of(folder, *options, name=name), run)) for name in NAMES[:3]]
    odd = server_of(folder, *options, name="d")
    check, read = readable_sums([*answers, weights(ask_gradients(odd, **{"run": run, **other}))])
    assert check.all()
    assert np.abs(read.astype(float)).mean() > 2**60  # uniform in 64 bits
    again = ask_gradients(odd, **{"run": run, **other, "scale": 3.0})
    assert "an exchange has one answer" in refusal(again)
    assert charged_steps(odd, other.get("run", run)) == charged_steps(server_of(folder, *options), run)


@pytest.mark.parametrize("options", ALL)
def test_who_asks_again_gets_the_same_bytes_and_no_lower_epsilon(folder, options):
    first, run = asked_all(folder, options, f"again{len(options)}"), f"again{len(options)}"
    told = metrics(ask_gradients(server_of(folder, *options), run))["epsilon"]
    forget()
    second = [weights(ask_gradients(server_of(folder, *options, name=name), run)) for name in NAMES]
    assert all(same(*pair) for pair in zip(first, second, strict=True))
    assert metrics(ask_gradients(server_of(folder, *options), run))["epsilon"] >= told
    third = asked_all(folder, options, run, exchange=2)
    assert not any(same(*pair) for pair in zip(first, third, strict=True))  # other masks
    assert same(*({"all": readable_sums(of)[1]} for of in (first, third))) == (
        options is STATISTICS
    )  # one noise in a run


CHANGED = ["nodes=3", "nodes=5", "privacy.colluders=0", "privacy.noise=secret", "privacy.noise=seeded", "delta=0.002"]
CHANGED += ["privacy.target-epsilon=3", "privacy.clip=2", "masked=false"]


def changed(server, options):
    """Let a server send other options, which its own code may refuse."""
    server.grid.contexts[2].run_config["overrides"] = " ".join(options)
    return server


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("option", CHANGED)
def test_a_run_keeps_its_options_and_one_account(folder, option, first):
    run, other = f"kept{option}{first}".replace("=", "-"), [option]
    if "noise" in option:
        other.append("privacy.colluders=-1")
    before, after = (GRADIENT, [*GRADIENT, *other])[:: 1 if first else -1]
    began = ask_gradients(changed(server_of(folder, *GRADIENT), before), run)
    charged = charged_steps(server_of(folder, *GRADIENT), run)
    assert bool(refusal(began)) == (not charged)
    assert first or bool(refusal(began)) == (option in ("nodes=3", "nodes=5", "masked=false"))
    reply = ask_gradients(changed(server_of(folder, *GRADIENT), after), run, 2)
    if charged:
        assert refusal(reply)
        assert not weights(reply)
        assert charged_steps(server_of(folder, *GRADIENT), run) == charged


def test_noise_from_the_seed_beside_masks_protects_nothing_and_says_so(folder):
    server = server_of(folder, *GRADIENT, "privacy.noise=seeded", "privacy.colluders=-1")
    assert "epsilon" not in metrics(ask_gradients(server, "seeded"))
    [line] = {row["protection"] for row in server.ledger if row["run"] == "seeded" and row["field"] == "arrays"}
    assert line.startswith("not protected: its noise comes from the run's seed")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["masked=false"], "protect a sum, and nothing less; got masked=false"),
        (["nodes=0"], "needs the number of institutions"),
        (["nodes=2"], "at least three institutions"),
        (["privacy.colluders=3"], "a sum needs three institutions"),
        (["privacy.noise=secret"], "are for noise=shared"),
        (["delta=0"], "one delta for all institutions"),
        (["strategy=fedavg", "dp=classifier"], "sums over all examples"),
        (["strategy=fedavg", "dp=update", "privacy.clip=1e30"], r"privacy.clip lies in \[1e-9, 1e9\]; got 1e\+30"),
        (["strategy=fedavg", "dp=update+classifier", "noise=secret", "colluders=-1"], "dp=update stands alone"),
    ],
)
def test_options_that_cannot_be_are_refused_by_everyone(folder, options, line):
    with pytest.raises(ConfigError, match=line):
        compose([*GRADIENT, *options])
    server = changed(server_of(folder, *GRADIENT), [*GRADIENT, *options])
    reply = ask_gradients(server, "cannot be")
    assert refusal(reply)
    assert not weights(reply)
    assert charged_steps(server, "cannot be") == []


@pytest.mark.parametrize("options", ALL)
@pytest.mark.parametrize(
    ("policy", "own", "line"),
    [
        ("min-colluders: 2", [], "noise that 2 institutions may lack or give away"),
        ("min-colluders: 1", ["privacy.colluders=0"], "the run says privacy.colluders=0: choose more"),
        ("min-colluders: 1", [], ""),
        ("max-delta: 1.0e-5", [], "delta <= 1e-05"),
        ("{max-epsilon: 1, max-delta: 0.01}", [], "has epsilon 2"),
    ],
)
def test_policies_hold_before_anything_is_charged(folder, options, policy, own, line):
    server, run = server_of(folder, *options, *own, policy=policy), f"policy {len(policy)}{len(own)}{len(options)}"
    stages = {"fedsgd": "differentiate", "fedstats": "summarise", "fedavg": "train", "fml": "train-mutually"}
    stage = stages[name := server.config.strategy.name]
    call = RollCall(strategy=name, run=run, stages=[stage])
    for reply in (server.send(call), ask_gradients(server, run)):
        assert line in refusal(reply)
        assert bool(line) == bool(refusal(reply))
    assert len(charged_steps(server, run)) == (not line)


@pytest.mark.parametrize("options", ALL)
@pytest.mark.parametrize(("owner", "method"), [(PrivacyBudget, "charge"), (Masking, "closed")])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_releases_nothing_that_was_not_charged(folder, monkeypatch, options, owner, method, when):
    run, does = f"crash {method} {when} {len(options)}", getattr(owner, method)

    def crashes(self, *about):
        if when == "after":
            does(self, *about)
        raise RunError("the power is gone")

    monkeypatch.setattr(owner, method, crashes)
    assert not weights(ask_gradients(server_of(folder, *options), run))
    monkeypatch.setattr(owner, method, does)
    forget()
    at_crash = len(charged_steps(server_of(folder, *options), run))
    assert at_crash == ((method, when) != ("charge", "before"))
    check, _ = readable_sums(asked_all(folder, options, run))
    assert not check.any()
    charges = charged_steps(server_of(folder, *options), run)
    assert len(charges) == at_crash + 1
    assert sum(steps for _, steps in charges) == (1 if options is STATISTICS or method == "closed" else at_crash + 1)


def test_the_account_ends_a_run_of_too_many_exchanges_or_if_it_is_lost(folder):
    server = server_of(folder, *GRADIENT)
    told = [metrics(ask_gradients(server, "long", n))["epsilon"] for n in range(1, 6)]
    assert told == sorted(set(told))
    assert told[-1] <= 2
    assert "the privacy budget is epsilon 2" in refusal(ask_gradients(server, "long", 6))
    (server.state / "runs" / "long" / "privacy.jsonl").unlink()
    forget()
    assert "missing or an older copy" in refusal(
        ask_gradients(server_of(folder, *GRADIENT), "long", 6, stated=told[-1])
    )


def spoiled(monkeypatch, strategy, change):
    """Let hospital b change what it has made before it is masked."""
    owners = {"fedsgd": FedSGDClient, "fedstats": FedStatsClient, "fedavg": FedAvgClient, "fml": FMLClient}
    owner = owners[strategy]
    method = "summarise" if strategy == "fedstats" else "under_dp"
    makes = getattr(owner, method)

    def spoils(self, *about):
        answer = makes(self, *about)
        made = {name: change(of) for name, of in opened(answer.arrays).items()}
        return replace(answer, arrays=made) if self.institution.name == "b" else answer

    monkeypatch.setattr(owner, method, spoils)


@pytest.mark.parametrize("options", ALL)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda of: of + 2**50, "an institution has sent too large numbers"),
        (lambda of: of + np.int64(2**62), "an institution has sent too large numbers"),
        (lambda of: of.astype(np.float32), "whole numbers leave, int64; .* is float32: kept back"),
        (lambda of: of.astype(np.int32), "whole numbers leave, int64; .* is int32: kept back"),
        (lambda of: of * 0, ""),  # no share of the noise, and nothing else: that is what t is for
    ],
)
def test_what_a_bad_institution_adds_is_a_line_not_a_model(folder, monkeypatch, options, change, message):
    strategy = compose(options).strategy.name
    spoiled(monkeypatch, strategy, change)
    job = [*options, "rounds=1"]
    if not message:
        result = peers.run(folder, *job, names=NAMES, own=pinned_keys(folder, NAMES)).result
        assert {of["delta"] for of in result["privacy"].values()} == {DELTA}
        return
    with pytest.raises(FlwrReplayError, match=f"^.*{message}.*$"):
        peers.run(folder, *job, names=NAMES, own=pinned_keys(folder, NAMES))


def test_numbers_that_64_bits_do_not_hold_are_refused_before_they_are_charged(tmp_path):
    write_shards(tmp_path, {"a": 4000, "b": 9, "c": 9, "d": 9})
    pinned_keys(tmp_path, NAMES)
    server = server_of(tmp_path, *STATISTICS, "privacy.target-epsilon=1e13", "delta=1e-5")
    assert "leave no room in 64 bits" in refusal(ask_gradients(server, "large", total=5000))
    assert charged_steps(server, "large") == []


@pytest.mark.parametrize("strategy", ["fedavg", "fedprox", "fedavgm", "fml"])
@pytest.mark.parametrize(("lr", "clip", "norm"), [(0.5, 1e-3, 0.5), (1e30, 1.0, 0.0), (0.0, 1.0, 0.0)])
def test_whatever_the_server_asks_an_update_has_at_most_half_the_sensitivity(
    folder, monkeypatch, strategy, lr, clip, norm
):
    """Two updates of norm C differ by 2C at most, which is the unit; what diverged is zero, and no message says so."""
    made, noisy = [], PrivacyBudget.noisy

    def noted(self, mechanism, sums, step, stream):
        made.append(math.sqrt(sum(float(of.square().sum()) for of in sums.values())))
        return noisy(self, mechanism, sums, step, stream)

    monkeypatch.setattr(PrivacyBudget, "noisy", noted)
    options = [*UPDATE, f"strategy={strategy}", f"privacy.clip={clip}"]
    reply = ask_gradients(server_of(folder, *options), run := f"norm {strategy} {norm} {lr > 1}", lr=lr)
    assert not refusal(reply)
    assert {"train-loss", "loss"}.isdisjoint(metrics(reply))
    assert made == [pytest.approx(norm, rel=3e-5)]
    assert made[0] <= 0.5
    for wrong in ({"scale": math.nan}, {"scale": 1e30}, {"arrays": {"head.fc.bias": np.zeros(3, np.float32)}}):
        reply = ask_gradients(server_of(folder, *options), run, 2, **wrong)
        assert not weights(reply)
        assert refusal(reply)
    assert len(charged_steps(server_of(folder, *options), run)) == 1


@pytest.mark.parametrize("colluders", [0, 1])
@pytest.mark.parametrize("strategy", ["fedavg", "fedavgm", "fml"])
def test_the_noise_in_a_model_is_that_of_two_clips_in_the_mean_of_the_institutions(folder, strategy, colluders):
    job = [*UPDATE, f"strategy={strategy}", "model.width=256", f"privacy.colluders={colluders}", "lr=1e-30"]
    done = peers.run(folder, *job, "privacy.clip=0.5", "rounds=3", names=NAMES, own=pinned_keys(folder, NAMES))
    asked = {
        config_in(of.content)["server-round"]: weights(of) for _, of, _ in done.grid.log if stage_of(of)[:5] == "train"
    }
    first, second, third = (np.concatenate([of.ravel() for of in asked[n].values()]) for n in (1, 2, 3))
    times = math.hypot(1, 0.9 * (strategy == "fedavgm"))  # of the first step the server's momentum keeps so much
    seen = (second - first).std() * len(NAMES) / (2 * 0.5)  # noise of one sum, in units of its sensitivity
    assert (third - second).std() * len(NAMES) / (2 * 0.5) == pytest.approx(times * seen, rel=0.05)
    pld = PLDAccountant()
    pld.compose(SelfComposedDpEvent(GaussianDpEvent(seen * math.sqrt(1 - colluders / len(NAMES))), 3))
    [stated] = {of["epsilon"] for of in done.result["privacy"].values()}
    assert stated == pytest.approx(pld.get_epsilon(DELTA), rel=0.05)
