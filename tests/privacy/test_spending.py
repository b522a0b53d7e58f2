"""What an institution has spent outlives its process, and nobody turns it back unnoticed."""

import itertools
import json
import os
import signal
import time

import pytest
from flwr.app import Message
from harness import forked
from peers import NAMES, hospitals, run

from flwr_replay.errors import ConfigError
from flwr_replay.institution.mutual import MutualLearner
from flwr_replay.payloads.common import Failure
from flwr_replay.privacy.account import Account
from flwr_replay.privacy.accounting import SampledGaussian
from flwr_replay.privacy.accounting import epsilon as epsilon_of

JOB = ["strategy=proxyfl", "dp=proxy", "sigma=2", "delta=0.01"]


def run_until_killed(folder):
    """Run until the first step of the third institution in round 2, and be killed there."""
    calls, step, checkpoints = itertools.count(1), MutualLearner.step, folder / "runs" / "shot" / "checkpoints"

    def struck(*both):
        if next(calls) == 13:  # two steps a round at each of four
            while not (checkpoints / "000001.safetensors").exists():  # which is written meanwhile
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        step(*both)

    MutualLearner.step = struck
    run(folder, *JOB, "rounds=2", name="shot")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    hospitals(folder)
    return folder


def epsilon(ran, name):
    return Account(ran.state(name), delta=0.01).epsilon()


def test_a_process_killed_between_charge_and_release_has_paid(folder):
    assert os.waitstatus_to_exitcode(os.waitpid(forked(run_until_killed, folder), 0)[1]) == -signal.SIGKILL
    run_id = (folder / "runs" / "shot" / "run-id").read_text().strip()
    assert len((folder / "state" / "c" / "runs" / run_id / "privacy.jsonl").read_text().splitlines()) == 2
    resumed = run(folder, *JOB, "rounds=2", resume=str(folder / "runs" / "shot"))
    assert [len(resumed.charges(name)) for name in NAMES] == [3, 3, 3, 2]
    assert all(resumed.result["privacy"][name]["epsilon"] == epsilon(resumed, name) for name in NAMES)


@pytest.mark.parametrize("left", [0, 2], ids=["gone", "one charge short"])
def test_an_account_that_says_less_than_was_stated_trains_nothing(folder, left):
    def cuts(grid, message):
        if ("train-proxy", "a", 4) in grid.asked[-2:-1]:
            for file in folder.rglob("state/b/runs/*/privacy.jsonl"):
                lines = file.read_text().splitlines(keepends=True)[:left]
                file.write_text("".join(lines)) if lines else file.unlink()

    ran = run(folder, *JOB, "rounds=4", before=cuts)
    [failure] = ran.result["failures"]
    assert failure["institution"] == "b"
    assert "so it is missing or an older copy and lacks later releases" in failure["reason"]
    three_rounds = ran.charges("a")[:3]
    stated = epsilon_of([SampledGaussian(c["rate"], c["sigma"], c["steps"]) for c in three_rounds], 0.01, "prv")
    assert ran.result["privacy"]["b"]["epsilon"] == stated < epsilon(ran, "a")


def test_a_server_that_begins_again_knows_what_was_stated(folder):
    first = run(folder, *JOB, "rounds=2")
    (folder / "state" / "b" / "runs" / first.run / "privacy.jsonl").unlink()
    again = run(folder, *JOB, "rounds=3", resume=str(first.folder))
    assert [failure["institution"] for failure in again.result["failures"]] == ["b"]
    assert again.result["privacy"]["b"] == first.result["privacy"]["b"]


def test_when_one_diverges_the_others_go_on_and_what_they_released_is_in_the_ledger(folder):
    def diverges(grid, message, reply):
        if grid.asked[-1] == ("train-proxy", "a", 2):
            return Message(Failure(failure="not finite", error="DivergedError", name="a").encode(), reply_to=message)

    ran = run(folder, *JOB, "rounds=3", name="diverged", after=diverges)
    assert [(failure["institution"], failure["reason"]) for failure in ran.result["failures"]] == [("a", "not finite")]
    for file, reported in (("ledger", {"direction": "up", "field": "arrays"}), ("privacy", {})):
        rows = [json.loads(line) for line in (folder / "runs" / "diverged" / f"{file}.jsonl").read_text().splitlines()]
        assert {row["institution"] for row in rows if row["round"] == 2 and reported.items() <= row.items()} == {*"bcd"}


@pytest.mark.parametrize("options", [["dp=none", "target-epsilon=8"], ["dp=none", "epsilon=8"]])
def test_a_budget_without_privacy_is_refused(folder, options):
    with pytest.raises(ConfigError, match="a budget is for training under DP; got epsilon 8 and dp=none"):
        run(folder, "strategy=proxyfl", *options)
