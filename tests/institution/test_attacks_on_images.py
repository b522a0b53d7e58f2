"""Attacks on institutions that train image generators: by servers that ask for more than the run says, and by answers.

What an attack after the whole of FedER found: docs/audit.md.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import MetricRecord
from harness import node_configs, run, write_shards
from hostile_server import HostileServer, metrics, refusal, weights

from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError
from flwr_replay.files.atomic import alone, private_folder
from flwr_replay.files.tensors import read_tensors
from flwr_replay.generators.synthesis import SynthesisPlan, TrainingProgress
from flwr_replay.payloads.common import Train
from flwr_replay.payloads.feder import TrainOwnWithBuffers, TrainWithBuffers
from flwr_replay.payloads.local import EvaluateOwn
from flwr_replay.payloads.synthetic import DrawBuffer, KeepBuffer, TrainPiece
from flwr_replay.privacy.accounting import epsilon
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.wire.records import config_in, metrics_in

TASK = ["task=medmnist", "task.size=8", "classes=3", "model=cnn", "model.width=4", "model.norm=group", "device=cpu"]
TASK += ["training.batch_size=16"]
STYLE = ["generator=stylegan2", "generator.latents=4", "generator.width=4", "generator.max_width=4"]
STYLE += ["generator.steps=6", "generator.batch_size=16", "generator.privacy_loss=none"]
PLAIN = ["generator.deviation=false", "generator.r1_every=0", "generator.ada_images=0"]
FEDER = [*TASK, *STYLE, "strategy=feder", "buffer=12"]
ALL = "generator.classes=[all]"
END_TO_END = [*FEDER, *PLAIN, "mode=buffer-only", "dp=end-to-end", "sigma=8", ALL]


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path, {"a": 40, "b": 40})
    return tmp_path


def draw(server, run, images=12, refresh="never", exchange=1):
    """Have the generator trained, and images drawn."""
    while (reply := server.send(TrainPiece(run=run))) and not refusal(reply) and metrics(reply)["steps-left"]:
        pass
    return server.send(DrawBuffer(run=run, buffer=images, buffer_refresh=refresh, exchange=exchange))


def images(reply):
    return {image.tobytes() for image in weights(reply)["images"]}


def buffer(n, number=1):
    return KeepBuffer(
        run="r", number=number, buffer=12, images=np.zeros((n, 1, 8, 8), np.uint8), labels=np.zeros(n, np.int64)
    )


# --- what leaves ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dp", [[], [*PLAIN, "dp=generator", ALL]], ids=["plain", "generator under DP"])
def test_where_models_stay_none_is_trained_to_leave(folder, dp):
    server = HostileServer(folder, *FEDER, "mode=buffer-only", *dp)
    reply = server.send(TrainWithBuffers(arrays=server.weights, run="r", lr=0.1, mode="buffer-only"))
    assert "models stay with mode=buffer-only" in refusal(reply)
    assert not weights(reply)


def test_where_models_hop_none_is_kept(folder):
    server = HostileServer(folder, *FEDER)
    assert "models hop" in refusal(server.send(TrainOwnWithBuffers(run="r", lr=0.1, mode="standard", init_seed=1)))


def test_a_guarantee_does_not_go_with_tests_that_show_which_classes_are_there():
    with pytest.raises(ConfigError, match="which these are: leave external out"):
        PrivacyPlan.of(compose([*END_TO_END, "external=true"]))


def test_the_noise_for_a_target_covers_all_steps_of_an_image_generator():
    options = ["target-epsilon=2" if option.startswith("sigma=") else option for option in END_TO_END]
    plan = PrivacyPlan.of(compose(options))
    costs = [each.cost(40, plan.cost(each.mechanism, 40, 1).sigma) for each in plan.passes]  # `planned` is cut off at 2
    assert 1.9 < epsilon([*costs, *plan.fixed()], plan.config.delta_for(40), plan.accountant) <= 2


def test_a_buffer_that_is_never_refreshed_is_the_same_in_every_exchange(folder):
    server = HostileServer(folder, *FEDER)
    assert images(draw(server, "r")) == images(draw(server, "r", exchange=2))


def test_buffers_of_all_sizes_begin_with_the_same_images(folder):
    seen = set()
    for n in (12, 13, 300, 301):  # one generator, four runs
        seen |= images(draw(HostileServer(folder, *FEDER, f"strategy.buffer={n}"), f"n{n}", n))
    assert len(seen) <= 301
    assert len(list((folder / "state/a/generators").glob("*.safetensors"))) == 1


def test_a_policy_limits_how_often_new_images_are_drawn(folder):
    server = HostileServer(folder, *FEDER, "buffer_refresh=round", policy="limits: {round: 2}")
    assert not refusal(draw(server, "r", refresh="round", exchange=2))
    assert "server-round from 0 to 2; got 50" in refusal(draw(server, "r", refresh="round", exchange=50))


def test_a_policy_limits_how_many_generators_are_kept(folder):
    policy = "limits: {generators: 2}"
    for lr in (0.001, 0.002):
        assert not refusal(draw(HostileServer(folder, *FEDER, f"generator.lr={lr}", policy=policy), f"r{lr}"))
    reply = draw(HostileServer(folder, *FEDER, "generator.lr=0.003", policy=policy), "third")
    assert "generators from 0 to 2; got 3" in refusal(reply)


def test_a_generator_that_another_process_keeps_just_as_it_is_looked_for_counts(folder, monkeypatch):
    server = HostileServer(folder, *FEDER, policy="limits: {generators: 1}")
    another = private_folder(folder / "state/a/generators" / "another")

    def ended_meanwhile(path):
        another.with_suffix(".safetensors").touch()
        return False

    monkeypatch.setattr("flwr_replay.institution.synthesis.in_use", ended_meanwhile)
    assert "generators from 0 to 1; got 2" in refusal(server.send(TrainPiece(run="r")))


def test_a_generator_that_another_process_has_begun_counts_before_it_is_kept(folder):
    server = HostileServer(folder, *FEDER, policy="limits: {generators: 1}")
    with alone(private_folder(folder / "state/a/generators" / "another")):
        assert "generators from 0 to 1; got 2" in refusal(server.send(TrainPiece(run="r")))
    assert not refusal(server.send(TrainPiece(run="r")))


@pytest.mark.parametrize("options", [[], [ALL]], ids=["the server leaves them out", "all"])
def test_only_images_of_classes_that_the_node_declares_leave(folder, monkeypatch, options):
    monkeypatch.setattr("hostile_server.node_configs", declaring(classes="0"))
    reply = draw(HostileServer(folder, *FEDER, *options), "r")
    assert set(weights(reply)["labels"].tolist()) == {0}


def test_a_server_learns_no_path_of_an_institutions_file(folder, monkeypatch):
    plan = SynthesisPlan.of(compose(FEDER))
    for name in ("one", "two"):
        plan.write(folder / name, plan.fresh(0, torch.device("cpu")), TrainingProgress(steps=6), to_disk=False)
        monkeypatch.setattr("hostile_server.node_configs", declaring(**{"generator-checkpoint": str(folder / name)}))
        reply = HostileServer(folder, *FEDER).send(TrainPiece(run="r"))
    assert "generator.checkpoint is another file now" in refusal(reply)
    assert str(folder) not in refusal(reply)
    server = HostileServer(folder, *TASK, "strategy=cwt")  # a run that draws no images needs no generator
    assert not refusal(server.send(Train(arrays=server.weights, run="c", lr=0.1)))


def declaring(**keys):
    return lambda *args, **options: [{**node, **keys} for node in node_configs(*args, **options)]


# --- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [11, 20_000])
def test_a_buffer_is_kept_if_it_has_the_runs_size(folder, n):
    server = HostileServer(folder, *FEDER)
    assert not refusal(server.send(buffer(12)))
    assert "images (12, 1, 8, 8)" in refusal(server.send(buffer(n)))
    assert "strategy.buffer is 12, it asks for" in refusal(server.send(replace(buffer(n), buffer=n)))


def test_a_buffer_is_named_once(folder):
    server = HostileServer(folder, *FEDER)
    server.send(buffer(12))
    request = TrainWithBuffers(arrays=server.weights, run="r", exchange=1, lr=0.1, mode="standard")
    reply = server.send(replace(request, buffers=[1] * 1000, buffered=12_000))
    assert "every buffer is named once" in refusal(reply)


def test_a_model_that_stays_and_diverges_is_what_it_was_before_and_nobody_is_told(folder):
    server = HostileServer(folder, *END_TO_END)
    request = TrainOwnWithBuffers(run="r", exchange=1, lr=0.1, mode="buffer-only", init_seed=1)
    for exchange, lr in ((1, 0.1), (2, 1e30), (3, 0.1)):
        reply = server.send(replace(request, exchange=exchange, lr=lr))
        assert not refusal(reply)
        assert "train-loss" not in metrics(reply)
        tested = metrics(server.send(EvaluateOwn(run="r", exchange=exchange)))
        assert np.isfinite(tested["loss"])
    kept = [read_tensors(path) for path in sorted((server.state / "runs/r").glob("model-*"))]
    before, after, last = ([array.tobytes() for array in arrays.values()] for arrays in kept)
    assert before == after != last


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_generator_that_never_ends_is_its_institutions_failure(folder):
    asked = []

    def endless(grid, message, reply):
        stage = config_in(message.content).get("stage")
        if stage == "train-piece" and grid.name_of(message.metadata.dst_node_id) == "a":
            asked.append(1)
            metrics = {**metrics_in(reply.content), "steps": len(asked), "steps-left": 10**15}
            reply.content["metrics"] = MetricRecord(metrics)
        return reply

    ran = run(folder, [*FEDER, "rounds=1"], node_configs(folder, folder / "servers", "ab"), after=endless)
    assert [failure["institution"] for failure in ran.result["failures"]] == ["a"]
    assert "must train on to step 6" in ran.result["failures"][0]["reason"]
    assert len(asked) == 1


def test_images_under_dp_without_epsilon_are_no_answer(folder):
    def silent(grid, message, reply):
        if grid.name_of(message.metadata.dst_node_id) == "a" and "metrics" in reply.content:
            metrics = {
                key: value for key, value in metrics_in(reply.content).items() if key not in ("epsilon", "delta")
            }
            reply.content["metrics"] = MetricRecord(metrics)
        return reply

    nodes = node_configs(folder, folder / "servers", "ab")
    ran = run(folder, [*END_TO_END, "rounds=2"], nodes, after=silent)
    assert {failure["institution"] for failure in ran.result["failures"]} == {"a"}
    assert "states epsilon and delta" in ran.result["failures"][0]["reason"]
    assert ran.result["privacy"]["b"]["epsilon"] <= 2


def test_an_institution_that_has_lost_its_generator_trains_another(folder):
    lost = []

    def lose(grid, message):
        if config_in(message.content).get("stage") == "draw-buffer" and not lost:
            lost.extend((folder / "servers/a/generators").glob("*.safetensors"))
            for path in lost:
                path.unlink()

    nodes = node_configs(folder, folder / "servers", "a")
    other = [*node_configs(folder, folder / "servers", "b"), *nodes]
    ran = run(folder, [*FEDER, "rounds=3"], other, before=lose)
    assert [failure["institution"] for failure in ran.result["failures"]] == ["a"]
    assert len(list((ran.folder / "buffers").iterdir())) == 2
