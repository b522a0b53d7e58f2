"""Attacks on an institution's own generator: one that copies is found out; the command that runs them."""

import json
import stat
import sys

import numpy as np
import pytest
import torch
from harness import node_configs, run, write_shards

from flwr_replay.attacks import membership
from flwr_replay.attacks.intervals import Estimate
from flwr_replay.attacks.membership import bootstrapped
from flwr_replay.cli.main import main
from flwr_replay.generators import perceptual
from flwr_replay.generators.base import ImageGenerator
from flwr_replay.institution.synthesis import SynthesisStages
from flwr_replay.lab.exposure import matched
from flwr_replay.report.run_files import BOUND

SIZES = {"a": 40, "b": 33}
JOB = ["task=medmnist", "task.size=8", "classes=3", "model=cnn", "model.width=4", "model.norm=group", "device=cpu"]
JOB += ["generator.width=4", "generator.codes=8", "generator.dim=4", "generator.epochs=1", "prior.width=4"]
JOB += ["prior.layers=1", "prior.epochs=1", "strategy=feder", "buffer=8", "rounds=1"]


@pytest.fixture(autouse=True)
def shorter(monkeypatch):
    monkeypatch.setattr(perceptual, "STEPS", 40)  # the networks that measure and project need not be good
    monkeypatch.setattr(membership, "RESAMPLES", 200)


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("hospitals")
    return folder, write_shards(folder, SIZES), run(folder, JOB, node_configs(folder, folder / "state", "ab"))


@pytest.fixture
def synthetic(hospitals, monkeypatch, capsys):
    """Run `privacy synthetic` at institution a; return exit code, stdout, stderr."""

    def call(*words, of_run=None):
        folder, _, ran = hospitals
        node = f'name="a" data="{folder / "a.npz"}" state="{folder / "state"}"'
        command = [
            "flwr-replay",
            "privacy",
            "synthetic",
            str(of_run or ran.folder),
            "--node-config",
            node,
            *words,
        ]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, *capsys.readouterr()

    return call


class Copies(ImageGenerator):
    """Draws the institution's own images, and can make no others."""

    def __init__(self, own, labels):
        self.own, self.labels = own, labels

    def mechanisms(self, examples):
        return {}

    def train(self, images, labels, steps, dp=None, classes=None):
        raise AssertionError

    def sample(self, labels_B, rng):
        return self.own[torch.arange(len(labels_B)) % len(self.own)]

    def closest(self, x_BCHW, labels_B, look):
        return self.own[torch.cdist(look.embed(x_BCHW), look.embed(self.own)).argmin(1)]

    state = load_state = None


def test_membership_is_certain_for_separate_scores_and_a_guess_for_equal_ones():
    assert bootstrapped(np.arange(30, 50), np.arange(20), 0) == Estimate(1, 1, 1)
    interval = bootstrapped(np.arange(20), np.arange(20), 0)
    assert interval.value == 0.5
    assert interval.low < 0.5 < interval.high
    assert bootstrapped(np.arange(20), np.arange(30, 50), 0).value == 0


def test_both_sides_have_as_many_images_of_each_class():
    labels = [torch.tensor([0] * 30 + [1] * 10 + [2] * 5), torch.tensor([0] * 6 + [1] * 40 + [3] * 9)]
    for most, expected in ((100, [6, 10, 0, 0]), (8, [3, 5, 0, 0])):
        rows = matched(labels, 4, most, torch.Generator().manual_seed(0))
        for y, chosen in zip(labels, rows, strict=True):
            assert torch.bincount(y[chosen], minlength=4).tolist() == expected
            assert len(set(chosen.tolist())) == len(chosen)


@pytest.mark.sampled(2, of="slow audits")
def test_a_generator_that_copies_is_found_out(hospitals, synthetic, monkeypatch):
    own = hospitals[1]["a"]
    monkeypatch.setattr(SynthesisStages, "complete", lambda stages, run: Copies(*own))
    code, out, _ = synthetic("--json", "--samples", "64")
    assert code == 0
    for attack in json.loads(out)[0]["attacks"]:
        assert attack["auc"] > 0.95, attack
        assert attack["members"] < attack["others"] / 10


def test_the_network_that_projects_is_not_the_one_that_measures(hospitals, synthetic, monkeypatch):
    by_projecting = []

    class Flips(Copies):
        """Notes how far its images are by the network that it is given."""

        def closest(self, x_BCHW, labels_B, look):
            made = x_BCHW.flip(3)
            by_projecting.append(float((look.embed(x_BCHW) - look.embed(made)).square().sum(1).mean()))
            return made

    monkeypatch.setattr(SynthesisStages, "complete", lambda stages, run: Flips(*hospitals[1]["a"]))
    _, out, _ = synthetic("--json", "--samples", "16")
    trials = {(trial["attack"], trial["distance"]): trial for trial in json.loads(out)[0]["attacks"]}
    reported = [trials["projection", "local features"][side] for side in ("members", "others")]
    for measured, projected in zip(reported, by_projecting, strict=True):
        assert 0 < measured != pytest.approx(projected, rel=1e-3)


def test_the_command_says_each_attack_and_keeps_its_pictures_for_the_owner(hospitals, synthetic):
    code, out, err = synthetic("--samples", "32")
    assert code == 0, err
    assert "a: 9 training images, as many held-out ones" in out
    for attack in ("nearest sample, pixels", "projection, local features"):
        assert attack in out
    assert "evidence, and no guarantee" in out
    (folder,) = (hospitals[0] / "state" / "a" / "synthetic").iterdir()
    names = {file.name for file in folder.iterdir()}
    assert {
        "result.json",
        "members-real-projection-nearest.png",
        *(f"projection-local-features.{form}" for form in ("png", "svg", "pdf", "csv")),
    } <= names
    assert all(stat.S_IMODE(file.stat().st_mode) & 0o077 == 0 for file in [folder, *folder.iterdir()])


@pytest.mark.sampled(2, of="slow audits")
def test_the_same_attack_finds_the_same(synthetic):
    assert synthetic("--json", "--samples", "16")[1] == synthetic("--json", "--samples", "16")[1]


@pytest.mark.sampled(2, of="slow audits")
def test_a_generator_under_dp_is_its_runs_and_the_command_says_what_is_guaranteed(hospitals, synthetic):
    folder = hospitals[0]
    under_dp = ["dp=generator+prior", "codebook=gradient", "generator.classes=[all]"]
    ran = run(folder, [*JOB, *under_dp], node_configs(folder, folder / "state", "ab"))
    code, out, err = synthetic("--samples", "16", of_run=ran.folder)
    assert code == 0, err
    assert "the guarantee is the epsilon of training the generator" in out
    assert "no epsilon covers synthetic images" not in out
    assert synthetic("--json", "--samples", "16", of_run=ran.folder)[1] != synthetic("--json", "--samples", "16")[1]


def test_runs_without_generators_and_incomplete_ones_are_refused(hospitals, synthetic, tmp_path):
    folder = hospitals[0]
    plain = run(folder, [*JOB[:7], "strategy=cwt", "rounds=1"], node_configs(folder, tmp_path / "state", "ab"))
    assert "only generators of synthetic images can be examined" in synthetic(of_run=plain.folder)[2]
    assert "a run directory has a config.yaml" in synthetic(of_run=tmp_path)[2]
    other = tmp_path / "other"
    other.mkdir()
    text = (hospitals[2].folder / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.removeprefix(BOUND).replace("epochs: 1", "epochs: 2", 1))
    code, _, err = synthetic(of_run=other)
    assert code == 2
    assert "images are drawn from a trained generator" in err
