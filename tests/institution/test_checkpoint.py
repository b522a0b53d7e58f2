"""A generator that has been trained elsewhere: used as it is, checked before any training, never chosen by a server."""

import shlex

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from harness import node_configs, run, write_shards
from safetensors.numpy import save_file

from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError
from flwr_replay.generators.synthesis import SynthesisPlan, TrainingProgress
from flwr_replay.institution.node import institution_of
from flwr_replay.runs.execute import Job

TASK = ["task=medmnist", "task.size=8", "classes=3", "model=cnn", "model.width=4", "model.norm=group", "device=cpu"]
TINY = ["generator.width=4", "generator.codes=8", "generator.dim=4", "generator.epochs=1", "prior.width=4"]
TINY += ["prior.layers=1", "prior.epochs=1"]
JOB = [*TASK, *TINY, "strategy=feder", "buffer=8", "rounds=1"]


@pytest.fixture
def trained(tmp_path):
    """Write a generator with so many steps to go, of a run with more options; return its file."""

    def write(*options, left=0):
        plan, path = SynthesisPlan.of(compose([*JOB, *options])), tmp_path / "trained.safetensors"
        progress = TrainingProgress(steps=9, steps_left=left, loss=0.5)
        plan.write(path, plan.fresh(7, torch.device("cpu")), progress, to_disk=False)
        return path

    return write


def test_an_institution_draws_from_its_checkpoint_and_trains_nothing(tmp_path, trained):
    write_shards(tmp_path, {"a": 40, "b": 33})
    nodes = node_configs(tmp_path, tmp_path / "state", "ab")
    nodes[0]["generator-checkpoint"] = str(trained())
    ran = run(tmp_path, JOB, nodes)
    assert not ran.result["failures"]
    assert not list((tmp_path / "state" / "a").glob("generators/*.safetensors"))
    assert len(list((tmp_path / "state" / "b").glob("generators/*.safetensors"))) == 1
    pieces = [reply for asked, _, reply in ran.grid.log if asked[:2] == ("train-piece", "a")]
    assert len(pieces) == 1
    metrics = pieces[0].content["metrics"]
    assert (metrics["steps"], metrics["steps-left"]) == (9, 0)
    assert "diversity" in metrics


def test_two_generators_draw_other_images(tmp_path, trained):
    write_shards(tmp_path, {"a": 40})
    drawn = []
    for state, options in (("one", ()), ("two", ("seed=1",))):
        nodes = node_configs(tmp_path, tmp_path / state, "a")
        nodes[0]["generator-checkpoint"] = str(trained(*options) if not drawn else tmp_path / "other.safetensors")
        ran = run(tmp_path, [*JOB, "strategy=syncentral", f"run_name={state}"], nodes)
        drawn.append(next((ran.folder / "buffers").iterdir()).read_bytes())
        plan = SynthesisPlan.of(compose(JOB))
        fresh = plan.fresh(8, torch.device("cpu"))
        plan.write(tmp_path / "other.safetensors", fresh, TrainingProgress(steps=9), to_disk=False)
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("written", "left", "says"),
    [
        (["classes=4"], 0, "classes 3; got channels 1, size 8, classes 4"),
        (["task.size=16"], 0, "size 8, classes 3; got channels 1, size 16"),
        (["task.channels=3"], 0, "channels 1, size 8, classes 3; got channels 3"),
        (["generator.width=8"], 0, r"with the run's generator\.\* and prior\.\* options"),
        (["generator=stylegan2", "generator.latents=4", "generator.max_width=4"], 0, "generator=vqvae2"),
        ([], 5, "has 5 steps to go"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_before_any_training(trained, written, left, says):
    if "generator=stylegan2" in written:
        shared = [word for word in JOB if not word.startswith(("generator.codes", "generator.dim", "generator.epochs"))]
        plan = SynthesisPlan.of(compose([*shared, *written]))
        path = trained()
        plan.write(path, plan.fresh(0, torch.device("cpu")), TrainingProgress(), to_disk=False)
    else:
        path = trained(*written, left=left)
    with pytest.raises(ConfigError, match=says):
        Job.of(compose([*JOB, f"generator.checkpoint={path}"]), ["institution-1"])


def test_files_that_are_no_generators_are_refused(tmp_path):
    foreign = tmp_path / "foreign.safetensors"
    save_file({"w": np.zeros(3)}, foreign)
    (tmp_path / "text.safetensors").write_text("no tensors")
    for place, says in (
        (foreign, "must hold a generator with channels 1, size 8, classes 3; got none"),
        (tmp_path / "text.safetensors", "it is damaged"),
        (tmp_path / "absent.safetensors", r"generator\.checkpoint must be a trained generator, .*absent"),
        (tmp_path, r"generator\.checkpoint must be a trained generator, .*institution-1\.safetensors"),
    ):
        with pytest.raises(ConfigError, match=says):
            Job.of(compose([*JOB, f"generator.checkpoint={place}"]), ["institution-1"])


@pytest.mark.parametrize(
    ("generator", "option", "key"),
    [
        ("vqvae2", "generator.checkpoint", "generator-checkpoint"),
        ("stylegan2", "generator.checkpoint", "generator-checkpoint"),
        ("stylegan2", "generator.perceptual-weights", "perceptual-weights"),
    ],
)
def test_a_server_names_no_file_at_an_institution(tmp_path, generator, option, key):
    def of(*asked, **owned):
        overrides = shlex.join(["strategy=feder", f"generator={generator}", *TASK, *asked])
        node = {"name": "a", "data": str(tmp_path), "state": str(tmp_path), **owned}
        return institution_of(Context(1, 1, node, RecordDict(), {"overrides": overrides}))[1]

    with pytest.raises(ConfigError, match=f"{option} is an institution's own file: .*{key}"):
        of(f"{option}=/secret")
    own = of(**{key: "/own"}).generator
    assert vars(own)[option.partition(".")[2].replace("-", "_")] == "/own"
