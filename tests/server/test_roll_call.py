"""The roll call: who is there, whose app it is, and what happens when an answer is lost."""

import json
import shlex
import time
from itertools import groupby
from types import SimpleNamespace

import pytest
from flwr.app import Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from grid import NEVER, Grid, first_times

from flwr_replay.client_app import app
from flwr_replay.config.compose import compose, overrides_of
from flwr_replay.engines.inline import InlineGrid
from flwr_replay.errors import RunError
from flwr_replay.report.progress import Display
from flwr_replay.runs.execute import execute
from flwr_replay.server import asking, roll

JOB = ["partition=iid", "partition.size=64", "model=mlp", "model.width=8", "rounds=2", "device=cpu"]
FEDREPLAY = ["strategy=fedreplay", "cut=hidden1", "encoder=random"]
CRASHED, LOST = 8, None
GONE = 5
NODE_GONE = "its node has gone; the run goes on without it until it returns"


def lose_roll_calls(code, times):
    """Lose the first answers of node 3, the second institution, to the roll call; without a code none ever comes."""
    lost = first_times(*[("roll-call", "institution-2")] * times)

    def before(grid, message):
        if lost(grid, grid.asked[-1]):
            return Message(Error(NEVER if code is None else code, "the process died"), reply_to=message)

    return before


def run(tmp_path, *options, served=app, nodes=3, **script):
    overrides = [*JOB, f"nodes={nodes}", *options, f"runs_dir={tmp_path}", "run_name=x"]
    grid = Grid.simulated(served, {"overrides": shlex.join(overrides)}, nodes, state=str(tmp_path / "state"))
    vars(grid).update(script)
    return execute(grid, compose(overrides), Display())


@pytest.mark.parametrize("code", [CRASHED, LOST])
def test_a_lost_answer_is_reported_and_the_node_asked_again(tmp_path, code):
    result, folder = run(tmp_path, *FEDREPLAY, "timeout=4", before=lose_roll_calls(code, 1))
    [failure] = result["failures"]
    assert failure["institution"] == "3"
    assert "asked again" in failure["reason"]
    assert sorted(result["final"]["institutions"]) == ["institution-1", "institution-2", "institution-3"]
    entries = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    uploads = [entry for entry in entries if entry["field"] == "latents"]
    assert {(entry["institution"], entry["kind"]) for entry in uploads} == {
        (f"institution-{k}", "per-sample") for k in (1, 2, 3)
    }


def test_who_states_pinned_keys_in_an_unsealed_run_has_nobody_refused(tmp_path):
    def after(grid, message, reply):
        if grid.asked[-1][:2] == ("roll-call", "institution-1"):
            reply.content["config"]["pins"] = "f" * 64
        return reply

    result, _ = run(tmp_path, "strategy=fedavg", nodes=2, after=after)
    assert result["failures"] == []
    assert sorted(result["final"]["institutions"]) == ["institution-1", "institution-2"]


def test_a_node_that_never_answers_takes_no_part(tmp_path):
    result, _ = run(tmp_path, *FEDREPLAY, before=lose_roll_calls(CRASHED, 99))
    assert sorted(result["final"]["institutions"]) == ["institution-1", "institution-3"]  # node 3 is the second
    assert result["metric"] == "accuracy"


@pytest.mark.parametrize(("wait", "visits"), [(30, [1, 2, 3, 1, 2, 3]), (0, [1, 3, 1, 3])])
def test_a_run_waits_for_an_institution_whose_node_was_killed_before_it_answered(tmp_path, caplog, wait, visits):
    def there(grid):
        return [2, 4] if grid.times("roll-call", "institution-2") == 1 and grid.looks < 4 else None

    options = ["strategy=cwt", f"wait={wait}"]
    result, folder = run(tmp_path, *options, before=lose_roll_calls(GONE, 1), there=there)
    [failure] = result["failures"]
    assert failure["reason"].startswith("no answer to the roll call (error 5")
    assert visited(folder) == [f"institution-{k}" for k in visits]
    assert "waiting for who has gone to come back, up to wait=" in caplog.text


def test_who_says_each_time_that_its_node_has_gone_holds_up_the_run_for_that_wait_only(tmp_path):
    result, folder = run(tmp_path, "strategy=cwt", "wait=1.2", "evaluate_every=2", before=lose_roll_calls(GONE, 99))
    assert sorted(result["final"]["institutions"]) == ["institution-1", "institution-3"]
    entries = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    asked = [entry for entry in entries if entry["institution"] == "3" and entry["round"] == 0]
    assert sum(entry["field"] == asked[0]["field"] for entry in asked) == 3  # at once, after 0.5 s, a second later


def test_who_has_come_back_is_waited_for_no_longer_though_another_takes_no_part(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, sleep=lambda s: setattr(clock, "now", clock.now + s))
    monkeypatch.setattr(roll, "time", clock)
    gone = lose_roll_calls(GONE, 1)

    def before(grid, message):
        if grid.asked[-1][:2] == ("roll-call", "institution-3"):
            return Message(Error(CRASHED, "it fails each time"), reply_to=message)
        return gone(grid, message)

    result, _ = run(tmp_path, "strategy=fedavg", before=before)
    assert clock.now == 0.5
    assert sorted(result["final"]["institutions"]) == ["institution-1", "institution-2"]


def visited(folder):
    entries = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    trained = [entry["institution"] for entry in entries if (entry["stage"], entry["direction"]) == ("train", "up")]
    return [key for key, _ in groupby(trained)]


def test_who_was_seen_once_and_had_gone_when_the_roll_was_called_is_waited_for(tmp_path):
    result, folder = run(tmp_path, "strategy=cwt", there=lambda grid: [2, 4] if grid.looks in (2, 3) else None)
    assert result["failures"] == []
    assert visited(folder) == [f"institution-{k}" for k in (1, 2, 3, 1, 2, 3)]


def test_who_comes_back_within_the_wait_is_asked_though_a_slow_one_is_waited_for_longer(tmp_path):
    """Institution 2 claims that its node has gone, then never answers; that of institution 3 has gone, and returns."""
    since = []

    def before(grid, message):
        at = grid.asked[-1]
        first_time = grid.times(*at[:2]) == 1
        if at.stage == "roll-call" and (at.name == "institution-2" or (at.name == "institution-3" and first_time)):
            return Message(Error(GONE if first_time else NEVER, "it died"), reply_to=message)

    def there(grid):
        if grid.times("roll-call", "institution-3") == 1:
            since.append(time.monotonic())
            return [2, 3] if since[-1] - since[0] < 1 else None  # it returns while institution 2 is waited for

    _, folder = run(tmp_path, "strategy=cwt", "rounds=1", "wait=1.5", "timeout=2", before=before, there=there)
    assert visited(folder) == ["institution-1", "institution-3"]


def test_who_leaves_while_the_run_waits_for_another_is_named(tmp_path):
    def there(grid):
        return None if grid.times("roll-call", "institution-2") < 2 else [2, 3]

    result, _ = run(tmp_path, "strategy=fedavg", "wait=2", before=lose_roll_calls(GONE, 99), there=there)
    [failure] = [failure for failure in result["failures"] if failure["institution"] == "institution-3"]
    assert failure == {"round": 1, "institution": "institution-3", "reason": NODE_GONE}


def test_who_took_part_and_is_not_there_in_the_resumed_run_is_named(tmp_path):
    run(tmp_path, "strategy=fedavg")
    more = [f"resume={tmp_path / 'x'}", "rounds=3", "nodes=2"]
    result, _ = run(tmp_path, "strategy=fedavg", *more, there=lambda grid: [2, 3])
    assert [failure["institution"] for failure in result["failures"]] == ["institution-3"]


def test_a_long_wait_for_who_says_each_time_that_its_node_has_gone_fills_no_files(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, sleep=lambda s: setattr(clock, "now", clock.now + s))
    monkeypatch.setattr(roll, "time", clock)
    result, _ = run(tmp_path, "strategy=fedavg", "wait=86400", "rounds=1", before=lose_roll_calls(GONE, 9999))
    assert clock.now == pytest.approx(86400)
    assert len(result["failures"]) < 500  # a day


def test_an_app_of_anyones_trains_and_its_own_metric_leads(tmp_path):
    foreign = ClientApp()

    @foreign.train()
    def train(message, context):
        metrics = MetricRecord({"num-examples": 3, "train-loss": 0.5})
        return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)

    @foreign.evaluate()
    def evaluate(message, context):
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 3, "error": 0.25})}), reply_to=message)

    result, _ = run(tmp_path, "strategy=cwt", served=foreign)
    assert result["failures"] == []
    assert result["metric"] == "error"
    assert result["final"]["global"] == {"error": 0.25}
    assert sorted(result["final"]["institutions"]) == ["2", "3", "4"]


@pytest.mark.parametrize("options", [["strategy=fedavg"], FEDREPLAY])
def test_a_resumed_run_needs_the_data_that_it_began_with(tmp_path, options):
    run(tmp_path, *options, "partition.size=0", "split=test")
    overrides = [*overrides_of(tmp_path / "x" / "config.yaml"), f"resume={tmp_path / 'x'}", "nodes=2", "rounds=3"]
    grid = InlineGrid.simulated(app, {"overrides": shlex.join(overrides)}, 2, state=str(tmp_path / "state"))
    with pytest.raises(RunError, match="institution-1 had 480 training examples and now has 719"):
        execute(grid, compose(overrides), Display())


@pytest.mark.parametrize("strategy", ["local", "fedavg", "cwt"])
def test_state_that_is_gone_is_reported_not_begun_anew(tmp_path, strategy):
    run(tmp_path, f"strategy={strategy}", "optimizer-state=keep")
    overrides = [*overrides_of(tmp_path / "x" / "config.yaml"), f"resume={tmp_path / 'x'}", "rounds=3"]
    grid = InlineGrid.simulated(app, {"overrides": shlex.join(overrides)}, 3, state=str(tmp_path / "other"))
    with pytest.raises(RunError, match=r"is gone: restore the newest state directory, or begin a new run"):
        execute(grid, compose(overrides), Display())


@pytest.mark.parametrize("strategy", ["local", "fedavg", "cwt", "proxyfl"])
def test_an_older_copy_of_the_state_is_reported_and_not_used(tmp_path, strategy):
    run(tmp_path, f"strategy={strategy}", "optimizer-state=keep")
    key = {"local": "model", "proxyfl": "pair"}.get(strategy, "optimizer")
    for state in (tmp_path / "state").iterdir():
        max(state.glob(f"runs/*/{key}-*.safetensors")).unlink()  # of the last training; that before it stays
    overrides = [*overrides_of(tmp_path / "x" / "config.yaml"), f"resume={tmp_path / 'x'}", "rounds=3"]
    grid = InlineGrid.simulated(app, {"overrides": shlex.join(overrides)}, 3, state=str(tmp_path / "state"))
    older = rf"saved, in exchange \d; the {key} of run .* is that of exchange \d: restore the newest state directory"
    with pytest.raises(RunError, match=older):
        execute(grid, compose(overrides), Display())


def test_who_does_not_answer_a_resumed_run_is_named(tmp_path):
    run(tmp_path, "strategy=local")
    more = [f"resume={tmp_path / 'x'}", "rounds=3", "timeout=4"]
    result, _ = run(tmp_path, "strategy=local", *more, before=lose_roll_calls(CRASHED, 1))
    assert [failure["institution"] for failure in result["failures"]] == ["institution-2"]


def test_too_few_institutions_end_the_run_with_one_line(tmp_path):
    few = "this run needs at least 4 institutions; 2 joined within 0.1 s: start more SuperNodes"
    with pytest.raises(RunError, match=few):
        run(tmp_path, "strategy=cwt", "nodes=4", "wait=0.1", there=lambda grid: [2, 3])


@pytest.mark.parametrize(
    ("kind", "grids", "told"),
    [
        ("SIMULATED", ("Grid",), "Flower simulates 2: .* num-supernodes=4"),
        ("INLINE", "Grid", "2 joined within 0 s: .*"),
    ],
)
def test_a_simulation_that_has_too_few_is_not_waited_for(tmp_path, monkeypatch, kind, grids, told):
    """Flower makes its nodes one after another, while the app begins."""
    monkeypatch.setattr(asking, kind, grids)
    seen = iter([[], [2]] if kind == "SIMULATED" else [])
    begun = time.monotonic()
    with pytest.raises(RunError, match=f"this run needs at least 4 institutions; {told}"):
        run(tmp_path, "strategy=cwt", "nodes=4", "wait=60", there=lambda grid: next(seen, [2, 3]))
    assert time.monotonic() - begun < 30  # not the 60 s that it waits for SuperNodes
