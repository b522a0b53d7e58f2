"""FedSGD is gradient descent on the pooled data."""

import itertools
import re

import numpy as np
import pytest
import torch
from averaging import JOB, SIZES, run
from harness import write_shards
from torch import nn
from torch.nn.functional import cross_entropy

from flwr_replay.clients import fedsgd
from flwr_replay.config.compose import compose
from flwr_replay.config.sections import TrainingConfig
from flwr_replay.engines.inline import InlineGrid
from flwr_replay.engines.simulate import Simulation, run_inline
from flwr_replay.errors import ConfigError
from flwr_replay.files.tensors import read_tensors
from flwr_replay.forecast.forecast import forecast_page
from flwr_replay.institution.client import InstitutionClient
from flwr_replay.institution.owner import Institution
from flwr_replay.learning.tasks import Classification
from flwr_replay.models.zoo import backbone
from flwr_replay.movements.base import Settings
from flwr_replay.report.progress import Display
from flwr_replay.rng import derived_seed
from flwr_replay.serve import serve
from flwr_replay.strategies.fedsgd import FedSGD
from flwr_replay.wire.records import array_record, opened
from flwr_replay.wire.weights import to_arrays

RATE = 0.3


class Double(nn.Module):
    """Two layers in float64."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, x):
        return self.net(x.flatten(1).double())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_full_batch_gradient_descent_on_the_union_in_float64(tmp_path, monkeypatch, momentum):
    monkeypatch.setattr(fedsgd, "ROWS_AT_ONCE", 10)  # several blocks each, and one block that is not full
    torch.set_num_threads(1)
    rng, sizes = np.random.default_rng(0), [37, 11, 1]
    x, y = rng.normal(size=(49, 6, 1, 1)).astype(np.float32), rng.integers(0, 3, 49)
    ends = np.cumsum([0, *sizes])
    owned = [
        Institution.from_arrays("abc"[k], (x[i:j], y[i:j]), (x[:3], y[:3]))
        for k, (i, j) in enumerate(itertools.pairwise(ends))
    ]
    training = TrainingConfig(lr=RATE, momentum=momentum)

    def client(context) -> InstitutionClient:
        institution = owned[int(context.node_config["partition-id"])]
        institution.state_root = tmp_path
        return fedsgd.FedSGDClient(institution, Double, Classification(3), training)

    grid = InlineGrid.simulated(serve(client), {}, 3)
    strategy = FedSGD(
        settings=Settings(roll_call=True, training=training, task=Classification(3), model=Double, nodes=3)
    )
    weights = opened(strategy.start(grid, array_record(to_arrays(Double(7))), 5).arrays)

    model, x_all, y_all = Double(7), torch.from_numpy(x), torch.from_numpy(y)
    steps = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    for _ in range(5):
        steps.zero_grad()
        cross_entropy(model(x_all), y_all).backward()
        steps.step()
    for name, value in model.state_dict().items():
        assert weights[name].dtype == np.float64
        np.testing.assert_allclose(weights[name], value.numpy(), rtol=0, atol=1e-10, err_msg=name)


def test_one_institution_is_a_step_of_sgd_and_every_round_uses_each_example_once(tmp_path):
    shards = write_shards(tmp_path, SIZES)
    weights, _ = run(tmp_path, "fedsgd", "rounds=1", "lr=0.5", "model=mlp", "model.width=8", names="a")
    config = compose([*JOB, "model=mlp", "model.width=8"])
    model = backbone(config.model, config.task)(derived_seed(0, "model"))
    x, y = shards["a"]
    cross_entropy(model(x), y).backward()
    for name, parameter in model.named_parameters():
        expected = (parameter - 0.5 * parameter.grad).detach().numpy()
        np.testing.assert_allclose(weights[name], expected, rtol=0, atol=1e-6)


def test_under_dp_the_rate_is_bounded_by_the_noise(tmp_path):
    """Gabor's head begins with zeros, so after one step it is as large as the rate."""
    job = ["task=digits", "model=gabor", "nodes=3", "strategy=fedsgd", "rounds=1", "device=cpu", "lr=5", "momentum=0"]
    job += ["dp=gradient", "privacy.noise=seeded", "privacy.sigma=2", "delta=0.001"]

    def head(name, *options):
        _, folder = run_inline([*job, *options, f"runs_dir={tmp_path / name}"], Display())
        return read_tensors(folder / "models" / "global.safetensors")["head.fc.weight"]

    whole, bounded, loose = head("whole"), head("bounded", "lr_by_noise=0.001"), head("loose", "lr_by_noise=1")
    np.testing.assert_allclose(bounded, whole * (0.001 * 1315 / (2 * 3**0.5)) / 5, rtol=1e-4, atol=1e-9)
    assert loose.tobytes() == whole.tobytes()


def noise_line(*options, method="strategy=fedsgd dp=gradient"):
    """Return what is said of a sum's noise before a run: its norm, and how many examples or updates add how much."""
    job = ["task=digits", "model=gabor", "nodes=4", *method.split(), "privacy.sigma=0.5", "delta=1e-5", "rounds=4"]
    page = forecast_page(Simulation.of(compose([*job, *options])))
    [line] = re.findall(r"norm ([0-9.,e+]+), and ([0-9,]+) (?:examples|updates) add at most ([0-9.,e+]+)", page)
    return [float(number.strip(",.").replace(",", "")) for number in line]


@pytest.mark.parametrize(("method", "share"), [("fedsgd dp=gradient", 1315 / 4), ("fedavg dp=update", 1)])
def test_the_noise_of_a_sum_is_that_of_those_who_are_drawn(method, share):
    whole, half = (noise_line(of, method=f"strategy={method}") for of in ("fraction=1", "fraction=0.5"))
    assert half[0] == pytest.approx(whole[0] / 2**0.5, rel=0.01)
    assert half[1:] == pytest.approx([2 * share] * 2, rel=0.01)
    assert whole[1:] == pytest.approx([4 * share] * 2, rel=0.01)


def test_a_clip_above_all_gradients_is_said_and_what_it_hides_is_refused():
    """Gabor's features have norm 10, so a head's gradient has √2 √101 at most, whatever the image."""
    assert noise_line("privacy.clip=14")[1:] == [1315, 1315]
    assert noise_line("privacy.clip=1000")[2] == pytest.approx(1315 * 202**0.5 / 1000, rel=1e-4)
    assert noise_line("privacy.clip=1000", "model.hidden=8")[2] == 1315  # no bound is known
    means = "strategy=fedstats dp=statistics head=means"
    assert noise_line("strategy.clip=25", method=means)[2] == 1315 * 10 / 25
    for method, clip in (("strategy=fedsgd dp=gradient", "privacy.clip=1e6"), (means, "strategy.clip=1e5")):
        with pytest.raises(ConfigError, match="choose a larger epsilon, or a smaller clip"):
            noise_line(clip, method=method)
