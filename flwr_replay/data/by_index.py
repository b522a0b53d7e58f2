"""A partition by a file that says who owns which training example, as benchmarks publish theirs.

    partition=index partition.file=shards.csv       columns index,institution; a row for each example
    partition=index partition.file=shards.json      {"site-1": [0, 7, 12], "site-2": [3, 4]}, or a list of such lists

Indices count the data's own training examples from 0, those too that a run holds out to validate on. Who is in no shard
is left out.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flwr_replay.config.quoting import digits
from flwr_replay.config.sections import PartitionConfig, require
from flwr_replay.data.datasets import Dataset
from flwr_replay.data.dealing import Dealt
from flwr_replay.data.readers import csv_rows, line_of, shortened
from flwr_replay.errors import DataError, refuse_all

__all__ = ["deal_by_index", "listed_shards"]


def deal_by_index(dataset: Dataset, config: PartitionConfig, nodes: int, seed: int) -> Dealt:
    """Deal training examples as `config.file` says, validation examples that were held out of these, too.

    Raises
    ------
    ConfigError
        For another number of institutions.
    DataError
        For a file that cannot be read, an index that is none or is there twice, or a patient with two owners.
    """
    names, shards = listed_shards(config.file)
    held = np.zeros(len(dataset.train), bool) if dataset.held is None else dataset.held
    rule = f"indices in {config.file} count the {len(held):,} training examples of {dataset.name} from 0"
    require(
        len(shards) == nodes,
        f"{config.file} has {len(shards)} institutions; got nodes={nodes}: set nodes={len(shards)}, or leave it out",
    )
    indices = [index for shard in shards for index in shard]
    faults = [
        f"{rule}; got {index:,}{', as if counted from 1' * (index == len(held) and 0 not in indices)}: correct it"
        for index in dict.fromkeys(indices)
        if not 0 <= index < len(held)
    ]
    owners = np.full(len(held), -1)
    for k, index in ((k, index) for k, shard in enumerate(shards) for index in shard if 0 <= index < len(held)):
        if owners[index] >= 0:
            faults.append(f"an example has one owner; index {index} is in {config.file} twice: leave one out")
        owners[index] = k
    if dataset.train.patients is not None:
        owned = zip(dataset.train.patients, owners[~held].tolist(), strict=True)
        first: dict[str, int] = {}
        split = dict.fromkeys(who for who, k in owned if k >= 0 and first.setdefault(who, k) != k)
        faults += [f"a patient's examples are at one institution; those of {who} are at several" for who in split]
    refuse_all(faults, DataError)
    train, val = ([np.flatnonzero(owners[mask] == k) for k in range(nodes)] for mask in (~held, held))
    dropped = int((owners[~held] < 0).sum())
    return Dealt(train, names, dropped, val=None if dataset.held is None else val)


def listed_shards(file: str) -> tuple[tuple[str, ...], list[list[int]]]:
    """Read such a file: return the institutions' names, none for a list of lists, and each one's indices."""
    require(bool(file), "partition=index needs partition.file, a table .csv or a .json: set it")
    path, faults = Path(file).expanduser(), list[str]()
    listed, named = _of_json(path) if path.suffix.lower() == ".json" else (_of_table(path), True)
    shards: dict[str, list[int]] = {name: [] for name in listed}
    for name, where, value in ((name, *place) for name, own in listed.items() for place in own):
        text = value if isinstance(value, str) else json.dumps(value)  # 2.0, true and null are no numbers then
        try:
            shards[name].append(int(digits(text)))
        except ValueError:
            faults.append(f"an index is a whole number from 0; got {shortened(text)} ({where}): correct it")
    if not all(shards) or not shards:
        faults.append(f"every shard in {path} must name its institution; got {'an empty name' if shards else 'none'}")
    refuse_all(faults, DataError)
    return tuple(shards) if named else (), list(shards.values())


def _of_table(path: Path) -> dict[str, list[tuple[str, Any]]]:
    listed: dict[str, list[tuple[str, Any]]] = {}
    for where, cells in csv_rows(path, ["index", "institution"]):
        listed.setdefault(cells["institution"], []).append((where, cells["index"]))
    return listed


def _of_json(path: Path) -> tuple[dict[str, list[tuple[str, Any]]], bool]:
    """Return each institution's indices with their place, and whether institutions are named."""

    def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        if len(read := dict(pairs)) < len(pairs):
            raise ValueError("an institution is there twice")
        return read

    try:
        read = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=once)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} must be JSON, each institution once; it cannot be read ({line_of(error)})") from None
    lists = dict(enumerate(read)) if isinstance(read, list) else read
    if not isinstance(lists, dict) or not all(isinstance(shard, list) for shard in lists.values()):
        raise DataError(f'{path} must be {{"institution": [indices], …}} or a list of such lists; got something else')
    listed = {str(name): [(f"{name} in {path}", index) for index in shard] for name, shard in lists.items()}
    return listed, isinstance(read, dict)
