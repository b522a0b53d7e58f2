"""Images from latents."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from flwr_replay.attacks.latents import invert, latents_of, learned_decoder, mixes, nearest_auxiliary
from flwr_replay.attacks.scores import Judge, psnr
from flwr_replay.attacks.search import Search, total_variation, tuned
from flwr_replay.config.model import ModelConfig
from flwr_replay.config.sections import TaskConfig
from flwr_replay.models import build, split

TASK = TaskConfig(name="digits", format="digits", channels=1, size=8, classes=10)
FORM = (1, 8, 8)


@pytest.fixture(scope="module")
def digits() -> torch.Tensor:
    return torch.tensor(load_digits().images / 16, dtype=torch.float32)[:, None]


def orthogonal() -> nn.Module:
    flat = nn.Linear(64, 64)
    nn.init.orthogonal_(flat.weight, generator=torch.Generator().manual_seed(0))
    return nn.Sequential(nn.Flatten(), flat)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_invertible_encoder_is_inverted(digits: torch.Tensor, dtype: str) -> None:
    encoder = orthogonal()
    recovered = invert(encoder, latents_of(encoder, digits[:8], dtype), FORM, Search(alpha=0), seed=0)
    assert psnr(recovered, digits[:8]).min() >= 60


def test_attacks_repeat_and_leave_the_encoder_as_it_was(digits: torch.Tensor) -> None:
    encoder, _ = split(build(ModelConfig(name="cnn", width=4), TASK, 0), "conv1")  # batch norm, training mode
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    latents = latents_of(encoder, digits[:4])
    first, second, other = (invert(encoder, latents, FORM, Search(steps=20), seed) for seed in (0, 0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert all(torch.equal(before[name], value) for name, value in encoder.state_dict().items())
    assert all(parameter.requires_grad for parameter in encoder.parameters())


def test_a_batch_that_was_normalised_together_is_inverted_together(digits: torch.Tensor) -> None:
    encoder = nn.Sequential(orthogonal(), nn.BatchNorm1d(64, eps=1e-2)).train()
    sent = latents_of(encoder, digits[:32], batch=32)
    assert mixes(encoder)
    assert not mixes(encoder.eval())
    recovered = invert(encoder.train(), sent, FORM, Search(alpha=0), seed=0)
    assert (latents_of(encoder, recovered, batch=32) - sent).abs().mean() < 0.01  # up to what batch norm takes away
    assert (latents_of(encoder, digits[:32], batch=16) - sent).abs().mean() > 0.1


@pytest.mark.sampled(2, of="slow learning")
def test_many_images_are_inverted_in_batches(digits: torch.Tensor) -> None:
    encoder = orthogonal()
    recovered = invert(encoder, latents_of(encoder, digits[:300]), FORM, Search(alpha=0), seed=0)
    assert psnr(recovered, digits[:300]).min() >= 60


def test_more_restarts_never_have_a_larger_objective(digits: torch.Tensor) -> None:
    encoder, _ = split(build(ModelConfig(name="cnn", width=4, norm="group"), TASK, 0), "conv2")
    latents = latents_of(encoder, digits[:6])

    def mismatch(restarts: int) -> torch.Tensor:
        recovered = invert(encoder, latents, FORM, Search(alpha=0, steps=15, restarts=restarts), seed=0)
        return (latents_of(encoder, recovered) - latents).square().flatten(1).sum(1)

    single, four = mismatch(1), mismatch(4)
    assert (four <= single * 1.0001).all()
    assert (four < single).any()


def test_settings_are_chosen_on_auxiliary_images(digits: torch.Tensor) -> None:
    encoder = orthogonal()
    latents = latents_of(encoder, digits[:4])

    def attack(search: Search) -> torch.Tensor:
        return invert(encoder, latents, FORM, search, seed=0)

    good = Search(alpha=0, steps=200)
    assert tuned([Search(alpha=100, steps=200), good, Search(steps=1)], attack, digits[:4]) == good


def test_total_variation_by_hand() -> None:
    x = torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]], [[[0.5, 0.5], [0.5, 0.5]]]])
    assert total_variation(x).tolist() == [1.0, 0.0]
    assert total_variation(torch.rand(3, 5, 1, 1)).tolist() == [0, 0, 0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "cut"), [("cnn", "conv2"), ("mlp", "hidden1")])
def test_a_decoder_beats_the_mean_and_the_nearest_auxiliary_image(digits: torch.Tensor, model: str, cut: str) -> None:
    encoder, _ = split(build(ModelConfig(name=model, width=48, norm="group"), TASK, 0), cut)
    auxiliary, victim = digits[:600], digits[600:700]
    latents = latents_of(encoder, auxiliary)
    sent = latents_of(encoder, victim, "int8")
    recovered = learned_decoder(latents, auxiliary, steps=300, seed=0).images(sent)
    judge, rows = Judge(victim), torch.arange(100)
    scores = judge.scores(recovered, rows)
    copied = judge.scores(nearest_auxiliary(sent, latents, auxiliary), rows)
    assert scores.psnr > judge.mean_image(auxiliary, rows).psnr + 3
    assert scores.psnr > copied.psnr + 1
    assert scores.identified.low > 0.8 > copied.identified.value
    control = judge.control(recovered, rows)
    assert control is not None
    assert control.identified.high < 0.1


def test_the_nearest_auxiliary_image_is_the_victims_if_it_is_there(digits: torch.Tensor) -> None:
    encoder = orthogonal()
    latents = latents_of(encoder, digits[:50])
    assert torch.equal(nearest_auxiliary(latents[20:30], latents, digits[:50]), digits[20:30])
