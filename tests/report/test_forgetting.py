"""The forgetting matrix: what it holds, that it survives a resumption, and what its numbers mean."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_replay.check.strategy import Breaking
from flwr_replay.engines.simulate import run_inline
from flwr_replay.report.forgetting import drops
from flwr_replay.report.progress import Display
from flwr_replay.runs.options import resolve

JOB = ["task=digits", "partition=ks", "model=cnn", "model.width=4", "nodes=3", "rounds=2", "forgetting=true"]


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))


def run(tmp_path, strategy):
    return run_inline([f"strategy={strategy}", *JOB, f"runs_dir={tmp_path}", f"run_name={strategy}"], Display())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("strategy", "exchanges", "taught"), [("cwt", 6, 1), ("fedavg", 2, 3), ("fedreplay", 2, 0), ("local", 2, 3)]
)
def test_a_row_for_each_exchange_and_a_column_for_each_institution(tmp_path, strategy, exchanges, taught):
    result, folder = run(tmp_path, strategy)
    forgetting = result["forgetting"]
    assert forgetting["institutions"] == ["institution-1", "institution-2", "institution-3"]
    assert len(forgetting["matrix"]) == len(forgetting["exchanges"]) == exchanges
    assert all(len(row) == 3 and all(0 <= value <= 1 for value in row) for row in forgetting["matrix"])
    assert {len(exchange["taught"]) for exchange in forgetting["exchanges"]} == {taught}
    assert (folder / "forgetting.png").read_bytes().startswith(b"\x89PNG")


def test_cwt_forgets_whom_it_leaves_and_fedreplay_does_not(tmp_path):
    assert run(tmp_path, "cwt")[0]["forgetting"]["largest-drop"] > 0.2
    assert run(tmp_path, "fedreplay")[0]["forgetting"]["largest-drop"] < 0.1


def test_a_resumed_run_has_the_same_matrix(tmp_path):
    whole, _ = run(tmp_path, "cwt")
    broken = [*JOB, "strategy=cwt", f"runs_dir={tmp_path}", "run_name=broken"]
    with pytest.raises(KeyboardInterrupt):
        run_inline(broken, Breaking(4))
    overrides, _ = resolve([], "", str(tmp_path / "broken"))
    resumed, folder = run_inline(overrides, Display())
    assert resumed["forgetting"] == whole["forgetting"]
    assert len((folder / "forgetting.jsonl").read_text().splitlines()) == 6


def test_without_the_option_nothing_is_asked(tmp_path):
    result, folder = run_inline(["strategy=cwt", *JOB, "forgetting=false", f"runs_dir={tmp_path}"], Display())
    assert result["forgetting"] is None
    assert not (folder / "forgetting.jsonl").exists()
    asked = {
        json.loads(line)["round"] for line in (folder / "ledger.jsonl").read_text().splitlines() if "evaluate" in line
    }
    assert asked == {3, 6}


def test_errors_are_forgotten_upwards():
    rows = [
        {"round": 1, "taught": ["a"], "own": {"a": 2.0, "b": 9.0}},
        {"round": 2, "taught": ["b"], "own": {"a": 7.0, "b": 1.0}},
    ]
    assert drops(rows, higher_is_better=False) == [(2, "a", 5.0)]


@given(st.lists(st.lists(st.floats(0, 1), min_size=2, max_size=2), min_size=1, max_size=6))
def test_where_all_are_taught_everybody_counts_from_the_second_exchange(values):
    rows = [{"round": i, "taught": ["a", "b"], "own": {"a": a, "b": b}} for i, (a, b) in enumerate(values)]
    drops_by_name = drops(rows)
    assert len(drops_by_name) == 2 * (len(values) - 1)
    for at, name, lost in drops_by_name:
        column = [row["own"][name] for row in rows[: at + 1]]
        assert lost == max(column[:-1]) - column[-1]
