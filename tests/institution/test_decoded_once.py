"""An institution decodes its images once: its processes share a memory map, which nothing copies."""

import shlex

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from forks import begun_together
from harness import run
from PIL import Image

from flwr_replay.data import decoded, load
from flwr_replay.data.decoded import DecodedImages
from flwr_replay.errors import ConfigError
from flwr_replay.institution.node import institution_of
from flwr_replay.memory import forget

TASK = ["task=folder", "task.channels=1", "task.size=8", "task.classes=2", "model=mlp", "model.width=4"]


@pytest.fixture
def folder(tmp_path):
    for name in ("a", "b"):
        for n in range(40):
            place = tmp_path / name / str(n % 2)
            place.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng([n, ord(name)]).integers(0, 256, (8, 8), np.uint8)
            Image.fromarray(pixels).save(place / f"{n:02d}.png")
    return tmp_path


def node(folder, name="a", **more):
    return {"name": name, "data": str(folder / name), "state": str(folder / "state"), **more}


def institution(folder, **more):
    """The institution as a new process has it."""
    forget()
    context = Context(1, 1, node(folder, **more), RecordDict(), {"overrides": shlex.join([*TASK, "strategy=fedavg"])})
    return institution_of(context)[0]


def unreadable(monkeypatch):
    def read(source, members):
        raise AssertionError("nothing must be decoded")

    monkeypatch.setattr(decoded.ImageSource, "examples", read)


def test_a_later_process_decodes_nothing_and_its_tensors_are_the_map(folder, monkeypatch, recwarn):
    first = institution(folder)
    x, y = first.train.x.clone(), first.train.y.clone()
    unreadable(monkeypatch)
    again = institution(folder)
    data = again.data
    assert isinstance(data.train.x, np.memmap)
    for shard, examples in ((again.train, data.train), (again.test, data.test)):
        assert shard.x.data_ptr() == examples.x.ctypes.data
        assert shard.x.is_contiguous()
    assert torch.equal(again.train.x, x)
    assert torch.equal(again.train.y, y)
    assert (folder / "state" / "a" / "decoded").is_dir()
    assert [str(warning.message) for warning in recwarn if "writable" in str(warning.message)] == []


@pytest.mark.parametrize("strategy", ["fedavg", "fedreplay", "fedsgd", "fml"])
def test_a_run_on_maps_has_the_bits_of_one_without(folder, strategy, monkeypatch):
    more = {
        "fedreplay": ["cut=hidden1", "model=mlp"],
        "fml": ["dp=none", "listen=pool", "alpha=0", "private-epochs=1"],
    }.get(strategy, [])
    job = [*TASK, f"strategy={strategy}", "rounds=2", "batch_size=8", *more]
    results = []
    for name, size in (("without", "0"), ("fills", "1"), ("finds", "1")):
        if name == "finds":
            unreadable(monkeypatch)
        forget()
        nodes = [node(folder, name, **{"cache-gb": size}) for name in "ab"]
        ran = run(folder, job, nodes, name=f"{strategy}-{name}")
        assert not ran.result["failures"]
        results.append({file.name: file.read_bytes() for file in (ran.folder / "models").glob("*.safetensors")})
    assert results[0]
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("size", ["much", "-1", "nan", "", "\u0663", "1_0"])
def test_a_wrong_size_is_one_line(folder, size):
    with pytest.raises(ConfigError, match="cache-gb in --node-config must be a number of GB, 0 for no cache; got"):
        institution(folder, **{"cache-gb": size})


def fill_cache(begin, decodings, task, place):
    plain = decoded.ImageSource.examples

    def counted(source, members):
        with decodings.get_lock():
            decodings.value += 1
        return plain(source, members)

    decoded.ImageSource.examples = counted
    begin.wait()
    assert len(load(task, DecodedImages(place, 1e9)).train)


def test_of_processes_that_begin_together_one_decodes_and_the_others_wait(folder):
    task = institution(folder).read.args[1]
    assert begun_together(fill_cache, task, folder / "decoded") == 1
    assert len(list((folder / "decoded").iterdir())) == 2
