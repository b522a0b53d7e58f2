"""Files of named arrays: what safetensors' own library reads is what was written."""

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from flwr_replay.errors import DamagedError
from flwr_replay.files.tensors import CODES, read_tensors, write_tensors


@pytest.mark.parametrize("dtype", CODES)
def test_every_dtype_comes_back_beside_others(tmp_path, dtype):
    arrays = {
        "a": np.arange(6).astype(dtype).reshape(2, 3),
        "bytes": np.arange(5, dtype=np.uint8),
        "none": np.zeros((0, 4), dtype),
        "one": np.array(1, dtype),
        "w": np.linspace(0, 1, 7),
    }
    write_tensors(tmp_path / "x", arrays)
    read_back = load_file(tmp_path / "x")
    assert read_back.keys() == arrays.keys()
    for name, array in arrays.items():
        assert read_back[name].dtype == array.dtype
        np.testing.assert_array_equal(read_back[name], array)


def test_views_in_any_order_are_written_as_what_they_show(tmp_path):
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    arrays = {"turned": whole.T, "every second": whole[::2, 1::2], "big-endian": whole.astype(">f4")}
    write_tensors(tmp_path / "x", arrays, {"values": "{}"})
    read_back = load_file(tmp_path / "x")
    for name, array in arrays.items():
        np.testing.assert_array_equal(read_back[name], array)
    with safe_open(tmp_path / "x", "numpy") as file:
        assert file.metadata()["values"] == "{}"


def test_what_the_format_does_not_have_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError, match="'name' is <U5"):
        write_tensors(tmp_path / "x", {"name": np.array(["Curie"])})
    assert not list(tmp_path.iterdir())


def test_what_is_read_keeps_the_files_order_so_that_it_is_written_with_the_same_bytes(tmp_path):
    arrays = {f"{key}{i}": np.full(i + 1, i, np.float32) for i in range(9) for key in "zca"}
    write_tensors(tmp_path / "one", arrays)
    read = read_tensors(tmp_path / "one")
    assert list(read) == list(arrays)
    write_tensors(tmp_path / "two", read)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_one_changed_bit_is_damage(tmp_path):
    write_tensors(tmp_path / "x", {"w": np.ones(3)})
    data = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DamagedError, match="its checksum differs"):
        read_tensors(tmp_path / "x")
