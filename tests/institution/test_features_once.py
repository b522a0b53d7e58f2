"""An institution computes its features once: found again, made anew after any change, never half-written."""

import json
import resource
import shlex
import signal
from collections import OrderedDict

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from forks import begun_together
from harness import run
from PIL import Image

from flwr_replay.config.compose import compose
from flwr_replay.data import Dataset, Examples, decoded, load
from flwr_replay.data.decoded import FOLDER, DecodedImages
from flwr_replay.errors import RunError
from flwr_replay.institution.features import FeatureSource, featured
from flwr_replay.institution.node import institution_of
from flwr_replay.memory import forget
from flwr_replay.models.frozen import Frozen
from flwr_replay.models.layers import as_input
from flwr_replay.models.zoo import build, encoder_of

JOB = ["strategy=fedavg", "task=folder", "channels=1", "task.size=16", "classes=2"]
CNN = ["model=cnn", "model.width=8", "model.train=head"]
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    for n in range(40):
        place = tmp_path / "a" / str(n % 2)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(n).integers(0, 256, (16, 16), np.uint8)).save(place / f"{n:02d}.png")
    return tmp_path


@pytest.fixture
def passes(monkeypatch):
    """How many examples passed an encoder to be kept."""
    passed, plain = [], FeatureSource.examples

    def counted(source, members):
        for batch in plain(source, members):
            passed.append(len(batch))
            yield batch

    monkeypatch.setattr(FeatureSource, "examples", counted)
    return passed


def institution(folder, *options, **more):
    """The institution as a new process has it."""
    forget()
    node = {"name": "a", "data": str(folder / "a"), "state": str(folder / "state"), **more}
    words = {"overrides": shlex.join([*JOB, *(options or CNN)])}
    return institution_of(Context(1, 1, node, RecordDict(), words))[0]


def kept_features(folder):
    place = folder / "state" / "a" / FOLDER
    files = [json.loads(file.read_text()) | {"form": file.stem} for file in place.glob("*.json")]
    return place, [about["form"] for about in files if about["dtype"] == "<f4"]


def test_a_later_process_encodes_nothing_and_reads_no_image(folder, passes, monkeypatch):
    first = institution(folder)
    x = first.train.x.clone()
    assert sum(passes) == 40
    monkeypatch.setattr(FeatureSource, "examples", None)
    again = institution(folder)
    assert isinstance(again.data.train.x, np.memmap)
    assert again.train.x.data_ptr() == again.data.train.x.ctypes.data
    assert torch.equal(again.train.x, x)
    assert "digest" not in vars(again.data.train.images)  # for which all images would be read
    encoder = encoder_of(*model_and_task(CNN))
    with torch.no_grad():
        images = torch.from_numpy(np.array(again.data.train.images.x))
        torch.testing.assert_close(again.train.x.flatten(1), encoder(as_input(images)).flatten(1))


def model_and_task(words):
    config = compose([*JOB, *words])
    return config.model, config.task


def test_who_runs_on_kept_features_has_the_bits_of_who_computes_them(folder, passes):
    results = []
    for name, size in (("without", "0"), ("fills", "1"), ("finds", "1")):
        forget()
        passes.clear()
        node = {"name": "a", "data": str(folder / "a"), "state": str(folder / "state"), "cache-gb": size}
        ran = run(folder, [*JOB, *CNN, "rounds=2", "batch_size=8"], [node], name=name)
        assert not ran.result["failures"]
        assert sum(passes) == {"without": 40, "fills": 40, "finds": 0}[name]
        results.append({file.name: file.read_bytes() for file in (ran.folder / "models").glob("*.safetensors")})
        assert bool(kept_features(folder)[1]) == (size == "1")
    assert results[0]
    assert results[0] == results[1] == results[2]


def cut_last_bytes(images, about):
    images.write_bytes(images.read_bytes()[:-5])


def flip_first_byte(images, about):
    images.write_bytes(bytes([images.read_bytes()[0] ^ 255]) + images.read_bytes()[1:])


def tear(images, about):
    about.write_bytes(about.read_bytes()[:-20])


@pytest.mark.parametrize("damage", [cut_last_bytes, flip_first_byte, tear])
def test_a_damaged_entry_is_computed_anew(folder, passes, damage):
    x = institution(folder).train.x.clone()
    place, (form,) = kept_features(folder)
    damage(place / f"{form}.images", place / f"{form}.json")
    passes.clear()
    assert torch.equal(institution(folder).train.x, x)
    assert sum(passes) == 40
    passes.clear()
    assert torch.equal(institution(folder).train.x, x)
    assert not passes


def other_image(folder):
    Image.fromarray(np.full((16, 16), 7, np.uint8)).save(folder / "a" / "0" / "00.png")
    return CNN


def other_weights(folder):
    torch.save(build(*model_and_task(CNN[:2]), 5).state_dict(), folder / "other.pth")
    return [*CNN, f"model.weights={folder / 'other.pth'}"]


CHANGES = {
    "image": other_image,
    "weights": other_weights,
    "size": lambda folder: [*CNN, "task.size=12"],
    "cut": lambda folder: [*CNN[:2], "model.train=from:conv2"],
    "norm": lambda folder: [*CNN, "model.norm=group"],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_features_of_something_else_are_computed(folder, passes, change):
    before = institution(folder).train.x.clone()
    options = change(folder)
    passes.clear()
    weights = {"weights": str(folder / "other.pth")} if change is other_weights else {}
    after = institution(folder, *options, **weights)
    assert not torch.equal(after.train.x, before)
    assert sum(passes) == 40
    with torch.no_grad():
        model, task = model_and_task(options)
        images = as_input(torch.from_numpy(np.array(after.data.train.images.x)))
        torch.testing.assert_close(after.train.x.flatten(1), encoder_of(model, task)(images).flatten(1))


@pytest.mark.parametrize("what", ["version", "threads"])
def test_another_version_or_number_of_threads_computes_them_anew(folder, passes, monkeypatch, what):
    """Of lite0 another number of threads gives other bits."""
    institution(folder).train  # noqa: B018
    passes.clear()
    if what == "version":
        monkeypatch.setattr(decoded, "version", lambda package: "99")
    else:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    institution(folder).train  # noqa: B018
    assert sum(passes) == 40


def test_labels_compute_nothing_anew(folder, passes):
    rows = [f"{n % 2}/{n:02d}.png,{n % 2},{'test' if n < 8 else 'train'}" for n in range(40)]
    (folder / "a" / "manifest.csv").write_text("\n".join(["image,label,split", *rows]) + "\n")
    first = institution(folder).train.y.sum()
    passes.clear()
    (folder / "a" / "manifest.csv").write_text("\n".join(["image,label,split", *rows]).replace(",1,", ",0,") + "\n")
    assert institution(folder).train.y.sum() < first
    assert not passes


def test_a_full_disk_is_one_line_and_nothing_is_left(folder):
    """A file can have no more bytes than the system's limit, as on a disk that is full."""
    institution(folder, "model=cnn", "model.width=8").train.x.sum()  # decoded images lie there
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, limits[1]))
    try:
        with pytest.raises(RunError, match=r"\.images must be written; File too large: raise") as error:
            institution(folder).train  # noqa: B018
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert "\n" not in str(error.value)
    place, forms = kept_features(folder)
    assert not forms
    assert len(list(place.iterdir())) == 2


def fill_cache(begin, encodings, place, task, model):
    plain = FeatureSource.examples

    def counted(source, members):
        with encodings.get_lock():
            encodings.value += 1
        return plain(source, members)

    FeatureSource.examples = counted
    dataset = load(task)
    begin.wait()
    made = featured(dataset, task, encoder_of(model, task), CPU, DecodedImages(place, 1e9))
    assert isinstance(made.train.x, np.memmap)


def test_of_processes_that_begin_together_one_encodes_and_the_others_wait(folder):
    model, task = model_and_task([*CNN, f"task.data_dir={folder / 'a'}"])
    assert begun_together(fill_cache, folder / "kept", task, model) == 1
    assert len(list((folder / "kept").iterdir())) == 2


def test_features_drive_out_no_images_of_which_they_are_made(folder, passes, caplog):
    images, features = 40 * 256, 40 * 8 * 16 * 4
    for _ in range(2):
        passes.clear()
        made = institution(folder, **{"cache-gb": str((images + features - 1) / 1e9)})
        assert len(made.train) < 40 == sum(passes)
        place, forms = kept_features(folder)
        assert not forms
        assert len(list(place.glob("*.images"))) == 1
    assert "features beside decoded images take" in caplog.text


class Own(torch.nn.Module):
    """A user's encoder: it shows a function, and returns half numbers."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.norm, self.change = kind, torch.nn.BatchNorm2d(1), lambda x: x

    def extra_repr(self):
        return str(self.change)

    def forward(self, x):
        return self.norm(x)[:, :, ::2].to(self.kind)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_an_own_encoder_in_half_numbers_that_shows_a_function_is_found_again(tmp_path, passes, kind):
    x = np.random.default_rng(0).integers(0, 256, (10, 1, 16, 16), np.uint8)
    own, task = Examples(x, np.zeros(10, np.int64)), model_and_task(CNN)[1]
    for count in (10, 0):
        passes.clear()
        encoder = Frozen(OrderedDict(own=Own(kind)), torch.zeros(1, 1, 16, 16), alone=True)
        made = featured(Dataset("own", own, own.take(np.arange(0))), task, encoder, CPU, DecodedImages(tmp_path, 1e9))
        assert sum(passes) == count
    assert isinstance(made.train.x, np.memmap)
    with torch.no_grad():
        assert torch.equal(torch.from_numpy(np.array(made.train.x)), encoder(as_input(torch.from_numpy(x))).float())


def test_an_images_features_have_the_same_bits_whatever_passes_with_it():
    """PyTorch's convolutions of other numbers of images differ in the last bits, as resnet18's do."""
    words = ["model=timm", "model.name=resnet18", "model.size=96", "model.train=head", "task.size=32"]
    model, task = model_and_task(words)
    x = np.random.default_rng(0).integers(0, 256, (12, 1, 32, 32), np.uint8)
    source = FeatureSource(task, {"train": Examples(x, np.zeros(12, np.int64))}, encoder_of(model, task), CPU)
    assert source.together > 12
    alone = np.concatenate([source.encoded(x[n : n + 1]) for n in range(12)])
    np.testing.assert_array_equal(alone, source.encoded(x[::-1])[::-1])


def test_changed_images_are_kept_nowhere(folder, passes):
    made = institution(folder, *CNN, "training.augment=flip")
    assert made.train.x.dtype == torch.uint8
    assert not passes
    assert kept_features(folder)[1] == []
