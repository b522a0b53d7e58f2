"""Mutual learning against the formulas, example by example."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from flwr_replay.config.model import ModelConfig
from flwr_replay.config.sections import TaskConfig
from flwr_replay.errors import ConfigError
from flwr_replay.institution.budget import DPTraining
from flwr_replay.institution.mutual import Learning, MutualLearner, shift_batch
from flwr_replay.learning.tasks import make_task
from flwr_replay.models import build
from flwr_replay.movements.mutual import MutualConfig, check_pair
from flwr_replay.privacy.accounting import SampledGaussian
from flwr_replay.privacy.secret import Stream
from flwr_replay.server.settings import Settings
from flwr_replay.strategies.fml import FMLConfig

TASK = TaskConfig(name="x", format="x", channels=1, size=8, classes=3)
LR, B = 0.1, 6


def model(seed, name="mlp"):
    return build(ModelConfig(name=name, width=5), TASK, seed)


def batch(n=B):
    draw = torch.Generator().manual_seed(7)
    return torch.rand(n, 1, 8, 8, generator=draw), torch.randint(3, (n,), generator=draw)


def learner(alpha, beta, dp=None, phi=1, name="lenet5", rests=False, **request):
    private, proxy = model(phi, name), model(2)
    halves = [Learning(half, torch.optim.SGD(half.parameters(), lr=LR)) for half in (private, proxy)]
    asked = SimpleNamespace(listen="loss", alpha=alpha, beta=beta, **request)
    return MutualLearner(*halves, make_task(TASK), asked, B, dp, rests)


def formula(weight, student_C, teacher_C, label):
    """Kalra et al. 2023, eq. 4 and 5, with the teacher first in the divergence."""
    p, q = teacher_C.softmax(0), student_C.softmax(0)
    divergence = sum(p[c] * (p[c].log() - q[c].log()) for c in range(3))
    return (1 - weight) * -q[label].log() + weight * divergence


def stepped(half, loss):
    gradients = torch.autograd.grad(loss, list(half.parameters()))
    return [parameter.detach() - LR * g for parameter, g in zip(half.parameters(), gradients, strict=True)]


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (0.9, 0.0), (0.0, 0.3), (1.0, 1.0)])
def test_a_step_is_the_formulas_from_answers_before_it(alpha, beta):
    x, y = batch()
    student = learner(alpha, beta)
    phi, theta = model(1, "lenet5"), model(2)
    f, h = phi(x), theta(x)
    own = sum(formula(alpha, f[i], h[i].detach(), y[i]) for i in range(B)) / B
    others = sum(formula(beta, h[i], f[i].detach(), y[i]) for i in range(B)) / B
    expected = stepped(phi, own), stepped(theta, others)
    student.step(x, y)
    for half, weights in zip((student.private, student.proxy), expected, strict=True):
        torch.testing.assert_close([p.detach() for p in half.model.parameters()], weights)
    assert student.loss() == pytest.approx(own.item(), rel=1e-5)


def visit(clip, sigma):
    return DPTraining(clip, SampledGaussian(0.5, sigma, 4), Stream(bytes(32)))


@pytest.mark.parametrize("drawn", [0, 2])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_the_proxys_gradient_is_clipped_example_by_example(beta, drawn):
    """A slow loop over single examples; sigma is so small that no noise shows. What was drawn is φ's alone."""
    (x, y), clip = batch(5), 0.05
    student = learner(0.5, beta, visit(clip, 1e-9))
    student.drawn = drawn  # the first of these rows
    phi, theta = model(1, "lenet5"), model(2)
    f, h = phi(x), theta(x).detach()
    own = sum(formula(0.5, f[i], h[i], y[i]) for i in range(5)) / 5
    learnt, f = stepped(phi, own), f.detach()
    total = [torch.zeros_like(parameter) for parameter in theta.parameters()]
    for i in range(drawn, 5):
        gradients = torch.autograd.grad(formula(beta, theta(x[i : i + 1])[0], f[i], y[i]), list(theta.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm().item()
        total = [t + g / max(1.0, norm / clip) for t, g in zip(total, gradients, strict=True)]
    student.step(x, y)
    expected = [p.detach() - LR * t / B for p, t in zip(theta.parameters(), total, strict=True)]
    torch.testing.assert_close([p.detach() for p in student.proxy.model.parameters()], expected)
    torch.testing.assert_close([p.detach() for p in student.private.model.parameters()], learnt)
    assert student.loss() is None
    assert (student.seen, student.proxy_steps) == (B + drawn, 1)  # the size of a Poisson batch is not reported


def test_without_a_teacher_the_proxy_does_not_depend_on_the_private_model():
    x, y = batch()
    proxies = []
    for phi in (1, 5):
        student = learner(0.5, 0.0, visit(1.0, 1.0), phi=phi)
        student.step(x, y)
        proxies.append([p.detach() for p in student.proxy.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*proxies, strict=True))


@pytest.mark.parametrize(("n", "name"), [(0, "lenet5"), (1, "cnn")])  # batch norm needs two
def test_a_batch_that_is_too_small_moves_the_proxy_alone(n, name):
    x, y = batch(n)
    student = learner(0.5, 0.5, visit(1.0, 1.0), name=name)
    before = [p.detach().clone() for p in student.private.model.parameters()]
    student.step(x, y)
    assert all(torch.equal(a, b) for a, b in zip(before, student.private.model.parameters(), strict=True))
    assert not torch.equal(next(model(2).parameters()), next(student.proxy.model.parameters()))


def test_a_proxy_whose_budget_is_used_up_rests_and_goes_on_teaching():
    x, y = batch()
    student = learner(0.5, 0.5, rests=True)
    student.step(x, y)
    assert all(torch.equal(a, b) for a, b in zip(model(2).parameters(), student.proxy.model.parameters(), strict=True))
    assert not torch.equal(next(model(1, "lenet5").parameters()), next(student.private.model.parameters()))
    assert student.proxy_steps == 0
    assert student.loss() is None


def test_passes_of_the_private_model_alone_learn_from_the_proxy_as_it_came():
    data = SimpleNamespace(x=batch(12)[0], y=batch(12)[1])
    student = learner(1.0, 0.0, None, private_epochs=150, private_batch_size=4, private_shift=0)
    student.alone(data, torch.arange(12), torch.Generator().manual_seed(0))
    theta = model(2)
    gap = functional.kl_div(
        student.private.model(data.x).log_softmax(1),
        theta(data.x).log_softmax(1),
        log_target=True,
        reduction="batchmean",
    )
    first = functional.kl_div(
        model(1, "lenet5")(data.x).log_softmax(1), theta(data.x).log_softmax(1), log_target=True, reduction="batchmean"
    )
    assert gap < first / 10
    assert all(torch.equal(a, b) for a, b in zip(theta.parameters(), student.proxy.model.parameters(), strict=True))
    assert student.seen == 150 * 12


def test_a_shift_moves_a_batch_and_fills_with_nothing():
    x, draws = torch.arange(1.0, 10).view(1, 1, 3, 3), torch.Generator().manual_seed(0)
    shifted = {tuple(shift_batch(x, 1, draws).flatten().int().tolist()) for _ in range(200)}
    assert len(shifted) == 9
    assert {(1, 2, 3, 4, 5, 6, 7, 8, 9), (0, 0, 0, 0, 1, 2, 0, 4, 5), (5, 6, 0, 8, 9, 0, 0, 0, 0)} <= shifted


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"alpha": 1.5}, r"strategy\.alpha lies in \[0, 1\]"),
        ({"beta": -0.1}, r"strategy\.beta"),
        ({"private_optimizer": "lion"}, r"strategy\.private-optimizer"),
        ({"private_epochs": -1}, r"strategy\.private-epochs"),
    ],
)
def test_wrong_options_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        MutualConfig(**options)


def test_a_task_without_classes_is_refused():
    regression = make_task(TaskConfig(name="x", kind="regression", format="x", channels=1, size=8))
    with pytest.raises(ConfigError, match="choose a classification"):
        check_pair(FMLConfig(), Settings(task=regression))


def test_private_models_are_built_before_any_training():
    def fails(seed):
        raise ConfigError("too small")

    with pytest.raises(ConfigError, match="too small"):
        check_pair(FMLConfig(), Settings(task=make_task(TASK), private_models=(lambda seed: nn.Linear(1, 1), fails)))
