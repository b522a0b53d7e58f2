"""Files of an older version (commit 50abd983, 23 November): read with a warning, or refused in one line.

`older/` holds a run of CWT on digits under DP, one institution's state directory without its key, and a policy, as that
version wrote them; its checkpoints and environment.json are left out, and config.yaml names another folder of runs.
"""

import json
import shutil
from pathlib import Path

import pytest
from harness import command

from flwr_replay import load_model
from flwr_replay.errors import DamagedError, RefusedError, RunError
from flwr_replay.institution.policy import Policy, read_policy
from flwr_replay.privacy.account import Account
from flwr_replay.privacy.accounting import SampledGaussian
from flwr_replay.report.run_files import read_result
from flwr_replay.state.kept import kept, retire
from flwr_replay.state.spent import AllRuns
from flwr_replay.wire.ledger import Ledger

OLDER = Path(__file__).parent / "older"


@pytest.fixture
def run(tmp_path):
    return shutil.copytree(OLDER / "run", tmp_path / "old")


@pytest.mark.parametrize(
    ("words", "page", "says"),
    [
        ("runs show RUN", "", "accuracy 0.0947"),
        ("runs list --runs-dir RUNS", "", "accuracy 0.0947"),
        ("report RUN", "report.html", "accuracy is 0.095"),
        ("deploy evidence RUN", "evidence.html", "DP-SGD, Poisson sampling"),
    ],
)
def test_a_run_is_read(run, monkeypatch, capsys, words, page, says):
    places = words.replace("RUNS", str(run.parent)).replace("RUN", str(run)).split()
    assert command(monkeypatch, *places) == 0
    captured = capsys.readouterr()
    assert "damaged" not in captured.out + captured.err
    assert says in ((run / page).read_text() if page else captured.out)


def test_its_model_is_loaded(run):
    model = load_model(run)
    assert sum(array.numel() for array in model.parameters()) > 0


def test_what_has_no_result_is_still_damaged(run):
    values = json.loads((run / "result.json").read_text())
    del values["privacy"]
    (run / "result.json").write_text(json.dumps(values))
    with pytest.raises(DamagedError):
        read_result(run)


def test_it_does_not_go_on(run, monkeypatch, capsys):
    assert command(monkeypatch, "run", "--resume", str(run), "rounds=2") == 2
    says = f"{run} is of an older version of flwr-replay, which has no option evaluate_before_mixing: begin a new run"
    assert says in capsys.readouterr().err.replace("\n", " ")


def test_its_account_has_the_same_charges_and_counts_for_later_runs(run, tmp_path):
    state = shutil.copytree(OLDER / "state" / "institution-1", tmp_path / "institution-1")
    account = Account(state / "run", delta=1 / 24)
    stated = read_result(run)["privacy"]["institution-1"]["epsilon"]
    assert account.mechanisms == ("classifier",)
    assert account.stated_epsilon == pytest.approx(stated, rel=0.01)
    assert AllRuns(state).read()["run"].epsilon > stated  # at a smaller delta
    with pytest.raises(RefusedError, match=r"others \(runs: 1\) have"):
        AllRuns(state, most=stated).check(0.1, 1e-6)
    newer = Account(state / "runs" / "run", delta=1e-6)  # of the same name, charged before there was a sum
    for _ in range(2):
        newer.charge("classifier", SampledGaussian(0.1, 1.0, 1))
    both = AllRuns(state).read()["run"]
    assert both.charges == 3
    assert both.epsilon > newer.epsilon() + stated
    shutil.rmtree(newer.folder)
    shutil.move(state / "run", newer.folder)  # an older run's account that is moved counts once
    assert AllRuns(state).read()["run"].charges == 1
    shutil.move(newer.folder, state / "lost+found")
    assert not AllRuns(state).read()  # no run has this name; a disk has it, and only root may look


def test_its_state_directory_is_named_for_what_it_is(tmp_path):
    state = shutil.copytree(OLDER / "state" / "institution-1", tmp_path / "institution-1")
    before = sorted(state.rglob("*"))
    for look in (kept, lambda folder: retire(folder, tmp_path / "receipt")):
        with pytest.raises(RunError, match=r"of an older version: keep its ledger and every privacy\.jsonl"):
            look(state)
    assert sorted(state.rglob("*")) == before


def test_its_ledger_goes_on(tmp_path):
    state = shutil.copytree(OLDER / "state" / "institution-1", tmp_path / "institution-1")
    old = (state / "ledger.jsonl").read_text()
    ledger = Ledger(state)
    ledger.record({"run": "new"}, [])
    ledger.flush()
    assert (state / "ledger.jsonl").read_text().startswith(old)


def test_its_policy_means_what_it_meant():
    policy = read_policy(OLDER / "policy.yaml")
    assert policy == Policy(
        strategies=("fedreplay", "cwt"), kinds=("model", "statistic", "per-sample"), max_upload_mb=64
    )
