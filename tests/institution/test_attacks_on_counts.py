"""Attacks on a policy's floor for small cells, by a server that sends what it likes.

The hospital has 60 training and 60 test examples: 3 of class 0, 20 of class 1, 37 of class 2.
"""

import json
from dataclasses import dataclass

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from harness import SHARDS, node_configs, run
from hostile_server import HostileServer, metrics, refusal, weights

from flwr_replay.config.compose import compose
from flwr_replay.engines.inline import InlineGrid
from flwr_replay.errors import ConfigError, RefusedError
from flwr_replay.forecast.officer import findings, planned
from flwr_replay.institution.floor import check_declared, check_options, floored
from flwr_replay.institution.guard import guard
from flwr_replay.institution.node import institution_of
from flwr_replay.institution.policy import Policy, read_policy
from flwr_replay.memory import forget
from flwr_replay.payloads.common import Evaluate, RollCall, Train, Trained
from flwr_replay.payloads.ditto import EvaluatePersonal, TrainPersonal
from flwr_replay.payloads.fedreplay import Extract
from flwr_replay.payloads.fedsgd import Differentiate
from flwr_replay.payloads.fedstats import Summarise
from flwr_replay.payloads.replay import Codes, TrainedPrior
from flwr_replay.payloads.splitnn import Half
from flwr_replay.payloads.synthetic import DrawBuffer, TrainSlice
from flwr_replay.report.officer_page import write_officer_page
from flwr_replay.report.pages import write_page
from flwr_replay.report.summary import summary
from flwr_replay.state.counts import FILE
from flwr_replay.wire.fields import statistic

COUNTS = (3, 20, 37)
FLOOR = "min-count: 10\n"
TASK = [*SHARDS, "classes=3", "model=mlp", "model.width=6", "batch_size=16", "device=cpu", "rounds=1"]
HEAD = "head.fc"


def write(folder, name="a", counts=COUNTS, tests=COUNTS, labels=(0, 1, 2)):
    """Write a hospital with so many training and test images of each class; of class c they are bright by c."""
    rng, parts = np.random.default_rng(0), {}
    for split, of_each in (("train", counts), ("test", tests)):
        y = np.repeat(labels, of_each)
        noise = rng.integers(0, 60, (len(y), 8, 8), np.uint8)
        parts[f"{split}_images"] = noise + (80 * y % 200).astype(np.uint8)[:, None, None]
        parts[f"{split}_labels"] = y
    np.savez(folder / f"{name}.npz", **parts)
    forget()


@pytest.fixture
def folder(tmp_path):
    write(tmp_path)
    return tmp_path


def server_of(folder, *options, policy=FLOOR, task=TASK, **more):
    return HostileServer(folder, *task, *(options or ["strategy=fedavg"]), policy=policy, **more)


def always(server, scores):
    """Return weights whose answer is the same for every image: the class with the largest score."""
    blank = {name: np.zeros_like(array) for name, array in server.weights.items()}
    return {**blank, f"{HEAD}.bias": np.array(scores, np.float32)}


def brighter(server, place, than):
    """Return weights that answer 2 where one pixel, 0 to 1, is brighter, else 1."""
    arrays = always(server, [-9, 0, 0])
    names = [name for name, array in arrays.items() if array.ndim == 2]
    arrays[names[0]][0, place] = 1
    arrays[names[0].replace("weight", "bias")][0] = 1
    for name in names[1:-1]:
        arrays[name][0, 0] = 1
    arrays[names[-1]][2, 0], arrays[f"{HEAD}.bias"][2] = 1000, -1000 * (1 + than)
    return arrays


def ask(server, arrays, run="r", exchange=1, **more):
    return server.send(Evaluate(arrays=arrays, run=run, server_round=exchange, **more))


# --- what a policy says -----------------------------------------------------------------------------------------------


def test_without_the_key_every_number_leaves(folder):
    server = server_of(folder, policy="")
    assert metrics(server.send(RollCall(strategy="fedavg", run="r")))["num-examples"] == 60
    assert metrics(ask(server, always(server, [0, 0, 9])))["confusion"][2::3] == list(COUNTS)  # the attack works


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("min-count: ten", "must be a number"),
        ("min-count: 1.5", "whole number"),
        ("min-count: 9\nmetrics: exact", "exact"),
    ],
)
def test_a_faulty_floor_is_an_error(tmp_path, text, says):
    (tmp_path / "policy.yaml").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_policy(tmp_path / "policy.yaml")


# --- roll call and trainings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [["strategy=fedavg"], ["strategy=fedavg", "model=cnn", "model.norm=batch", "batch_size=6"]]
)
def test_the_number_of_few_examples_is_not_told(folder, options):
    write(folder, counts=(1, 2, 4))
    for policy in ("", FLOOR):
        server = server_of(folder, *options, policy=policy)
        said = [
            server.send(RollCall(strategy="fedavg", run="r")),
            server.send(Train(arrays=server.weights, run="r", lr=0.1)),
        ]
        told = [metrics(reply).get("num-examples") == 7 or "7 examples" in refusal(reply) for reply in said]
        assert all(told) == (not policy)
        assert all("fewer than 10 training examples" in refusal(reply) for reply in said) == bool(policy)


@pytest.mark.parametrize("skipping", [False, True], ids=["roll call", "at once to training"])
def test_two_runs_do_not_tell_how_many_came_between(folder, skipping):
    def told(run):
        server = server_of(folder)
        request = Train(arrays=server.weights, run=run, lr=0.0) if skipping else RollCall(strategy="fedavg", run=run)
        return server.send(request)

    assert metrics(told("before"))["num-examples"] == 60
    write(folder, counts=(4, 20, 37))
    assert "training examples more or fewer than before" in refusal(told("one came"))
    write(folder, counts=(5, 30, 37))
    assert metrics(told("twelve came"))["num-examples"] == 72
    write(folder, counts=(3, 25, 37))
    assert refusal(told("five are more than at first"))


def test_no_loss_leaves_of_a_training(folder):
    """With a rate of nothing a loss tells how many examples a server's weights are wrong about."""
    whole = [*TASK[:-3], "batch_size=60", *TASK[-2:], "strategy=fedavg"]
    arrays = always(server_of(folder), [-1000, 0, 0])
    free = HostileServer(folder, *whole).send(Train(arrays=arrays, run="r", lr=0.0))
    found = metrics(free)["train-loss"]
    assert round((found - np.log(2)) * 60 / 1000) == COUNTS[0]  # the attack works
    floored = HostileServer(folder, *whole, policy=FLOOR).send(Train(arrays=arrays, run="s", lr=0.0))
    assert set(metrics(floored)) == {"num-examples", "examples-seen", "num-steps"}


def test_sums_of_labels_that_are_classes_do_not_leave(folder):
    write(folder, counts=(0, 57, 3))
    regression = [option for option in TASK if "classes" not in option]
    regression += ["task.kind=regression", "task.classes=1", "strategy=fedavg"]
    call = RollCall(strategy="fedavg", run="r")
    sums = metrics(HostileServer(folder, *regression).send(call))
    assert sums["label-sum"] - sums["num-examples"] == 3  # the attack works
    assert "fewer than 10 values" in refusal(HostileServer(folder, *regression, policy=FLOOR).send(call))
    write(folder, counts=(4,) * 15, tests=(4,) * 15, labels=range(15))
    assert metrics(HostileServer(folder, *regression, policy=FLOOR).send(call))["label-squares"] > 0


def test_no_option_makes_a_number_that_of_the_smallest_class():
    with pytest.raises(RefusedError, match="that of the smallest class"):
        check_options(Policy(min_count=10), compose(["task=tuberculosis", "task.balanced=true", "strategy=fedavg"]))


STYLE = [*SHARDS, "classes=3", "device=cpu", "rounds=1", "model=cnn", "model.width=4", "model.norm=group"]
STYLE += ["generator=stylegan2", "generator.latents=4", "generator.width=4", "generator.max_width=4"]
STYLE += ["generator.steps=2", "generator.batch_size=16", "generator.privacy_loss=none"]


def drawn(server):
    while (reply := server.send(TrainSlice(run="r"))) and not refusal(reply) and metrics(reply)["steps-left"]:
        pass
    return server.send(DrawBuffer(run="r", buffer=12, buffer_refresh="never", server_round=1))


def test_images_are_drawn_for_no_class_with_few(folder):
    """Labels tell which classes an institution has enough images of."""
    write(folder, counts=(6, 20, 37))
    for policy, classes in (("", {0, 1, 2}), (FLOOR, {1, 2})):
        reply = drawn(server_of(folder, "strategy=feder", "buffer=12", task=STYLE, policy=policy))
        assert set(weights(reply)["labels"]) == classes


def test_no_part_of_the_examples_is_counted(folder):
    """Sets of classes, each large enough, would tell every class: (n₀ + n₁) + (n₀ + n₂) - n = n₀."""
    server = answered_by(folder, lambda context: {"num-examples": len(institution_of(context)[0].train) - 3})
    assert "num-examples must be of all training examples" in refusal(server.send_content(RecordDict()))


# --- tests ------------------------------------------------------------------------------------------------------------


def test_small_cells_of_a_test_stay(folder):
    server = server_of(folder)
    assert metrics(ask(server, always(server, [0, 0, 9]))) == {"num-examples": 60, "hits": 37}


@pytest.mark.parametrize(
    ("confusion", "left"), [([20, 10, 12, 30], {"confusion": [20, 10, 12, 30]}), ([20, 9, 12, 30], {"hits": 50})]
)
def test_large_cells_leave(confusion, left):
    tested = MetricRecord({"num-examples": sum(confusion), "loss": 0.5, "confusion": confusion})
    answer = Message(RecordDict({"metrics": tested}), 1, "evaluate")
    assert floored(Policy(min_count=10), answer) == {"num-examples": sum(confusion), **left}


@pytest.mark.parametrize(
    ("tests", "scores", "says"),
    [
        ((1, 2, 4), [0, 0, 9], "fewer than 10 examples were tested"),
        (COUNTS, [9, 0, 0], "fewer than 10 examples were classified rightly"),
        ((0, 3, 57), [0, 0, 9], "fewer than 10 examples wrongly"),
    ],
)
def test_few_are_called_few(folder, tests, scores, says):
    """A total less the other cells is a cell: nothing of such a test leaves but these words."""
    write(folder, tests=tests)
    server = server_of(folder)
    reply = ask(server, always(server, scores))
    assert says in refusal(reply)
    assert not metrics(reply)
    assert "used up" in refusal(ask(server, always(server, [0, 9, 0])))  # that it was few is an answer, too


def test_two_tests_are_not_subtracted(folder):
    """Two thresholds between which one example lies tell its label, and its pixel."""
    with np.load(folder / "a.npz") as file:
        pixels, of_each = np.unique(file["test_images"][23:, 5, 5] / 255, return_counts=True)  # of class 2
    alone = int(np.flatnonzero(of_each[5:-5] == 1)[0]) + 5
    asked = [brighter(server_of(folder), 5 * 8 + 5, pixels[alone] + by) for by in (-0.001, 0.001)]
    free = server_of(folder, policy="metrics: counted")
    right = [np.trace(np.reshape(metrics(ask(free, arrays))["confusion"], (3, 3))) for arrays in asked]
    assert right[0] - right[1] == 1  # the attack works
    server = server_of(folder)
    first = ask(server, asked[0])
    assert metrics(first)["hits"] == right[0]
    for named in ("r", "another"):
        forget()  # another process
        assert "tests can be subtracted" in refusal(ask(server_of(folder), asked[1], named))
    forget()
    assert metrics(ask(server_of(folder), asked[0])) == metrics(first)  # nothing new
    assert "tests can be subtracted" in refusal(ask(server_of(folder), asked[0], exchange=2))


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
    server.send(TrainPersonal(arrays=server.weights, run="r", server_round=1, lr=0.1, lam=1.0))
    request = EvaluatePersonal(arrays=always(server, [0, 0, 9]), run="r", server_round=1)
    free = server_of(folder, "strategy=ditto", policy="").send(request)
    assert not refusal(free)
    assert {"global-confusion", "confusion"} <= set(metrics(free))
    assert set(metrics(server.send(request))) <= {"num-examples", "hits"}


def test_of_an_answer_that_was_lost_no_second_is_made(folder):
    server = server_of(folder)
    ask(server, always(server, [0, 0, 9]))
    file = server.state / FILE
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines() if "answer" not in line))
    assert "used up" in refusal(ask(server, always(server, [0, 0, 9])))
    file.write_text(file.read_text()[:-9])  # what a full disk leaves
    assert refusal(ask(server, always(server, [0, 0, 9])))


# --- what cannot be floored -------------------------------------------------------------------------------------------


def test_sums_of_features_are_refused_without_noise(folder):
    """A feature that is 1 for some images and 0 for others counts these."""
    plain, noisy = (
        ["strategy=fedstats"],
        ["strategy=fedstats", "dp=statistics", "delta=0.001", "privacy.target-epsilon="],
    )

    def sums(policy, *options):
        server = server_of(folder, *options, policy=policy)
        return server.send(Summarise(arrays=server.weights, run=f"r{len(policy)}{len(options)}", clip=10.0))

    found = weights(sums("", *plain))[f"{HEAD}.bias"]
    np.testing.assert_allclose(found / found.sum() * 60, COUNTS, rtol=1e-3)  # the attack works
    assert "ClassSums.arrays are sums of features" in refusal(sums(FLOOR, *plain))
    assert "ClassSums.arrays" in refusal(sums(FLOOR, *noisy[:3], f"{noisy[3]}1000000"))  # noise that hides nothing
    assert not refusal(sums(f"{FLOOR}max-epsilon: 2\nmax-delta: 0.001\n", *noisy[:3], f"{noisy[3]}2"))


def test_rows_are_refused_without_noise(folder):
    options = ["strategy=fedreplay", "encoder=random"]
    server = server_of(folder, *options)
    encoder = {name: array for name, array in server.weights.items() if name.startswith("hidden1")}
    request = Extract(
        arrays=encoder, run="r", cut="hidden1", latent_dtype="float32", first=0, chunk_bytes=10**6, views=1
    )
    assert "rows of single patients, whose labels can be counted" in refusal(server.send(request))
    local = [*options, "dp=latents", "latent-clip=1", "latent-epsilon=8", "label-epsilon=2"]
    policy = f"{FLOOR}max-local-epsilon: 10\nmax-delta: 0.1\n"
    assert "latents" in weights(server_of(folder, *local, policy=policy).send(request))


@dataclass(frozen=True, kw_only=True)
class OfAnAuthor(Trained):
    """An answer of a method of one's own."""

    moved: float = statistic("distance")


@pytest.mark.parametrize("answer", [TrainedPrior, Codes, Half, OfAnAuthor])
def test_a_number_that_nobody_can_floor_is_refused(answer):
    with pytest.raises(RefusedError, match=f"{answer.__name__}.*: choose dp="):
        check_declared(Policy(min_count=10), answer, None, compose([*TASK, "strategy=fedavg"]))


@pytest.mark.parametrize("kind", ["regression", "segmentation"])
def test_only_a_classifications_tests_count_examples(kind):
    config = compose([*SHARDS, f"task.kind={kind}", "task.classes=1", "strategy=fedavg", "model=mlp"])
    with pytest.raises(RefusedError, match=f"tests of a {kind} do not count examples"):
        check_declared(Policy(min_count=10), Evaluate.answer, None, config)


def answered_by(folder, numbers):
    """Return a server of an institution that answers by an app of its own."""
    own, server = ClientApp(mods=[guard]), server_of(folder)
    [here] = server.grid.contexts.values()

    @own.train()
    def train(message, context):
        return Message(RecordDict({"metrics": MetricRecord(numbers(context))}), reply_to=message)

    server.grid = InlineGrid(own, here.run_config, [here.node_config])
    return server


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ({"num-examples": 60}, ""),
        ({"num-examples": 60, "positives": 3}, "nobody can say of how many examples positives is"),
        ({"num-examples": 6}, "num-examples must be of all"),
    ],
)
def test_an_app_of_ones_own_sends_no_number_but_that_of_examples(folder, sent, says):
    said = refusal(answered_by(folder, lambda context: sent).send_content(RecordDict()))
    assert says in said
    assert bool(said) == bool(says)


def test_weights_without_noise_tell_counts_and_no_floor_holds(folder):
    """What the policy's own text says: only max-epsilon bounds this."""
    server = server_of(folder, "strategy=fedsgd")
    reply = server.send(Differentiate(arrays=always(server, [0, 0, 0]), run="r", server_round=1))
    found = 60 * (1 / 3 - weights(reply)[f"{HEAD}.bias"])
    np.testing.assert_allclose(found, COUNTS, rtol=1e-3)


# --- an honest run ----------------------------------------------------------------------------------------------------


def test_a_run_of_hospitals_with_a_floor_has_an_accuracy_and_no_cells(folder):
    for name in "bc":
        write(folder, name)
    write(folder, "c", counts=(1, 2, 4))
    (folder / "policy.yaml").write_text(FLOOR)
    nodes = [one | {"policy": str(folder / "policy.yaml")} for one in node_configs(folder, folder / "state", "abc")]
    options = [*TASK, "strategy=fedavg", "rounds=3", "evaluate_every=3", "lr=0.3"]
    ran = run(folder, options, nodes)
    assert set(ran.result["final"]["global"]) == {"accuracy"}
    assert ran.result["nodes"] == 2
    said = summary(ran.result, ran.folder)
    assert "fewer than 10 training examples" in said
    page = write_page(ran.folder).read_text()
    assert "no count below 10" in page
    assert "row by row" not in page
    assert not (ran.folder / "confusion.csv").exists()
    left = {line["field"] for line in ran.own_ledger("a") if line["stage"] == "evaluate"}
    assert left == {"num-examples", "hits"}
    of_c = [*options, f"data_dir={folder / 'c.npz'}", "partition=natural"]
    found = findings(*planned(of_c, ["c"]), folder / "policy.yaml")
    assert not found["takes-part"]
    assert "fewer than 10 training examples" in json.dumps(found["rules"])
    found = findings(
        *planned([*options, f"data_dir={folder / 'a.npz'}", "partition=natural"], ["a"]), folder / "policy.yaml"
    )
    assert found["allowed"]
    allowed = {
        line["field"] for line in found["fields"] if line["verdict"] == "allowed" and line["stage"] == "evaluate"
    }
    assert allowed == {"num-examples", "confusion"}
    assert "All runs together have 1 such tests" in write_officer_page(folder, found)[0].read_text()
    assert "No number of fewer than 10 examples leaves" in write_officer_page(folder, found)[0].read_text()
    found = findings(*planned([*options, f"data_dir={folder / 'a.npz'}", "partition=natural"], ["a"]), None)
    assert "min-count is off" in write_officer_page(folder, found)[0].read_text()
