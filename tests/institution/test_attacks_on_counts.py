"""Attacks on a policy's floor for small cells, by a server that sends what it likes."""

import json
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
from flwr.app import RecordDict
from harness import SHARDS, command, node_configs, run
from hostile_server import HostileServer, metrics, refusal, weights
from small_cells import COUNTS, FLOOR, HEAD, TASK, answered_by, ask_evaluation, constant_weights, server_of, write_cells

from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError, RefusedError
from flwr_replay.forecast.officer import findings, planned
from flwr_replay.institution.floor import check_declared, check_options
from flwr_replay.institution.node import institution_of
from flwr_replay.institution.policy import Policy, read_policy
from flwr_replay.payloads.common import RollCall, Train, Trained
from flwr_replay.payloads.fedreplay import Extract
from flwr_replay.payloads.fedsgd import Differentiate
from flwr_replay.payloads.fedstats import Summarise
from flwr_replay.payloads.replay import Codes, TrainedPrior
from flwr_replay.payloads.splitnn import Half
from flwr_replay.payloads.synthetic import DrawBuffer, TrainPiece
from flwr_replay.report.officer_page import write_officer_page
from flwr_replay.report.pages import write_page
from flwr_replay.report.summary import summary
from flwr_replay.wire.fields import statistic


@pytest.fixture
def folder(tmp_path):
    write_cells(tmp_path)
    return tmp_path


# --- what a policy says -----------------------------------------------------------------------------------------------


def test_without_the_key_every_number_leaves(folder):
    server = server_of(folder, policy="")
    assert metrics(server.send(RollCall(strategy="fedavg", run="r")))["num-examples"] == 60
    assert metrics(ask_evaluation(server, constant_weights(server, [0, 0, 9])))["confusion"][2::3] == list(
        COUNTS
    )  # the attack works


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
    write_cells(folder, counts=(1, 2, 4))
    for policy in ("", FLOOR):
        server = server_of(folder, *options, policy=policy)
        replies = [
            server.send(RollCall(strategy="fedavg", run="r")),
            server.send(Train(arrays=server.weights, run="r", lr=0.1)),
        ]
        told = [metrics(reply).get("num-examples") == 7 or "7 examples" in refusal(reply) for reply in replies]
        assert all(told) == (not policy)
        assert all("fewer than 10 training examples" in refusal(reply) for reply in replies) == bool(policy)


@pytest.mark.parametrize("skipping", [False, True], ids=["roll call", "at once to training"])
def test_two_runs_do_not_tell_how_many_came_between(folder, skipping):
    def told(run):
        server = server_of(folder, policy=FLOOR + "max-evaluations: 9")  # each run may ask for one, for half an hour
        request = Train(arrays=server.weights, run=run, lr=0.0) if skipping else RollCall(strategy="fedavg", run=run)
        return server.send(request)

    assert metrics(told("before"))["num-examples"] == 60
    write_cells(folder, counts=(4, 20, 37))
    assert "training examples more or fewer than before" in refusal(told("one came"))
    write_cells(folder, counts=(5, 30, 37))
    assert metrics(told("twelve came"))["num-examples"] == 72
    write_cells(folder, counts=(3, 25, 37))
    assert refusal(told("five are more than at first"))


def test_no_loss_leaves_of_a_training(folder):
    """With a rate of nothing a loss tells how many examples a server's weights are wrong about."""
    whole = [*TASK[:-3], "batch_size=60", *TASK[-2:], "strategy=fedavg"]
    arrays = constant_weights(server_of(folder), [-1000, 0, 0])
    free = HostileServer(folder, *whole).send(Train(arrays=arrays, run="r", lr=0.0))
    loss = metrics(free)["train-loss"]
    assert round((loss - np.log(2)) * 60 / 1000) == COUNTS[0]  # the attack works
    floored = HostileServer(folder, *whole, policy=FLOOR).send(Train(arrays=arrays, run="s", lr=0.0))
    assert set(metrics(floored)) == {"num-examples", "examples-seen", "num-steps"}


def test_no_failure_counts(folder):
    """A loss that is finite for two examples, and not for three, counts without leaving."""
    replaced = ("task.size", "model", "batch_size")
    options = [*(option for option in TASK if not option.startswith(replaced)), "task.size=32", "model=lenet5"]
    options.append("batch_size=60")
    write_cells(folder, size=32)

    def fails(policy, few):
        """Say whether a training fails that has an infinite loss once more than `few` examples are of class 0."""
        server, gain = HostileServer(folder, *options, "strategy=fedavg", policy=policy), 150 * 400 * 120 * 84
        size = float((np.finfo(np.float32).max / (few + 0.5) / gain) ** (1 / 5))
        arrays = {name: np.full_like(of, size * name.endswith("weight")) for name, of in server.weights.items()}
        arrays["conv1.conv.weight"][:], arrays["conv1.conv.bias"][:] = 0, size
        arrays[f"{HEAD}.weight"][:] = [[-size]] + [[0]] * 2
        reply = server.send(Train(arrays=arrays, run=f"r{few}{len(policy)}", lr=0.0))
        return "loss must stay finite" in refusal(reply)

    assert [fails("", few) for few in (2, 3)] == [True, False]  # the attack works: there are 3
    assert not any(fails(FLOOR, few) for few in (2, 3))


@pytest.mark.parametrize("kind", ["regression", "segmentation"])
def test_only_a_classification_counts_examples(folder, kind):
    """Labels' sums are counts where they are classes; of other numbers, a change tells the label that came."""
    options = [*(option for option in TASK if "classes" not in option), "task.classes=1", "strategy=fedavg"]
    reply = server_of(folder, f"task.kind={kind}", task=options).send(RollCall(strategy="fedavg", run="r"))
    assert f"tests and sums of labels of a {kind} do not count examples" in refusal(reply)


def test_no_option_makes_a_number_that_of_the_smallest_class():
    with pytest.raises(RefusedError, match="that of the smallest class"):
        check_options(Policy(min_count=10), compose(["task=tuberculosis", "task.balanced=true", "strategy=fedavg"]))


STYLE = [*SHARDS, "classes=3", "device=cpu", "rounds=1", "model=cnn", "model.width=4", "model.norm=group"]
STYLE += ["generator=stylegan2", "generator.latents=4", "generator.width=4", "generator.max_width=4"]
STYLE += ["generator.steps=2", "generator.batch_size=16", "generator.privacy_loss=none"]


def drawn_buffer(server):
    while (reply := server.send(TrainPiece(run="r"))) and not refusal(reply) and metrics(reply)["steps-left"]:
        pass
    return server.send(DrawBuffer(run="r", buffer=12, buffer_refresh="never", exchange=1))


def test_images_are_drawn_for_no_class_with_few(folder):
    """Labels tell which classes an institution has enough images of."""
    write_cells(folder, counts=(6, 20, 37))
    for policy, classes in (("", {0, 1, 2}), (FLOOR, {1, 2})):
        reply = drawn_buffer(server_of(folder, "strategy=feder", "buffer=12", task=STYLE, policy=policy))
        assert set(weights(reply)["labels"]) == classes


def test_no_part_of_the_examples_is_counted(folder):
    """Sets of classes, each large enough, would tell every class: (n₀ + n₁) + (n₀ + n₂) - n = n₀."""
    server = answered_by(folder, lambda context: {"num-examples": len(institution_of(context)[0].train) - 3})
    assert "num-examples must be of all training examples" in refusal(server.send_content(RecordDict()))


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

    bias = weights(sums("", *plain))[f"{HEAD}.bias"]
    np.testing.assert_allclose(bias / bias.sum() * 60, COUNTS, rtol=1e-3)  # the attack works
    assert "ClassSums.arrays are sums of features" in refusal(sums(FLOOR, *plain))
    assert "ClassSums.arrays" in refusal(sums(FLOOR, *noisy[:3], f"{noisy[3]}1000000"))  # noise that hides nothing
    assert not refusal(sums(f"{FLOOR}max-epsilon: 2\nmax-delta: 0.001\n", *noisy[:3], f"{noisy[3]}2"))


def test_the_noise_of_many_sums_does_not_average_out(folder):
    """Each run has an epsilon of its own, and noise of its own."""
    noisy = ["strategy=fedstats", "dp=statistics", "delta=0.001", "privacy.target-epsilon=2"]
    server = server_of(folder, *noisy, policy=f"{FLOOR}max-epsilon: 2\nmax-delta: 0.001\n")

    def summed(run):
        return server.send(Summarise(arrays=server.weights, run=run, clip=10.0))

    first = weights(summed("first"))
    assert "the noise of many sums averages out" in refusal(summed("second"))
    call = RollCall(strategy="fedstats", run="third", stages=["summarise"])
    assert "the noise of many sums averages out" in refusal(server.send(call))
    np.testing.assert_array_equal(weights(summed("first"))[f"{HEAD}.bias"], first[f"{HEAD}.bias"])


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
        check_declared(Policy(min_count=10), answer, None)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ({"num-examples": 60}, ""),
        ({"num-examples": 60, "positives": 3}, "nobody can say of how many examples positives is"),
        ({"num-examples": 6}, "num-examples must be of all"),
    ],
)
def test_an_app_of_ones_own_sends_no_number_but_that_of_examples(folder, sent, says):
    reason = refusal(answered_by(folder, lambda context: sent).send_content(RecordDict()))
    assert says in reason
    assert bool(reason) == bool(says)


def test_an_app_of_ones_own_sends_no_number_as_a_text(folder):
    server = answered_by(folder, lambda context: {"num-examples": 60}, config={"positives": 3})
    assert "nobody can say of how many examples positives is" in refusal(server.send_content(RecordDict()))


def test_weights_without_noise_tell_counts_and_no_floor_holds(folder):
    """What the policy's own text says: only max-epsilon bounds this."""
    server = server_of(folder, "strategy=fedsgd")
    reply = server.send(Differentiate(arrays=constant_weights(server, [0, 0, 0]), run="r", exchange=1))
    counts = 60 * (1 / 3 - weights(reply)[f"{HEAD}.bias"])
    np.testing.assert_allclose(counts, COUNTS, rtol=1e-3)


# --- an honest run ----------------------------------------------------------------------------------------------------


def test_an_encoder_may_be_trained_without_the_examples_that_are_held_out(folder):
    """The number of these follows from that of all."""
    write_cells(folder, "b")
    (folder / "policy.yaml").write_text(f"{FLOOR}max-local-epsilon: 10\nmax-delta: 0.1\n")
    nodes = [node | {"policy": str(folder / "policy.yaml")} for node in node_configs(folder, folder / "state", "ab")]
    local = ["dp=latents", "latent-clip=1", "latent-epsilon=8", "label-epsilon=2", "encoder-epochs=1"]
    ran = run(folder, [*TASK, "strategy=fedreplay", *local], nodes)
    assert ran.result["nodes"] == 2
    assert not ran.result["failures"]


def test_a_model_that_is_always_right_has_an_accuracy(folder):
    write_cells(folder, counts=(0, 5, 55), tests=(0, 0, 60))
    (folder / "policy.yaml").write_text(FLOOR)
    nodes = [node | {"policy": str(folder / "policy.yaml")} for node in node_configs(folder, folder / "state", "a")]
    ran = run(folder, [*TASK, "strategy=fedavg", "lr=0.3"], nodes)
    assert ran.result["final"]["global"] == {"accuracy": 51 / 60}


def test_a_run_of_hospitals_with_a_floor_has_an_accuracy_and_no_cells(folder, monkeypatch, capsys):
    for name in "bc":
        write_cells(folder, name)
    write_cells(folder, "c", counts=(1, 2, 4))
    (folder / "policy.yaml").write_text(FLOOR)
    nodes = [node | {"policy": str(folder / "policy.yaml")} for node in node_configs(folder, folder / "state", "abc")]
    options = [*TASK, "strategy=fedavg", "rounds=3", "evaluate_every=3", "lr=0.3"]
    ran = run(folder, options, nodes)
    assert set(ran.result["final"]["global"]) == {"accuracy"}
    assert ran.result["nodes"] == 2
    assert ran.result["floored"] == ["a", "b"]
    text = summary(ran.result, ran.folder)
    assert "fewer than 10 training examples" in text
    assert "lower bound where few were right, or wrong; no cells left (min-count): a, b" in " ".join(text.split())
    page = write_page(ran.folder).read_text()
    assert "no count below 10" in page
    assert "row by row" not in page
    assert not (ran.folder / "confusion.csv").exists()
    left = {line["field"] for line in ran.own_ledger("a") if line["stage"] == "evaluate"}
    assert left == {"num-examples", "hits"}
    trial = {"institution": "a", "stage": "fit", "field": "arrays", "attack": "none", "not-judged": "it has 3 examples"}
    shutil.copytree(folder / "state" / "a", folder / "copies" / "state" / "a")
    (folder / "lax.yaml").write_text("metrics: counted\n")
    for place, more, says in (
        (ran.folder, (), "a, b had one: give it, --policy FILE"),
        (ran.folder, ("--policy", str(folder / "lax.yaml")), "a, b had one: give it, --policy FILE"),
        (ran.folder, ("--policy", str(folder / "policy.yaml")), ""),
        (folder / "state" / "a", (), ""),  # the policy lies beside
        (folder / "copies" / "state" / "a", (), "a had one: give it, --policy FILE"),
    ):
        (place / "attacks").mkdir(exist_ok=True)
        (place / "attacks" / "attacks.json").write_text(json.dumps({"attacks": [trial]}))
        assert command(monkeypatch, "deploy", "evidence", str(place), *more) == (2 if says else 0)
        assert says in " ".join(capsys.readouterr().err.split())
        if not says:
            verdicts = json.loads((place / "evidence.json").read_text())
            assert all(own["tests"] == "–" for own in verdicts.get("runs", {}).values())  # of all runs together
            [line] = verdicts["attacks"]
            assert line.endswith("attacks.json says why, with numbers")
            assert "3 examples" not in (place / "evidence.html").read_text()
    of_c = [*options, f"data_dir={folder / 'c.npz'}", "partition=natural"]
    verdicts = findings(*planned(of_c, ["c"]), folder / "policy.yaml")
    assert not verdicts["takes-part"]
    assert "fewer than 10 training examples" in json.dumps(verdicts["rules"])
    of_a = [*options, f"data_dir={folder / 'a.npz'}", "partition=natural"]
    verdicts = findings(*planned(of_a, ["a"]), folder / "policy.yaml")
    refused = [rule for rule in verdicts["rules"] if rule["verdict"] == "broken"]
    assert {rule["rule"] for rule in refused} == {"room"}, refused  # the one test of each state here is used up
    shutil.rmtree(folder / "state")
    verdicts = findings(*planned(of_a, ["a"]), folder / "policy.yaml")
    assert verdicts["allowed"]
    allowed = {
        line["field"] for line in verdicts["fields"] if line["verdict"] == "allowed" and line["stage"] == "evaluate"
    }
    assert allowed == {"num-examples", "confusion"}
    assert "All runs together have 1 such tests" in write_officer_page(folder, verdicts)[0].read_text()
    assert "No number of fewer than 10 examples leaves" in write_officer_page(folder, verdicts)[0].read_text()
    verdicts = findings(*planned([*options, f"data_dir={folder / 'a.npz'}", "partition=natural"], ["a"]), None)
    assert "min-count is off" in write_officer_page(folder, verdicts)[0].read_text()
