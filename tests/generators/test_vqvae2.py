"""VQ-VAE-2: shapes, decoding what was encoded, learning, equal bits, no mixing of examples."""

import copy
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from sklearn.datasets import load_digits

from flwr_replay.config.halves import load_options
from flwr_replay.errors import ConfigError, WireError
from flwr_replay.generators.autoencoder import VQVAE2Config, build_generator
from flwr_replay.generators.base import by_level
from flwr_replay.learning.training import torch_rng
from flwr_replay.models.layers import step
from flwr_replay.wire.weights import encoded, load_arrays

CONF = Path(__file__).parents[2] / "conf" / "generator"
TINY = {"name": "vqvae2", "codes": 8, "dim": 4, "width": 8}


def tiny_vqvae2(channels=1, size=8, seed=0, **options):
    return build_generator(VQVAE2Config(**TINY | options), channels, size, seed)


def images(n, channels=1, size=8, seed=0):
    return torch.rand(n, channels, size, size, generator=torch.Generator().manual_seed(seed))


@cache
def digits():
    return torch.from_numpy(load_digits().images).float()[:, None] / 16


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("codebook", ["ema", "gradient"])
@pytest.mark.parametrize(
    ("size", "channels", "top", "bottom"), [(8, 1, 1, 2), (28, 1, 4, 8), (29, 2, 4, 8), (32, 3, 4, 8), (256, 3, 32, 64)]
)
def test_shapes(codebook, size, channels, top, bottom):
    model, x = tiny_vqvae2(channels, size, codebook=codebook), images(2, channels, size)
    loss, _ = model.loss(x, torch_rng("draws"))
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert model.grids == ((top, top), (bottom, bottom))
    codes = model.encode(x)
    assert (codes.shape, codes.dtype) == ((2, model.codes_per_image), torch.int64)
    assert model.codes_per_image == top**2 + bottom**2
    assert codes.min() >= 0
    assert codes.max() < model.codebook_size == 8
    assert [level.shape for level in by_level(codes, model.grids)] == [(2, top, top), (2, bottom, bottom)]
    decoded = model.decode(codes)
    assert decoded.shape == x.shape
    assert decoded.min() >= 0
    assert decoded.max() <= 1


@pytest.mark.parametrize("codebook", ["ema", "gradient"])
@pytest.mark.parametrize("size", [8, 28])
def test_decoding_codes_gives_the_forward_passs_reconstruction(codebook, size):
    model, x = tiny_vqvae2(size=size, codebook=codebook), images(3, size=size)
    codes = model.encode(x)
    decoded = []
    hook = model.decoder.register_forward_hook(lambda *call: decoded.append(call[-1]))
    _, terms = model.eval().loss(x, torch_rng("draws"))
    hook.remove()
    pad = (decoded[0].shape[-1] - size) // 2
    forward = decoded[0][..., pad : pad + size, pad : pad + size]
    torch.testing.assert_close(model.decode(codes), forward.clamp(0, 1))
    torch.testing.assert_close(terms["reconstruction"], (forward - x).square().mean())
    assert torch.equal(model.train().encode(x), codes)


def test_the_loss_is_the_sum_of_its_terms():
    model, x = tiny_vqvae2(codebook="gradient", beta=0.25), images(5)
    loss, terms = model.loss(x, torch_rng("draws"))
    squares = {}
    for name in ("top", "bottom"):
        book = getattr(model, name)
        book.register_forward_hook(
            lambda module, inputs, out, name=name: squares.update(
                {name: (inputs[0] - module.lookup(out[1])).square().mean()}
            )
        )
    model.loss(x, torch_rng("draws"))
    distance = squares["top"] + squares["bottom"]
    torch.testing.assert_close(loss, 4 * terms["reconstruction"] + 1.25 * distance)
    torch.testing.assert_close(terms["commitment"], distance.detach())
    assert all(1 <= terms[f"perplexity-{level}"] <= 8 for level in ("top", "bottom"))


def trained(steps=5, seed=0, draws=0, codebook="ema"):
    model, own = tiny_vqvae2(seed=seed, codebook=codebook), torch_rng(draws)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for i in range(steps):
        step(model, optimizer, model.loss(digits()[32 * i : 32 * i + 32], own)[0])
    return model


def test_equal_seeds_give_equal_bits_and_the_global_generator_is_left_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model = trained()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert same(trained().state_dict(), model.state_dict())
    assert not same(trained(draws=1).state_dict(), model.state_dict())
    assert not same(trained(seed=1).state_dict(), model.state_dict())


def test_training_goes_on_from_a_state_with_the_same_bits():
    whole, own = tiny_vqvae2(), torch_rng("draws")
    optimizer = torch.optim.SGD(whole.parameters(), 1e-2)
    for i in range(4):
        if i == 2:
            half, rest = tiny_vqvae2(seed=9), torch_rng("other")
            load_arrays(half, encoded(whole))
            rest.set_state(own.get_state())
        step(whole, optimizer, whole.loss(digits()[32 * i : 32 * i + 32], own)[0])
    optimizer = torch.optim.SGD(half.parameters(), 1e-2)
    for i in (2, 3):
        step(half, optimizer, half.loss(digits()[32 * i : 32 * i + 32], rest)[0])
    assert same(half.state_dict(), whole.state_dict())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codebook", ["ema", "gradient"])
def test_training_more_than_halves_the_error_on_digits(codebook):
    model, draws = tiny_vqvae2(codes=32, width=16, decay=0.9, codebook=codebook), torch_rng("draws")
    optimizer, unseen = torch.optim.Adam(model.parameters(), 1e-2), digits()[1600:]
    first = (model.decode(model.encode(unseen)) - unseen).square().mean()
    for _ in range(150):
        x = digits()[torch.randperm(1600, generator=draws)[:64]]
        step(model, optimizer, model.loss(x, draws)[0])
    error = (model.decode(model.encode(unseen)) - unseen).square().mean()
    assert error < first / 2
    assert error < 0.7 * unseen.var(0).mean()  # the mean image's error, which a decoder reaches without codes


def test_a_receiver_of_the_decoder_decodes_the_same():
    for codebook in ("ema", "gradient"):
        sender = trained(codebook=codebook)
        codes = sender.encode(digits()[:9])
        receiver = tiny_vqvae2(seed=5, codebook=codebook)
        assert not torch.equal(receiver.decode(codes), sender.decode(codes))
        state = sender.decoder_state_dict()
        receiver.load_decoder(state)
        assert torch.equal(receiver.decode(codes), sender.decode(codes))
        assert not [name for name in state if "encode" in name or "avg" in name or "cluster" in name]
        with pytest.raises(WireError, match="differ at 'decoder"):
            tiny_vqvae2(channels=2, codebook=codebook).load_decoder(state)


def test_no_example_of_a_private_generator_depends_on_another():
    model, x = tiny_vqvae2(size=28, codebook="gradient"), images(4, size=28)
    before = copy.deepcopy(model.state_dict())
    assert dict(model.named_buffers()) == {}

    def gradients(rows):
        model.zero_grad()
        model.loss(x[rows], torch_rng("draws"))[0].backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    single = [gradients(slice(i, i + 1)) for i in range(4)]
    for whole, *each in zip(gradients(slice(None)), *single, strict=True):
        torch.testing.assert_close(whole, torch.stack(each).mean(0), rtol=1e-4, atol=1e-6)
    assert same(model.state_dict(), before)
    assert torch.equal(model.encode(x), torch.cat([model.encode(image[None]) for image in x]))


@pytest.mark.filterwarnings("ignore")
def test_opacus_takes_a_private_generators_per_example_gradients():
    opacus = pytest.importorskip("opacus.grad_sample")
    model, x = tiny_vqvae2(codebook="gradient"), images(3)
    single = []
    for image in x:
        model.zero_grad()
        model.loss(image[None], torch_rng("draws"))[0].backward()
        single.append([parameter.grad.clone() for parameter in model.parameters()])
    hooked = opacus.GradSampleModule(model)
    model.loss(x, torch_rng("draws"))[0].backward()
    for parameter, *expected in zip(model.parameters(), *single, strict=True):
        torch.testing.assert_close(parameter.grad_sample, torch.stack(expected), rtol=1e-4, atol=1e-6)
    hooked.remove_hooks()


@pytest.mark.parametrize("file", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_choice_sets_every_option(file):
    values, config_type = yaml.safe_load(file.read_text()), load_options("generator", file.stem)
    assert values.keys() == {field.name for field in fields(config_type)}
    assert config_type(**values).name == file.stem


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"codebook": "emma"}, "did you mean ema"),
        ({"codes": 1}, "generator.codes must be at least 2; got 1"),
        ({"dim": 0}, "generator.dim must be at least 1"),
        ({"width": 1}, "generator.width must be at least 2"),
        ({"lr": 0.0}, "generator.lr must be positive"),
        ({"lr_halving": -1}, "generator.lr-halving must not be negative"),
        ({"decay": 1.0}, r"generator.decay lies in \[0, 1\)"),
        ({"beta": float("nan")}, "generator.beta must be finite"),
    ],
)
def test_wrong_options_are_refused_in_one_line(wrong, line):
    with pytest.raises(ConfigError, match=line):
        VQVAE2Config(**TINY | wrong)
