"""Faults of the machine: answers that come too late, workers that are gone, a machine that goes down."""

import logging
import re
import shlex
import signal
import sys
import time

import pytest
from flwr.app import Error, Message
from grid import NEVER, Grid

from flwr_replay.client_app import app
from flwr_replay.config.compose import compose
from flwr_replay.errors import RefusedError, RunError
from flwr_replay.report.progress import Display
from flwr_replay.runs.checkpoints import Checkpoints
from flwr_replay.runs.execute import execute
from flwr_replay.server import asking, recorder
from flwr_replay.studies.compare import compare_strategies
from flwr_replay.wire.records import config_in

JOB = ["strategy=fedavg", "model=mlp", "model.width=4", "nodes=3", "rounds=9", "device=cpu"]
GONE = "<class 'ray.exceptions.ActorDiedError'>:<'The actor died.\n\tactor_id: 1\nThe actor is dead because of that.'>"


def serve_slowly(times):
    """Serve with an app whose second institution takes its time over its first training."""

    def served(message, context):
        training = message.metadata.dst_node_id == 3 and config_in(message.content)["stage"] == "train"
        if training and not times:
            times.append(time.sleep(4.1))
        return app(message, context)

    return served


def first_slow(grid, message):
    """Let the first training take its time, and nobody answer in the second round."""
    trained = len(grid.who("train"))
    if trained == 1:
        time.sleep(1.1)
    return mute(grid, message) if trained > 3 and "train" in grid.asked[-1] else None


def lose_worker(grid, message):
    """Let every third message meet a worker that is gone, from the second round on."""
    trained = len(grid.who("train"))
    if grid.asked[-1].stage == "train" and trained > 3 and trained % 3 == 0:
        return Message(Error(0, GONE), reply_to=message)
    return None


def mute(grid, message):
    """Never let anybody answer."""
    return Message(Error(NEVER, "silent"), reply_to=message)


def never_answer_training(grid, message):
    """Never let the second institution answer a request to train."""
    return mute(grid, message) if grid.asked[-1][:2] == ("train", "institution-2") else None


class Clock:
    """Goes on while the server sleeps, so that a busy machine changes nothing."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def ran(tmp_path, *options, served=app, nodes=3, **script):
    overrides = [*JOB, *options]
    config = compose([*overrides, f"runs_dir='{tmp_path / 'runs'}'", "run_name=x"])
    grid = Grid.simulated(served, {"overrides": shlex.join(overrides)}, nodes, state=str(tmp_path / "state"))
    vars(grid).update(script)
    return execute(grid, config, Display())[0]


def test_an_answer_in_process_that_comes_after_the_timeout_is_not_used(tmp_path):
    ran(tmp_path / "first", "rounds=1")  # what is slow only once
    result = ran(tmp_path, "timeout=4", "rounds=2", served=serve_slowly([]))
    [failure] = result["failures"]
    assert failure == {"round": 1, "institution": "institution-2", "reason": "no answer within timeout=4 s"}
    used = [ran(tmp_path / str(rounds), f"rounds={rounds}")["examples-seen"] for rounds in (1, 2)]
    assert used[0] < result["examples-seen"] < used[1]


def test_the_log_says_for_whom_the_run_waits(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(asking, "SILENCE", 0.1)
    caplog.set_level(logging.INFO, "flwr")
    monkeypatch.setattr(asking, "time", Clock())
    ran(tmp_path, "timeout=1.5", "rounds=1", before=never_answer_training)
    waits = [line for line in caplog.messages if line.startswith("waiting for")]
    assert waits == ["waiting for institution-2, 0 min"] * 4  # after 0.1, 0.2, 0.4 and 0.8 s
    caplog.clear()
    with pytest.raises(RunError, match="3 joined within"):
        ran(tmp_path / "two", "nodes=4", "wait=0.7", "rounds=1")
    assert "waiting for institutions to join: 3 of 4, 0 min" in caplog.messages


def test_who_has_not_joined_is_named_and_what_can_be_done(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(asking, "SILENCE", 0.1)
    caplog.set_level(logging.INFO, "flwr")
    names = "[institution-1,institution-2,institution-3,north]"
    says = r"missing: north: start its SuperNode and resume the run, or go on with nodes=3 if the others' officers"
    with pytest.raises(RunError, match=says):
        ran(tmp_path, "nodes=4", f"clinics={names}", "wait=0.7", "rounds=1")
    assert "waiting for institutions to join: 3 of 4; missing: north, 0 min" in caplog.messages
    with pytest.raises(RunError, match=r"nodes=3 and every peers\.txt without it, if the others"):
        ran(tmp_path / "masked", "masked=true", "nodes=4", f"clinics={names}", "wait=0.7", "rounds=1")
    assert ran(tmp_path / "three", "nodes=3", f"clinics={names}", "rounds=1")["nodes"] == 3  # as the line says


def test_who_is_not_back_when_a_run_is_resumed_is_named(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "flwr")
    first = ran(tmp_path, "rounds=1")
    assert first["nodes"] == 3
    with pytest.raises(RunError, match=r"2 joined within 0.2 s; missing: institution-\d: start its SuperNode"):
        ran(tmp_path, f"resume={tmp_path / 'runs' / 'x'}", "rounds=2", "nodes=3", "wait=0.2", there=lambda grid: [2, 3])


def test_the_log_says_how_long_such_an_answer_took_before(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(asking, "SILENCE", 0.1)
    caplog.set_level(logging.INFO, "flwr")
    with pytest.raises(RunError, match="no institution answered"):
        ran(tmp_path, "timeout=3", "rounds=2", before=first_slow)
    waits = [line for line in caplog.messages if line.startswith("waiting for")]
    assert re.fullmatch(
        r"waiting for institution-1, institution-2, institution-3, 0 min; train took up to 0:00:0\d before", waits[-1]
    )


def test_a_deployments_log_says_what_to_do_about_nodes_that_do_not_answer_the_roll_call(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(asking, "SILENCE", 0.1)
    monkeypatch.setattr(asking, "DEPLOYED", (Grid.__name__,))
    caplog.set_level(logging.INFO, "flwr")
    again = "; they may still answer an earlier run: if none is live, start their SuperNodes again"
    for more, told in (((), ""), ((f"resume={tmp_path / 'runs' / 'x'}",), again)):
        caplog.clear()
        with pytest.raises(RefusedError, match="no institution takes part"):
            ran(tmp_path, "timeout=0.3", "wait=1", "nodes=3", *more, before=mute)
        [line] = {line for line in caplog.messages if line.startswith("waiting for node")}
        assert line.endswith(f"0 min{told}")


def test_a_simulation_stops_once_messages_to_a_dead_worker_have_failed_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(asking, "SIMULATED", (Grid.__name__,))
    with pytest.raises(RunError) as raised:
        ran(tmp_path, before=lose_worker)
    message = str(raised.value)
    assert "3 messages to one have failed: institution-3: error 0: The actor is dead because of that" in message
    assert "resume the run" in message
    assert "\n" not in message
    assert len((tmp_path / "runs" / "x" / "failures.jsonl").read_text().splitlines()) == 3
    again = ran(tmp_path, f"resume='{tmp_path / 'runs' / 'x'}'")
    assert again["rounds"] == 9


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("method", "code"), [("fedavg", 0), ("cwt", 0), ("avgpush", 0), ("fedavg", 3), ("fedavg", 5), ("fedavg", 8)]
)
def test_an_error_code_from_one_institution_costs_only_that_one(tmp_path, method, code):
    """Also the code of Flower's engine for a worker that has failed, which a ClientApp can send."""

    def before(grid, message):
        failing = grid.asked[-1].name == "institution-3" and grid.asked[-1].stage != "roll-call"
        return Message(Error(code, GONE), reply_to=message) if failing else None

    result = ran(tmp_path, f"strategy={method}", "rounds=4", before=before)
    assert result["rounds"] == 4
    assert {failure["institution"] for failure in result["failures"]} == {"institution-3"}


def test_what_is_kept_of_an_institutions_reasons_is_bounded_and_the_first_are_whole(tmp_path, monkeypatch):
    """Also when the run is resumed; the log has all."""
    monkeypatch.setattr(recorder, "REASONS", 2000)

    def talking(grid, message):
        train = grid.asked[-1][:2] == ("train", "institution-3")
        return Message(Error(0, f"{len(grid.asked):04d}" + "x" * 850), reply_to=message) if train else None

    result = ran(tmp_path, "rounds=5", before=talking)
    assert [len(failure["reason"]) > 850 for failure in result["failures"]] == [True] * 3 + [False] * 2
    place = tmp_path / "runs" / "x"
    result = ran(tmp_path, "rounds=7", f"resume='{place}'", before=talking)
    assert {len(failure["reason"]) for failure in result["failures"][3:]} == {recorder.CUT}
    assert len(result["failures"]) == len((place / "failures.jsonl").read_text().splitlines()) == 7


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["fedavg", "cwt"])
def test_one_institution_that_fails_whenever_it_is_drawn_ends_no_run(tmp_path, method):
    """With this seed institution-2 is drawn three times in a row, which is as often as there are institutions."""
    drawn = ["fraction=0.34", "seed=15", "rounds=5", "evaluate_every=5"]
    result = ran(tmp_path, f"strategy={method}", *drawn, failing=[("train", "institution-2")])
    assert len(result["failures"]) >= 3
    with pytest.raises(RunError, match="no institution answered"):
        ran(tmp_path / "all", f"strategy={method}", *drawn[:2], "rounds=99", failing=[("train",)])


def test_one_institution_that_fails_is_visited_twice_in_a_row_and_ends_no_run(tmp_path):
    """In another order it is the last of a cycle and the first of the next."""
    failing = [("train", "institution-2")]
    result = ran(tmp_path, "strategy=cwt", "strategy.order=shuffled", "nodes=2", "rounds=8", nodes=2, failing=failing)
    assert len(result["failures"]) == 8


def test_a_serial_run_ends_after_its_last_whole_round_and_not_before(tmp_path, monkeypatch):
    """As docs/privacy.md says of a budget that is spent in the middle of a round."""
    exchange = Display.exchange

    def stops(display, number, *progress):
        exchange(display, number, *progress)
        if number == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(Display, "exchange", stops)
    with pytest.raises(KeyboardInterrupt):
        ran(tmp_path, "strategy=cwt")
    resume = f"resume='{tmp_path / 'runs' / 'x'}'"
    with pytest.raises(RunError, match=r"has done 2 rounds, now rounds=1: give rounds=2 or more"):
        ran(tmp_path, "strategy=cwt", resume, "rounds=1")
    assert ran(tmp_path, "strategy=cwt", resume, "rounds=2")["rounds"] == 2


def test_attempts_that_end_before_the_first_checkpoint_do_not_end_the_run(tmp_path, monkeypatch):
    def fails(*_):
        raise RunError("no space left")

    resume = f"resume='{tmp_path / 'runs' / 'x'}'"
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "write", fails)
        for again in ([], [resume], [resume]):
            with pytest.raises(RunError, match="no space left"):
                ran(tmp_path, "rounds=1", *again)
    assert ran(tmp_path, "rounds=1", resume)["rounds"] == 1


def test_a_model_that_is_worth_nothing_is_said_once_while_it_trains(tmp_path, caplog):
    caplog.set_level(logging.INFO, "flwr")
    ran(tmp_path, "lr=1e-9", "rounds=4", "evaluate_every=1")
    messages = [line for line in caplog.messages if line.startswith("warning: ")]
    assert len(messages) <= 1
    assert all("predicts class" in line for line in messages)
    ran(tmp_path / "two", "lr=300", "rounds=4", "evaluate_every=1")
    [line] = [line for line in caplog.messages if line.startswith("warning: The loss in tests is ")]
    assert "smaller lr" in line


def test_sigterm_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # as the command line has it
    try:
        monkeypatch.setattr(Display, "exchange", lambda *progress: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(SystemExit):
            ran(tmp_path)
        told = f"flwr-replay run --resume {tmp_path / 'runs' / 'x'}"
        assert f"interrupted; to continue: {told}\n" in capsys.readouterr().err
        monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")  # as `uv run` sets it
        resume = f"resume='{tmp_path / 'runs' / 'x'}'"
        with pytest.raises(SystemExit):
            ran(tmp_path, resume, "rounds=30")
        assert f"interrupted; to continue: uv run {told} rounds=30\n" in capsys.readouterr().err
        with pytest.raises(RunError, match=r"not made shorter; .*/x has done 2 rounds, now rounds=1: give rounds=2 or"):
            ran(tmp_path, resume, "rounds=1")
        with pytest.raises(SystemExit):
            compare_strategies(["fedavg", "cwt"], [*JOB[1:], "seeds=1"], "", 1, tmp_path)
        assert "interrupted; repeat the command to continue\n" in capsys.readouterr().err
    finally:
        signal.signal(signal.SIGTERM, before)
