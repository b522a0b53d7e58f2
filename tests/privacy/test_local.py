"""Local DP: the analytic Gaussian mechanism, randomised response, how they add up, and what a run claims of them."""

import json
from math import exp, sqrt

import numpy as np
import pytest
import torch

from flwr_replay.config.compose import compose
from flwr_replay.engines.simulate import Simulation, simulate
from flwr_replay.errors import ConfigError
from flwr_replay.forecast.forecast import forecast, forecast_page
from flwr_replay.privacy.account import Account
from flwr_replay.privacy.accounting import LocalRelease, SampledGaussian, epsilon
from flwr_replay.privacy.gaussian import gaussian_delta, gaussian_epsilon, gaussian_noise
from flwr_replay.privacy.local import LocalDP, clipped, keep_probability, randomised
from flwr_replay.privacy.noise import noise_of, shown_noise
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.privacy.secret import Stream
from flwr_replay.report.progress import Display
from flwr_replay.runs.execute import Job, claim

OPTIONS = ["latent-clip=2", "latent-epsilon=8", "label-epsilon=3"]
LATENTS = ["strategy=fedreplay", "device=cpu", "model.width=4", "dp=latents", *OPTIONS]


def hockey_stick(eps, mu):
    """Integrate max(0, p - e^eps q) for p = N(mu, 1), q = N(0, 1): the definition of delta, and no formula for it."""
    x = np.linspace(-12, 12 + mu, 2_000_001)
    p, q = np.exp(-((x - mu) ** 2) / 2), np.exp(eps - x**2 / 2)
    return float(np.maximum(0, p - q).sum() * (x[1] - x[0]) / sqrt(2 * np.pi))


def stream():
    return Stream(bytes(32))


# --- the Gaussian mechanism -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("eps", "mu"), [(0.0, 1.0), (0.1, 0.05), (1.0, 0.3), (8.0, 2.0), (50.0, 7.0), (200.0, 16.0)])
def test_delta_is_its_definition(eps, mu):
    assert gaussian_delta(eps, mu) == pytest.approx(hockey_stick(eps, mu), rel=1e-6)


@pytest.mark.parametrize("eps", [0.1, 1.0, 8.0, 50.0, 200.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_sigma_solves_its_delta_and_is_the_least(eps, delta):
    sigma = gaussian_noise(eps, delta)
    assert hockey_stick(eps, 1 / sigma) == pytest.approx(delta, rel=1e-5)
    assert gaussian_delta(eps, 1 / sigma) <= delta < gaussian_delta(eps, 1.001 / sigma)
    assert eps * (1 - 1e-6) < gaussian_epsilon(1 / sigma, delta) <= eps


def test_large_epsilons_do_not_overflow():
    assert gaussian_epsilon(1 / gaussian_noise(1e4, 1e-9), 1e-9) == pytest.approx(1e4)


# --- an upload --------------------------------------------------------------------------------------------------------


def local(views=1, **change):
    options = {"clip": 2.0, "latent_epsilon": 8.0, "label_epsilon": 3.0, "classes": 5, "encoder_trained": True}
    return LocalDP(**{**options, "views": views, **change})


def test_views_add_up_and_labels_too():
    once, four = (local(views).cost(1e-5) for views in (1, 4))
    assert four.sigma == pytest.approx(2 * once.sigma)
    for cost in (once, four):
        assert 10.9999 < epsilon([cost], 1e-5) <= 11
    rows = [LocalRelease(1.0, four.sigma, 1)] * 4  # one by one
    assert epsilon([*rows, LocalRelease(1.0, four.sigma, 0, 3.0)], 1e-5) == pytest.approx(epsilon([four], 1e-5))
    twice = gaussian_epsilon(sqrt(2) / once.sigma, 1e-5) + 6
    assert epsilon([once, once], 1e-5) == pytest.approx(twice)
    assert epsilon([LocalRelease(1.0, once.sigma, 0)], 1e-5) == 0


def test_accounts_keep_local_releases_and_never_mix_them_with_others(tmp_path):
    cost = local(4).cost(1e-5)
    Account(tmp_path, delta=1e-5).charge("latents", cost)
    assert Account(tmp_path, delta=1e-5).spent == [cost]
    assert Account(tmp_path, delta=1e-5).epsilon() == epsilon([cost], 1e-5)
    with pytest.raises(ConfigError, match="one kind of neighbours"):
        epsilon([cost, SampledGaussian(0.1, 1.0, 5)], 1e-5)


def test_measured_noise_is_the_formulas():
    dp, x = local(4), torch.randn(400, 7, 5, 5, generator=torch.Generator().manual_seed(0))
    sigma = dp.cost(1e-5).sigma
    noise = dp.noisy(x, sigma, stream()) - clipped(x, dp.clip)
    assert float(noise.std()) == pytest.approx(2 * 2.0 * sigma, rel=0.02)
    assert abs(float(noise.mean())) < 4 * 2 * 2.0 * sigma / sqrt(x.numel())
    assert float(torch.corrcoef(noise.flatten(1)[:2])[0, 1].abs()) < 0.3  # each row has noise of its own


def test_rows_are_clipped_one_by_one_whatever_an_encoder_makes_of_them():
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [torch.inf, 1.0], [torch.nan, 1.0], [3e38, -3e38]])
    rows = clipped(x, 2.0)
    torch.testing.assert_close(rows[:2], torch.tensor([[1.2, 1.6], [0.3, 0.4]], dtype=torch.float64))
    assert rows[2:5].count_nonzero() == 0
    assert float(torch.linalg.vector_norm(rows, dim=1).max()) <= 2.0


def test_labels_stay_as_often_as_they_may():
    n, given = 60_000, torch.arange(3).repeat(20_000)
    labels = randomised(given, 3, 1.5, stream())
    table = torch.bincount(3 * given + labels, minlength=9).reshape(3, 3) / (n / 3)
    stays = exp(1.5) / (exp(1.5) + 2)
    assert keep_probability(1.5, 3) == pytest.approx(stays)
    expected = torch.full((3, 3), (1 - stays) / 2).fill_diagonal_(stays)
    torch.testing.assert_close(table, expected, rtol=0, atol=0.015)  # about four standard deviations
    assert randomised(torch.tensor([-7, 99]), 3, 20.0, stream()).tolist() == [0, 2]


# --- options and claims -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["dp=latents", "latent-epsilon=8", "label-epsilon=2"], "needs latent-clip, .*latent-clip=0, "),
        (["dp=latents", "latent-clip=1", "label-epsilon=2"], "needs latent-clip, .*latent-epsilon=0, "),
        (["dp=latents", "latent-clip=1", "latent-epsilon=8"], "needs latent-clip, .*label-epsilon=0"),
        (["dp=latents", *OPTIONS, "latent-clip=-1"], r"latent-clip lies in \[1e-9, 1e9\]; got -1"),
        (["dp=latents", *OPTIONS, "latent-epsilon=-1"], r"latent-epsilon lies in .*; got -1"),
        (["dp=latents", *OPTIONS, "label-epsilon=21"], r"label-epsilon lies in .*; got 21"),
        (["dp=latents", *OPTIONS, "target-epsilon=3"], r"the budget is latent-epsilon \+ label-epsilon"),
        (["latent-epsilon=8"], "are for dp=latents; got dp=none: leave them out"),
        (["dp=encoder+latents", *OPTIONS], "stands alone: its epsilon is for one example replaced"),
        (["dp=latents", *OPTIONS, "strategy=cwt"], r"strategy=cwt can have dp=.*classifier.*; got dp=latents: choose"),
        (["dp=latents", *OPTIONS, "task=diabetes", "model=mlp"], "task=diabetes is a regression, which has none"),
        (["dp=latents", *OPTIONS, "task=heart_disease", "model=mlp"], "mixes patients without noise"),
    ],
)
def test_bad_input_is_one_line(options, line):
    with pytest.raises(ConfigError, match=line) as refused:
        PrivacyPlan.of(compose(["strategy=fedreplay", *options]))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "claims", "unsaid"),
    [
        (["upload-views=3"], ["all 3 views together", "the encoder, which whoever is asked trains"], []),
        (
            ["encoder=random"],
            ["latents (epsilon 8) and its label (epsilon 3), together epsilon 11, are"],
            ["views", "trains on its examples"],
        ),
    ],
)
def test_the_claim_names_neighbours_and_what_it_leaves_out(options, claims, unsaid):
    text = claim(Job.of(compose([*LATENTS, *options])).strategy("run"))
    claims = [*claims, "one example replaced by another", "not for one more or less", "how many examples there are"]
    claims += ["each row is a view of one example", "losses and metrics", "What leaves as a whole has no epsilon."]
    claims += ["a patient with several has as many times the epsilon", "every further run adds its own"]
    assert [words for words in [*claims, "Rounding to float16 or int8 adds no protection"] if words not in text] == []
    assert [words for words in unsaid if words in text.replace("a view of", "")] == []
    assert "promises an example next to nothing" in text  # at 11
    assert "promises an example next to nothing" not in local(latent_epsilon=4.0).sentence()
    assert "nothing is protected" in claim(Job.of(compose([*LATENTS, "noise=seeded"])).strategy("run"))


def test_forecast_ledger_and_result_say_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    options = [*LATENTS, "encoder=random", "rounds=1", "nodes=2", "partition=iid", "partition.size=40", "delta=1e-3"]
    overrides = [*options, f"runs_dir={tmp_path}"]
    run = Simulation.of(compose(overrides))
    expected = {(line.field, line.protection) for line in forecast(run) if line.direction == "up"}
    page = forecast_page(run)
    table = page[page.index("Sent up") : page.index("By institution")]
    assert "-DP of each replaced example" in table
    assert max(map(len, table.splitlines())) <= 80
    assert "the institutions send: a label for every row, changed at random." in page
    assert run.job.settings.privacy.local.sentence() in page
    result, folder = simulate(run, overrides, Display())
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert {(line["field"], line["protection"]) for line in ledger if line["direction"] == "up"} == expected
    assert {(name, "(11, 0.001)-DP of each replaced example") for name in ("latents", "labels")} <= expected
    assert result["privacy-claim"] == run.job.settings.privacy.local.sentence()
    for account in result["privacy"].values():
        assert 10.999 < account["epsilon"] <= 11
        assert (account["delta"], account["dp"], account["proven"]) == (1e-3, "latents", True)
        assert account["mechanism"].endswith("one example replaced")


def test_the_noise_that_a_run_states_is_that_of_its_latents_and_counts():
    latents = ["strategy=fedreplay", "dp=latents", "latent-clip=2", "latent-epsilon=4", "label-epsilon=1"]
    plan = PrivacyPlan.of(compose([*latents, "delta=1e-4"]))
    (noise,) = noise_of(plan, 300)
    assert noise == {
        "mechanism": "latents",
        "sigma": plan.local.cost(1e-4).sigma,
        "clip": 2.0,
        "label-epsilon": 1.0,
        "examples": 300,
    }
    assert shown_noise([noise]) == (
        f"latents: sigma {noise['sigma']:.3g}, clip C 2, noise 2 C sigma; labels: randomised response, epsilon 1"
    )
    replay = ["strategy=cwt", "replay=pixelcnn", "dp=generator+prior", "codebook=gradient", "prior-clip=0.5"]
    counted = noise_of(PrivacyPlan.of(compose(replay)), 300)
    assert [(line["mechanism"], line.get("clip")) for line in counted] == [
        ("generator", 1.0),
        ("prior", 0.5),
        ("label counts", None),
    ]
    assert shown_noise(counted).endswith("; label counts: sigma 10")
