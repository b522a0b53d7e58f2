"""Attacks on a policy's floor for small cells by tests, of one run and of several."""

import os
import time
from functools import partial

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict
from hostile_server import metrics, refusal
from small_cells import COUNTS, FLOOR, HEAD, TASK, answered_by, ask_evaluation, constant_weights, server_of, write_cells

from flwr_replay.config.compose import compose
from flwr_replay.errors import RefusedError
from flwr_replay.institution.floor import check_tests, floored
from flwr_replay.institution.policy import Policy
from flwr_replay.memory import forget
from flwr_replay.payloads.common import RollCall, Train
from flwr_replay.payloads.ditto import EvaluatePersonal, TrainPersonal
from flwr_replay.payloads.local import EvaluateOwn, TrainOwn
from flwr_replay.state.counts import FILE, KEPT, ROOM
from flwr_replay.state.store import REMOVED, RUNS


@pytest.fixture
def folder(tmp_path):
    write_cells(tmp_path)
    return tmp_path


def brighter(server, place, than):
    """Return weights that answer 2 where one pixel, 0 to 1, is brighter, else 1."""
    arrays = constant_weights(server, [-9, 0, 0])
    names = [name for name, array in arrays.items() if array.ndim == 2]
    arrays[names[0]][0, place] = 1
    arrays[names[0].replace("weight", "bias")][0] = 1
    for name in names[1:-1]:
        arrays[name][0, 0] = 1
    arrays[names[-1]][2, 0], arrays[f"{HEAD}.bias"][2] = 1000, -1000 * (1 + than)
    return arrays


def test_small_cells_of_a_test_stay(folder):
    server = server_of(folder)
    assert metrics(ask_evaluation(server, constant_weights(server, [0, 0, 9]))) == {"num-examples": 60, "hits": 37}


@pytest.mark.parametrize(
    ("confusion", "left"),
    [
        ([20, 10, 12, 30], {"confusion": [20, 10, 12, 30]}),
        ([20, 9, 12, 30], {"hits": 50}),
        ([20, 10, 0, 30], {"hits": 50}),  # ten are wrong
        ([20, 9, 0, 30], {"hits": 50}),  # at least
        ([59, 0, 0, 0], {"hits": 50}),
        ([0, 49, 0, 10], {"hits": 10}),
        ([0, 50, 0, 9], {"hits": 0}),
        ([4, 0, 6, 0], {"hits": 0}),
        ([4, 0, 0, 6], {"hits": 0}),  # 1 would say that all are right
        ([9, 0, 0, 9], {"hits": 0}),
        ([9, 0, 0, 10], {"hits": 10}),  # 10 to 19 are right
    ],
)
def test_large_cells_leave(confusion, left):
    tested = MetricRecord({"num-examples": sum(confusion), "loss": 0.5, "confusion": confusion})
    answer = Message(RecordDict({"metrics": tested}), 1, "evaluate")
    assert floored(Policy(min_count=10), answer) == {"num-examples": sum(confusion), **left}


@pytest.mark.parametrize(
    ("tests", "scores", "left"),
    [
        ((1, 2, 4), [0, 0, 9], {}),
        (COUNTS, [9, 0, 0], {"num-examples": 60, "hits": 0}),
        ((0, 3, 57), [0, 0, 9], {"num-examples": 60, "hits": 51}),
    ],
)
def test_few_are_called_few(folder, tests, scores, left):
    """A total less the other cells is a cell: so nothing of such a test leaves but that few are right, or wrong."""
    write_cells(folder, tests=tests)
    server = server_of(folder)
    reply = ask_evaluation(server, constant_weights(server, scores))
    assert metrics(reply) == left
    assert left or "fewer than 10 examples were tested" in refusal(reply)
    assert "used up" in refusal(
        ask_evaluation(server, constant_weights(server, [0, 9, 0]))
    )  # that it was few is an answer, too


def test_two_tests_are_not_subtracted(folder):
    """Two thresholds between which one example lies tell its label, and its pixel."""
    with np.load(folder / "a.npz") as file:
        pixels, of_each = np.unique(file["test_images"][23:, 5, 5] / 255, return_counts=True)  # of class 2
    alone = int(np.flatnonzero(of_each[5:-5] == 1)[0]) + 5
    asked = [brighter(server_of(folder), 5 * 8 + 5, pixels[alone] + by) for by in (-0.001, 0.001)]
    free = server_of(folder, policy="metrics: counted")
    right = [np.trace(np.reshape(metrics(ask_evaluation(free, arrays))["confusion"], (3, 3))) for arrays in asked]
    assert right[0] - right[1] == 1  # the attack works
    server = server_of(folder)
    first = ask_evaluation(server, asked[0])
    assert metrics(first)["hits"] == right[0]
    for named in ("r", "another"):
        forget()  # another process
        assert "tests can be subtracted" in refusal(ask_evaluation(server_of(folder), asked[1], named))
    forget()
    assert metrics(ask_evaluation(server_of(folder), asked[0])) == metrics(first)  # nothing new
    assert "tests can be subtracted" in refusal(ask_evaluation(server_of(folder), asked[0], exchange=2))


ONE = ["strategy=fedavg", "rounds=3", "evaluate_every=3"]


@pytest.mark.parametrize(
    "other", ["evaluate_every=1", "split=validation", "forgetting=true", "evaluate_before_mixing=true", "external=true"]
)
def test_a_run_that_will_ask_for_more_tests_is_refused_at_once(folder, other):
    name = other.partition("=")[0]
    options = [*(option for option in [*TASK, *ONE] if not option.startswith((f"{name}=", "rounds=1"))), other]
    call = RollCall(strategy="fedavg", run="r")
    assert "set evaluate-every=3 split=test" in refusal(server_of(folder, *options[-1:], task=options[:-1]).send(call))
    more = server_of(folder, *options[-1:], task=options[:-1], policy="min-count: 10\nmax-evaluations: 4")
    assert "min-count" not in refusal(more.send(call))


def test_a_run_with_one_test_is_not(folder):
    task = [option for option in TASK if option != "rounds=1"]
    assert not refusal(server_of(folder, *ONE, task=task).send(RollCall(strategy="fedavg", run="r")))


def test_the_second_of_two_models_stays(folder):
    """Ditto's answer has two tests of the same examples; the server chooses one model and moves the other."""
    server = server_of(folder, "strategy=ditto")
    server.send(TrainPersonal(arrays=server.weights, run="r", exchange=1, lr=0.1, lam=1.0))
    request = EvaluatePersonal(arrays=constant_weights(server, [0, 0, 9]), run="r", exchange=1)
    free = server_of(folder, "strategy=ditto", policy="").send(request)
    assert not refusal(free)
    assert {"global-confusion", "confusion"} <= set(metrics(free))
    assert set(metrics(server.send(request))) <= {"num-examples", "hits"}


@pytest.mark.parametrize("left", [1, 0.5])
def test_of_an_answer_that_was_lost_none_has_left_so_it_is_made_again(folder, left):
    """A process was killed before it wrote the answer down, or a full disk has cut the line."""
    server = server_of(folder)
    answer = metrics(ask_evaluation(server, constant_weights(server, [0, 0, 9])))
    test, line = (server.state / FILE).read_text().splitlines()[-2:]
    (server.state / FILE).write_text(f"{test}\n{line[: int(len(line) * (1 - left))]}")
    assert metrics(ask_evaluation(server, constant_weights(server, [0, 0, 9]))) == answer
    assert "used up" in refusal(ask_evaluation(server, constant_weights(server, [0, 9, 0])))
    assert metrics(ask_evaluation(server, constant_weights(server, [0, 0, 9]))) == answer


def test_few_are_called_few_again(folder):
    server = server_of(folder)
    first = metrics(ask_evaluation(server, constant_weights(server, [9, 0, 0])))
    write_cells(folder, tests=(30, 30, 30))
    assert metrics(ask_evaluation(server, constant_weights(server, [9, 0, 0]))) == first


def test_a_line_of_a_failure_is_an_answer_too(folder):
    """It may tell of the examples, as that a loss is not finite: a server could train on, and ask as before."""
    server, request = server_of(folder, "strategy=local"), EvaluateOwn(run="r", exchange=1)
    first = refusal(server.send(request))
    assert "has no model yet" in first
    server.send(TrainOwn(run="r", exchange=1, lr=0.1, init_seed=0))
    assert refusal(server.send(request)) == first


def test_a_run_of_which_no_test_could_leave_is_refused_before_it_trains(folder):
    server = server_of(folder)
    ask_evaluation(server, constant_weights(server, [0, 0, 9]), run="before")
    call = server.send(RollCall(strategy="fedavg", run="r", stages=["train", "evaluate"]))
    assert "tests can be subtracted" in refusal(call)
    assert not refusal(server.send(RollCall(strategy="fedavg", run="before")))  # it was resumed
    without = server_of(folder, policy=f"{FLOOR}metrics: none")
    assert "subtracted" not in refusal(without.send(RollCall(strategy="fedavg", run="r")))


def test_of_two_runs_at_the_same_time_the_second_is_refused_before_it_trains(folder):
    call, server = partial(RollCall, strategy="fedavg", stages=["train", "evaluate"]), server_of(folder)
    assert not refusal(server.send(call(run="first")))
    assert "another run may still ask for them: wait until it ends" in refusal(server.send(call(run="second")))
    assert not refusal(server.send(call(run="first")))  # it was resumed
    long_ago = time.time() - KEPT - 1
    os.utime(server.state / RUNS / "first" / ROOM, (long_ago, long_ago))
    assert not refusal(server.send(call(run="third")))
    os.utime(server.state / RUNS / "third" / ROOM, (long_ago, long_ago))
    server.send(Train(arrays=server.weights, run="third", exchange=1, lr=0.1, local_epochs=1))  # it goes on
    assert "another run may still" in refusal(server.send(call(run="second")))
    (server.state / RUNS / "third" / REMOVED).touch()  # the institution says that it is over
    assert not refusal(server.send(call(run="second")))
    write_cells(folder, "b", counts=(3, 3, 3))
    small = server_of(folder, name="b")  # a run that it refuses keeps no tests from others
    assert ["fewer than 10 training" in refusal(small.send(call(run=run))) for run in ("first", "second")] == [True] * 2


def test_tests_at_the_end_of_a_run_are_counted():
    options = [*TASK[:-1], "strategy=fedavg", "rounds=4", "evaluate_every=2", "evaluate_before_mixing=true"]
    config = compose([*(option for option in options if option != "split=test"), "split=validation"])
    check_tests(Policy(min_count=10, max_evaluations=6), config)
    with pytest.raises(RefusedError, match="this run asks for 6"):
        check_tests(Policy(min_count=10, max_evaluations=5), config)


@pytest.mark.parametrize(
    ("sent", "left"),
    [
        ({"accuracy": 0.9}, {}),
        ({"accuracy": 0.9, "num-examples": 60}, {}),
        ({"confusion": [20, 10, 10, 20], "num-examples": 63}, {}),  # three were not predicted
        ({"confusion": [20, 10, 30], "num-examples": 60}, {}),
        ({"confusion": [20, 9, 11, 20], "num-examples": 60, "loss": 0.5}, {"num-examples": 60, "hits": 40}),
    ],
)
def test_a_test_by_an_app_of_ones_own_counts_all_its_examples(folder, sent, left):
    server = answered_by(folder, lambda context: sent)
    reply = ask_evaluation(server, server.weights)
    assert metrics(reply) == left
    assert ("all of these in a square confusion" in refusal(reply)) == (not left)
