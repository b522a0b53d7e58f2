"""Attacks on a policy's `max-total-epsilon`, by a server that names as many runs as it likes."""

import os
import shutil
import time

import numpy as np
import pytest
from harness import command, node_configs
from harness import run as ran_by
from hostile_server import at_the_same_time, metrics, refusal, weights
from small_cells import HEAD, TASK, server_of, write_cells

from flwr_replay.files.lines import add_line
from flwr_replay.forecast.officer import findings, planned
from flwr_replay.memory import forget
from flwr_replay.payloads.common import RollCall
from flwr_replay.payloads.fedsgd import Differentiate
from flwr_replay.payloads.fedstats import Summarise
from flwr_replay.privacy.account import Account
from flwr_replay.report.officer_page import write_officer_page
from flwr_replay.state.counts import KEPT
from flwr_replay.state.spent import AllRuns

TWICE = "max-total-epsilon: 4\nmax-epsilon: 2\nmax-delta: 0.001\n"
SUMS = ["strategy=fedstats", "dp=statistics", "delta=0.001", "privacy.target-epsilon=2"]
STEPS = ["strategy=fedsgd", "dp=gradient", "delta=0.0003", "privacy.epsilon=3", "privacy.sigma=4"]
FULL = "policy lets all runs together have epsilon <= 4 (max-total-epsilon); others (runs: 2) have"


@pytest.fixture
def folder(tmp_path):
    write_cells(tmp_path)
    return tmp_path


@pytest.fixture
def server(folder):
    return server_of(folder, *SUMS, policy=TWICE)


def ask_sums(server, run):
    return server.send(Summarise(arrays=server.weights, run=run, clip=10.0))


def call_roll(server, run):
    return server.send(RollCall(strategy="fedstats", run=run, stages=["summarise"]))


def epsilon_of_accounts(server):
    """Return epsilon of all accounts, as each answer stated it last."""
    files = sorted(server.state.glob("runs/*/privacy.jsonl"))
    return [Account(file.parent, delta=0.001).epsilon() for file in files]


@pytest.mark.parametrize("calling", [True, False], ids=["roll calls", "at once to sums"])
def test_a_new_run_for_every_message_does_not_make_the_sum_larger(server, calling):
    replies = []
    for run in ("one", "two", "three", "four"):
        replies.append([call_roll(server, run)] * calling + [ask_sums(server, run)])
    assert not any(refusal(reply) for answers in replies[:2] for reply in answers)
    assert all(FULL in refusal(reply) and not weights(reply) for answers in replies[2:] for reply in answers)
    stated = [metrics(answers[-1])["epsilon"] for answers in replies[:2]]
    assert epsilon_of_accounts(server) == stated
    assert 3.9 < sum(stated) <= 4
    assert server.charges("three") == []


def test_an_answer_that_is_asked_for_again_costs_nothing_when_all_is_spent(server):
    first = weights(ask_sums(server, "one"))
    ask_sums(server, "two")
    forget()  # a new process
    np.testing.assert_array_equal(weights(ask_sums(server, "one"))[f"{HEAD}.bias"], first[f"{HEAD}.bias"])
    assert FULL in refusal(ask_sums(server, "three"))


@pytest.mark.parametrize("gone", ["the runs", "an account", "by command"])
def test_what_is_removed_frees_nothing(server, gone, monkeypatch):
    for run in ("one", "two"):
        ask_sums(server, run)
    if gone == "the runs":
        shutil.rmtree(server.state / "runs")
    elif gone == "an account":
        (server.state / "runs" / "one" / "privacy.jsonl").unlink()
    else:
        assert command(monkeypatch, "deploy", "state", str(server.state), "--remove", "one", "--yes") == 0
    forget()
    assert FULL in refusal(ask_sums(server, "three"))
    assert not weights(ask_sums(server, "one"))  # nor does its own run begin anew


def test_a_lost_account_is_seen_when_the_policy_asks_for_no_sum_any_more(server, folder):
    ask_sums(server, "one")
    (server.state / "runs" / "one" / "privacy.jsonl").unlink()
    reply = ask_sums(server_of(folder, *SUMS, policy="max-epsilon: 2\nmax-delta: 0.001\n"), "one")
    assert "its account of run 'one' states 0, so it is missing" in refusal(reply)
    assert not weights(reply)


def test_a_run_whose_id_is_too_long_for_a_file_stops_no_other(server):
    assert "at most 200 bytes" in refusal(ask_sums(server, "é" * 122))
    assert weights(ask_sums(server, "one"))


@pytest.mark.parametrize("file", ["spent/one.json", "runs/older/privacy.jsonl"])
def test_a_damaged_sum_stops_all_runs(server, file):
    older(server)
    if file.startswith("spent"):
        ask_sums(server, "one")
    damaged = server.state / file
    damaged.write_bytes(damaged.read_bytes().replace(b"0", b"1").replace(b"}", b"", 1))
    forget()
    reply = ask_sums(server, "two")
    assert "own log says more" in refusal(reply)
    assert not weights(reply)


# --- runs at the same time --------------------------------------------------------------------------------------------


def test_two_processes_do_not_each_spend_what_is_left(folder, monkeypatch):
    policy = TWICE.replace("4", "3")
    asking = [lambda run=run: ask_sums(server_of(folder, *SUMS, policy=policy), run) for run in ("one", "two")]
    replies = at_the_same_time(monkeypatch, AllRuns, "_write", *asking)
    assert sum(bool(weights(reply)) for reply in replies) == 1
    assert any("others (runs: 1) have 2, 1" in refusal(reply) for reply in replies)


def test_a_run_has_its_whole_budget_from_its_roll_call_until_it_is_silent(folder):
    server = server_of(folder, *SUMS, policy=TWICE.replace("4", "3"))
    assert not refusal(call_roll(server, "first"))
    line = "have 2 (of it 2 is kept for runs that go on, until silent for 30 min), 1 is left, and this run"
    for reply in (call_roll(server, "second"), ask_sums(server, "second")):
        assert line in refusal(reply)
        assert "num-examples" not in metrics(reply)
    long_ago = time.time() - KEPT - 1
    os.utime(server.state / "spent" / "first.json", (long_ago, long_ago))
    assert not refusal(call_roll(server, "second"))
    assert line in refusal(ask_sums(server, "first"))  # it says so, and does not spend what is another's now
    assert weights(ask_sums(server, "second"))


def test_the_sum_ends_a_run_before_its_own_budget(folder):
    policy = TWICE.replace("max-epsilon: 2", "max-epsilon: 3")
    assert weights(ask_sums(server_of(folder, *SUMS, policy=policy), "sums"))
    server, replies = server_of(folder, *STEPS, policy=policy), []
    while not replies or weights(replies[-1]):
        forget()  # a new process
        replies.append(server.send(Differentiate(arrays=server.weights, run="steps", exchange=len(replies) + 1)))
    assert "epsilon <= 4 (max-total-epsilon); others (runs: 1) have 2, 2.0" in refusal(replies[-1])
    stated = [metrics(reply)["epsilon"] for reply in replies[:-1]]
    assert 0.6 < stated[0] < stated[-1] < 2.01


def test_a_run_that_has_all_to_itself_ends_at_its_own_budget(folder):
    """Methods whose budget is used up go on without training; those that a policy refuses cannot."""
    server, exchange = server_of(folder, *STEPS, policy="max-total-epsilon: 3\nmax-delta: 0.001\n"), 1
    while weights(reply := server.send(Differentiate(arrays=server.weights, run="steps", exchange=exchange))):
        exchange += 1
    assert refusal(reply).startswith("the privacy budget is epsilon 3")


def test_a_crash_between_the_sum_and_the_account_costs_nothing(server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Account, "charge", lambda *_: 1 / 0)
        assert not weights(ask_sums(server, "one"))
    assert weights(ask_sums(server, "one"))
    assert weights(ask_sums(server, "two"))


# --- what else a server may choose ------------------------------------------------------------------------------------


def test_many_small_epsilons_do_not_add_their_deltas_up(folder):
    server = server_of(folder, *SUMS[:-1], "privacy.target-epsilon=0.1", policy=TWICE)
    replies = [ask_sums(server, f"r{k}") for k in range(3)]
    assert [bool(weights(reply)) for reply in replies] == [True, True, False]
    assert "have delta <= 0.002 (max-total-epsilon); others (runs: 2) have 0.002, 0 is left" in refusal(replies[-1])


@pytest.mark.parametrize("options", [["strategy=fedavg"], [*SUMS[:-1], "sigma=1"], [*SUMS, "privacy.noise=seeded"]])
def test_nothing_without_an_epsilon_passes_by(folder, options):
    server = server_of(folder, *options, policy="max-total-epsilon: 4\nmax-delta: 0.001\n")
    call = server.send(RollCall(strategy=options[0][9:], run="r", stages=["summarise"]))
    assert "policy asks for epsilon <= 4" in refusal(call)


def older(server, steps=1):
    """Write the account of a run of an older version, which names no delta."""
    folder = server.state / "runs" / "older"
    folder.mkdir(parents=True)
    charge = {"mechanism": "classifier", "rate": 1.0, "sigma": 3.0, "steps": steps, "noise": "secret"}
    add_line(folder / "privacy.jsonl", charge)


def test_accounts_of_before_count(server):
    older(server, 4)
    assert "others (runs: 1) have 2." in refusal(ask_sums(server, "one"))
    shutil.rmtree(server.state / "runs" / "older")
    forget()
    assert "others (runs: 1) have 2." in refusal(ask_sums(server, "two"))  # it was written down


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_an_honest_run_and_what_all_runs_come_to(folder, monkeypatch, capsys):
    (folder / "policy.yaml").write_text(TWICE.replace("4", "3"))
    nodes = [node | {"policy": str(folder / "policy.yaml")} for node in node_configs(folder, folder / "state", "a")]
    ran = ran_by(folder, [*TASK, *SUMS], nodes)
    state = folder / "state" / "a"
    shown = "all runs together, 1 of them with an epsilon: epsilon 2 and delta 0.001, of 3 and 0.0015"
    assert ran.result["privacy"]["a"]["epsilon"] <= 2
    assert command(monkeypatch, "deploy", "state", str(state)) == 0
    assert shown in capsys.readouterr().out
    assert command(monkeypatch, "deploy", "evidence", str(state)) == 0
    assert shown in (state / "evidence.html").read_text()
    for options, verdict in ((SUMS, "broken"), ([*SUMS[:2], "delta=0.0005", "privacy.target-epsilon=1"], "kept")):
        whole = [*TASK, *options, f"data_dir={folder / 'a.npz'}", "partition=natural"]
        forecast = findings(*planned(whole, ["a"]), folder / "policy.yaml")
        assert [rule["verdict"] for rule in forecast["rules"] if rule["rule"] == "max-total-epsilon"] == [verdict]
        assert forecast["takes-part"] == (verdict == "kept")
        assert shown in write_officer_page(folder, forecast)[0].read_text()
