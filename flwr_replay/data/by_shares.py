"""A partition by stated label shares, as tables of papers have them.

Letters: N examples, K institutions, C classes.

    partition=shares 'partition.shares=["0.96 0.04", "0.83 0.17", "0.23 0.77", "0.09 0.91"]'
    partition=shares partition.file=shares.csv        columns institution,<class>,…[,size]

The classes of a list are in the order of their numbers. The columns of a file are named as the classes are, by
`task.class_names` or else by their numbers.
"""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.quoting import digits
from flwr_replay.config.sections import PartitionConfig, require
from flwr_replay.data.dealing import Dealt, Indices
from flwr_replay.data.readers import csv_rows, shortened
from flwr_replay.data.skew import is_continuous
from flwr_replay.errors import ConfigError, DataError, nearest
from flwr_replay.rng import derived_rng

__all__ = ["deal_by_shares"]

ROUNDING = 0.02  # by which the shares of a row may miss 1, as those of a printed table do


def deal_by_shares(
    y: NDArray[Any], config: PartitionConfig, nodes: int, seed: int, classes: Sequence[str] = ()
) -> Dealt:
    """Deal each institution its share of every class.

    The parameters are a `LabelDealer`'s. Of `config`, `size` is the number of examples per institution, 0 for as
    many as possible; a file's column `size` says it for each.

    Returns
    -------
    Dealt
        Counts are the shares' by largest remainders, so they differ from them by less than one. `names` are the
        file's, in its order; empty for a list.

    Raises
    ------
    ConfigError
        For continuous labels, another number of rows or classes, shares that do not sum to 1, or too few examples of
        a class.
    DataError
        For an unreadable file, or a wrong cell of it.
    """
    require(not is_continuous(y), "partition=shares needs classes; got continuous labels: choose partition=ks")
    require(
        bool(config.shares) != bool(config.file),
        "partition=shares needs partition.shares, a list, or partition.file, a table: set one of them",
    )
    values_C, counts_C = np.unique(y, return_counts=True)
    called = [classes[value] if classes else str(value) for value in values_C]
    names, shares_KC, sizes_K = _listed(config) if config.shares else _tabled(Path(config.file), called, len(y))
    require(
        len(shares_KC) == nodes,
        f"partition=shares has a row for each institution; got {len(shares_KC)} for nodes={nodes}: set "
        f"nodes={len(shares_KC)}",
    )
    require(
        shares_KC.shape[1] == len(values_C),
        f"a row of partition.shares has a share for each of {len(values_C)} classes; got {shares_KC.shape[1]}",
    )
    shares_KC = shares_KC / shares_KC.sum(axis=1, keepdims=True)
    if sizes_K is None:
        sizes_K = np.full(nodes, config.size or _largest(shares_KC, counts_C))
    wanted_KC = np.stack([_counts(share_C, size) for share_C, size in zip(shares_KC, sizes_K, strict=True)])
    lacking = np.flatnonzero(wanted_KC.sum(axis=0) > counts_C)
    if len(lacking) or not sizes_K.all():
        c = lacking[0] if len(lacking) else int(counts_C.argmin())
        raise ConfigError(
            f"partition=shares deals each example once; class {called[c]} has {counts_C[c]} examples, and "
            f"{max(wanted_KC[:, c].sum(), 1)} are wanted: at most partition.size={_largest(shares_KC, counts_C)}"
        )
    rng = derived_rng(seed, "partition", "shares")
    dealt: list[list[Indices]] = [[] for _ in range(nodes)]
    for value, wanted_K in zip(values_C, wanted_KC.T, strict=True):
        members = rng.permutation(np.flatnonzero(y == value))
        for shard, taken in zip(dealt, np.split(members, np.cumsum(wanted_K))[:-1], strict=True):
            shard.append(taken)
    return Dealt([np.concatenate(shard) for shard in dealt], names)


def _listed(config: PartitionConfig) -> tuple[tuple[str, ...], NDArray[np.float64], None]:
    rows = []
    for text in config.shares:
        try:
            rows.append([float(digits(word)) for word in text.split()])
        except ValueError:
            raise ConfigError(
                f"a row of partition.shares is numbers with spaces between; got {shortened(text)}"
            ) from None
        _check(rows[-1], f"partition.shares, {shortened(text)}", ConfigError)
    require(
        len({len(row) for row in rows}) == 1,
        f"every row of partition.shares has as many classes; got {', '.join(str(len(row)) for row in rows)}",
    )
    return (), np.asarray(rows), None


def _tabled(
    path: Path, classes: Sequence[str], most: int
) -> tuple[tuple[str, ...], NDArray[np.float64], NDArray[np.int64] | None]:
    rows, names, sizes = [], [], []
    for where, cells in csv_rows(path, ["institution", *classes]):
        if unknown := cells.keys() - {"institution", "size", *classes}:
            raise DataError(f"unknown column {shortened(min(unknown))} in {path}: {nearest(min(unknown), classes)}")
        if not cells["institution"] or cells["institution"] in names:
            raise DataError(
                f"every row must name another institution; got {shortened(cells['institution'])} in {where}"
            )
        try:
            rows.append([float(digits(cells[name])) for name in classes])
            sizes += [int(digits(cells["size"]))] if "size" in cells else []
        except ValueError:
            raise DataError(f"shares must be numbers, sizes whole ones; {where} has others: correct it") from None
        _check(rows[-1], where, DataError)
        names.append(cells["institution"])
        if sizes and not 1 <= sizes[-1] <= most:
            raise DataError(f"size must lie in 1 to {most}, the training examples; got {sizes[-1]} in {where}")
    if not rows:
        raise DataError(f"{path} must have a row for each institution; got none")
    return tuple(names), np.asarray(rows), np.asarray(sizes) if sizes else None


def _check(row: Sequence[float], where: str, kind: type[ConfigError | DataError]) -> None:
    """Refuse shares that are none, or do not sum to 1."""
    if not all(isfinite(share) and share >= 0 for share in row) or abs(sum(row) - 1) > ROUNDING:
        shown = " ".join(f"{share:g}" for share in row)
        raise kind(f"an institution's shares must not be negative and sum to 1; got {shown} in {where}")


def _counts(share_C: NDArray[np.float64], size: int) -> Indices:
    """Divide a size by largest remainders."""
    exact_C = share_C * size
    counts_C = np.floor(exact_C).astype(np.int64)
    counts_C[np.argsort(counts_C - exact_C, kind="stable")[: size - counts_C.sum()]] += 1
    return counts_C


def _largest(shares_KC: NDArray[np.float64], counts_C: Indices) -> int:
    """Find the largest equal size for which no class runs out."""
    needed_C = shares_KC.sum(axis=0)
    size = int(min(counts_C[needed_C > 0] / needed_C[needed_C > 0]))
    while size and (np.stack([_counts(row, size) for row in shares_KC]).sum(axis=0) > counts_C).any():
        size -= 1
    return size
