"""Data looked at before a run: `flwr-replay data show` and `data images`.

A partition is shown as text and as a picture. Test images become PNG files, a folder for each label.

Letters: K institutions, C classes or decile groups.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.sections import TaskConfig
from flwr_replay.data.class_counts import extremes, warnings
from flwr_replay.data.classes import Classes
from flwr_replay.data.datasets import Dataset, Examples
from flwr_replay.data.folder import MODES
from flwr_replay.data.partitions import Partition
from flwr_replay.data.skew import is_continuous, ks_matrix, label_histogram, tv_matrix
from flwr_replay.errors import ConfigError, RunError
from flwr_replay.files.atomic import NAME, make_folder, write_atomic
from flwr_replay.terminal import fitted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["show", "write_images"]

WIDEST = 20  # the most columns of numbers that are legible in a terminal and a heat map
PICTURE = "partition.png"


def show(dataset: Dataset, partition: Partition, out: Path | None = None) -> str:
    """Describe a partition: sizes, label histograms, KS and total variation; of majority, classes that starve.

    With a folder `out`, which is created if missing, `partition.png` is written, and its path stands in the last line.
    Raises `RunError` if it cannot be.
    """
    labels = [dataset.train.labels[indices] for indices in partition.train]
    values, counts_KC = label_histogram(labels)
    if is_continuous(dataset.train.labels):
        names = [f">= {value:.3g}" for value in values]
    else:
        names = [dataset.classes[value] if dataset.classes else str(value) for value in values]
    ks_KK, tv_KK = ks_matrix(labels), tv_matrix(labels)
    used = sum(map(len, partition.train))
    unused = len(dataset.train) - used - partition.dropped
    lines = [
        f"{dataset.name}: {len(partition.names)} institutions, {used} training examples"
        + f", {partition.dropped} left out" * bool(partition.dropped)
        + f", {unused} unused" * bool(unused),
        f"mean pairwise KS {partition.ks:.3f}, mean pairwise total variation {partition.tv:.3f}",
        *extremes(partition.skew),
        *warnings(partition.skew),
    ]
    tables = [_histogram(partition, names, counts_KC)]
    if len(partition.names) <= WIDEST:
        tables += [_matrix("KS", partition, ks_KK), _matrix("total variation", partition, tv_KK)]
    if out is None:
        return "\n".join([*lines, *tables])
    path = make_folder(out, "--out") / PICTURE
    write_atomic(path, _picture(dataset, partition, names, counts_KC, {"KS": ks_KK, "total variation": tv_KK}))
    return "\n".join([*lines, *tables, f"picture: {path}"])


def _histogram(partition: Partition, values: list[str], counts_KC: NDArray[np.int64]) -> str:
    """Tabulate training labels; of many classes, only the five most frequent at each institution."""
    splits = {"train": partition.train, "val": partition.val, "test": partition.test}
    shown = {split: shards for split, shards in splits.items() if shards is not None}
    headings = ["institution", *shown, *(values if len(values) <= WIDEST else ["classes", "most frequent"])]
    rows = []
    for k, name in enumerate(partition.names):
        sizes = [str(len(shards[k])) for shards in shown.values()]
        if len(values) <= WIDEST:
            cells = [str(count) for count in counts_KC[k]]
        else:
            top = np.argsort(-counts_KC[k], kind="stable")[:5]
            most = ", ".join(f"{values[c]}: {counts_KC[k, c]}" for c in top if counts_KC[k, c])
            cells = [str(np.count_nonzero(counts_KC[k])), most]
        rows.append([name, *sizes, *cells])
    return fitted("training labels", headings, rows)


def _matrix(title: str, partition: Partition, matrix_KK: NDArray[np.float64]) -> str:
    numbers = [str(number + 1) for number in range(len(partition.names))]
    rows = [
        [f"{number} {name}", *(f"{value:.2f}" for value in row_K)]
        for number, name, row_K in zip(numbers, partition.names, matrix_KK, strict=True)
    ]
    return fitted(f"{title} between institutions", ["", *numbers], rows)


def _picture(
    dataset: Dataset,
    partition: Partition,
    values: list[str],
    counts_KC: NDArray[np.int64],
    matrices: dict[str, NDArray[np.float64]],
) -> bytes:
    """Draw the stacked histogram and the heat maps, without pyplot, which has global state."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    K, C = counts_KC.shape
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    bars, *maps = figure.subplots(1, 1 + len(matrices), width_ratios=[1.4, *(1 for _ in matrices)])
    palette = colormaps["tab10" if C <= 10 else "viridis"]
    bottom_K = np.zeros(K, np.int64)
    for c in range(C):
        colour = palette(c if C <= 10 else c / (C - 1))
        bars.bar(range(K), counts_KC[:, c], bottom=bottom_K, color=colour, label=values[c])
        bottom_K += counts_KC[:, c]
    bars.set(title=f"{dataset.name}: training examples by label", ylabel="examples")
    if C <= WIDEST:
        bars.legend(title="label", fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    _name_axis(bars, partition, "x")
    for axes, (title, matrix_KK) in zip(maps, matrices.items(), strict=True):
        image = axes.imshow(matrix_KK, vmin=0, vmax=1, cmap="magma")
        mean = partition.ks if title == "KS" else partition.tv
        axes.set(title=f"{title}, mean {mean:.3f}")
        _name_axis(axes, partition, "xy")
        if K <= 12:
            for (i, j), value in np.ndenumerate(matrix_KK):
                shade = "white" if value < 0.6 else "black"
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=shade, fontsize="small")
        figure.colorbar(image, ax=axes, shrink=0.8)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def _name_axis(axes: Axes, partition: Partition, which: str) -> None:
    """Label an axis with the institutions; of very many, matplotlib labels only every n-th."""
    if len(partition.names) > WIDEST:
        return
    short = [name.removeprefix("institution-") for name in partition.names]
    for axis in which:
        getattr(axes, f"set_{axis}ticks")(range(len(short)), short)
        if short != list(partition.names):
            getattr(axes, f"set_{axis}label")("institution")
    if max(map(len, short)) > 4:
        axes.tick_params(axis="x", rotation=90)


def write_images(examples: Examples, task: TaskConfig, count: int, out: Path) -> int:
    """Write the first images as `<label>/<number>.png`, which `flwr-replay predict` reads; return how many.

    `count` is at least 1, and more than there are means all. The folder `out` is created if missing.

    Raises
    ------
    ConfigError
        If the examples are no uint8 images, grey or in colour, with a class each of `task`.
    RunError
        If the folder cannot be written, or has another file of the same name; then nothing is written.
    """
    from PIL import Image

    if task.kind != "classification" or task.channels not in MODES or examples.x.dtype != np.uint8:
        raise ConfigError(f"only images with a class each can be written as PNG files; task={task.name} has others")
    if count < 1:
        raise ConfigError(f"--count must be at least 1; got {count}")
    pictures, classes = dict[Path, bytes](), Classes(task)
    for number, (x_CHW, label) in enumerate(zip(examples.x[:count], examples.y, strict=False)):
        name = classes.names[label]
        name = name if NAME.fullmatch(name) else f"class-{label}"  # a name may be no folder's, a number another's
        file = io.BytesIO()
        Image.fromarray(x_CHW[0] if task.channels == 1 else x_CHW.transpose(1, 2, 0)).save(file, "PNG")
        pictures[out / name / f"{number:05d}.png"] = file.getvalue()
    for path, png in pictures.items():
        if path.exists() and path.read_bytes() != png:
            raise RunError(f"{path} is there already, and is another image: choose another folder")
    for path, png in pictures.items():
        make_folder(path.parent, "DIR")
        write_atomic(path, png)
    return len(pictures)
