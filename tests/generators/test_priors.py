"""What holds of every prior: its options, its seed, no mixing of examples, gradients of single examples; bins."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from flwr_replay.api import Where, start
from flwr_replay.client_app import client_of
from flwr_replay.config.catalogue import choices
from flwr_replay.config.compose import compose
from flwr_replay.config.halves import load_options
from flwr_replay.errors import ConfigError
from flwr_replay.generators.autoencoder import VQVAE2Config, build_generator
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.generators.priors import LabelBins, build_prior, check_cpu, example_nats, summed_nats
from flwr_replay.generators.synthesis import SynthesisPlan
from flwr_replay.institution.owner import Institution
from flwr_replay.learning.training import torch_rng
from flwr_replay.privacy.dpsgd import clipped_sums
from flwr_replay.report.progress import LogDisplay

PRIORS = choices("prior")
CONF = Path(__file__).parents[2] / "conf" / "prior"
TINY = {"pixelcnn": {"width": 8, "layers": 2}, "maskgit": {"width": 8, "layers": 2, "heads": 2}}
CPU = torch.device("cpu")


def tiny_prior(name, size=16, seed=0):
    images = build_generator(VQVAE2Config(name="vqvae2", codes=4, dim=2, width=4), 1, size, 0)
    return build_prior(load_options("prior", name)(name=name, **TINY[name]), images, 3, seed)


@pytest.fixture(params=PRIORS)
def name(request):
    return request.param


def batch(prior, n=3):
    codes = torch.randint(4, (n, 20), generator=torch_rng("codes"))
    return codes, torch.tensor([2, 0, 1])[:n], prior.uniform(n, torch_rng("draws"))


def single_gradients(prior, tensors):
    gradients = []
    for example in zip(*(torch.split(tensor, 1) for tensor in tensors), strict=True):
        prior.zero_grad()
        prior.loss(*example).backward()
        gradients.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in prior.parameters()])
    prior.zero_grad()
    return gradients


def test_no_example_depends_on_another(name):
    prior = tiny_prior(name)
    assert dict(prior.named_buffers()) == {}
    single = single_gradients(prior, batch(prior))
    prior.loss(*batch(prior)).backward()
    for parameter, *tensors in zip(prior.parameters(), *single, strict=True):
        torch.testing.assert_close(parameter.grad, torch.stack(tensors).mean(0), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("size", [8, 16])
def test_dp_sgd_clips_the_gradient_of_every_example(name, size):
    """Twin: each example alone, its gradient clipped by hand."""
    prior, clip = tiny_prior(name, size), 0.05
    codes, labels, _ = batch(prior)
    tensors = codes[:, : 5 * (size // 8) ** 2], labels, prior.uniform(3, torch_rng("draws"))
    expected = [torch.zeros_like(parameter) for parameter in prior.parameters()]
    for gradients in single_gradients(prior, tensors):
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        assert norm > clip
        for summed, gradient in zip(expected, gradients, strict=True):
            summed += gradient * (clip / norm)
    sums, _ = clipped_sums(prior, lambda *tensor: summed_nats(prior, *tensor), tensors, clip)
    for summed, twin in zip(sums, expected, strict=True):
        torch.testing.assert_close(summed, twin, rtol=1e-3, atol=1e-6)


def test_weights_depend_on_the_seed_alone(name):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = tiny_prior(name, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert all(torch.equal(value, first[key]) for key, value in tiny_prior(name, seed=3).state_dict().items())
    assert any(not torch.equal(value, first[key]) for key, value in tiny_prior(name, seed=4).state_dict().items())


def test_one_rng_draws_the_same_codes(name):
    prior, labels = tiny_prior(name), torch.tensor([0, 2, 1, 2])
    codes = prior.sample(labels, torch_rng("draws"))
    assert codes.shape == (4, 20)
    assert codes.min() >= 0
    assert codes.max() < 4
    assert torch.equal(prior.sample(labels, torch_rng("draws")), codes)
    assert not torch.equal(prior.sample(labels, torch_rng("others")), codes)


def test_an_examples_score_does_not_depend_on_the_others(name):
    prior = tiny_prior(name).eval()
    codes, labels, _ = batch(prior)
    with torch.no_grad():
        scores = example_nats(prior, codes, labels)
        assert len(set(scores.tolist())) == 3
        assert torch.equal(example_nats(prior, codes[1:2], labels[1:2]), scores[1:2])


def test_a_choice_sets_every_option(name):
    values = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert list(values) == [field.name for field in fields(load_options("prior", name))]
    assert load_options("prior", name)(**values).name == name


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["prior=pixelrnn"], "did you mean pixelcnn"),
        (["prior.layers=0"], "prior.layers must be at least 1"),
        (["prior.lr=-1.0"], "prior.lr must be positive"),
        (["prior=maskgit", "prior.width=10"], "prior.width must be a multiple of prior.heads; got 10 and 4"),
        (["prior=maskgit", "prior.temperature=-1"], "prior.temperature must be finite and not negative"),
        (["prior.steps=9"], "prior.steps is an option of prior=maskgit; got prior=pixelcnn"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options, line):
    with pytest.raises(ConfigError, match=line):
        compose(options)


def test_large_images_are_refused_on_a_cpu_with_the_time_that_they_take(name):
    config = compose([f"prior={name}"]).prior
    check_cpu(config, 128, CPU)
    check_cpu(config, 256, torch.device("cuda"))
    training, drawing = config.cpu_seconds
    hours = (training * config.epochs + drawing) / 3.6
    with pytest.raises(
        ConfigError, match=rf"cpu-size=128 pixels; got task.size=256.* {hours:.1f} hours or more to learn"
    ):
        check_cpu(config, 256, CPU)
    check_cpu(compose([f"prior={name}", "prior.cpu-size=256"]).prior, 256, CPU)


def test_neither_command_nor_institution_begins_what_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    options = ["strategy=cwt", "replay=pixelcnn", "prior=maskgit", "prior.cpu-size=4", "device=cpu", "rounds=1"]
    refused = r"at most prior\.cpu-size=4 pixels; got task\.size=8"
    with pytest.raises(ConfigError, match=refused):
        start(options, Where(), str(tmp_path / "runs"), "", LogDisplay())
    assert not (tmp_path / "runs").exists()
    nothing = np.zeros((2, 1, 8, 8), np.uint8), np.zeros(2, np.int64)
    institution = Institution.from_arrays("a", nothing, nothing, device="cpu")
    with pytest.raises(ConfigError, match=refused):
        client_of(institution, compose(options))


def test_only_a_run_that_trains_a_prior_is_refused():
    large = ["task.size=256", "strategy=cwt"]
    for replay, plan in (("pixelcnn", ReplayPlan), ("buffer", SynthesisPlan)):
        with pytest.raises(ConfigError, match=r"prior\.cpu-size=256 to wait"):
            plan.of(compose([*large, f"replay={replay}"])).check_device(CPU)
    ReplayPlan.of(compose([*large, "replay=vqvae2"])).check_device(CPU)
    SynthesisPlan.of(compose([*large, "replay=buffer", "generator=stylegan2"])).check_device(CPU)
    SynthesisPlan.of(compose([*large, "replay=buffer", "generator.checkpoint=trained"])).check_device(CPU)


def test_bins_hold_their_labels():
    bins, labels = LabelBins(low=-3.0, high=3.0, bins=7), torch.linspace(-2.99, 2.99, 50)
    error = (bins.centres(bins.classes(labels)) - labels).abs()
    assert error.max() <= 3 / 7 + 1e-5
    assert torch.equal(bins.classes(bins.centres(torch.arange(7))), torch.arange(7))
    assert bins.classes(torch.tensor([-50.0, 50.0])).tolist() == [0, 6]
