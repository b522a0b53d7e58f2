"""A generator that several processes want is trained once; a simulation without one does not begin; the summary."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from flwr_replay.config.compose import compose
from flwr_replay.engines.simulate import Simulation, run_inline
from flwr_replay.errors import ConfigError
from flwr_replay.generators.synthesis import SynthesisPlan
from flwr_replay.generators.vqvae2 import VQVAE2Images
from flwr_replay.institution.owner import Institution
from flwr_replay.institution.synthesis import SynthesisStages
from flwr_replay.payloads.synthetic import TrainPiece
from flwr_replay.report.progress import Display
from flwr_replay.report.summary import summary
from flwr_replay.state.store import StateStore

RUN = ["strategy=feder", "task=medmnist", "task.size=8", "classes=2", "model=cnn", "model.width=4", "device=cpu"]
CODES = ["generator.width=4", "generator.codes=8", "generator.dim=4", "generator.epochs=8", "prior.epochs=1"]
SMALL = ["prior.width=4", "prior.layers=1", "generator.batch_size=16", "prior.batch_size=16"]


def stages_of(folder, *options):
    rng = np.random.default_rng(0)
    institution = Institution.from_arrays("a", (rng.integers(0, 256, (48, 1, 8, 8), np.uint8), np.arange(48) % 2))
    institution.state_root = folder
    return SynthesisStages(
        institution, StateStore(institution), SynthesisPlan.of(compose([*RUN, *CODES, *SMALL, *options]))
    )


def test_processes_that_want_one_generator_train_it_by_turns(tmp_path, monkeypatch):
    train, taken = VQVAE2Images.train, []

    def watched(self, x, y, steps, *further):
        taken.extend(steps)
        return train(self, x, y, steps, *further)

    monkeypatch.setattr(VQVAE2Images, "train", watched)

    def trained(stages):
        while stages.train_piece(TrainPiece(run="r")).steps_left:
            pass
        return stages.complete("r").state()

    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(trained, [stages_of(tmp_path, "generator.piece_steps=3") for _ in range(3)])
    assert sorted(taken) == list(range(27))  # every step once: 3 batches x (8 + 1) epochs
    assert all(np.array_equal(first[key], other[key]) for other in others for key in first)


def test_a_message_that_has_waited_longer_than_a_piece_lasts_still_takes_steps(tmp_path):
    stages = stages_of(tmp_path, "generator.piece_seconds=1e-9")
    assert stages.train_piece(TrainPiece(run="r")).steps == 10


def test_a_simulation_in_which_nobody_has_images_of_a_class_ends_before_anything_is_written(tmp_path):
    job = ["strategy=feder", "task=digits", "nodes=2", "partition=iid", "partition.size=6", "device=cpu", "model=mlp"]
    with pytest.raises(ConfigError, match=r"a class of at least 4 images; no institution has more than [123]"):
        Simulation.of(compose(job))
    assert Simulation.of(compose([*job, "buffer=0"]))  # no generator is trained


def test_without_dp_a_summary_says_what_distances_are_worth_and_a_warning_what_is_noise(tmp_path, caplog):
    job = ["strategy=feder", "task=digits", "nodes=2", "partition.size=40", "device=cpu", "rounds=1", "model=mlp"]
    job += [
        "mode=synthetic-only",
        "buffer=0",
        "generator=stylegan2",
        "generator.steps=1",
        "generator.privacy_loss=none",
    ]
    result, folder = run_inline([*job, "generator.width=4", f"runs_dir='{tmp_path}'"], Display())
    assert "0% of its images look like real ones; below 10% they are noise: train longer" in caplog.text
    assert "evidence, and no guarantee" in summary(result, folder)
