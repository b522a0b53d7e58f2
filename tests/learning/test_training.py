"""Training helpers: iterations, shuffles, what is kept between visits, losses that are not finite."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flwr_replay.clients.cwt import CWTClient
from flwr_replay.config.model import ModelConfig
from flwr_replay.config.sections import TaskConfig, TrainingConfig
from flwr_replay.data import Dataset, Examples
from flwr_replay.errors import DivergedError, TrainingError, WireError
from flwr_replay.institution.owner import Institution
from flwr_replay.learning.tasks import Classification
from flwr_replay.learning.training import (
    batches,
    learning_rate,
    make_optimizer,
    mean_loss,
    refuse_single_batches,
    torch_rng,
)
from flwr_replay.models import build as build_model
from flwr_replay.models import placed
from flwr_replay.models.layers import as_input
from flwr_replay.payloads.common import Train
from flwr_replay.rng import derived_seed
from flwr_replay.wire.records import opened
from flwr_replay.wire.weights import load_arrays, load_optimizer_arrays, optimizer_arrays, to_arrays

N, B = 45, 8
DATA = Examples(np.random.default_rng(0).integers(0, 256, (N, 1, 3, 3), np.uint8), np.arange(N, dtype=np.int64) % 3)


def build(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


@pytest.fixture
def client(tmp_path):
    """Build a client as a new process would: nothing but the state directory is left from the one before."""
    torch.set_num_threads(1)

    def new(**training):
        institution = Institution("a", lambda: Dataset("d", DATA, DATA), torch.device("cpu"), state_root=tmp_path)
        training = {"batch_size": B, "lr": 0.1, **training}
        return CWTClient(institution, build, Classification(3), TrainingConfig(**training), seed=5)

    return new


def visits(new, arrays, rounds, **more):
    """Send the model to fresh clients, visit after visit; return its weights after each."""
    weights = {}
    for exchange in rounds:
        visit = Train(exchange=exchange, arrays=arrays, **{"run": "r", "lr": 0.1, **more})
        arrays = opened(new().train(visit).arrays)
        weights[exchange] = arrays
    return weights


def same(left, right):
    return all(left[name].tobytes() == right[name].tobytes() for name in left | right)


# --- batches ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(n=st.integers(1, 70), b=st.integers(1, 80), seed=st.integers(0, 9))
def test_a_visit_has_max_1_floor_n_over_b_full_batches_of_different_examples(n, b, seed):
    x, y = torch.arange(n)[:, None].float(), torch.arange(n)
    taken = list(batches(x, y, b, torch_rng(seed)))
    assert len(taken) == max(1, n // b)
    assert all(len(y_B) == min(b, n) for _, y_B in taken)
    drawn = torch.cat([y_B for _, y_B in taken])
    assert len(set(drawn.tolist())) == len(drawn)
    assert torch.equal(torch.cat([x_B for x_B, _ in taken])[:, 0].long(), drawn)


def test_every_round_has_a_fresh_shuffle_that_the_seed_alone_decides(client):
    def order(exchange, **kept):
        torch.manual_seed(exchange)  # the global state has no say
        data = client().training_data()
        return next(y_B.tolist() for _, y_B in batches(data.x, torch.arange(N), N, client().shuffle(exchange)))

    orders = [order(exchange) for exchange in range(1, 6)]
    assert all(sorted(order) == list(range(N)) for order in orders)
    assert len({tuple(order) for order in orders}) == 5
    assert orders == [order(exchange) for exchange in range(1, 6)]
    twin = torch.randperm(N, generator=torch.Generator().manual_seed(derived_seed(5, "a", 1)))
    assert orders[0] == twin.tolist()


def test_bytes_become_numbers_between_0_and_1_and_stay_bytes_at_home():
    x = torch.tensor([[0, 51, 255]], dtype=torch.uint8)
    assert torch.equal(as_input(x), torch.tensor([[0, 0.2, 1]]))
    assert x.tolist() == [[0, 51, 255]]
    floats = torch.tensor([[-3.5, 300]])
    assert torch.equal(as_input(floats), floats)


# --- optimizer state --------------------------------------------------------------------------------------------------

OPTIMIZERS = [{}, {"momentum": 0.0}, {"optimizer": "adam"}, {"weight_decay": 0.1}]


def twin(arrays, rounds, keep, optimizer="sgd", momentum=0.9, weight_decay=0.0):
    """Plain PyTorch: one optimizer throughout, or a new one for every visit."""
    model = build(0)
    model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
    x, y, steps = torch.from_numpy(DATA.x) / 255, torch.from_numpy(DATA.y), None
    for exchange in rounds:
        if steps is None or not keep:
            adam = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=weight_decay, fused=True)
            sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=weight_decay)
            steps = adam if optimizer == "adam" else sgd
        order = torch.randperm(N, generator=torch.Generator().manual_seed(derived_seed(5, "a", exchange)))
        for i in range(N // B):
            rows = order[i * B : (i + 1) * B]
            steps.zero_grad()
            cross_entropy(model(x[rows]), y[rows]).backward()
            steps.step()
    return to_arrays(model)


@pytest.mark.parametrize("training", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("rule", ["keep", "reset"])
def test_optimizer_state_is_kept_or_reset_between_visits_as_reported(client, training, rule):
    start = to_arrays(build(0))
    weights = visits(lambda: client(**training), start, [1, 4, 7], optimizer_state=rule)[7]
    assert same(weights, twin(start, [1, 4, 7], rule == "keep", **training))
    if training.get("momentum") != 0:
        assert not same(weights, twin(start, [1, 4, 7], rule == "reset", **training))


@pytest.mark.parametrize("training", OPTIMIZERS, ids=str)
def test_repeated_exchanges_give_the_same_bits(client, training):
    def new():
        return client(**training)

    once = visits(new, to_arrays(build(0)), [1, 2, 3, 4, 5], optimizer_state="keep")
    for again in ([5], [5], [4, 5], [5]):  # a checkpoint is written beside the next exchange: two may be lost
        repeated = visits(new, once[again[0] - 1], again, optimizer_state="keep")
        assert same(repeated[5], once[5])


def test_runs_share_no_state(client):
    start = to_arrays(build(0))
    first = visits(client, start, [1, 2], optimizer_state="keep", run="one")
    second = visits(client, start, [1, 2], optimizer_state="keep", run="two")
    assert same(first[2], second[2])


@pytest.mark.parametrize(
    ("ours", "kind", "options"),
    [
        (
            TrainingConfig(momentum=0.9, weight_decay=0.01),
            torch.optim.SGD,
            {"foreach": False, "momentum": 0.9, "weight_decay": 0.01},
        ),
        (TrainingConfig(optimizer="adam", weight_decay=0.01), torch.optim.Adam, {"fused": True, "weight_decay": 0.01}),
    ],
)
def test_an_optimizer_makes_the_steps_of_pytorchs_which_hooks_see(ours, kind, options):
    models, seen = (build(1), build(1)), list[tuple[object, ...]]()
    made, theirs = make_optimizer(models[0], ours, 0.1), kind(models[1].parameters(), lr=0.1, **options)
    x, y = torch.rand(8, 9, generator=torch_rng(0)), torch.arange(8) % 3
    hooks = [register_optimizer_step_pre_hook(lambda *given: seen.append(given))]
    hooks += [register_optimizer_step_post_hook(lambda *given: seen.append(given))]
    for optimizer in (made, theirs):
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    for _ in range(3):
        for model, optimizer in zip(models, (made, theirs), strict=True):
            optimizer.zero_grad(True)  # as Opacus calls it
            cross_entropy(model(x), y).backward()
            optimizer.step()
    given = made.step(lambda: 7.0), theirs.step(lambda: 7.0)
    assert given == (7, 7)
    for hook in hooks:
        hook.remove()
    whole = [of for own in (made, theirs) for of in ((own, (own,), {}), "before", "after", (own, (own,), {}))]
    assert seen[:24] == whole * 3
    assert len(seen) == 32
    for mine, its in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine, its)
    assert str(made.state_dict()) == str(theirs.state_dict())


def test_an_optimizer_comes_back_from_named_arrays():
    model = build(1)
    optimizer = make_optimizer(model, TrainingConfig(optimizer="adam"), 0.1)
    for _ in range(2):
        model(torch.ones(2, 9)).sum().backward()
        optimizer.step()
    other = make_optimizer(build(1), TrainingConfig(optimizer="adam"), 0.7)
    load_optimizer_arrays(other, optimizer_arrays(optimizer))
    assert same(optimizer_arrays(other), optimizer_arrays(optimizer))
    assert other.param_groups[0]["lr"] == 0.7


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_an_optimizer_goes_on_whatever_order_the_weights_lie_in(optimizer):
    """PyTorch 2.15's fused Adam takes state as it lies in memory; a state directory has every array in C order."""
    training = TrainingConfig(optimizer=optimizer, momentum=0.9)
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(1))

    def fresh():
        return build_model(
            ModelConfig(name="lenet5"), TaskConfig(name="toy", format="digits", channels=1, size=28, classes=10), 0
        )

    def go_on(model, steps, optimizer):
        for _ in range(steps):
            model(images).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    whole, first, second = fresh(), placed(fresh(), "cpu"), placed(fresh(), "cpu")
    assert not all(parameter.is_contiguous() for parameter in first.parameters())
    go_on(whole, 4, make_optimizer(whole, training, 0.01))
    before = make_optimizer(first, training, 0.01)
    go_on(first, 2, before)
    load_arrays(second, to_arrays(first))
    after = make_optimizer(second, training, 0.01)
    load_optimizer_arrays(after, {name: array.copy() for name, array in optimizer_arrays(before).items()})
    go_on(second, 2, after)
    expected = to_arrays(whole)
    assert all(np.allclose(array, expected[name], atol=2e-4) for name, array in to_arrays(second).items())


def test_nothing_of_a_broken_visit_is_left_in_the_next(client):
    start = to_arrays(build(0))
    clean = visits(client, start, [1])[1]
    stopped = client()
    stopped.scratch_model(start)(torch.ones(2, 9)).sum().backward()  # and then an error
    assert same(opened(stopped.train(Train(exchange=1, arrays=start, run="r", lr=0.1)).arrays), clean)


# --- losses, learning rate, weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_stops_the_training(wrong):
    losses = [torch.tensor(0.5), torch.tensor(wrong), torch.tensor(-wrong), torch.tensor(0.1)]
    for some in (losses[:2], losses[1:2], losses):
        with pytest.raises(DivergedError, match=r"lower training\.lr"):
            mean_loss(some)
    assert mean_loss([losses[0], losses[0] * 3]) == 1.0


def test_a_visit_that_diverges_returns_and_keeps_nothing(client, tmp_path):
    start = to_arrays(build(0))
    start["4.bias"][:] = math.nan
    with pytest.raises(DivergedError):
        visits(client, start, [1], optimizer_state="keep")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_the_learning_rate_falls_tenfold_every_lr_step_rounds():
    stepped = TrainingConfig(lr=0.5, lr_step=35)
    assert [learning_rate(stepped, r) for r in (0, 34, 35, 69, 70)] == pytest.approx([0.5, 0.5, 0.05, 0.05, 0.005])
    assert learning_rate(TrainingConfig(lr=0.5), 10**6) == 0.5


def test_batch_norm_never_meets_a_batch_of_one(client):
    for examples, batch_size in ((1, 8), (9, 1)):
        refuse_single_batches(torch.nn.GroupNorm(1, 1), examples, batch_size)
        with pytest.raises(TrainingError, match="at least two examples; got"):
            refuse_single_batches(torch.nn.BatchNorm2d(1), examples, batch_size)
    refuse_single_batches(torch.nn.BatchNorm2d(1), 2, 8)
    with pytest.raises(TrainingError, match="batches of 1"):
        visits(lambda: client(batch_size=1), to_arrays(build(0)), [1])


def test_weights_go_in_and_out_bit_for_bit_or_not_at_all():
    arrays, model = to_arrays(build(1)), build(2)
    load_arrays(model, arrays)
    assert same(to_arrays(model), arrays)
    arrays["1.weight"][:] = 7  # a copy, not the module's own memory
    assert not (to_arrays(model)["1.weight"] == 7).any()
    lacking = {name: array for name, array in arrays.items() if name != "4.bias"}
    for wrong in (
        lacking,
        {**arrays, "more": arrays["4.bias"]},
        {**arrays, "4.bias": np.zeros(4, np.float32)},
        {**arrays, "4.bias": arrays["4.bias"].astype(int)},
    ):
        before = to_arrays(model)
        with pytest.raises(WireError, match="model's own names, shapes and kinds of number"):
            load_arrays(model, wrong)
        assert same(to_arrays(model), before)
