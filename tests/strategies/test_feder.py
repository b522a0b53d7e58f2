"""FedER through real messages: what it equals, what is conserved, what crosses how often, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from harness import SHARDS, Ran, broken, node_configs, run, same, write_shards
from safetensors.numpy import load_file

from flwr_replay.clients.feder import FedERClient
from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError, DataError, FlwrReplayError, RefusedError, RunError
from flwr_replay.generators.synthesis import SynthesisPlan
from flwr_replay.institution.owner import Institution
from flwr_replay.institution.synthesis import SynthesisStages
from flwr_replay.payloads.synthetic import Buffer, KeepBuffer, TrainPiece
from flwr_replay.runs.execute import Job
from flwr_replay.state.store import StateStore
from flwr_replay.strategies.feder import FedER
from flwr_replay.wire.records import config_in, opened

SIZES = {"a": 40, "b": 33, "c": 20}
TASK = [*SHARDS, "classes=3", "model=cnn", "model.width=4", "model.norm=group"]
TINY = ["generator.width=4", "generator.codes=8", "generator.dim=4", "generator.epochs=1"]
TINY += ["prior.width=4", "prior.layers=1", "prior.epochs=1"]
PLAIN = [*TASK, "batch_size=16", "lr=0.05", "device=cpu", "rounds=4"]
JOB = [*PLAIN, *TINY, "strategy=feder", "buffer=12"]


class Models(Ran):
    """What a run left, and its models by the institution that has trained them last."""

    @property
    def models(self):
        return {file.stem: load_file(file) for file in (self.folder / "models").glob("*.safetensors")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("hospitals")
    write_shards(folder, SIZES)
    return folder


@pytest.fixture
def start(folder, tmp_path):
    """Run the small job; options may name another strategy, and institutions."""

    def start(*options, names="cab", **more):
        job = JOB if not any(option.startswith("strategy=") for option in options) else PLAIN
        ran = run(folder, [*job, *options], node_configs(folder, tmp_path / "state", names), ran=Models, **more)
        return Models(ran.result, ran.folder, ran.grid, tmp_path)

    return start


def asked_of(ran, stage):
    return [asked for asked in ran.grid.asked if asked.stage == stage]


def test_one_institution_is_local(start):
    alone = start("buffer=12", names="a")
    local = start("strategy=local", "optimizer_state=reset", names="a")
    (kept,) = local.state("a").glob("model-000004.safetensors")
    assert same(alone.models["a"], load_file(kept))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("state", ["reset", "keep"])
def test_buffer_only_without_a_buffer_is_local(start, state):
    options = (f"optimizer_state={state}", "training.momentum=0.9")
    ours = start("mode=buffer-only", "buffer=0", *options)
    local = start("strategy=local", *options)
    for name in SIZES:
        files = [job.state(name) / "model-000004.safetensors" for job in (ours, local)]
        assert same(*map(load_file, files))
    assert not ours.models


def test_between_two_without_a_buffer_a_model_makes_cwts_visits(start):
    ours = start("buffer=0", names="ab")
    cwt = start("strategy=cwt", "rounds=2", names="ab")
    assert same(ours.models["b"], cwt.models["global"])  # begun at the first, trained there in rounds 1 and 3


def test_who_fails_leaves_its_model_as_it_was_sent(start):
    ran = start("buffer=0", "rounds=2", failing=(("train-with-buffers", "b", 2),))
    assert {failure["institution"] for failure in ran.result["failures"]} == {"b"}
    (sent,) = [asked for at, asked, _ in ran.grid.log if at == ("train-with-buffers", "b", 2)]
    assert same(ran.models["b"], opened(sent.content["arrays"]))
    assert set(ran.models) == set(SIZES)
    assert len({b"".join(array.tobytes() for array in model.values()) for model in ran.models.values()}) == 3


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [
        "",
        "mode=buffer-only",
        "mode=synthetic-only buffer_refresh=round",
        "order=queue durations=[1,3,2] agreement=true",
    ],
)
def test_a_run_that_broke_off_goes_on_with_the_same_bits(folder, tmp_path, options):
    job = [*JOB, *options.split()]

    def again(place, *overrides, **more):
        nodes = node_configs(folder, tmp_path / more.pop("state"))
        return run(place, overrides, nodes, ran=Models, **more)

    whole = again(folder, *job, state="whole")
    resumed = broken(lambda *a, **k: again(*a, state="broken", **k), folder, *job, stop_after=2)
    assert whole.models.keys() == resumed.models.keys()
    assert all(same(whole.models[name], resumed.models[name]) for name in whole.models)
    assert whole.result["final"] == resumed.result["final"]
    assert whole.result.get("agreement") == resumed.result.get("agreement")


@pytest.mark.sampled(2, of="slow runs")
def test_a_generator_that_is_trained_in_many_messages_is_the_same(folder, tmp_path):
    runs = []
    for steps in (1, 1000):
        job, nodes = [*JOB, "generator.epochs=3"], node_configs(folder, tmp_path / str(steps))
        runs.append(run(folder, [*job, f"generator.piece_steps={steps}"], nodes, ran=Models))
    assert [len(asked_of(run, "train-piece")) > 3 for run in runs] == [True, False]
    assert all(same(runs[0].models[name], runs[1].models[name]) for name in SIZES)


# --- queues, agreement, architectures ---------------------------------------------------------------------------------


@pytest.mark.sampled(2, of="slow runs")
def test_a_queue_says_what_decided_the_order(start):
    timed, arrived = start("order=queue", "durations=[1,3,2]"), start("order=queue", "rounds=6")
    assert timed.result["order-decided-by"] == "durations"
    assert arrived.result["order-decided-by"] == "arrival"
    assert "order-decided-by" not in start("rounds=2").result
    for ran, rounds in ((timed, 4), (arrived, 6)):
        assert len(asked_of(ran, "train-with-buffers")) == 3 * rounds
        assert len(asked_of(ran, "keep-buffer")) == 6
        assert set(ran.models) == set(SIZES)


def test_a_queues_model_that_was_not_trained_goes_on_as_it_was_sent(start):
    failing = tuple(("train-with-buffers", "b", at) for at in range(1, 9))
    ran = start("order=queue", "durations=[1,1,1]", "buffer=0", "rounds=8", failing=failing)
    assert set(ran.models) == set(SIZES)
    sent = [opened(asked.content["arrays"]) for at, asked, _ in ran.grid.log if at[:2] == ("train-with-buffers", "b")]
    others = [
        opened(asked.content["arrays"])
        for at, asked, _ in ran.grid.log
        if at[0] == "train-with-buffers" and at[1] != "b"
    ]
    assert sent
    assert any(same(model, other) for model in sent for other in others)


def test_agreement_is_every_models_test_at_every_institution(start):
    ran = start("agreement=true", "buffer=0", "rounds=2")
    agreement = ran.result["agreement"]
    assert agreement["metric"] == "balanced-accuracy"
    for name in SIZES:
        scores = agreement["by-institution"][name]
        assert set(scores) == set(SIZES)
        assert agreement["standard-deviation"][name] == pytest.approx(np.std(list(scores.values())))
        own = ran.result["final"]["institutions"][name]["balanced-accuracy"]
        assert scores[name] == own  # the model that is there


def test_with_buffer_only_models_may_have_two_architectures(folder, tmp_path):
    nodes = node_configs(folder, tmp_path / "state")
    for node, model in zip(nodes, ("cnn", "lenet5", "cnn"), strict=True):
        node["private-model"] = model
    job = [*JOB, "mode=buffer-only", "private-models=[cnn,lenet5]"]
    ran = run(folder, job, nodes, ran=Models)
    assert not ran.result["failures"]
    kept = {name: tmp_path / "state" / name / "runs" / ran.run / "model-000004.safetensors" for name in SIZES}
    forms = {name: frozenset(load_file(file)) for name, file in kept.items()}
    assert forms["c"] == forms["b"] != forms["a"]  # the nodes' order is c, a, b
    assert "model" not in {row["kind"] for row in ran.ledger}


def test_a_buffer_goes_up_once_and_to_each_institution_once(start):
    ran = start("memory=all", "rounds=6")
    assert len(asked_of(ran, "draw-buffer")) == 3
    assert len(asked_of(ran, "keep-buffer")) == 6
    kinds = {row["kind"] for row in ran.ledger if row["stage"] in ("draw-buffer", "keep-buffer")}
    assert kinds == {"synthetic", "statistic", "instruction"}


@pytest.mark.parametrize(
    ("options", "names"), [(["rounds=1"], "cab"), (["rounds=3"], "a"), (["rounds=1", "memory=all"], "cab")]
)
def test_images_that_nobody_can_learn_do_not_leave(start, options, names):
    ran = start(*options, names=names)
    assert not asked_of(ran, "draw-buffer")
    assert "synthetic" not in {row["kind"] for row in ran.ledger}


def test_a_buffer_is_the_same_however_often_it_is_asked_for(start):
    drawn = []

    def twice(grid, message, reply):
        if config_in(message.content).get("stage") == "draw-buffer":
            message.content["config"]["server-round"] = 77
            grid.after = None
            drawn.extend([reply, grid.answer(message)])

    start(after=twice)
    first, second = (Buffer.decode(reply.content) for reply in drawn)
    assert np.array_equal(first.images, second.images)
    assert np.array_equal(first.labels, second.labels)


def test_labels_are_uniform_over_the_classes_that_an_institution_has(start):
    buffers = []

    def keep(grid, message, reply):
        if config_in(message.content).get("stage") == "draw-buffer":
            buffers.append(Buffer.decode(reply.content))

    start("buffer=30", after=keep)
    for buffer in buffers:
        assert buffer.images.shape == (30, 1, 8, 8)
        counts = np.bincount(buffer.labels)
        assert counts[counts > 0].max() - counts[counts > 0].min() <= 1


def test_synthetic_only_reads_no_real_image_after_the_generator(start, monkeypatch):
    reads = []
    training_data = FedERClient.training_data
    monkeypatch.setattr(FedERClient, "training_data", lambda self, *a: reads.append(1) or training_data(self, *a))
    ran = start("mode=synthetic-only")
    assert not reads
    for name in SIZES:
        assert len(load_file(ran.state(name) / "own-synthetic-000001.safetensors")["labels"]) == SIZES[name]
    start("mode=standard")
    assert reads


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["buffer=-1"], "strategy.buffer must be at least 0; got -1"),
        (["buffer=2049"], "strategy.buffer must be at most 2048"),
        (["mode=buffers-only"], "did you mean buffer-only"),
        (["memory=al"], "did you mean all"),
        (["order=queues"], "did you mean queue"),
        (["order=queue", "durations=[1,0]"], "strategy.durations must be positive"),
        (["order=queue", "mode=buffer-only"], "models stay"),
        (["private-models=[cnn]"], "models that hop have one form"),
        (["optimizer-state=keep"], "a model that hops begins with a fresh optimizer"),
        (["task=diabetes", "model=mlp"], "has tables"),
        (["task=histopathology", "model=deepset"], "has bags"),
        (["task=isbi2012", "model=unet"], "is a segmentation"),
        (["task.size=300"], "up to 256 pixels"),
        (["replay=vqvae2"], "replay is for serial and parallel methods"),
        (["dp=classifier"], r"strategy=feder can have dp=generator\+prior; got dp=classifier"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, says):
    other = any(option.startswith("task=") for option in options)
    with pytest.raises(FlwrReplayError, match=says):
        Job.of(compose([*(["strategy=feder"] if other else JOB), *options]))


def test_durations_for_too_few_institutions_end_the_run_before_any_training(start):
    with pytest.raises(ConfigError, match="a number for each institution; got 2 for 3"):
        start("order=queue", "durations=[1,2]")


def test_an_institution_without_enough_images_of_any_class_takes_part_without_a_generator(tmp_path):
    write_shards(tmp_path, {"a": 40, "b": 33, "c": 5})
    ran = run(tmp_path, JOB, node_configs(tmp_path, tmp_path / "state"), ran=Models)
    assert {failure["institution"] for failure in ran.result["failures"]} <= {"c"}
    assert set(ran.models) == set("abc")


def test_a_run_without_any_generator_ends_before_a_model_is_trained(tmp_path):
    write_shards(tmp_path, {"a": 5, "b": 6})
    with pytest.raises(RunError, match="no institution could train its generator"):
        run(tmp_path, JOB, node_configs(tmp_path, tmp_path / "state", "ab"))


@pytest.mark.parametrize(("low", "high", "fine"), [(0.0, 1.0, True), (-0.1, 1.0, False), (0.0, 1.1, False)])
def test_a_generator_learns_only_images_in_0_to_1(tmp_path, low, high, fine):
    x = np.full((40, 1, 8, 8), low, np.float32)
    x[20:] = high
    institution = Institution.from_arrays("a", (x, np.arange(40) % 3))
    institution.state_root = tmp_path
    stages = SynthesisStages(institution, StateStore(institution), SynthesisPlan.of(compose(JOB)))
    if fine:
        assert stages.train_piece(TrainPiece(run="r")).steps_left == 0
    else:
        with pytest.raises(DataError, match=r"numbers in \[0, 1\]; got others: rescale them"):
            stages.train_piece(TrainPiece(run="r"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wrong", ["shape", "labels", "number"])
def test_a_bad_buffer_reaches_nobody(start, wrong):
    def spoil(grid, message, reply):
        asked = config_in(message.content).get("stage"), grid.name_of(message.metadata.dst_node_id)
        if asked != ("draw-buffer", "b"):
            return None
        good = Buffer.decode(reply.content)
        values = {"images": good.images, "labels": good.labels}
        if wrong == "shape":
            values["images"] = values["images"][..., :7]
        if wrong == "labels":
            values["labels"] = values["labels"] + 3
        if wrong == "number":
            values = {key: array[:5] for key, array in values.items()}
        reply.content = Buffer(**values, num_examples=good.num_examples).encode()
        return reply

    ran = start(after=spoil)
    assert {failure["institution"] for failure in ran.result["failures"]} == {"b"}
    assert "a buffer" in ran.result["failures"][0]["reason"]
    assert asked_of(ran, "keep-buffer")
    assert not list((ran.folder / "buffers").glob("*b*"))


def test_a_policy_without_synthetic_refuses_at_the_roll_call(folder, tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text("kinds: [model, statistic]\n")
    nodes = node_configs(folder, tmp_path / "state")
    nodes[0]["policy"] = str(policy)
    ran = run(folder, JOB, nodes, ran=Models)
    (failure,) = [failure for failure in ran.result["failures"] if failure["institution"] == "c"][:1]
    assert "Buffer.images is synthetic" in failure["reason"]
    assert not [row for row in ran.ledger if row["institution"] == "c" and row["stage"] != "roll-call"]


def test_a_policy_limits_the_generator_too(folder, tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text("limits: {epochs: 1}\n")
    nodes = [{**node, "policy": str(policy)} for node in node_configs(folder, tmp_path / "state")]
    with pytest.raises(RefusedError, match=r"generator.epochs"):
        run(folder, [*JOB, "generator.epochs=2"], nodes)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", ["max-epsilon: 8\n", "max-upload-mb: 0.001\n"])
def test_what_a_policy_forbids_of_a_buffer_does_not_leave(folder, tmp_path, policy):
    (tmp_path / "policy.yaml").write_text(policy)
    nodes = node_configs(folder, tmp_path / "state")
    nodes[0]["policy"] = str(tmp_path / "policy.yaml")
    ran = run(folder, JOB, nodes, ran=Models)
    left = [row for row in ran.ledger if row["direction"] == "up" and row["institution"] == "c"]
    assert not [row for row in left if row["kind"] in ("synthetic", "model")]
    assert "c" in {failure["institution"] for failure in ran.result["failures"]}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wrong", [{"number": 0}, {"labels": 3}, {"images": 7}])
def test_a_buffer_that_a_hostile_server_sends_is_refused(start, wrong):
    def spoil(grid, message):
        if config_in(message.content).get("stage") != "keep-buffer":
            return
        good = KeepBuffer.decode(message.content)
        labels, images = good.labels + wrong.get("labels", 0), good.images[..., : wrong.get("images", 8)]
        message.content = replace(good, number=wrong.get("number", good.number), labels=labels, images=images).encode()

    ran = start(before=spoil)
    assert {failure["institution"] for failure in ran.result["failures"]} == set(SIZES)
    assert all("a buffer has a number from 1 on" in failure["reason"] for failure in ran.result["failures"])


def test_a_buffer_of_another_size_than_the_runs_is_not_drawn(start):
    def more(grid, message):
        if config_in(message.content).get("stage") == "draw-buffer":
            message.content["config"]["buffer"] = 13

    with pytest.raises(RunError, match=r"no institution has sent a buffer; .* strategy\.buffer is 12, it asks for 13"):
        start(before=more)


def test_settings_without_a_generator_are_refused():
    with pytest.raises(ConfigError, match="FedER needs a generator"):
        FedER()


def test_a_run_in_which_nobody_can_send_a_buffer_stops_at_once_and_asks_again_when_resumed(folder, tmp_path):
    """As with a full disk: it trained all its rounds without any buffer."""
    nodes, job = node_configs(folder, tmp_path / "state"), [*JOB, "rounds=3"]
    with pytest.raises(RunError, match="no institution has sent a buffer; a, b, c: error 2: made to fail: resume"):
        run(folder, job, nodes, name="unsent", failing=[("draw-buffer",)])
    again = run(folder, job, nodes, resume=str(folder / "runs" / "unsent"))
    assert len(again.grid.who("draw-buffer")) == 3
    assert again.result["rounds"] == 3
