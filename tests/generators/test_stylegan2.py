"""StyleGAN2's layers and regularisers against slow twins, ADA's p, and trainings that break off."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from flwr_replay.errors import ConfigError
from flwr_replay.generators.ada import adapted, augmented
from flwr_replay.generators.base import ImageForm
from flwr_replay.generators.style_layers import Discriminator, Modulated, StyleGenerator, label_deviation
from flwr_replay.generators.stylegan2 import StyleGAN2, StyleGAN2Config, gradient_penalty, path_lengths

TINY = {
    "latents": 8,
    "mapping": 2,
    "width": 4,
    "max_width": 8,
    "batch_size": 4,
    "steps": 30,
    "ada_images": 200,
    "privacy_steps": 4,
}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def gan(size=8, channels=1, seed=0, **options):
    config = StyleGAN2Config(name="stylegan2", **{**TINY, **options})
    return StyleGAN2(config, ImageForm(channels, size, 3), seed, CPU)


def images(size=8, channels=1, n=10):
    return torch.randint(0, 256, (n, channels, size, size), generator=rng(), dtype=torch.uint8), torch.arange(n) % 3


@pytest.mark.parametrize("demodulate", [True, False])
def test_a_modulated_convolution_is_one_of_scaled_weights_for_every_example(demodulate):
    layer = Modulated(5, 7, 6, demodulate=demodulate)
    x, w = torch.randn(4, 5, 8, 8, generator=rng()), torch.randn(4, 6, generator=rng(1))
    convolved = layer(x, w)
    weight, gain = layer.conv.layer.weight, layer.conv.gain
    for i, style in enumerate(layer.style(w)):
        scaled = weight * gain * style[None, :, None, None]
        if demodulate:
            scaled = scaled / (scaled.square().sum((1, 2, 3), keepdim=True) + 1e-8).sqrt()
        expected = F.conv2d(x[i : i + 1], scaled, padding=1)
        torch.testing.assert_close(convolved[i : i + 1], expected, rtol=1e-5, atol=1e-5)


def test_r1_is_the_squared_gradient_by_finite_differences():
    torch.manual_seed(0)
    model = Discriminator(3, 1, 8, 4, 8, residual=True).double()
    x, y = torch.randn(2, 1, 8, 8, generator=rng(), dtype=torch.float64).requires_grad_(), torch.tensor([0, 0])
    penalty = gradient_penalty(model(x, y), x)
    slow = 0.0
    with torch.no_grad():
        for place in np.ndindex(*x.shape):
            ends = []
            for h in (1e-5, -1e-5):
                moved = x.detach().clone()
                moved[place] += h
                ends.append(float(model(moved, y).sum()))
            slow += ((ends[0] - ends[1]) / 2e-5) ** 2 / len(x)
    assert penalty.item() == pytest.approx(slow, rel=1e-5)


def test_path_lengths_are_norms_of_a_directional_derivative():
    torch.manual_seed(0)
    model = StyleGenerator(4, 1, 3, 1, 8, 4, 8).double()
    w = torch.randn(2, 4, generator=rng(), dtype=torch.float64).requires_grad_()
    lengths = path_lengths(model.synthesis(w, None), w, rng(3))
    noise = torch.randn((2, 1, 8, 8), generator=rng(3), dtype=torch.float64) / 8
    with torch.no_grad():
        for i in range(2):
            gradient = []
            for j in range(4):
                ends = []
                for h in (1e-5, -1e-5):
                    moved = w.detach().clone()
                    moved[i, j] += h
                    ends.append(float((model.synthesis(moved, None) * noise).sum()))
                gradient.append((ends[0] - ends[1]) / 2e-5)
            assert float(lengths[i]) == pytest.approx(float(np.linalg.norm(gradient)), rel=1e-5)


def test_the_deviation_is_over_examples_of_one_label():
    x, labels = torch.randn(5, 2, 4, 4, generator=rng()), torch.tensor([0, 1, 0, 2, 1])
    deviation = label_deviation(x, labels)
    assert deviation.shape == (5, 1, 4, 4)
    for label in (0, 1):
        own = x[labels == label]
        expected = (own.var(0, unbiased=False) + 1e-8).sqrt().mean()
        torch.testing.assert_close(deviation[labels == label], expected.expand(2, 1, 4, 4))
    assert float(deviation[3].abs().max()) == 0  # alone with its label


def test_p_moves_both_ways_and_stays_in_its_range():
    assert adapted(0.5, 0.9, 100, 1000) > 0.5 > adapted(0.5, 0.3, 100, 1000)
    assert adapted(0.0, -1.0, 100, 1000) == 0
    assert adapted(0.99, 1.0, 100, 1000) == 1


def test_without_probability_an_image_stays_as_it_is():
    x = torch.rand(4, 1, 8, 8, generator=rng()) * 2 - 1
    assert torch.equal(augmented(x, 0.0, rng()), x)
    changed = augmented(x, 1.0, rng())
    assert changed.shape == x.shape
    assert all(not torch.equal(after, before) for after, before in zip(changed, x, strict=True))


def test_every_16_steps_the_discriminators_gradient_has_r1s():
    x, y = images(n=4)
    x, gradients = x / 127.5 - 1, []
    for step in (0, 1, 15, 16):
        model = gan(r1=0.5)
        model._discriminator_step(step, x, y, rng())
        gradients.append(torch.cat([p.grad.flatten() for p in model.discriminator.parameters()]))
    model, x = gan(), x.requires_grad_()
    (by_x,) = torch.autograd.grad(model.discriminator(x, y).sum(), x, create_graph=True)
    (16 * 0.5 / 2 * by_x.square().sum() / 4).backward()
    of_r1 = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.discriminator.parameters()]
    expected = torch.cat([gradient.flatten() for gradient in of_r1])
    assert float(expected.abs().max()) > 1e-3
    for regularised, plain in ((0, 1), (3, 2)):
        torch.testing.assert_close(gradients[regularised] - gradients[plain], expected, rtol=1e-4, atol=1e-5)


def test_all_images_that_the_discriminator_sees_are_augmented():
    x, y = images(n=4)
    seen = {0.0: [], 1.0: []}
    for p, inputs in seen.items():
        model = gan()
        model.p = p
        model.discriminator.register_forward_pre_hook(lambda _, given, inputs=inputs: inputs.append(given[0].detach()))
        model.train(x, y, range(1))
    pairs = [*zip(*seen.values(), strict=True)]
    assert len(pairs) == 3  # real ones; generated ones in D's step, and in G's
    assert all(not torch.equal(seen, original) for pair in pairs for seen, original in zip(*pair, strict=True))


def test_samples_come_from_the_running_means_alone():
    x, y = images()
    model = gan()
    model.train(x, y, range(3))
    drawn = model.sample(y, rng())
    for value in model.generator.parameters():
        value.data.add_(1)
    assert torch.equal(model.sample(y, rng()), drawn)
    for value in model.running.parameters():
        value.data.add_(1)
    assert not torch.equal(model.sample(y, rng()), drawn)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"path_length": True, "residual": True, "condition_to": 0.5}])
def test_a_training_in_pieces_ends_with_the_same_bits(options):
    x, y = images()
    whole, cut = gan(**options), gan(**options)
    whole.train(x, y, range(30))
    for first, last in ((0, 7), (7, 8), (8, 30)):
        cut.train(x, y, range(first, last))
        other = gan(seed=99, **options)
        other.seed = cut.seed
        other.load_state({name: array.copy() for name, array in cut.state().items()})
        cut = other
    assert whole.p > 0
    for name, array in whole.state().items():
        assert array.tobytes() == cut.state()[name].tobytes(), name
    assert torch.equal(whole.sample(y, rng()), cut.sample(y, rng()))


@pytest.mark.parametrize(("size", "channels"), [(8, 3), (28, 1), (32, 1)])
def test_images_have_the_tasks_form(size, channels):
    model = gan(size, channels, steps=2)
    x, y = images(size, channels)
    figures = model.train(x, y, range(2))
    assert set(figures) == {"loss", "discriminator", "p"}
    drawn = model.sample(y, rng())
    assert drawn.shape == x.shape
    assert 0 <= float(drawn.min()) <= float(drawn.max()) <= 1


def test_without_noise_the_same_latent_gives_the_same_image():
    model = gan()
    z, y = torch.randn(2, 8, generator=rng()), torch.tensor([0, 1])
    model.generator.first.strength.data.fill_(1.0)
    w = model.generator.styles(z, y)
    assert torch.equal(model.generator.synthesis(w, None), model.generator.synthesis(w, None))
    assert not torch.equal(model.generator.synthesis(w, rng(1)), model.generator.synthesis(w, rng(2)))


def test_the_labels_weight_rises_between_two_shares_of_the_training():
    model = gan(condition_from=0.2, condition_to=0.6)
    assert [model.label_weight(step) for step in (0, 6, 12, 18, 29)] == [0, 0, 0.5, 1, 1]
    assert gan().label_weight(0) == 1


@pytest.mark.sampled(2, of="slow learning")
def test_it_learns_two_tones():
    """Images of one label are dark, of the other light; so are those that are drawn."""
    x = torch.cat([torch.full((16, 1, 8, 8), 40), torch.full((16, 1, 8, 8), 210)]).byte()
    y = torch.repeat_interleave(torch.arange(2), 16)
    model = gan(steps=200, batch_size=8, ema_images=200, ada_images=0, mapping_rate=1.0, lr=0.005, r1=1.0)
    model.train(x, y, range(200))
    drawn = model.sample(torch.tensor([0] * 8 + [1] * 8), rng())
    assert float(drawn[:8].mean()) < 0.45 < 0.55 < float(drawn[8:].mean())


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"latents": 0}, "generator.latents must be at least 1"),
        ({"steps": 0}, "generator.steps must be at least 1"),
        ({"mapping_rate": 0.0}, "generator.mapping-rate must be positive"),
        ({"condition_from": 0.5, "condition_to": 0.2}, "generator.condition-to lies between condition-from and 1"),
    ],
)
def test_wrong_options_are_refused_in_one_line(wrong, line):
    with pytest.raises(ConfigError, match=line):
        gan(**wrong)
