"""Reading public formats, and one clear line for whatever is wrong with a file."""

from __future__ import annotations

import gzip
import pickle
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

from flwr_replay.config.sections import PartitionConfig, TaskConfig
from flwr_replay.data import load
from flwr_replay.errors import ConfigError, DataError
from flwr_replay.runs.options import resolve

ROOT = Path(__file__).resolve().parents[2]
Task = Callable[..., TaskConfig]


def images(n: int, *shape: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def idx(array: NDArray[np.uint8]) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.asarray(array.shape, ">u4").tobytes() + array.tobytes()


def write_idx(folder: Path, prefix: str, x: NDArray[np.uint8], y: Any, gz: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in (("images-idx3", x), ("labels-idx1", np.asarray(y, np.uint8))):
        data = idx(array)
        path = folder / f"{prefix}-{name}-ubyte{'.gz' if gz else ''}"
        path.write_bytes(gzip.compress(data) if gz else data)


def refused(task: TaskConfig, *words: str) -> None:
    """The error is one line with all these words."""
    with pytest.raises(DataError) as caught:
        load(task)
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert word in line, line


# ----------------------------------------------------------------------------------------------------------- digits


def test_digits_are_whole_scaled_and_always_split_alike(task: Task) -> None:
    from sklearn.datasets import load_digits

    first, second = load(task("digits")), load(task("digits"))
    assert (len(first.train), len(first.test), first.val) == (1438, 359, None)
    assert first.train.x.shape[1:] == (1, 8, 8)
    assert first.train.y.dtype == np.int64
    np.testing.assert_array_equal(first.train.x, second.train.x)
    together = np.concatenate([first.train.x, first.test.x])[:, 0]
    source = np.rint(load_digits().images * 255 / 16).astype(np.uint8)
    np.testing.assert_array_equal(np.unique(together, axis=0), np.unique(source, axis=0))
    assert set(np.unique(together)) <= {round(level * 255 / 16) for level in range(17)}
    assert np.bincount(first.test.y).min() >= 25


def test_labels_beyond_the_classes_and_another_size_are_refused(task: Task) -> None:
    refused(task("digits", classes=9), "0..8", "got 9", "task.classes")
    refused(task("digits", size=28), "1 x 28 x 28", "1 x 8 x 8", "scikit-learn")


# -------------------------------------------------------------------------------------------------------------- idx


@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("inner", ["", "MNIST/raw"])
def test_idx_in_every_layout(tmp_path: Path, task: Task, gz: bool, inner: str) -> None:
    x = images(9, 28, 28)
    write_idx(tmp_path / inner, "train", x[:6], range(6), gz)
    write_idx(tmp_path / inner, "t10k", x[6:], range(3), gz)
    data = load(task("mnist", data_dir=str(tmp_path)))
    np.testing.assert_array_equal(data.train.x[:, 0], x[:6])
    np.testing.assert_array_equal(data.test.x[:, 0], x[6:])
    assert data.train.y.tolist() == list(range(6))
    assert data.train.x.flags.writeable


def test_idx_with_the_test_split_alone_is_divided_in_order(tmp_path: Path, task: Task) -> None:
    write_idx(tmp_path, "t10k", images(10, 28, 28), range(10))
    data = load(task("mnist", data_dir=str(tmp_path)))
    assert data.train.y.tolist() == list(range(8))
    assert data.test.y.tolist() == [8, 9]


def test_fashion_mnist_is_not_taken_from_mnists_folder(tmp_path: Path, task: Task) -> None:
    write_idx(tmp_path / "MNIST" / "raw", "t10k", images(10, 28, 28), range(10))
    refused(task("fashion_mnist", data_dir=str(tmp_path)), "t10k-images-idx3-ubyte", "FashionMNIST")


def test_idx_files_that_are_missing_or_broken(tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    mnist = task("mnist", data_dir=str(tmp_path))
    refused(mnist, "t10k-images-idx3-ubyte", str(tmp_path), "MNIST/raw", "task.data-dir", "task.download=true")
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    refused(task("mnist"), str(tmp_path / "home" / "data"), "task.download=true")

    write_idx(tmp_path, "t10k", images(4, 28, 28), [1, 2, 3])
    refused(mnist, "4 images", "3 labels", "t10k-labels-idx1-ubyte")
    write_idx(tmp_path, "t10k", images(4, 28, 28), [1, 2, 3, 11])
    refused(mnist, "got 11", "example 3", "t10k-labels")
    write_idx(tmp_path, "t10k", images(4, 14, 14), [1, 2, 3, 4])
    refused(mnist, "1 x 28 x 28", "1 x 14 x 14", "t10k-images")
    write_idx(tmp_path, "t10k", images(0, 28, 28), [])
    refused(mnist, "got none", "t10k-images")

    file = tmp_path / "t10k-images-idx3-ubyte"
    whole = idx(images(4, 28, 28))
    file.write_bytes(whole[:-1])
    refused(mnist, str(file), "3136", "got 3135", "truncated")
    file.write_bytes(b"not an idx file at all")
    refused(mnist, str(file), "00000803", b"not ".hex())
    file.write_bytes(b"")
    refused(mnist, str(file), "nothing")
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    refused(mnist, "labels", "t10k-labels-idx1-ubyte")
    file.unlink()
    for broken in (gzip.compress(whole)[:-20], b"no gzip"):
        write_idx(tmp_path, "t10k", images(4, 28, 28), [1, 2, 3, 4], gz=True)
        file.with_name(file.name + ".gz").write_bytes(broken)
        refused(mnist, f"{file}.gz", "complete")


def test_download_only_if_said_and_whole_or_not_at_all(
    tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def mnist(root: str, download: bool) -> None:
        calls.append(root)
        write_idx(Path(root) / "MNIST" / "raw", "t10k", images(5, 28, 28), range(5))
        if len(calls) == 1:
            raise RuntimeError("connection lost")

    monkeypatch.setitem(sys.modules, "torchvision.datasets", SimpleNamespace(MNIST=mnist))
    folder = tmp_path / "new"
    refused(task("mnist", data_dir=str(folder)), "task.download=true")
    assert not calls
    assert not folder.exists()
    refused(task("mnist", data_dir=str(folder), download=True), "connection lost", str(folder))
    assert not list(folder.iterdir())
    assert len(load(task("mnist", data_dir=str(folder), download=True)).train) == 4
    assert [path.name for path in folder.iterdir()] == ["MNIST"]
    load(task("mnist", data_dir=str(folder), download=True))
    assert len(calls) == 2
    with pytest.raises(ConfigError, match="own"):
        load(replace(task("mnist", data_dir=str(tmp_path), download=True), name="own"))


def test_shared_mnist(shared: Path, task: Task) -> None:
    data = load(task("mnist", data_dir=str(shared / "mnist")))
    assert (data.train.x.shape, data.test.x.shape) == ((8000, 1, 28, 28), (2000, 1, 28, 28))
    assert data.train.y[:5].tolist() == [7, 2, 1, 0, 4]


# --------------------------------------------------------------------------------------------------------- CIFAR-10


def write_cifar(folder: Path, per_batch: int = 4) -> NDArray[np.uint8]:
    folder.mkdir(parents=True, exist_ok=True)
    x = images(6 * per_batch, 3, 32, 32)
    for n, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        rows = x[n * per_batch : (n + 1) * per_batch].reshape(per_batch, -1)
        batch = {"data": rows, "labels": [n] * per_batch, "filenames": ["a.png"] * per_batch}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return x


def test_cifar10_batches(tmp_path: Path, task: Task) -> None:
    x = write_cifar(tmp_path / "cifar-10-batches-py")
    for data_dir in (tmp_path, tmp_path / "cifar-10-batches-py"):
        data = load(task("cifar10", data_dir=str(data_dir)))
        np.testing.assert_array_equal(np.concatenate([data.train.x, data.test.x]), x)
        assert data.train.y.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
        assert data.test.y.tolist() == [5] * 4


def test_cifar10_broken(tmp_path: Path, task: Task) -> None:
    cifar = task("cifar10", data_dir=str(tmp_path))
    refused(cifar, "cifar-10-batches-py/test_batch", str(tmp_path), "task.download=true")
    write_cifar(tmp_path)
    batch = tmp_path / "data_batch_3"
    batch.write_bytes(batch.read_bytes()[:500])
    refused(cifar, str(batch), "cannot be read")
    batch.write_bytes(pickle.dumps({"data": [], "other": []}))
    refused(cifar, str(batch), "labels")
    batch.unlink()
    refused(cifar, str(batch), "missing")


def as_python_2(x: NDArray[np.uint8], y: list[int]) -> bytes:
    """Pickle a batch as Python 2's cPickle has pickled the public ones: protocol 2, texts as bytes, with a memo."""

    def texts(*words: bytes) -> bytes:
        return b"".join(b"U" + bytes([len(word)]) + word for word in words)

    shape = b"M" + struct.pack("<H", len(x)) + b"M" + struct.pack("<H", x.size // len(x)) + b"\x86"
    dtype = b"cnumpy\ndtype\nq\x0aU\x02u1K\x00K\x01\x87Rq\x0b(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09"
    state = b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<i", x.size) + x.tobytes() + b"tb"
    labels, names = (
        b"]q\x04(" + b"".join(b"K" + bytes([label]) for label in y) + b"e",
        b"]q\x0c(" + texts(b"a.png") * len(y),
    )
    head = b"\x80\x02}q\x01(" + texts(b"batch_label") + b"q\x02" + texts(b"training batch 1 of 5", b"labels") + labels
    return head + texts(b"data") + array + state + texts(b"filenames") + names + b"eu."


@pytest.mark.parametrize("protocol", [2, 3, 4, "as Python 2"])
@pytest.mark.parametrize("n", [1, 4])
def test_cifar10_batches_of_any_writer(tmp_path: Path, task: Task, protocol: Any, n: int) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    x = write_cifar(folder, n)
    rows, y = x[-n:].reshape(n, -1), list(range(n))
    batches = [{"data": rows, "labels": y, "filenames": ["a.png"] * n}, {b"data": rows, b"labels": y}]
    old = protocol == "as Python 2"
    for data in [as_python_2(rows, y)] if old else [pickle.dumps(batch, protocol=protocol) for batch in batches]:
        assert pickle.loads(data, encoding="bytes" if old else "ASCII")  # it is what Python reads
        (folder / "test_batch").write_bytes(data)
        test = load(task("cifar10", data_dir=str(tmp_path))).test
        np.testing.assert_array_equal(test.x, x[-n:])
        assert test.y.tolist() == y


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"(K\x03U\x01|NNNJ", b"(K\x03U\x01|NNU\x08AAAAAAAAJ", "2 images"),  # ends the process if numpy gets it
        (b"U\x02u1", b"U\x02O8", "array of bytes"),
        (b"U\x02u1", b"U\x02f4", "array of bytes"),
        (b"M\x00\x0c\x86", b"M\x01\x0c\x86", "reshape"),
        (b"cnumpy\ndtype\n", b"cos\nsystem\n", "os.system"),
        (b"cnumpy\ndtype\n", b"cnumpy\nload\n", "numpy.load"),
        (b"q\x01", b"r\xff\xff\xff\xff", "2 images"),  # a memo of 2^32 entries
        (b"U\x04data", b")" + b"\x85" * 200_000, "keys must be texts"),
        (b"]q\x04(K\x00K\x01e", b"]q\x04(G?\xec\xcc\xcc\xcc\xcc\xcc\xcdK\x01e", "BINFLOAT"),
        (b"]q\x04(K\x00K\x01e", b"]q\x04(\x88K\x01e", "whole numbers"),
        (b"]q\x04(K\x00K\x01e", b"U\x02ab", "whole numbers"),
        (b"]q\x04(K\x00K\x01e", b"P9\n", "PERSID"),
    ],
)
def test_a_crafted_batch_is_refused_or_harmless(
    tmp_path: Path, task: Task, old: bytes, new: bytes, message: str
) -> None:
    write_cifar(tmp_path, 2)
    whole = as_python_2(images(2, 3, 32, 32).reshape(2, -1), [0, 1])
    assert old in whole
    (tmp_path / "test_batch").write_bytes(whole.replace(old, new, 1))
    if message == "2 images":
        assert len(load(task("cifar10", data_dir=str(tmp_path))).test) == 2
    else:
        refused(task("cifar10", data_dir=str(tmp_path)), "test_batch", message)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, task: Task) -> None:
    write_cifar(tmp_path)
    target = tmp_path / "made-by-pickle"
    evil = type("Evil", (), {"__reduce__": lambda self: (Path.touch, (target,))})()
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(evil))
    refused(task("cifar10", data_dir=str(tmp_path)), "data_batch_1")
    (tmp_path / "data_batch_1").write_bytes(b"cos\nsystem\n(S'touch " + str(target).encode() + b"'\ntR.")
    refused(task("cifar10", data_dir=str(tmp_path)), "it asks for os.system")
    assert not target.exists()


# --------------------------------------------------------------------------------------------------------- MedMNIST


def medmnist_arrays(*shape: int, n: int = 5) -> dict[str, Any]:
    return {
        f"{split}_{what}": images(n, *shape) if what == "images" else np.arange(n, dtype=np.uint8)[:, None] % 2
        for split in ("train", "val", "test")
        for what in ("images", "labels")
    }


def test_medmnist_grey_and_colour_file_and_folder(tmp_path: Path, task: Task) -> None:
    grey, colour = medmnist_arrays(28, 28), medmnist_arrays(28, 28, 3)
    np.savez(tmp_path / "any.npz", **grey)
    assert len(load(task("medmnist", data_dir=str(tmp_path))).train) == 5  # the only one there
    np.savez(tmp_path / "colour.npz", **{key: value for key, value in colour.items() if "val" not in key})
    with pytest.raises(DataError, match=r"one \.npz file is read; .* has 2: set task\.data-dir=.*any\.npz or another"):
        load(task("medmnist", data_dir=str(tmp_path)))
    np.savez(tmp_path / "medmnist.npz", **grey)
    data = load(task("medmnist", data_dir=str(tmp_path)))
    np.testing.assert_array_equal(data.train.x[:, 0], grey["train_images"])
    assert data.train.y.tolist() == [0, 1, 0, 1, 0]
    assert data.val is not None
    assert len(data.val) == 5
    data = load(task("medmnist", data_dir=str(tmp_path / "colour.npz"), channels=3))
    np.testing.assert_array_equal(data.test.x.transpose(0, 2, 3, 1), colour["test_images"])
    assert data.val is None


def test_medmnist_broken(tmp_path: Path, task: Task) -> None:
    path = tmp_path / "some.npz"
    some = task("medmnist", data_dir=str(path))
    refused(some, "some.npz", str(tmp_path), "task.download=true")
    arrays = medmnist_arrays(28, 28)
    np.savez(path, **arrays)
    whole = path.read_bytes()
    for broken in (whole[:1000], whole[: len(whole) // 2], b"", b"not an npz file"):
        path.write_bytes(broken)
        refused(some, str(path), "truncated")
    np.save(path.with_suffix(".npy"), np.zeros(3))
    path.write_bytes(path.with_suffix(".npy").read_bytes())
    refused(some, str(path))
    path.write_bytes(
        whole.replace(b"PK\x03\x04\x2d\x00\x00", b"PK\x03\x04\x2d\x00\x01").replace(
            b"\x2d\x00\x00\x00\x00\x00", b"\x2d\x00\x01\x00\x00\x00"
        )
    )
    refused(some, str(path), "encrypted")
    np.savez(path, train_images=arrays["train_images"])
    refused(some, str(path), "train_labels")
    np.savez(path, **{**arrays, "train_labels": np.ones((5, 14), np.uint8)})
    refused(some, "(5, 14)", "train_labels", "several labels")
    np.savez(path, **{**arrays, "test_images": images(5, 28, 28, 28)})
    refused(some, "(5, 28, 28, 28)", "test_images")
    np.savez(path, **{**arrays, "train_labels": np.array([[0], [1], [2], [0], [1]])})
    refused(some, "got 2", "example 2", "train_labels")
    np.savez(path, **{**arrays, "val_images": images(4, 28, 28)})
    refused(some, "4 images", "5 labels")
    np.savez(path, **{**arrays, "train_labels": np.array([None] * 5)})
    refused(some, str(path), "another file")
    np.savez(path, **arrays)
    path.write_bytes(whole[:5000] + b"broken" + whole[5006:])
    refused(some, str(path), "download it again")


def test_medmnist_download(tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    def reader(split: str, download: bool, root: str, size: int) -> None:
        assert size == 64
        np.savez(Path(root) / "pathmnist_64.npz", **medmnist_arrays(64, 64, 3))

    package = SimpleNamespace(INFO={"pathmnist": {"python_class": "PathMNIST"}}, PathMNIST=reader)
    monkeypatch.setitem(sys.modules, "medmnist", package)
    path = tmp_path / "data" / "pathmnist_64.npz"
    assert len(load(task("medmnist", data_dir=str(path), download=True, channels=3, size=64)).train) == 5
    assert path.is_file()
    refused(task("medmnist", data_dir=str(tmp_path / "patmnist.npz"), download=True), "did you mean pathmnist?")
    monkeypatch.setitem(sys.modules, "medmnist", None)
    with pytest.raises(ConfigError, match=r"\[medmnist\]|--extra medmnist"):
        load(task("medmnist", data_dir=str(tmp_path / "pathmnist.npz"), download=True))


def test_a_medmnist_file_says_its_own_form(tmp_path: Path, task: Task) -> None:
    x, y = images(20, 12, 12, 3), np.arange(20)[:, None] % 10
    np.savez(tmp_path / "mine.npz", train_images=x, train_labels=y, test_images=x[:9], test_labels=y[:9])
    words = ["task=medmnist", f"task.data-dir={tmp_path / 'mine.npz'}"]
    own_task = resolve([*words, "nodes=2"], ".", "")[1].task
    assert (own_task.channels, own_task.size, own_task.classes) == (3, 12, 10)
    assert resolve([*words, "nodes=2", "classes=12"], ".", "")[1].task.classes == 12
    with pytest.raises(DataError, match=r"got 2 \(example 2 of .*: set task.classes=10, or correct it"):
        load(task("medmnist", data_dir=str(tmp_path / "mine.npz"), channels=3, size=12))


def test_shared_pneumonia(shared: Path, task: Task) -> None:
    data = load(task("medmnist", data_dir=str(shared / "pneumoniamnist.npz")))
    assert np.bincount(data.train.y).tolist() == [388, 3494]
    assert np.bincount(data.test.y).tolist() == [234, 390]
    assert data.val is not None
    assert np.bincount(data.val.y).tolist() == [135, 389]


# ----------------------------------------------------------------------------------------------------------- choices


def test_choices_are_named_as_their_files_and_hold_known_options() -> None:
    for path in (ROOT / "conf" / "task").glob("*.yaml"):
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert set(values) <= set(TaskConfig.__dataclass_fields__), path
        assert ({"train_size", "val_size", "test_size"} <= set(values)) == (values["format"] == "clinical"), path
        assert ("balanced" in values) == (path.stem in ("retina", "isic", "tuberculosis")), path
        values |= {"load": "package.module:function"} if path.stem == "own" else {}
        assert TaskConfig(**{**values, "class_names": tuple(values.get("class_names", ()))}).name == path.stem
    for path in (ROOT / "conf" / "partition").glob("*.yaml"):
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        itself = {"own": "deal", "index": "file"}  # says how many
        needed = {"name", "test", itself.get(path.stem, "size")}
        assert needed <= set(values) <= set(PartitionConfig.__dataclass_fields__), path
        values |= {"shares": tuple(values["shares"])} if "shares" in values else {}
        own = {"deal": "package.module:function"} if path.stem == "own" else {}
        assert PartitionConfig(**{**values, **own}) == PartitionConfig(name=path.stem, **own), path
