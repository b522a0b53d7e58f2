"""Replay of numbers and of masks."""

import numpy as np
import pytest
import torch
from clinical import draw, write_csv
from PIL import Image
from replay_runs import simulated
from safetensors.numpy import load_file

from flwr_replay.config.compose import compose, overrides_of
from flwr_replay.convert import convert
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.generators.sampler import CodeSource, sampler_of
from flwr_replay.institution.learner import mixed_batches

AGES = [60 + 3 * n for n in range(40)]  # months


def kept_codes_and_decoder(ran, name, number=0):
    """Return what an institution keeps last under a source's number: its codes, its decoder."""
    files = [sorted(ran.state(name).glob(f"{what}-{number:02d}-*"))[-1] for what in ("codes", "decoder")]
    return [load_file(path) for path in files]


def sampler(ran, name):
    codes, decoder = kept_codes_and_decoder(ran, name)
    replay_plan = ReplayPlan.of(compose(overrides_of(ran.folder / "config.yaml")))
    source = CodeSource(name.encode(), decoder, codes["codes"], codes["labels"])
    return sampler_of((source,), replay_plan, torch.device("cpu"))


@pytest.fixture
def hands(tmp_path):
    """A boy's grey level is his age."""
    truth = "Bone age ground truth.csv"
    write_csv(tmp_path / "boneage-training-dataset.csv", "id,boneage,male", [(age, age, "True") for age in AGES])
    write_csv(tmp_path / truth, "Case ID,Sex,Ground truth bone age (months)", [(n, "M", 100 + n) for n in range(8)])
    for age in AGES:
        draw(tmp_path / "boneage-training-dataset" / f"{age}.png", age)
    for n in range(8):
        draw(tmp_path / "boneage-test-dataset" / f"{n}.png", 100 + n)
    convert("boneage", tmp_path)
    return [
        "task=boneage",
        f"task.data-dir='{tmp_path}'",
        "task.size=8",
        "model=cnn",
        "model.width=4",
        "partition=iid",
        "split=test",
    ]


def test_ages_travel_beside_codes_in_months(tmp_path, hands):
    ran = simulated(tmp_path, *hands, "replay=vqvae2")
    assert not ran.result["failures"]
    for name in ("institution-1", "institution-2"):
        assert sorted(kept_codes_and_decoder(ran, name)[0]["labels"]) == AGES
        [(x, y)] = mixed_batches(
            iter([(torch.rand(3, 1, 8, 8), torch.tensor([1.0, 2, 3]))]), sampler(ran, name), 8, rng()
        )
        assert (x.shape, x.dtype, y.dtype) == ((11, 1, 8, 8), torch.float32, torch.float32)
        assert set(y[:8].tolist()) <= set(AGES)
        assert y[8:].tolist() == [1, 2, 3]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("prior", ["pixelcnn", "maskgit"])
def test_drawn_ages_are_the_middles_of_their_bins_in_months(tmp_path, hands, prior):
    ran = simulated(tmp_path, *hands, "replay=pixelcnn", f"prior={prior}", "prior.bins=6")
    assert not ran.result["failures"]
    mean, scale = np.mean(AGES), np.std(AGES)
    middles = mean + scale * np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    own = [len(kept_codes_and_decoder(ran, "institution-2", number)[0]["labels"]) for number in (0, 1)]
    assert own == [20, 20]
    labels = np.concatenate([kept_codes_and_decoder(ran, "institution-2", number)[0]["labels"] for number in (0, 1)])
    counts = np.histogram(AGES, mean + scale * np.arange(-3, 4))[0]
    np.testing.assert_allclose(sorted(labels), np.repeat(middles, counts), rtol=1e-5)


@pytest.mark.sampled(2, of="slow replay")
def test_masks_come_out_of_the_codes(tmp_path):
    pixels_of = np.random.default_rng(0)
    for number in range(6):
        for what, pixels in (
            ("image", pixels_of.integers(0, 256, (32, 32))),
            ("label", 255 * pixels_of.integers(0, 2, (32, 32))),
        ):
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / f"{what}_{number:02d}.png")
    task = ["task=isbi2012", f"task.data-dir='{tmp_path}'", "task.size=16", "model=unet", "model.width=2"]
    ran = simulated(tmp_path, *task, "replay=vqvae2", "partition=iid", "batch_size=4", "generator.epochs=20")
    assert not ran.result["failures"]
    codes, _ = kept_codes_and_decoder(ran, "institution-1")
    assert codes["labels"].dtype == np.int64
    assert not codes["labels"].any()
    generated = sampler(ran, "institution-1")
    [(x, y)] = mixed_batches(
        iter([(torch.rand(2, 1, 16, 16), torch.ones(2, 16, 16, dtype=torch.uint8))]), generated, 4, rng()
    )
    assert (x.shape, y.shape, y.dtype) == ((6, 1, 16, 16), (6, 16, 16), torch.uint8)
    assert set(y[:4].unique().tolist()) == {0, 1}
    drawn = torch.randperm(len(generated), generator=rng())[:4]
    both = generated.take(drawn)[0]
    assert torch.equal(x[:4], both[:, :1])
    assert torch.equal(y[:4], (both[:, 1] >= 0.5).byte())


def rng():
    return torch.Generator().manual_seed(0)
