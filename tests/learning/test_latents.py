"""Latent variables: quantisation, shifts, and the store on the disk."""

import threading
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from flwr_replay.errors import DamagedError, WireError
from flwr_replay.learning.latents import LatentStore, on_device, pack, prefetched, shift_each, unpack
from flwr_replay.payloads.fedreplay import Latents


@settings(max_examples=40)
@given(
    latents=array_shapes(min_dims=1, max_dims=4, max_side=5).flatmap(
        lambda shape: arrays("float32", shape, elements=st.floats(-1e5, 1e5, width=32))
    )
)
def test_rounding_has_bounds(latents):
    assert unpack(*pack(torch.from_numpy(latents), "float32")).tobytes() == latents.tobytes()
    halves = unpack(*pack(torch.from_numpy(latents), "float16"))
    bound = np.maximum(np.abs(latents) * 2.0**-11, 2.0**-25)
    inside = np.abs(latents) <= 65504
    assert (np.abs(halves - latents)[inside] <= bound[inside]).all()
    assert (np.abs(halves[~inside]) == 65504).all()
    codes, scales = pack(torch.from_numpy(latents), "int8")
    assert codes.dtype == np.int8
    peaks = np.abs(latents).reshape(len(latents), -1).max(1)
    errors = np.abs(unpack(codes, scales) - latents).reshape(len(latents), -1).max(1)
    assert (errors <= peaks / 254 * (1 + 1e-4) + 1e-30).all()


def test_a_shift_moves_every_image_by_its_own_offset():
    images = torch.arange(1.0, 3 * 2 * 16 + 1).reshape(3, 2, 4, 4)
    draws = torch.tensor([[1, 1], [0, 2], [2, 1]])
    moved = shift_each(images, 1, draws)
    assert torch.equal(moved[0], images[0])
    assert torch.equal(moved[1, :, 1:, :3], images[1, :, :3, 1:])
    assert not moved[1, :, 0].any()
    assert not moved[1, :, :, 3].any()
    assert torch.equal(moved[2, :, :3], images[2, :, 1:])


# --- the store --------------------------------------------------------------------------------------------------------


def chunk(latents, first, total, scales=None):
    labels = np.arange(first, first + len(latents), dtype=np.int64)
    numbers = {"num_examples": total, "first": first, "total": total, "raw_bytes": 1}
    return Latents(latents=latents, labels=labels, scales=scales, **numbers)


def test_batches_come_from_the_disk_and_memory_stays_bounded(tmp_path):
    rows, values, width = 512, 4096, 64
    union_bytes = 3 * rows * values * 4
    np.unique([0])  # imports numpy.ma, whose memory is not meant
    tracemalloc.start()
    store = LatentStore(tmp_path)
    for k, name in enumerate("abc"):
        for first in range(0, rows, width):
            latents = np.full((width, values), first + rows * k, np.float32)
            store.add(name, chunk(latents, first, rows))
    assert tracemalloc.get_traced_memory()[1] < union_bytes / 8
    del latents
    tracemalloc.reset_peak()
    opened_maps = []
    store._open = lambda name: opened_maps.append(LatentStore._open(store, name)) or opened_maps[-1]
    seen = 0
    for e_B, y_B in store.epoch(32, torch.Generator().manual_seed(0)):
        assert (e_B[:, 0].long() % rows == y_B // width * width).all()
        assert (e_B == e_B[:, :1]).all()
        seen += len(y_B)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seen == 3 * rows
    assert peak < union_bytes / 8
    assert len(opened_maps) == 3
    assert all(isinstance(array, np.memmap) for maps in opened_maps for array in maps.values())


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    step=st.integers(1, 9),
    b=st.integers(1, 30),
    dtype=st.sampled_from(["float32", "float16", "int8"]),
)
def test_batches_are_those_of_the_union_in_memory(tmp_path_factory, sizes, step, b, dtype):
    folder, rng, chunks = tmp_path_factory.mktemp("store"), np.random.default_rng(sum(sizes)), []
    for k, n in reversed(list(enumerate(sizes))):
        values = rng.normal(size=(n, 2, 3)).astype(np.float32)
        codes, scales = pack(torch.from_numpy(values), dtype)
        for first in range(0, n, step):
            cut = slice(first, first + step)
            store = LatentStore(folder)  # as after a restart
            assert store.next_row(f"i{k}") == first
            store.add(f"i{k}", chunk(codes[cut], first, n, None if scales is None else scales[cut]))
        chunks.insert(0, (unpack(codes, scales), np.arange(n)))
    LatentStore(folder).add("incomplete", chunk(codes[:1], 0, 2, None if scales is None else scales[:1]))
    e, y = (np.concatenate(column) for column in zip(*chunks, strict=True))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1)).numpy()
    drawn = list(LatentStore(folder).epoch(b, torch.Generator().manual_seed(1)))
    assert len(drawn) == max(1, len(y) // b)
    size = min(b, len(y))
    for i, (e_B, y_B) in enumerate(drawn):
        rows = order[i * size : (i + 1) * size]
        assert e_B.numpy().tobytes() == e[rows].tobytes()
        assert y_B.tolist() == y[rows].tolist()


def test_a_chunk_that_does_not_go_on_where_the_last_ended_is_refused(tmp_path):
    store, rows = LatentStore(tmp_path), np.zeros((2, 3), np.float32)
    store.add("a", chunk(rows, 0, 6))
    for wrong in (
        chunk(rows, 0, 6),  # again
        chunk(rows, 4, 6),  # a gap
        chunk(rows, 2, 5),  # another total
        chunk(np.zeros((5, 3), np.float32), 2, 6),  # too many
        chunk(rows[:0], 2, 6),  # none: the upload would never end
    ):
        with pytest.raises(WireError, match="rows"):
            store.add("a", wrong)
        assert store.next_row("a") == 2
        assert store.complete == []
    store.add("a", chunk(rows, 2, 6))
    store.add("a", chunk(rows, 4, 6))
    assert store.complete == ["a"]


@pytest.mark.parametrize("share", [slice(0, None, 2), slice(1, None, 2)])
def test_a_share_has_every_batchs_rows_in_the_same_order(tmp_path, share):
    store = LatentStore(tmp_path)
    for name in "ab":
        store.add(name, chunk(np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32), 0, 9))
    whole = store.epoch(5, torch.Generator().manual_seed(0))
    for (e_B, y_B), (own_e, own_y) in zip(
        whole, store.epoch(5, torch.Generator().manual_seed(0), share=share), strict=True
    ):
        assert torch.equal(own_e, e_B[share])
        assert torch.equal(own_y, y_B[share])


def test_another_runs_upload_is_refused(tmp_path):
    rows = np.zeros((2, 3), np.float32)
    LatentStore(tmp_path, "other").add("a", chunk(rows, 0, 2))
    assert LatentStore(tmp_path, "other").complete == ["a"]
    with pytest.raises(DamagedError, match="they are of the run other"):
        LatentStore(tmp_path, "mine")


# --- reading ahead ----------------------------------------------------------------------------------------------------


def counted(n, read, fault=None):
    for i in range(n):
        read.append((i, threading.current_thread()))
        yield torch.full((2, 3), float(i)), torch.tensor([i, i])
    if fault:
        raise fault


def readers(before):
    return [thread for thread in threading.enumerate() if thread not in before]


def test_a_thread_reads_one_batch_ahead_and_no_more():
    read, before = [], threading.enumerate()
    for i, (x_B, y_B) in enumerate(prefetched(counted(5, read))):
        [reader] = readers(before)
        while len(read) < min(i + 2, 5):  # the next one comes although nobody has asked for it
            reader.join(0.01)
        assert len(read) == min(i + 2, 5)
        assert (x_B == i).all()
        assert y_B.tolist() == [i, i]
    assert [k for k, _ in read] == list(range(5))
    assert {thread for _, thread in read} == {reader}
    assert not readers(before)


def test_an_error_of_the_reader_is_the_trainings_and_no_thread_stays():
    before = threading.enumerate()
    ahead = prefetched(counted(2, [], RuntimeError("torn")))
    assert next(ahead)[1].tolist() == [0, 0]
    assert next(ahead)[1].tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="torn"):
        next(ahead)
    stopped = prefetched(counted(5, []))
    next(stopped)
    stopped.close()
    assert not readers(before)


def test_for_a_gpu_batches_are_pinned_by_the_reader_and_copied_beside_the_computation(monkeypatch):
    pinned, moved, here = [], [], threading.current_thread()
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda tensor: pinned.append((id(tensor), threading.current_thread())) or tensor
    )
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *to, **how: moved.append((id(tensor), to, how)) or tensor)
    assert [y_B.tolist() for _, y_B in on_device(counted(3, []), "cuda")] == [[0, 0], [1, 1], [2, 2]]
    assert len(pinned) == 6
    assert here not in {thread for _, thread in pinned}
    assert [number for number, _ in pinned] == [number for number, _, _ in moved]
    assert all(to == ("cuda",) and how == {"non_blocking": True} for _, to, how in moved)


def test_for_a_cpu_batches_are_read_when_they_are_asked_for():
    read = []
    for i, (x_B, y_B) in enumerate(on_device(counted(3, read), "cpu")):
        assert (x_B == i).all()
        assert y_B.tolist() == [i, i]
        assert read[-1] == (i, threading.current_thread())
