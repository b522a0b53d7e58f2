"""Latents: packed to travel, and stored memory-mapped at the server, so that their union may exceed its memory."""

import io
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_replay.errors import DamagedError, WireError
from flwr_replay.files.atomic import private_folder, read_json, tally, write_json
from flwr_replay.files.disk import entries, opener, reading, there, writing
from flwr_replay.files.tensors import OF_RUN
from flwr_replay.learning.tasks import Task
from flwr_replay.payloads.fedreplay import Latents
from flwr_replay.wire.bounds import LARGEST, largest

__all__ = [
    "ROWS_TOGETHER",
    "LatentStore",
    "bytes_by_cut",
    "check_chunk",
    "check_reach",
    "on_device",
    "pack",
    "prefetched",
    "rows_per_chunk",
    "shift_each",
    "unpack",
]

AT_ONCE = 2**20  # bytes of latents that are read together, at least one batch
ROWS_TOGETHER = 32  # rows encoded together, always the same ones: their last bits depend on the size of the batch
UPLOAD = {"filled": int, "total": int, "raw-bytes": int}  # keys of upload.json; each array adds its length and checksum
ENVELOPE = 2048  # most bytes of a chunk's names, array headers and statistics


def pack(latents: Tensor, dtype: str) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """Quantise latents of shape (n, ...) to float32, float16 or int8 with one scale per example.

    Returns
    -------
    codes : NDArray
        Shape (n, ...), of the given dtype; float16 saturates at ±65504.
    scales : NDArray[np.float32] | None
        Shape (n,); int8 only: latents ≈ scales * codes, off by at most half a scale.
    """
    values = latents.cpu().numpy()
    if dtype == "int8":
        peaks = np.abs(values).reshape(len(values), -1).max(1)
        scales = (peaks / 127).astype(np.float32)
        scales[scales == 0] = 1
        spread = scales.reshape(-1, *[1] * (values.ndim - 1))
        return np.rint(values / spread).clip(-127, 127).astype(np.int8), scales
    if dtype == "float16":
        return values.clip(-65504, 65504).astype(np.float16), None
    return values.astype(np.float32), None


def unpack(codes: NDArray[Any], scales: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """Undo `pack`, up to its rounding."""
    values = codes.astype(np.float32)
    return values if scales is None else values * scales.reshape(-1, *[1] * (values.ndim - 1))


def bytes_by_cut(parts: Sequence[nn.Module], x_1: Tensor, label_bytes: int, dtype: str) -> dict[str, int]:
    """Return the bytes of one row of an upload, with label and scale, for every stage after which a model can be cut.

    The children of the model's parts are its stages; all but the head, the last, can be the encoder's last. `x_1` is
    one blank example, (1, ...), and `dtype` that of the latents as they travel.
    """
    sizes: dict[str, int] = {}
    training = [part.training for part in parts]
    with torch.inference_mode():
        for name, stage in [child for part in parts for child in part.eval().named_children()][:-1]:
            x_1 = stage(x_1)
            sizes[name] = x_1.numel() * np.dtype(dtype).itemsize + label_bytes + 4 * (dtype == "int8")
    for part, before in zip(parts, training, strict=True):
        part.train(before)
    return sizes


def check_reach(encoder: nn.Module, input_shape: tuple[int, ...] | None, device: torch.device | str) -> None:
    """Refuse an encoder, by `WireError`, before anybody receives it: its latents of noise in [0, 1] are too large.

    Without the shape of an example nothing is tried.
    """
    if input_shape is None:
        return
    noise = torch.rand(ROWS_TOGETHER, *input_shape, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        most = float(encoder.eval()(noise.to(device)).abs().max())
    if not most <= LARGEST:  # NaN fails, too
        raise WireError(f"sent an encoder whose latents of noise reach {most:g}; at most {LARGEST:g} are taken")


def check_chunk(
    name: str,
    chunk: Latents,
    dtype: str,
    views: int,
    fit: int,
    task: Task,
    primary: nn.Module,
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None,
) -> None:
    """Refuse an institution's chunk, by `WireError`, that is not what was asked for.

    Parameters
    ----------
    name : str
        The institution's.
    chunk : Latents
        What it sent.
    dtype, views, fit : str, int, int
        Of its latents; rows for each example; and how many of what is left come at once, 0: any number.
    task : Task
        Whose labels they have.
    primary : nn.Module
        What lies after the cut.
    shapes : tuple or None
        Those of one row's latents and labels; None: what comes first decides, provided that `primary` takes it.
    """
    if chunk.total != chunk.num_examples * views:
        raise WireError(f"an upload has examples times views rows; {name} announces {chunk.total}")
    if chunk.latents.dtype != dtype or (chunk.scales is not None) != (dtype == "int8"):
        raise WireError(f"{name}'s latents must be {dtype}, as asked for; got {chunk.latents.dtype}")
    if not task.accepts(chunk.labels):
        raise WireError(f"{name}'s labels must be the task's, {task}: check its data")
    if shapes and (got := (chunk.latents.shape[1:], chunk.labels.shape[1:])) != shapes:
        raise WireError(f"{name}'s latents and labels must have shapes {shapes}; got {got}")
    if len(chunk.labels) < min(fit, chunk.total - chunk.first):
        raise WireError(f"an upload comes in as few chunks as fit; {name} sent {len(chunk.labels)} rows")
    if shapes:
        return
    try:
        with torch.inference_mode():
            device = next(primary.parameters()).device
            primary.eval()(torch.zeros(1, *chunk.latents.shape[1:], device=device))
    except (RuntimeError, ValueError, IndexError) as error:
        line = " ".join(str(error).split())[:200]
        raise WireError(f"latents must fit the model after the cut; {chunk.latents.shape[1:]}: {line}") from None
    finally:
        primary.train()


def rows_per_chunk(row_values: int, label_bytes: int, dtype: str, chunk_bytes: int) -> int:
    """Return how many examples fit a chunk, with labels and scales; whole groups, if at least one fits.

    One example's latents have `row_values` of this dtype as they travel. Raises `WireError` if not even one fits.
    """
    row_bytes = row_values * np.dtype(dtype).itemsize + label_bytes + 4
    rows = (chunk_bytes - ENVELOPE) // row_bytes
    if rows < 1:
        raise WireError(
            f"strategy.chunk-mb must hold at least one example's latents; got {chunk_bytes / 1e6:g} MB for "
            f"{row_bytes / 1e6:.3g} MB: raise chunk-mb, or choose a deeper cut or a smaller latent-dtype"
        )
    return int(rows if rows < ROWS_TOGETHER else rows - rows % ROWS_TOGETHER)


def shift_each(images: Tensor, reach: int, offsets_B2: Tensor) -> Tensor:
    """Shift each image (B, C, H, W) by its own offset, by at most `reach` pixels; zeros enter at the border.

    Offsets are integers 0 … 2 * reach, vertical and horizontal; `reach` means no shift.
    """
    _, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, (reach,) * 4)
    rows = offsets_B2[:, :1].to(images.device) + torch.arange(height, device=images.device)
    columns = offsets_B2[:, 1:].to(images.device) + torch.arange(width, device=images.device)
    index = torch.arange(len(images), device=images.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


class LatentStore:
    """Latents on the server's disk: one folder of memory-mapped arrays for each institution.

    An institution is used once its upload is complete. A chunk that arrives twice is refused.
    """

    def __init__(self, folder: Path, run: str = "") -> None:
        self.folder, self.run = folder, run
        self.progress: dict[str, dict[str, Any]] = {}
        for meta in (upload / "upload.json" for upload in entries(folder)):
            if not there(meta):
                continue
            progress = read_json(meta, UPLOAD)
            if (of_run := progress.pop(OF_RUN, run)) != run:
                raise self._damaged(meta.parent.name, f"they are of the run {of_run}")
            self.progress[meta.parent.name] = progress
            self._check(meta.parent.name)

    def next_row(self, name: str) -> int | None:
        """Return the next row of an institution's upload; None once it is complete."""
        progress = self.progress.get(name, {"filled": 0, "total": -1})
        return None if progress["filled"] == progress["total"] else progress["filled"]

    def add(self, name: str, chunk: Latents) -> None:
        """Store a chunk on disk.

        Raises
        ------
        WireError
            If it does not begin where the last one ended, is empty, or does not fit the upload's total or form.
        RunError
            If it cannot be written, such as to a full disk.
        """
        progress = self.progress.get(name, {"filled": 0, "total": chunk.total, "raw-bytes": 0})
        last = chunk.first + len(chunk.labels)
        lengths = {len(array) for array in (chunk.latents, chunk.labels, chunk.scales) if array is not None}
        if (chunk.first, chunk.total) != (progress["filled"], progress["total"]) or len(lengths) > 1:
            raise WireError(
                f"{name}'s upload must go on at row {progress['filled']} of {progress['total']}; got rows "
                f"{chunk.first} to {last} of {chunk.total}"
            )
        if not chunk.first < last <= chunk.total:
            raise WireError(
                f"a chunk must hold rows of its upload; {name} sent {chunk.first} to {last} of {chunk.total}"
            )
        done = {"filled": last, "total": chunk.total, "raw-bytes": progress["raw-bytes"] + chunk.raw_bytes}
        arrays = {"latents": chunk.latents, "labels": chunk.labels, "scales": chunk.scales}
        for key, array in arrays.items():
            if array is not None:
                done[key] = self._write(name, key, chunk, array, tuple(progress.get(key, (0, 0))))
        write_json(self.folder / name / "upload.json", {OF_RUN: self.run, **done})
        self.progress[name] = done

    def _write(
        self, name: str, key: str, chunk: Latents, array: NDArray[Any], before: tuple[int, int]
    ) -> tuple[int, int]:
        """Append rows to an .npy file; return its length and checksum so far.

        They are not written by a memory map: on a full disk that would end the process without an error.
        """
        header, path = _header(array.dtype, (chunk.total, *array.shape[1:])), self.folder / name / f"{key}.npy"
        end = len(header) + (chunk.first + len(array)) * array[:1].nbytes
        private_folder(path.parent)
        with writing(path), open(path, "r+b" if chunk.first else "wb", opener=opener()) as file:
            if chunk.first and file.read(len(header)) != header:
                raise WireError(f"{name}'s rows must keep their form; it sent {array.dtype} {array.shape[1:]}")
            file.write(b"" if chunk.first else header)
            file.seek(end - array.nbytes)
            file.write(np.ascontiguousarray(array).data)
            file.truncate()  # an interrupted attempt may have left more
            file.flush()
            os.fsync(file.fileno())
        return tally(path, before, end)

    def rows(self, name: str, first: int, stop: int) -> dict[str, NDArray[Any]]:
        """Return rows `first` to `stop` of an upload that is complete: latents, labels and, of int8, scales."""
        return {key: np.array(array[first:stop]) for key, array in self._open(name).items()}

    @property
    def row_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Shapes of one row's latents and labels in the first upload that is complete; None if there is none."""
        for name in self.complete[:1]:
            maps = self._open(name)
            return maps["latents"].shape[1:], maps["labels"].shape[1:]
        return None

    @property
    def complete(self) -> list[str]:
        """Names of the institutions whose upload is complete, sorted."""
        return sorted(name for name in self.progress if self.next_row(name) is None)

    def reaches(self) -> str:
        """Say whose latents reach furthest, in a line on what to do where the union cannot be trained on."""
        reach = {
            name: math.prod(largest({key: array}) for key, array in self._open(name).items() if key != "labels")
            for name in self.complete
        }
        furthest = max(reach, key=reach.__getitem__)
        others = max((size for name, size in reach.items() if name != furthest), default=0.0)
        return (
            f"latents of {furthest} reach {reach[furthest]:.3g}, all others' {others:.3g}: where they are wrong, "
            f"remove {self.folder / furthest} and resume the run without that institution"
        )

    def __len__(self) -> int:
        return sum(self.progress[name]["total"] for name in self.complete)

    def epoch(
        self, batch_size: int, shuffle: torch.Generator, share: slice = slice(None)
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield max(1, ⌊n/b⌋) batches of the shuffled union: latents (B, ...) float32 and labels (B, ...).

        Of each batch only the rows in `share` are read and yielded.
        """
        maps = [self._open(name) for name in self.complete]
        ends = np.cumsum([len(own["latents"]) for own in maps])
        order, size = torch.randperm(len(self), generator=shuffle).numpy(), min(batch_size, len(self))
        chosen = order[: max(1, len(order) // batch_size) * size].reshape(-1, size)[:, share]
        row_bytes, n = 4 * math.prod(maps[0]["latents"].shape[1:]), chosen.shape[1]
        at_once = max(1, AT_ONCE // (n * row_bytes))  # batches that are read together: of each upload in one piece
        for i in range(0, len(chosen), at_once):
            x, y = _gathered(maps, ends, chosen[i : i + at_once].reshape(-1))
            for k in range(0, len(y), n):
                yield torch.from_numpy(x[k : k + n]), torch.from_numpy(y[k : k + n])

    def _check(self, name: str) -> None:
        """Refuse an upload that is not as it was stored. Uploads of older versions have no checksums."""
        progress = self.progress[name]
        whole = progress["filled"] == progress["total"]  # else the files are shorter than they say
        lengths = {len(array) for array in self._open(name).values()} if whole else {progress["total"]}
        sums = {self.folder / name / f"{key}.npy": tuple(progress[key]) for key in progress.keys() - UPLOAD}
        rows = 0 <= progress["filled"] <= progress["total"] and lengths == {progress["total"]}
        if not rows or any(tally(path, end=kept[0]) != kept for path, kept in sums.items()):
            raise self._damaged(name, "another checksum or length")

    def _open(self, name: str) -> dict[str, NDArray[Any]]:
        try:
            with reading(self.folder / name):
                arrays = {path.stem: np.load(path, mmap_mode="r") for path in entries(self.folder / name, "*.npy")}
            return {"latents": arrays["latents"], "labels": arrays["labels"], **arrays}
        except (ValueError, TypeError, EOFError, KeyError) as error:
            raise self._damaged(name, str(error)) from None

    def _damaged(self, name: str, how: str) -> DamagedError:
        return DamagedError(
            f"{self.folder / name} must hold the latents that {name} uploaded; it is damaged ({how}): remove the "
            "folder, and they are requested again"
        )


def prefetched(batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same batches; a thread reads each of them while the one before it is used."""
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = reader.submit(next, batches, None)
            yield batch


def on_device(batches: Iterator[tuple[Tensor, Tensor]], device: torch.device | str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches on a device; for a GPU they are read ahead and pinned, so that they are copied while it computes.

    On a CPU reading ahead was slower (docs/speed.md).
    """
    if torch.device(device).type == "cuda":
        batches = prefetched((x_B.pin_memory(), y_B.pin_memory()) for x_B, y_B in batches)
    for x_B, y_B in batches:
        yield x_B.to(device, non_blocking=True), y_B.to(device, non_blocking=True)


def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    form = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, form)
    return file.getvalue()


def _gathered(
    maps: Sequence[dict[str, NDArray[Any]]], ends: NDArray[np.int64], chosen: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Return latents and labels of rows of the union; `ends` says where each upload ends in it."""
    x = np.empty((len(chosen), *maps[0]["latents"].shape[1:]), np.float32)
    y = np.empty((len(chosen), *maps[0]["labels"].shape[1:]), maps[0]["labels"].dtype)
    owner = np.searchsorted(ends, chosen, side="right")
    for k in np.unique(owner):
        at, own = np.flatnonzero(owner == k), maps[k]
        rows = chosen[at] - (ends[k - 1] if k else 0)
        x[at] = unpack(own["latents"][rows], own["scales"][rows] if "scales" in own else None)
        y[at] = own["labels"][rows]
    return x, y
