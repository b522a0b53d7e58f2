"""DP-SGD beside a slow loop over single examples, plain SGD, and its formula."""

import logging
import os
import sys
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from harness import forked
from torch import nn
from torch.nn import functional

from flwr_replay.config.model import ModelConfig
from flwr_replay.config.sections import TaskConfig, TrainingConfig
from flwr_replay.errors import ConfigError
from flwr_replay.learning.tasks import Classification, Regression, Segmentation, make_task
from flwr_replay.learning.training import make_optimizer
from flwr_replay.models import StagedModel, build, placed
from flwr_replay.privacy import dpsgd
from flwr_replay.privacy.accounting import SampledGaussian
from flwr_replay.privacy.dpsgd import clipped_sums, noisy_step, poisson_batches, refuse_mixing
from flwr_replay.privacy.ghost import Ghost
from flwr_replay.privacy.secret import Stream, noise_stream

IMAGES = TaskConfig(name="images", format="digits", channels=1, size=16, classes=3)
MASKS = replace(IMAGES, kind="segmentation", classes=1)
NUMBERS = replace(IMAGES, kind="regression", classes=1)
MODELS = [
    (ModelConfig(name="mlp", width=8), IMAGES),
    (ModelConfig(name="lenet5"), IMAGES),
    (ModelConfig(name="cnn", width=4, norm="group"), NUMBERS),
    (ModelConfig(name="resnet18", width=4, norm="group"), IMAGES),
    (ModelConfig(name="unet", width=4, norm="group"), MASKS),
]


def examples(task, n, seed=0):
    """Return n examples of a task; their gradients differ in norm."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 1, task.size, task.size, generator=draw) * torch.arange(1, n + 1).view(-1, 1, 1, 1)
    if task.kind == "segmentation":
        return x, torch.randint(2, (n, task.size, task.size), generator=draw)
    if task.kind == "regression":
        return x, torch.randn(n, generator=draw)
    return x, torch.randint(task.classes, (n,), generator=draw)


def of_model(model, task):
    """Return the losses of single examples, by way of a model."""
    return lambda x, y: make_task(task).losses(model(x), y)


def slow_sums(model, loss, batch, clip):
    """Clip one gradient after another, each from a backward pass of its own."""
    sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for i in range(len(batch[0])):
        model.zero_grad()
        loss(*(tensor[i : i + 1] for tensor in batch)).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        for summed, gradient in zip(sums, gradients, strict=True):
            summed += gradient / max(1.0, float(norm) / clip)
    model.zero_grad()
    return sums


def distance(first, second):
    """Return the L2 norm of a difference over all parameters."""
    return torch.cat([(a - b).flatten() for a, b in zip(first, second, strict=True)]).norm().item()


def gradients_agree(first, second):
    return distance(first, second) <= 1e-4 * distance(second, [torch.zeros_like(b) for b in second])


@pytest.mark.parametrize(("config", "task"), MODELS, ids=lambda value: value.name)
def test_clipped_gradients_are_the_slow_loops(config, task):
    model, batch = build(config, task, seed=0), examples(task, 5)
    single = make_task(task).loss
    for clip in (0.1, float("inf")):
        sums, loss = clipped_sums(model, of_model(model, task), batch, clip)
        assert gradients_agree(sums, slow_sums(model, lambda x, y: single(model(x), y), batch, clip))
    losses = [single(model(batch[0][i : i + 1]), batch[1][i : i + 1]).item() for i in range(5)]
    assert loss.item() == pytest.approx(sum(losses), rel=1e-5)


def test_gradients_that_do_not_fit_in_memory_together_are_taken_in_chunks(monkeypatch):
    config, task = MODELS[0]
    model, batch, sizes = build(config, task, seed=0), examples(task, 5), []

    def losses(x, y):
        sizes.append(len(y))
        return of_model(model, task)(x, y)

    whole, _ = clipped_sums(model, losses, batch, 0.1)
    monkeypatch.setattr(dpsgd, "MEMORY", 2 * 4 * 2155)
    chunked, _ = clipped_sums(model, losses, batch, 0.1)
    assert sizes == [5, 2, 2, 1]
    assert gradients_agree(chunked, whole)


@pytest.mark.parametrize("order", ["channels last", "moved axes"])
def test_images_in_another_order_of_memory_have_the_same_gradients(order):
    """Opacus 1.6 alone takes other examples' pixels into an example's gradient here."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.Flatten())
    x = torch.randn(4, 6, 6, 3, generator=torch.Generator().manual_seed(0)).movedim(-1, 1)
    x = x.contiguous(memory_format=torch.channels_last) if order == "channels last" else x
    sums, _ = clipped_sums(model, lambda x: model(x).square().sum(1), (x,), 0.1)
    assert gradients_agree(sums, slow_sums(model, lambda x: model(x.contiguous()).square().sum(), (x,), 0.1))


class Quantized(nn.Module):
    """An autoencoder with a codebook that learns by gradients, as a VQ-VAE under differential privacy has."""

    def __init__(self):
        super().__init__()
        self.encoder, self.codes, self.decoder = nn.Linear(256, 4), nn.Embedding(8, 4), nn.Linear(4, 256)

    def losses(self, x):
        """Return reconstruction, codebook and commitment losses of each example, (B,)."""
        z = self.encoder(x.flatten(1))
        e = self.codes(torch.cdist(z.detach(), self.codes.weight.detach()).argmin(1))
        errors = (self.decoder(z + (e - z).detach()) - x.flatten(1)).square().mean(1)
        return (
            errors
            + functional.mse_loss(e, z.detach(), reduction="none").mean(1)
            + 0.25 * (z - e.detach()).pow(2).mean(1)
        )


def test_a_codebook_that_learns_by_gradients_is_clipped_per_example():
    torch.manual_seed(0)
    model, (x, _) = Quantized(), examples(IMAGES, 6)
    sums, _ = clipped_sums(model, model.losses, (x,), 0.1)
    assert gradients_agree(sums, slow_sums(model, lambda x: model.losses(x).sum(), (x,), 0.1))
    assert float(sums[2].abs().sum()) > 0  # the codebook's


def test_without_noise_and_clipping_it_is_plain_sgd_on_the_same_batches():
    config, task = MODELS[0]
    private, plain = (build(config, task, seed=0) for _ in range(2))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (private, plain)]
    x, y = examples(task, 40)
    cost, sizes = SampledGaussian(5 / 40, 0.0, 12), set()
    for rows in poisson_batches(40, cost, Stream(bytes(32))):
        batch = x[rows] / 40, y[rows]
        noisy_step(
            private,
            optimizers[0],
            of_model(private, task),
            batch,
            clip=float("inf"),
            sigma=0,
            batch_size=5,
            stream=Stream(b"1" * 32),
        )
        optimizers[1].zero_grad()
        (functional.cross_entropy(plain(batch[0]), batch[1], reduction="sum") / 5).backward()
        optimizers[1].step()
        sizes.add(len(rows))
    assert len(sizes) > 3
    assert gradients_agree(list(private.parameters()), list(plain.parameters()))


@pytest.mark.parametrize("ghost", [True, False])
def test_weights_in_another_order_of_memory_step_alike(ghost, monkeypatch):
    """PyTorch 2.15's fused Adam takes gradients as they lie in memory, whatever their strides."""
    monkeypatch.setattr(Ghost, "serves", lambda module: ghost)
    config, task = MODELS[1]
    x, y = examples(task, 12)
    weights = []
    for model in (build(config, task, seed=0), placed(build(config, task, seed=0), "cpu")):
        optimizer = make_optimizer(model, TrainingConfig(optimizer="adam"), 0.01)
        for _ in range(3):
            noise = Stream(bytes(32))
            noisy_step(
                model, optimizer, of_model(model, task), (x / 12, y), clip=1.0, sigma=0.1, batch_size=12, stream=noise
            )
        weights.append([parameter.detach() for parameter in model.parameters()])
    assert not all(parameter.is_contiguous() for parameter in weights[1])
    assert all(torch.allclose(*pair, atol=1e-4) for pair in zip(*weights, strict=True))


@pytest.mark.parametrize("n", [0, 4], ids=["empty batch", "batch"])
def test_public_examples_are_neither_clipped_nor_noised(n):
    config, task = MODELS[0]
    model = build(config, task, seed=0)
    (x, y), (px, py) = examples(task, n + 1), examples(task, 6)
    batch, losses = (x[:n], y[:n]), of_model(model, task)
    clipped, _ = clipped_sums(model, losses, batch, 0.1)
    public = torch.autograd.grad(losses(px, py).sum(), list(model.parameters()))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    how = {"clip": 0.1, "sigma": 0, "batch_size": 10, "stream": Stream(bytes(32))}
    noisy_step(model, optimizer, losses, batch, **how, public=(px, py))
    moved = [10 * (old - new) for old, new in zip(before, model.parameters(), strict=True)]
    assert gradients_agree(moved, [own + other for own, other in zip(clipped, public, strict=True)])


@pytest.mark.parametrize("n", [0, 4], ids=["empty batch", "batch"])
def test_the_noise_is_the_formulas(n):
    """g = (Σ clipped + N(0, σ²C² I)) / b: with SGD of rate 1 the weights move by it."""
    config, task = MODELS[0]
    model, batch = build(config, task, seed=0), examples(task, n)
    sums, _ = clipped_sums(model, of_model(model, task), batch, 0.5)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    loss = noisy_step(
        model,
        optimizer,
        of_model(model, task),
        batch,
        clip=0.5,
        sigma=3.0,
        batch_size=8,
        stream=Stream(bytes(32)),
    )
    moved = [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
    noise = torch.cat([(step - summed / 8).flatten() for step, summed in zip(moved, sums, strict=True)])
    assert len(noise) == 2155
    assert float(noise.std()) == pytest.approx(3.0 * 0.5 / 8, rel=0.05)
    assert abs(float(noise.mean())) < 4 * 3.0 * 0.5 / 8 / 2155**0.5
    assert (float(loss) > 0) == (n > 0)


def test_an_empty_batch_asks_for_no_loss():
    model = build(*MODELS[0], seed=0)
    sums, loss = clipped_sums(model, lambda x, y: pytest.fail("nothing to lose"), examples(IMAGES, 0), 1.0)
    assert not any(summed.any() for summed in sums)
    assert not loss


@pytest.mark.parametrize("wild", [1.0, 1e6, float("inf"), float("nan")])
@pytest.mark.parametrize("clip", [1e-3, 0.5])
def test_one_example_changes_the_sum_by_at_most_the_clip(clip, wild):
    config, task = MODELS[2]
    model, (x, y) = build(config, task, seed=0), examples(task, 9)
    x[4] *= wild
    others = [i for i in range(9) if i != 4]
    with_it, _ = clipped_sums(model, of_model(model, task), (x, y), clip)
    without, _ = clipped_sums(model, of_model(model, task), (x[others], y[others]), clip)
    assert distance(with_it, without) <= clip * (1 + 1e-4)  # the sums themselves are rounded
    assert all(summed.isfinite().all() for summed in with_it)
    if wild == 1.0:
        assert distance(with_it, without) > clip / 2


@pytest.mark.parametrize("wild", [float("inf"), float("nan"), 3e38])
def test_a_gradient_that_cannot_be_clipped_adds_nothing(wild):
    """Neither one that is not finite nor one whose factor would be no normal float32."""
    model = nn.Linear(2, 1, bias=False)  # whose gradient is the example
    sums, _ = clipped_sums(model, lambda x: model(x)[:, 0], (torch.tensor([[wild, 1.0], [0.3, 0.4]]),), 1.0)
    assert sums[0].tolist() == [pytest.approx([0.3, 0.4])]


@pytest.mark.parametrize("ghost", [False, True])
@pytest.mark.parametrize("size", [1e20, 1e30, 1e37, 1e38])
def test_a_huge_gradient_is_clipped_to_the_bound(ghost, size):
    layer = nn.Linear(2, 1, bias=False)
    model = StagedModel(OrderedDict(only=layer)) if ghost else layer
    sums, _ = clipped_sums(model, lambda x: model(x)[:, 0], (torch.tensor([[size, size]]),), 1.0)
    assert sums[0].norm() <= 1 + 1e-6


def test_two_runs_with_one_seed_differ_in_their_noise(tmp_path):
    def run(noise):
        model, (x, y) = build(*MODELS[0], seed=0), examples(IMAGES, 20)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        stream = noise_stream(noise, tmp_path, 0, "institution-1", "classifier", 1)
        for rows in poisson_batches(20, SampledGaussian(0.2, 1.0, 3), stream):
            noisy_step(
                model,
                optimizer,
                of_model(model, IMAGES),
                (x[rows], y[rows]),
                clip=1.0,
                sigma=1.0,
                batch_size=4,
                stream=stream,
            )
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert torch.equal(run("seeded"), run("seeded"))
    first, second = run("secret"), run("secret")
    # Three steps of noise 0.1 * 1.0 * 1.0 / 4 each, independent in both: nothing of it is common.
    assert float((first - second).std()) == pytest.approx(0.1 / 4 * (2 * 3) ** 0.5, rel=0.1)
    assert float((first - run("seeded")).std()) == pytest.approx(0.1 / 4 * (2 * 3) ** 0.5, rel=0.1)


def test_poisson_batches_toss_a_coin_for_every_example():
    n, q, steps = 50, 0.1, 4000
    masks = torch.zeros(steps, n)
    for mask, rows in zip(masks, poisson_batches(n, SampledGaussian(q, 1.0, steps), Stream(bytes(32))), strict=True):
        mask[rows] = 1
        assert rows.tolist() == sorted(set(rows.tolist()))
    deviation = (q * (1 - q) / steps) ** 0.5
    assert (masks.mean(0) - q).abs().max() < 5 * deviation
    sizes = masks.sum(1)
    assert float(sizes.var()) == pytest.approx(n * q * (1 - q), rel=0.1)
    assert sizes.min() == 0
    pairs = masks.T @ masks / steps
    assert (pairs - q * q).fill_diagonal_(0).abs().max() < 6 * (q * q / steps) ** 0.5
    everyone = poisson_batches(n, SampledGaussian(1.0, 1.0, 2), Stream(bytes(32)))
    assert [rows.tolist() for rows in everyone] == [list(range(n))] * 2


@pytest.mark.parametrize(
    ("task", "outputs", "labels"),
    [
        (Classification(3), (6, 3), torch.tensor([0, 1, 2, 2, 1, 0])),
        (Regression(mean=2.0, scale=3.0), (6, 1), torch.arange(6.0)),
        (Segmentation(), (6, 1, 4, 4), torch.arange(96).view(6, 4, 4) % 3 % 2),
    ],
    ids=["classification", "regression", "segmentation"],
)
def test_an_examples_loss_is_that_of_a_batch_of_one(task, outputs, labels):
    logits = torch.randn(outputs, generator=torch.Generator().manual_seed(0))
    slow = [task.loss(logits[i : i + 1], labels[i : i + 1]) for i in range(6)]
    torch.testing.assert_close(task.losses(logits, labels), torch.stack(slow))


def moving_codebook():
    vector_quantize_pytorch = pytest.importorskip("vector_quantize_pytorch")
    return nn.Sequential(nn.Linear(4, 4), vector_quantize_pytorch.VectorQuantize(dim=4, codebook_size=8))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: build(ModelConfig(name="cnn", width=4), IMAGES, 0), r"conv1\.norm .*batch.*model\.norm=group"),
        (lambda: nn.Sequential(nn.BatchNorm1d(3, affine=False, track_running_stats=False)), "normalises over"),
        (lambda: nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True)), "running_mean"),
        (moving_codebook, r"codebook.*generator\.codebook=gradient"),
        (lambda: nn.LSTM(3, 4), "single examples"),
        (lambda: build(*MODELS[0], seed=0).eval(), "training mode"),
    ],
    ids=["batch norm", "bare batch norm", "instance norm", "codebook", "recurrent", "evaluation mode"],
)
def test_what_mixes_examples_is_refused_with_the_reason(model, says):
    module = model()
    with pytest.raises(ConfigError, match=says):
        refuse_mixing(module)
    with pytest.raises(ConfigError, match=says):
        clipped_sums(module, lambda x: pytest.fail("must not run"), (torch.zeros(2, 4),), 1.0)


def test_parts_of_examples_are_not_clipped_one_by_one():
    model = nn.Linear(4, 1)  # of every row of an example, folded into the batch: each would be allowed a norm of C
    with pytest.raises(ConfigError, match="one row of its batch"):
        clipped_sums(model, lambda x: model(x.flatten(0, 1)).view(len(x), -1).sum(1), (torch.ones(3, 5, 4),), 1.0)


def test_frozen_batch_norm_mixes_nothing():
    """A private head on a frozen encoder."""
    model = build(ModelConfig(name="cnn", width=4), IMAGES, seed=0)
    for stage in (model.conv1, model.conv2):
        stage.requires_grad_(False).eval()
    batch = examples(IMAGES, 4)
    sums, _ = clipped_sums(model, of_model(model, IMAGES), batch, 0.1)
    head = list(model.head.parameters())
    slow = [torch.zeros_like(parameter) for parameter in head]
    for i in range(4):
        loss = functional.cross_entropy(model(batch[0][i : i + 1]), batch[1][i : i + 1])
        gradients = torch.autograd.grad(loss, head)
        norm = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
        for summed, gradient in zip(slow, gradients, strict=True):
            summed += gradient / max(1.0, norm / 0.1)
    assert gradients_agree(sums, slow)


def test_a_model_is_as_before_also_where_the_loss_fails():
    model, (x, y) = build(ModelConfig(name="lenet5"), IMAGES, seed=0), examples(IMAGES, 5)

    def fails(x, y):
        model(x)
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        clipped_sums(model, fails, (x[:2], y[:2]), 1.0)
    assert not any("activations" in vars(layer) for layer in model.modules())  # a failed batch must not stay
    for n in (3, 5):
        batch = x[:n], y[:n]
        sums, _ = clipped_sums(model, of_model(model, IMAGES), batch, 1.0)
        assert gradients_agree(sums, slow_sums(model, lambda x, y: functional.cross_entropy(model(x), y), batch, 1.0))
    assert not any(hasattr(parameter, "grad_sample") for parameter in model.parameters())
    hooks = [(layer._forward_pre_hooks, layer._forward_hooks, layer._backward_hooks) for layer in model.modules()]
    assert not any(map(any, hooks))


def test_opacus_leaves_the_root_logger_as_it_is(tmp_path):
    def first_import():
        logging.root.handlers.clear()
        for name in [name for name in sys.modules if name.startswith("opacus")]:
            del sys.modules[name]
        (tmp_path / "found").write_text(f"{refuse_mixing(nn.Linear(2, 2))} {logging.root.handlers}")

    os.waitpid(forked(first_import), 0)
    assert (tmp_path / "found").read_text() == "None []"
