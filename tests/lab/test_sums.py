"""What sums show: no more than epsilon allows, more if noise is too small, and without it who is alone in a class."""

import numpy as np
import pytest
import torch

from flwr_replay.attacks.catalogue import RATIO
from flwr_replay.attacks.sums import log_ratio
from flwr_replay.config.compose import compose
from flwr_replay.engines.simulate import run_inline
from flwr_replay.errors import RunError
from flwr_replay.institution import budget
from flwr_replay.lab.attack import attack_run
from flwr_replay.lab.evidence import ALL, Evidence
from flwr_replay.lab.judge import originals_of
from flwr_replay.lab.registry import Only
from flwr_replay.lab.sums import sum_attacks, summed
from flwr_replay.privacy import shares
from flwr_replay.report.progress import Display

EPSILON = 2
JOB = [
    "task=digits",
    "partition=iid",
    "model=gabor",
    "model.train=head",
    "evaluate_every=9",
    "device=cpu",
    "record=all",
]
METHODS = {
    "gradient": ["strategy=fedsgd", "rounds=3", "dp=gradient"],
    "statistics": ["strategy=fedstats", "rounds=1", "dp=statistics"],
}
SHARED = ["nodes=3", "masked=true", "noise=shared", "colluders=0"]
RECOVERED = ["nodes=4", *SHARED[1:], "dropouts=1", "partition.size=300"]
LONE = 5  # classes with one image each


def deal(labels, nodes, seed):
    """Deal one image each of the first classes, and 30 of each of the others, in turn."""
    rows = [np.flatnonzero(labels == c)[: 1 if c < LONE else 30] for c in range(10)]
    return [np.concatenate(rows)[k::nodes] for k in range(nodes)]


def results(tmp_path, *options):
    _, folder = run_inline([*JOB, *options, f"runs_dir={tmp_path}"], Display())
    return {
        trial["attack"]: trial for trial in attack_run(folder, Only(), "none", "", 1.0, lambda line: None)["attacks"]
    }


@pytest.mark.sampled(1, "divisor")
@pytest.mark.parametrize("divisor", [1, 6])
@pytest.mark.parametrize("hidden", [SHARED, ["nodes=1"], RECOVERED])
@pytest.mark.parametrize("method", METHODS)
def test_no_more_is_found_than_epsilon_allows_and_too_little_noise_is(tmp_path, monkeypatch, method, hidden, divisor):
    whole, plain = shares.discrete_gaussian, budget.noisy
    monkeypatch.setattr(shares, "discrete_gaussian", lambda n, stream: whole(n, stream) // divisor)
    monkeypatch.setattr(budget, "noisy", lambda sums, sigma, stream: plain(sums, sigma / divisor, stream))
    noisy = [*METHODS[method], f"target_epsilon={EPSILON}", "delta=1e-5", "partition.size=400", *hidden]
    result = results(tmp_path, *noisy)["likelihood ratio, all others known"]
    assert result["institution"] == ("institution-1" if hidden == ["nodes=1"] else ALL)
    assert result["stated"]["epsilon"] == pytest.approx(EPSILON, rel=0.01)
    assert result["noise"] == pytest.approx(1 / divisor, rel=0.05)
    assert (result["shown"] > result["stated"]["epsilon"]) == (divisor == 6)
    assert divisor == 6 or result["membership"]["auc"]["low"] < result["allowed"]["auc"]


def test_the_same_images_are_asked_about_again(tmp_path, monkeypatch):
    monkeypatch.setattr("flwr_replay.lab.sums.MOST", 30)
    noisy = [*METHODS["statistics"], "nodes=1", f"target_epsilon={EPSILON}", "delta=1e-5", "partition.size=200"]
    _, folder = run_inline([*JOB, *noisy, f"runs_dir={tmp_path}"], Display())
    evidence = Evidence.of(folder)
    [exhibit] = [exhibit for exhibit in evidence.exhibits if exhibit.means == "class sums"]
    originals = originals_of(evidence.config, "institution-1")
    once, again = (dict(sum_attacks(exhibit, evidence, originals, seed=0))[RATIO.name]() for _ in range(2))
    assert once["membership"]["members"] == 30
    assert once == again


@pytest.mark.sampled(1, "who")
@pytest.mark.parametrize(
    ("options", "who"), [(["nodes=1"], LONE), (["nodes=3", "masked=true"], LONE), (METHODS["statistics"], 0)]
)
def test_who_is_alone_in_a_class_is_found_unless_there_is_noise(tmp_path, monkeypatch, options, who):
    noise = [*SHARED, "target_epsilon=1", "delta=1e-5"] if who == 0 else ["rounds=1"]
    if who:
        monkeypatch.setattr("flwr_replay.lab.sums.AMONG", 100)  # chance would find one more where there is noise
    monkeypatch.setenv("FLWR_REPLAY_OWN_CODE", f"{__name__}:deal")
    dealt = ["strategy=fedstats", f"partition={__name__}:deal"]
    ran = results(tmp_path, *dealt, *options, *noise)["alone in a class"]
    assert round(ran["alone"]["value"] * ran["number"]) == who


def test_under_masks_only_whole_sums_over_images_are_attacked(tmp_path):
    masked = [*JOB, "rounds=1", "nodes=3", "masked=true", "partition.size=60", f"runs_dir={tmp_path}"]
    (_, averaged), (_, folder) = (
        run_inline([*masked, f"strategy={name}", f"run_name={name}"], Display()) for name in ("fedavg", "fedsgd")
    )

    def attack(folder, **only):
        return attack_run(folder, Only(**only), "none", "", 0.001, lambda line: None)["attacks"]

    with pytest.raises(RunError, match="strategy=fedavg averages models"):
        attack(averaged)
    with pytest.raises(RunError, match="sums of all can be attacked, nobody's own; got --institution 'institution-2'"):
        attack(folder, institution="institution-2")
    counted = next(trial for trial in attack(folder, institution=ALL) if trial["attack"] == "label counts")
    assert (counted["institution"], counted["labels"]["number"]) == (ALL, 180)
    exhibits = Evidence.of(folder).exhibits
    with pytest.raises(RunError, match="needs the answers of all institutions to one exchange"):
        summed(exhibits[:2], compose([*masked[:-1], "strategy=fedsgd"]))


def test_the_ratio_is_that_of_two_normal_densities():
    rng = torch.Generator().manual_seed(0)
    rest, added = torch.randn(2, 5, generator=rng, dtype=torch.float64)
    with_it, without = (torch.distributions.Normal(at, 3.0).log_prob(rest).sum() for at in (added, 0 * added))
    assert log_ratio(rest, added, 3.0) == pytest.approx(float(with_it - without))
