"""Attacks by encoders: names that are places, huge networks, other files, what is frozen in a pinned stage."""

import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import timm
import torch
from harness import SHARDS, write_shards
from hostile_server import HostileServer, metrics, refusal, weights
from safetensors.torch import save_file
from torch import nn

from flwr_replay.config.binding import shared_digest
from flwr_replay.config.compose import compose
from flwr_replay.config.model import PARAMETERS
from flwr_replay.memory import forget
from flwr_replay.models.zoo import encoder_digest, encoder_of
from flwr_replay.payloads.common import RollCall, Train
from flwr_replay.payloads.fedreplay import Extract

TASK = [*SHARDS, "classes=3", "batch_size=16", "device=cpu"]
MODEL = ["model=timm", "model.name=resnet18", "model.size=32", "model.train=head"]
FEDAVG, FEDREPLAY = [*TASK, *MODEL, "strategy=fedavg"], [*TASK, *MODEL, "strategy=fedreplay", "encoder=random"]
CALL = partial(RollCall, strategy="x", run="x", stages=["train"])
LATENTS = {"latent_dtype": "float32", "first": 0, "chunk_bytes": 10**6, "views": 1, "arrays": {}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    write_shards(folder, {"a": 40})
    for seed, name in enumerate(("own", "other")):
        torch.manual_seed(seed)
        save_file(timm.create_model("resnet18").state_dict(), folder / f"{name}.safetensors")
    return folder


@pytest.fixture
def own_encoder_file(folder):
    return str(folder / "own.safetensors")


def answer_to_request(folder, *options, request=None, policy="", **own):
    return HostileServer(folder, *options, policy=policy, **own).send(request or CALL())


# --- what a message can name ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    [
        *(f"model.name={name!r}" for name in ("hf-hub:timm/resnet18.a1_in1k", "hf_hub:timm/resnet18", "resnet18.")),
        *(
            f"model.name={name!r}"
            for name in ("local-dir:/etc", "resnet18.local-dir:/etc", "../resnet18", "/etc/passwd")
        ),
        *(
            "model.train=from:layer9",
            "model.train=from:",
            "model.train=none",
            "model.library=../timm",
            "model.size=2049",
        ),
        "model.build=os:system",
    ],
)
def test_what_a_message_names_is_none_of_a_hubs_names_nor_a_place(folder, own_encoder_file, option, monkeypatch):
    monkeypatch.setattr("timm.create_model", None if option.startswith("model.name") else timm.create_model)
    reason = refusal(answer_to_request(folder, *FEDAVG, "model.weights=x.pth", option, weights=own_encoder_file))
    assert reason == "ConfigError; the institution's own log says more"


@pytest.mark.parametrize(
    "weights", ["/etc/passwd", "https://example.org/w.pth", "hf-hub:timm/x.pth", "../w.safetensors"]
)
def test_a_message_does_not_say_which_file_is_read(folder, own_encoder_file, weights, monkeypatch):
    options = [*FEDAVG, f"model.weights={weights}"]
    assert "every institution has its own copy" in refusal(answer_to_request(folder, *options))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", None)
    encoder = encoder_digest(compose([*FEDAVG, f"model.weights={own_encoder_file}"]).model, compose(FEDAVG).task)
    assert (
        metrics(answer_to_request(folder, *options, request=CALL(frozen=encoder), weights=own_encoder_file))[
            "num-examples"
        ]
        == 40
    )
    theirs = "sha256:" + "0" * 64
    reason = refusal(answer_to_request(folder, *options, request=CALL(frozen=theirs), weights=own_encoder_file))
    assert theirs in reason
    assert encoder in reason


def test_an_institutions_own_path_is_not_told_and_every_institution_has_one_digest_of_its_options(
    folder, own_encoder_file
):
    other = own_encoder_file.replace("own.", "other.")
    asked = Extract(run="r", cut="features", **LATENTS)
    options = [*FEDREPLAY, "cut=features", "model.weights=x.pth"]
    assert not refusal(answer_to_request(folder, *options, request=asked, weights=own_encoder_file))
    assert "model.weights is another file now" in (
        reason := refusal(answer_to_request(folder, *options, request=asked, weights=other))
    )
    assert str(folder) not in reason
    for changed in ("model.train=from:layer4", "model.size=64", "model.name=resnet34"):
        reason = refusal(answer_to_request(folder, *options, changed, request=asked, weights=own_encoder_file))
        assert f"was begun with others ({changed.partition('=')[0]} was" in reason
        assert str(folder) not in reason
    first, second = (compose([*FEDREPLAY, "model.weights=" + file]) for file in (own_encoder_file, other))
    assert shared_digest(first) == shared_digest(second)  # by which sealed and masked runs know each other


def test_a_file_that_is_replaced_in_a_run_is_refused(folder, own_encoder_file, tmp_path):
    options, asked = [*FEDREPLAY, "cut=features", "model.weights=x.pth"], Extract(run="s", cut="features", **LATENTS)
    copied = str(shutil.copy(own_encoder_file, tmp_path / "w.safetensors"))
    assert not refusal(answer_to_request(folder, *options, request=asked, weights=copied))
    shutil.copy(own_encoder_file.replace("own.", "other."), copied)
    forget()  # as in a new process
    reason = refusal(answer_to_request(folder, *options, request=asked, weights=copied))
    assert "a run keeps its encoder; that of run 's' was sha256:" in reason


# --- what a message costs ---------------------------------------------------------------------------------------------


def test_a_huge_architecture_is_refused_before_it_is_built(folder, monkeypatch):
    monkeypatch.setattr("flwr_replay.models.zoo.seeded", None)  # whoever builds one fails otherwise
    giant = [*TASK, "model=timm", "model.name=eva_giant_patch14_224", "model.train=head", "strategy=fedavg"]
    assert f"parameters from 0 to {PARAMETERS:g}; got 1.01121e+09" in refusal(answer_to_request(folder, *giant))
    reason = refusal(answer_to_request(folder, *FEDAVG, policy="limits: {parameters: 1.0e+7}"))
    assert "parameters from 0 to 1e+07; got 1.11" in reason


def test_a_shape_is_known_without_computing_it(monkeypatch):
    """At 4,096 pixels a roll call took 5 GB and minutes, before any data were read."""
    computed, forward = [], nn.Conv2d.forward
    watched = lambda layer, x: (x.is_meta or computed.append(x.shape), forward(layer, x))[1]  # noqa: E731
    monkeypatch.setattr(nn.Conv2d, "forward", watched)
    config = compose([*FEDAVG, "model.size=2048"])
    assert encoder_of(config.model, config.task).shape == (512,)
    assert not computed


# --- what leaves ------------------------------------------------------------------------------------------------------


def test_a_pinned_stage_pins_what_is_frozen_although_it_does_not_travel(folder, own_encoder_file):
    options, asked = [*FEDREPLAY, "cut=features", "model.weights=x.pth"], Extract(run="p", cut="features", **LATENTS)
    config = compose([*FEDREPLAY, f"model.weights={own_encoder_file}"])
    policy = f"weights: {{extract: ['{encoder_digest(config.model, config.task)}']}}"
    assert weights(answer_to_request(folder, *options, request=asked, policy=policy, weights=own_encoder_file))[
        "latents"
    ].shape == (40, 512)
    for changed in ("model.name=resnet26d", "model.size=33", "model.train=from:layer4"):
        other = replace(asked, run=changed.partition("=")[2].replace(":", "-"))
        reason = refusal(answer_to_request(folder, *options, changed, "model.weights=''", request=other, policy=policy))
        assert "policy lets stage extract take weights" in reason
    reason = refusal(
        answer_to_request(
            folder, *options, request=asked, policy="weights: {extract: [random]}", weights=own_encoder_file
        )
    )
    assert "policy lets stage extract take weights random; got sha256:" in reason
    reason = refusal(answer_to_request(folder, *options, "model.train=all", request=asked, policy=policy))
    assert "freeze them, model.train=head" in reason


def test_nothing_of_a_frozen_part_can_be_asked_for(folder):
    server = HostileServer(folder, *FEDAVG)
    assert {*server.weights} == {"head.fc.weight", "head.fc.bias"}
    asked = {"run": "n", "lr": 0.1, "local_epochs": 1, "optimizer_state": "reset", "pooled": False}
    assert {*weights(server.send(Train(arrays=server.weights, **asked)))} == {*server.weights}
    more = server.weights | {"layer4.0.conv1.weight": np.zeros((512, 256, 3, 3), np.float32)}
    assert "layer4.0.conv1.weight" in refusal(server.send(Train(arrays=more, **asked)))
