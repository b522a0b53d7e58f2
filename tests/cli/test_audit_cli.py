"""flwr-replay privacy audit: what it finds in small runs, what it writes, and one line for every mistake."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from harness import node_configs, write_shards

from flwr_replay.cli.main import main
from flwr_replay.engines.inline import InlineGrid
from flwr_replay.institution import budget
from flwr_replay.lab.audit import audited_app
from flwr_replay.lab.canaries import Canaries, GradientCanaries
from flwr_replay.privacy import shares
from flwr_replay.privacy.account import Account
from flwr_replay.privacy.accounting import SampledGaussian, epsilon
from flwr_replay.privacy.dpsgd import noisy_step
from flwr_replay.privacy.secret import Stream

TASK = ["task=digits", "nodes=2", "partition=iid", "batch-size=64"]
DIGITS = [*TASK, "model=mlp", "model.width=16", "rounds=2"]
FEDAVG = ["strategy=fedavg", *DIGITS, "dp=classifier", "sigma=0.805"]


@pytest.fixture
def audit(monkeypatch, capsys, tmp_path):
    """Run an audit in this process, in an empty folder; return exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["flwr-replay", "privacy", "audit", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, *capsys.readouterr()

    return call


def test_an_honest_run_is_not_refuted_and_its_report_lies_in_the_run_s_folder(audit, tmp_path):
    code, out, _ = audit(*FEDAVG, "--canaries", "200", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["refuted"] is False
    assert report["canaries"] == 200
    assert report["steps"]["found"] == []
    assert report["steps"]["steps"] == report["steps"]["charged"] == 20
    assert report["claim"]["epsilon"] < report["steps"]["detectable"]
    [written] = tmp_path.glob("runs/*/audit.json")
    assert {key: value for key, value in json.loads(written.read_text()).items() if key in report} == report
    claim = report["claim"]
    [account] = tmp_path.glob("home/state/simulation/institution-1/runs/*/privacy.jsonl")
    charges = [json.loads(line) for line in account.read_text().splitlines()]
    costs = [SampledGaussian(charge["rate"], charge["sigma"], charge["steps"]) for charge in charges]
    assert claim["delta"] == 1e-5
    assert claim["epsilon"] == epsilon(costs, 1e-5, "prv")
    assert claim["epsilon"] > 4  # which holds at delta 1/|D|


def test_a_refuted_claim_has_exit_code_1_and_says_why(audit, monkeypatch):
    def quieter(*args, sigma, **rest):
        return noisy_step(*args, sigma=sigma / 2, **rest)

    monkeypatch.setattr(budget, "noisy_step", quieter)
    code, out, _ = audit("strategy=fedavg", *DIGITS, "dp=classifier", "sigma=0.6", "--canaries", "300")
    assert code == 1
    assert "REFUTED" in out
    assert "Found: less noise, for what one example adds, than charged." in out
    assert "no proof" not in out


def test_the_text_says_what_it_could_have_seen_and_what_it_cannot_show(audit):
    code, out, _ = audit(*FEDAVG, "--canaries", "100")
    assert code == 0
    assert "would have been found in 95 of 100 audits" in out
    assert "so would sums that grow after clipping" in out
    assert "Not refuted is no proof" in out
    assert "so they can refute no larger claim" in out
    assert "an honest claim is refuted in at most 1 of 100 audits" in out


def test_an_account_that_charges_half_of_the_steps_is_refuted(audit, monkeypatch):
    whole = Account.charge

    def half(account, mechanism, cost, *noise):
        whole(account, mechanism, replace(cost, steps=cost.steps // 2), *noise)

    monkeypatch.setattr(Account, "charge", half)
    code, out, _ = audit(*FEDAVG, "--canaries", "100")
    assert code == 1
    assert "20 steps of DP-SGD were seen, 10 were charged" in out


def test_steps_that_no_example_joined_show_nothing(audit, monkeypatch):
    def empty(examples, cost, stream):
        return iter([torch.empty(0, dtype=torch.int64)] * cost.steps)

    monkeypatch.setattr(budget, "poisson_batches", empty)
    code, _, err = audit(*FEDAVG, "--canaries", "100")
    assert code == 2
    assert "institution-1 has taken none that an example joined" in err.splitlines()[-1]


METHODS = {
    "a proxy": ["strategy=proxyfl", "model=mlp", "model.width=16", "dp=proxy"],
    "a part, by opacus": [
        "strategy=fedreplay",
        "model=cnn",
        "model.width=4",
        "model.norm=group",
        "dp=encoder",
        "encoder-epochs=2",
    ],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("words", METHODS.values(), ids=METHODS)
def test_in_honest_steps_of_other_methods_nothing_is_found(audit, words):
    code, out, _ = audit(*TASK, *words, "sigma=0.6", "rounds=1", "--canaries", "40", "--json")
    assert code == 0
    report = json.loads(out)["steps"]
    assert report["found"] == []
    assert report["steps"] == report["charged"] > 0


@pytest.mark.sampled(2, of="slow audits")
def test_mislabelled_images_are_found_without_dp_and_nothing_is_claimed(audit):
    learns = ["model=mlp", "model.width=64", "rounds=4", "local-epochs=40", "lr=0.1"]
    code, out, _ = audit("strategy=fedavg", *TASK, *learns, "--kind", "images", "--canaries", "200", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["claim"]["epsilon"] is None
    assert report["releases"] == 4
    assert report["auc"] > 0.8
    assert report["bounds"]["steinke"]["epsilon"] > 1.5


def test_a_proxy_is_scored_too(audit):
    code, out, _ = audit("strategy=proxyfl", *DIGITS, "dp=none", "--kind", "images", "--canaries", "50", "--json")
    assert code == 0
    assert json.loads(out)["releases"] == 2


def test_models_that_stay_cannot_be_scored(audit, tmp_path):
    words = ["strategy=proxyfl", *DIGITS, "dp=none", "topology=none", "--kind", "images", "--canaries", "50"]
    code, _, err = audit(*words)
    assert code == 2
    assert "institution-1 has released no such thing" in err.splitlines()[-1]
    assert not list(tmp_path.glob("runs/*/audit.json"))


DRAWS = ["strategy=proxyfl", *TASK, "model=gabor", "model.train=head", "replay=statistics", "beta=0", "sigma=1"]
DRAWS += ["dp=statistics+proxy", "rounds=1", "--canaries", "20"]


def test_an_audit_of_steps_says_that_the_sums_beside_them_were_not_tested(audit):
    code, out, _ = audit(*DRAWS)
    assert code == 0
    assert "The account of proxy, statistics claims epsilon" in out
    assert "Its sums were not tested: audit dp=statistics alone, with --kind sums." in out


LATENTS = ("dp=latents", "latent-clip=1", "latent-epsilon=8", "label-epsilon=1", "encoder=random")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["strategy=fedavg", *DIGITS], "no mechanism to audit: choose dp=generator or prior or classifier"),
        (["strategy=splitnn", *DIGITS], "strategy=splitnn can have none: choose another strategy"),
        (["strategy=fedreplay", *DIGITS, *LATENTS], "takes no such step"),
        (["strategy=fedstats", *DIGITS[:3], *DIGITS[4:], "dp=statistics", "target-epsilon=2"], "choose --kind sums"),
        ([*DRAWS, "--kind", "images"], "replay=statistics puts features beside them"),
        ([*FEDAVG, "--canaries", "5000"], "fewer than there are"),
        ([*FEDAVG, "--kind", "codes"], "--kind must be"),
        ([*FEDAVG, "--institution", "institution-7"], "--institution must be one of the run's"),
        (["strategy=local", *DIGITS, "--kind", "images"], "has none: choose other options"),
        ([*FEDAVG, "--kind", "noise"], "has none: choose other options"),
        (["strategy=central", *DIGITS, "dp=classifier"], "strategy=central trains on those of all"),
        (["a-run-directory"], "an option is written key=value"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(audit, tmp_path, words, message):
    code, out, err = audit(*words)
    assert code == 2
    assert not out
    assert message in err.splitlines()[-1]
    assert not (tmp_path / "runs").exists()


def test_a_deployed_node_has_no_canaries(tmp_path, caplog):
    write_shards(tmp_path, {"a": 40})
    [node] = node_configs(tmp_path, tmp_path / "state", "a")
    probe = GradientCanaries(Canaries.tossed(10, 40, 0), 0)
    grid = InlineGrid(audited_app("a", probe), {"overrides": "strategy=fedavg task=medmnist task.size=8"}, [node])
    message = grid.create_message(RecordDict(), "train", 2, "")
    [reply] = grid.send_and_receive([message])
    assert "ConfigError" in reply.content["config"]["failure"]
    assert "in a simulation only; this node is deployed" in caplog.text
    assert not probe.scores_m.any()


SUMS = ["preset=private", "task=digits", "nodes=4", "target-epsilon=1", "delta=1e-5", "--kind", "sums", "--json"]


@pytest.mark.parametrize("noise", [1, 1 / 6])
@pytest.mark.parametrize(
    "method",
    [["rounds=3"], ["strategy=fedstats", "head=lda", "rounds=1"], ["rounds=3", "masked=false", "noise=secret"]],
)
def test_noise_of_a_sixth_in_sums_is_found_by_the_bound_too(audit, monkeypatch, method, noise):
    """One of four helps the server; its share is taken off. Of the guesses' bound all epsilons hold."""
    drawn, normal = shares.discrete_gaussian, Stream.normal
    monkeypatch.setattr(shares, "discrete_gaussian", lambda n, stream: (drawn(n, stream) * noise).astype(np.int64))
    monkeypatch.setattr(Stream, "normal", lambda self, shape: normal(self, shape) * noise)
    code, out, _ = audit(*method, *SUMS, "--canaries", "300")
    report = json.loads(out)
    claim, bound = report["claim"]["epsilon"], report["bounds"]["steinke"]["epsilon"]
    assert claim == pytest.approx(1, rel=1e-3)
    assert report["steps"]["steps"] == report["steps"]["charged"] == (1 if "strategy=fedstats" in method else 3)
    [kind] = report["steps"]["kinds"]
    assert kind["sigma"]["seen"] == pytest.approx(
        noise * kind["sigma"]["charged"], rel=0.06
    )  # of some 4,000 numbers, 1 % in a deviation
    assert (code, bool(report["steps"]["found"]), bound > claim) == (
        (0, False, False) if noise == 1 else (1, True, True)
    )
