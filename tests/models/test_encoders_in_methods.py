"""Frozen encoders in every method: what travels, what stays, what is said, and what an attacker knows of them."""

from collections import OrderedDict
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from attacked_runs import Recorded
from harness import command
from torch import nn

from flwr_replay.check import strategy as check
from flwr_replay.config.catalogue import choices
from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError, TrainingError
from flwr_replay.finished.trained import load_model
from flwr_replay.lab.evidence import Evidence
from flwr_replay.lab.judge import originals_of
from flwr_replay.lab.registry import trial_of
from flwr_replay.learning.training import at_once
from flwr_replay.models import build
from flwr_replay.models.frozen import Frozen
from flwr_replay.models.zoo import described, encoder_of
from flwr_replay.runs.execute import Job, network_of

TINY = ["model=timm", "model.name=test_efficientnet", "model.size=32"]
HEAD = [*TINY, "model.train=head"]
ENCODERS = {
    "head": HEAD,
    "batch norm trains": [*TINY, "model.train=from:blocks4"],
    "group norm trains": ["model=timm", "model.name=test_efficientnet_gn", "model.size=32", "model.train=from:blocks4"],
    "lite0": ["model=lite0", "model.size=32", "model.train=head"],
    "cnn": ["model=cnn", "model.width=4", "model.train=head"],
}
SMALL = ["partition.size=40", "batch_size=16", "generator.epochs=1", "generator.width=4", "prior.epochs=1"]
SMALL += ["prior.width=4", "prior.layers=1", "privacy.noise=seeded"]
DRAWN = {"feder": ["buffer=20"], "syncentral": ["buffer=20"]}
LATENTS = "dp=latents latent_clip=1 latent_epsilon=8 label_epsilon=2"
JOBS = [
    "cwt replay=vqvae2",
    "fedavg replay=pixelcnn dp=end-to-end codebook=gradient",
    "splitnn replay=buffer replay.images=7 micro_batches=2",
    "proxyfl sealed=true",
    "fedavg masked=true",
    "cwt dp=classifier forgetting=true",
    "local dp=classifier external=true",
    "fml private_models=[gabor] evaluate_before_mixing=true",
    "proxyfl dp=none private_models=[mlp,lenet5] proxy_optimizer=travels training.optimizer=adam",
    "feder mode=buffer-only dp=end-to-end codebook=gradient generator.classes=[all]",
    f"fedreplay {LATENTS} upload_views=2 chunk_mb=0.1",
    "fedavg training.augment=shift optimizer_state=keep",
]


def keeps_the_contract(name, options, monkeypatch, tmp_path):
    """Check a method, and that of its encoder no weight is sent and none changes."""
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    for own in ("_check_mechanisms", "_check_masked"):  # with models of their own
        monkeypatch.setattr(check, own, lambda name: None)
    config, content, sent = compose([f"strategy={name}", *options]), check._content, set()
    encoder = encoder_of(config.model, config.task)
    before = encoder.digest
    monkeypatch.setattr(check, "_content", lambda arrays, scalars: sent.update(arrays) or content(arrays, scalars))
    check.check_strategy(name, [*SMALL, *DRAWN.get(name, []), *options])
    assert encoder_of(config.model, config.task) is encoder  # all models of the runs had these very weights
    assert encoder.digest == before
    assert not [
        sent_name for sent_name in sent for name, _ in encoder.stages.named_buffers() if sent_name.endswith(name)
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("name", choices("strategy"))
def test_every_method_keeps_its_contract_beside_an_encoder(name, encoder, monkeypatch, tmp_path):
    noiseless = ["dp=none"] if encoder == "batch norm trains" and name in ("proxyfl", "fml") else []
    head_alone = "model.train=head" in ENCODERS[encoder]
    refused = (
        pytest.raises(AssertionError, match="nothing trains but the head") if name == "moon" and head_alone else None
    )
    with refused or nullcontext():
        keeps_the_contract(name, [*ENCODERS[encoder], *noiseless], monkeypatch, tmp_path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("job", JOBS)
def test_options_keep_the_contract_beside_an_encoder(job, monkeypatch, tmp_path):
    name, *options = job.split()
    keeps_the_contract(name, [*options, *HEAD], monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Record FedReplay, and SplitNN with two batches in a visit."""
    few = [*ENCODERS["cnn"], "partition.size=64"]
    of = {name: [f"strategy={name}", *few] for name in ("fedreplay", "splitnn")}
    return Recorded(tmp_path_factory.mktemp("runs"), of)


@pytest.mark.parametrize(("run", "stages"), [("fedreplay", ["extract"]), ("splitnn", ["enter", "next-batch"])])
def test_an_attacker_has_an_encoder_that_everyone_has(run, stages, runs):
    evidence = Evidence.of(runs / run, "institution-1")
    own = originals_of(evidence.config, "institution-1")
    trials = [trial_of(exhibit, evidence) for exhibit in evidence.exhibits if exhibit.means == "activations"]
    assert [trial.exhibit.stage for trial in trials] == stages
    rows = torch.cat([trial.rows(own) for trial in trials])
    assert sorted(rows.tolist()) == list(range(64))


def test_a_trained_model_is_whole(runs, monkeypatch, tmp_path):
    model = load_model(runs / "fedreplay")
    head, encoder = model.network.head, encoder_of(compose(ENCODERS["cnn"]).model, model.task)
    x = torch.rand(3, 1, 8, 8)
    with torch.no_grad():
        expected = head(encoder(x)).softmax(1)
        assert torch.equal(model(x), expected)
        assert command(monkeypatch, "export", str(runs / "fedreplay"), "--out", str(tmp_path / "whole.pt2")) == 0
        torch.testing.assert_close(torch.export.load(tmp_path / "whole.pt2").module()(x), expected)


NOTHING = "nothing before the cut trains"
GROUP = "or another model, or freeze it"
WRONG = {
    "a random encoder": (["strategy=fedreplay", "encoder=random", *HEAD], NOTHING),
    "an institution's": (["strategy=fedreplay", "encoder_institution=institution-1", *HEAD], NOTHING),
    "augmented": (["strategy=fedreplay", "training.augment=flip", *HEAD], "needs encoder=institution"),
    "DP": (["strategy=fedreplay", "dp=encoder", *HEAD], "nothing there does"),
    "batch norm": (["strategy=fedavg", "dp=classifier", *ENCODERS["batch norm trains"]], GROUP),
    "a cut inside": (
        ["strategy=splitnn", "cut=blocks1", *HEAD],
        "with all up to features frozen by model.train, must be one",
    ),
    "no middle": (["strategy=splitnn", "share_labels=false", *HEAD], "model.train=from:STAGE"),
}


@pytest.mark.parametrize(("words", "line"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_a_frozen_encoder_is_one_line(words, line):
    with pytest.raises((ConfigError, TrainingError)) as error:
        Job.of(compose([*words, "nodes=2"]))
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_tests_fit_memory_where_a_model_enlarges_images():
    config = compose(["task=digits", *TINY[:2], "model.size=224", "model.train=head"])
    model = build(config.model, config.task, 0)
    assert isinstance(model[0], Frozen)
    assert at_once(torch.empty(1, 1, 8, 8), 512, model) == 4_000_000 // (3 * 224**2)
    assert at_once(torch.empty(1, *model[0].stored), 512, model) == 512


def test_the_digest_is_of_numbers_and_layers():
    x, linear = torch.zeros(1, 1, 2, 2), nn.Linear(4, 3)
    relu, silu = (nn.Sequential(nn.Flatten(), linear, act) for act in (nn.ReLU(), nn.SiLU()))
    first, second, third = (Frozen(OrderedDict(a=deepcopy(layer)), x, alone=False) for layer in (relu, silu, relu))
    assert first.digest == third.digest != second.digest


def test_shifted_images_have_no_kept_features():
    shifted = ["strategy=proxyfl", "private_shift=2", "private_epochs=1", *HEAD]
    assert not compose(shifted).features_once
    assert compose([word.replace("=2", "=0") for word in shifted]).features_once


def test_sealed_runs_take_frozen_weights():
    assert compose(["strategy=avgpush", "sealed=true", "model=lite0", "model.train=head"]).sealed


def test_a_publishers_means_stand_in_the_order_of_channels():
    config = compose(HEAD)
    assert "mean 0.485, 0.456, 0.406, standard deviation 0.229, 0.224, 0.225" in described(config.model, config.task)


def test_what_private_models_train_is_said():
    text = network_of(compose(["strategy=proxyfl", "task=digits", "model=mlp", "private_models=[mlp,lite0]"]))
    assert text.startswith("Private: tf_efficientnet_lite0, weights lite0; images to 224 x 224 pixels")
    assert "3,383,818 numbers train" in text
