"""Partitions of one data set among simulated institutions.

Letters: N examples, K institutions, C classes. A partition holds ascending indices into the data set. Each training
or validation example has at most one owner, each test example exactly one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.sections import PartitionConfig, require
from flwr_replay.data.by_index import deal_by_index
from flwr_replay.data.by_ks import deal_by_ks
from flwr_replay.data.by_majority import deal_by_majority
from flwr_replay.data.by_shares import deal_by_shares
from flwr_replay.data.class_counts import ClassCounts
from flwr_replay.data.datasets import Dataset, Examples
from flwr_replay.data.dealing import Dealt, Indices, LabelDealer, deal_by_dirichlet, deal_by_function
from flwr_replay.data.skew import is_continuous, ks_matrix, label_groups, mean_pairwise, tv_matrix
from flwr_replay.errors import ConfigError, DataError
from flwr_replay.files.atomic import NAME
from flwr_replay.rng import derived_rng

__all__ = ["Partition", "institution_name", "institution_names", "partition", "patients_of", "site_names"]

Dealer = Callable[[Dataset, PartitionConfig, int, int], Dealt]  # from data, options, K and a seed to shards


@dataclass(frozen=True, eq=False)
class Partition:
    """The examples of each institution, and how much the institutions differ.

    Parameters
    ----------
    names : tuple of K str
        The institutions, sorted.
    train, test : tuple of K int64 arrays
        Indices into the data set's splits.
    val : tuple of K int64 arrays, or None
        The same for the validation split, if the data set has one.
    ks, tv : float
        Mean pairwise Kolmogorov-Smirnov statistic and total variation of the training labels, in [0, 1].
    dropped : int
        Training examples left out to reach the KS target (`partition.drop`).
    contrast : float
        See `PartitionConfig`.
    classes : ClassCounts, or None
        For partition=majority: how many examples of each class the institutions have.
    """

    names: tuple[str, ...]
    train: tuple[Indices, ...]
    test: tuple[Indices, ...]
    val: tuple[Indices, ...] | None
    ks: float
    tv: float
    dropped: int
    contrast: float = 0.0
    classes: ClassCounts | None = None

    @property
    def skew(self) -> dict[str, Any]:
        """KS, TV, the number of training examples left out to reach the KS, and the report of `classes`."""
        skew = {"ks": round(self.ks, 6), "tv": round(self.tv, 6), "dropped": self.dropped}
        return skew if self.classes is None else {**skew, "classes": self.classes.report(self.names)}

    def examples(self, dataset: Dataset, k: int) -> Dataset:
        """Return the k-th institution's data set, named after the institution."""
        val = None if self.val is None or dataset.val is None else self._taken(dataset.val, self.val[k], k)
        train, test = self._taken(dataset.train, self.train[k], k), self._taken(dataset.test, self.test[k], k)
        return Dataset(self.names[k], train, test, val)

    def external(self, dataset: Dataset, k: int) -> Examples:
        """Return the test examples of all institutions but the k-th, with each one's contrast."""
        others = [self._taken(dataset.test, own, at) for at, own in enumerate(self.test) if at != k]
        if not others:
            return dataset.test.take(np.arange(0))
        return Examples(np.concatenate([shard.x for shard in others]), np.concatenate([shard.y for shard in others]))

    def _taken(self, examples: Examples, indices: Indices, k: int) -> Examples:
        """Return the k-th institution's examples, with its contrast."""
        own = examples.take(indices)
        if not self.contrast:
            return own
        place = 2 * k / (len(self.names) - 1) - 1 if len(self.names) > 1 else 0.0
        return replace(own, x=scaled_contrast(own.x, 1 + self.contrast * place))


def scaled_contrast(x: NDArray[Any], factor: float) -> NDArray[np.uint8]:
    """Scale every pixel's distance from mid-grey, 127.5; the result is clipped to 0..255."""
    return np.clip(np.rint((x - 127.5) * factor + 127.5), 0, 255).astype(np.uint8)


def institution_name(k: int, nodes: int) -> str:
    """Name the k-th simulated institution, with leading zeros so that names sort as numbers do.

    >>> institution_name(0, 4), institution_name(0, 12)
    ('institution-1', 'institution-01')
    """
    return f"institution-{k + 1:0{len(str(nodes))}d}"


@lru_cache(maxsize=4)  # with every message of a simulation
def institution_names(nodes: int) -> tuple[str, ...]:
    """Name all simulated institutions."""
    return tuple(institution_name(k, nodes) for k in range(nodes))


def partition(dataset: Dataset, config: PartitionConfig, nodes: int, seed: int) -> Partition:
    """Deal a data set to institutions.

    - iid: equal shards of a random order.
    - majority: one class makes up a share p of an institution's data, the rest is drawn from the other classes
      (Kalra et al. 2023, section 4.1); see `by_majority`.
    - ks: with a given mean pairwise KS statistic (Qu et al. 2022, section 4.1); see `by_ks`.
    - shares: stated shares of each class at each institution; see `by_shares`.
    - natural: by the sites that the data name, test and validation examples, too.
    - dirichlet: flwr-datasets' `DirichletPartitioner`; see `dealing`.
    - index: as a file says, held-out validation examples, too; see `by_index`.
    - own: by a function of the user's; see `dealing`.

    Where the data name patients, these are dealt, each with all examples of theirs: a size counts patients then, and
    labels are their most frequent ones.

    Test examples are dealt IID in equal shards. With `config.test="mirror"`, each class (or decile of a continuous
    label) is dealt in the proportions of its training examples. So are validation examples always, since an institution
    has none but of its own mix: who has a tenth of a class's training examples gets a tenth of its validation examples,
    and those of training examples that are nobody's are left out.

    There are K `nodes`. The same seed gives the same partition.

    Raises
    ------
    ConfigError
        For more distinct majors than classes, an unreachable KS, or more examples than there are.
    DataError
        If an institution would have no training or no test examples.
    """
    require(nodes >= 1, f"nodes must be at least 1; got {nodes}")
    require(
        nodes <= len(dataset.train) or config.name == "natural",
        f"every institution needs training examples of its own; got nodes={nodes} for {len(dataset.train)} of "
        f"{dataset.name}: take fewer nodes",
    )
    require(
        not config.contrast or dataset.train.x.dtype == np.uint8,
        f"partition.contrast needs images of bytes; got {dataset.train.x.dtype}: leave it at 0",
    )
    dealt = DEALERS[config.name](dataset, config, nodes, seed)
    names, train, test, val_shards = _checked_names(dealt.names, nodes), dealt.shards, dealt.test, dealt.val
    if test is None:
        test = _shards(dataset.test, "test", dataset.train, train, config, seed)
    if val_shards is None:
        val = dataset.val if dataset.val is not None and len(dataset.val) else None
        val_shards = _shards(val, "val", dataset.train, train, config, seed) if val else None
    shards = {"train": train, "test": test, "val": val_shards or []}
    for split, dealt_K in shards.items():
        for name, shard in zip(names, dealt_K, strict=False):
            if not len(shard) and split != "val":
                remedy = "take fewer nodes or more data"
                if config.name == "natural":  # its nodes are the sites
                    remedy = f"add {split} examples of {name}, or leave it out of the data"
                raise DataError(
                    f"every institution must hold {split} examples; {name} of {nodes} got none with "
                    f"partition={config.name}: {remedy}"
                )
    if nodes > 1 and dataset.train.y.dtype == np.int64 and len(np.unique(dataset.train.y)) < 2:
        raise DataError(
            f"{dataset.name} must hold training examples of at least two classes; all have label {dataset.train.y[0]}: "
            "correct the labels"
        )
    labels = [dataset.train.labels[shard] for shard in train]
    return Partition(
        names=names,
        train=tuple(np.sort(shard) for shard in train),
        test=tuple(np.sort(shard) for shard in test),
        val=None if val_shards is None else tuple(np.sort(shard) for shard in val_shards),
        ks=mean_pairwise(ks_matrix(labels)),
        tv=mean_pairwise(tv_matrix(labels)),
        dropped=dealt.dropped,
        contrast=config.contrast,
        classes=dealt.classes,
    )


# ------------------------------------------------------------------------------------------------ training examples


def _deal_iid(y: NDArray[Any], config: PartitionConfig, nodes: int, seed: int, classes: Sequence[str]) -> Dealt:
    require(
        config.size * nodes <= len(y),
        f"partition.size times nodes must not exceed the {len(y)} training examples; got {config.size} x {nodes}: "
        f"at most partition.size={len(y) // nodes}",
    )
    order = derived_rng(seed, "partition", "iid").permutation(len(y))
    return Dealt(np.array_split(order[: config.size * nodes or len(y)], nodes))


@dataclass(frozen=True, eq=False)
class Patients:
    """What is dealt: P patients, or examples where the data name no patients, or one example of each.

    So nobody's examples are at two institutions.
    """

    labels: NDArray[Any]  # (P,), each patient's: its most frequent class, or the mean of continuous labels
    members: Sequence[Indices] | None  # each patient's examples, ascending; None: patient p has example p alone

    def examples(self, shards: Sequence[Indices]) -> list[Indices]:
        """Return the examples of the patients that were dealt."""
        if self.members is None:
            return list(shards)
        none = np.empty(0, np.int64)
        return [np.concatenate([none, *(self.members[p] for p in shard)]) for shard in shards]


def patients_of(examples: Examples) -> Patients:
    """Return the patients in the order of their first examples."""
    labels = examples.labels
    if examples.patients is None or len(np.unique(examples.patients)) == len(examples):
        return Patients(labels, None)
    _, first, codes = np.unique(examples.patients, return_index=True, return_inverse=True)
    order = np.argsort(codes, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(codes))[:-1])
    members = [members[p] for p in np.argsort(first)]
    mean = is_continuous(labels)
    values = [labels[own].mean() if mean else np.bincount(labels[own]).argmax() for own in members]
    return Patients(np.asarray(values, labels.dtype), members)


def _by_labels(deal: LabelDealer) -> Dealer:
    """Deal patients by their labels, each with all examples; refuse options that count examples of a class."""

    def dealer(dataset: Dataset, config: PartitionConfig, nodes: int, seed: int) -> Dealt:
        patients = patients_of(dataset.train)
        counts = {
            "partition=majority": config.name == "majority",
            "partition.drop": config.name == "ks" and config.drop,
        }
        for option in (option for option, used in counts.items() if used and patients.members is not None):
            raise ConfigError(
                f"{option} counts single examples; these data name patients with several, who are dealt as a whole: "
                "choose another partition, or leave the column patient out"
            )
        dealt = deal(patients.labels, config, nodes, seed, dataset.classes)
        return dealt._replace(shards=patients.examples(dealt.shards))

    return dealer


def _deal_by_site(dataset: Dataset, config: PartitionConfig, nodes: int, seed: int) -> Dealt:
    names = site_names(dataset)
    require(config.size == 0, f"partition=natural takes every example of a site; got partition.size={config.size}")
    require(
        nodes == len(names),
        f"partition=natural has as many institutions as the data have sites, {len(names)}; got nodes={nodes}: "
        f"set nodes={len(names)}",
    )

    def owned(split: Examples) -> list[Indices]:
        return [np.flatnonzero(split.sites == name) for name in names]

    val = owned(dataset.val) if dataset.val else None
    return Dealt(owned(dataset.train), names, test=owned(dataset.test), val=val)


DEALERS: dict[str, Dealer] = {  # by name of the group partition
    "iid": _by_labels(_deal_iid),
    "ks": _by_labels(deal_by_ks),
    "majority": _by_labels(deal_by_majority),
    "shares": _by_labels(deal_by_shares),
    "dirichlet": _by_labels(deal_by_dirichlet),
    "own": _by_labels(deal_by_function),
    "natural": _deal_by_site,
    "index": deal_by_index,
}


def site_names(dataset: Dataset) -> tuple[str, ...]:
    """Return the names of the sites in the order of the data, training examples first.

    Raises
    ------
    ConfigError
        If the data do not name the site of every example.
    """
    if dataset.train.sites is None or dataset.test.sites is None:
        raise ConfigError(
            f"partition=natural needs the site of every example; task={dataset.name} names none: give the manifest a "
            "column and set task.site-column, or choose another partition"
        )
    return tuple(dict.fromkeys(str(site) for site in (*dataset.train.sites, *dataset.test.sites)))


def _checked_names(names: tuple[str, ...], nodes: int) -> tuple[str, ...]:
    for name in names:
        require(
            NAME.fullmatch(name) is not None,
            "an institution's name must be at most 160 letters, digits, spaces, dots, hyphens and underscores, a "
            f"letter or digit first; got {name!r}: rename it where the data name it",
        )
    require(
        not names or len(set(names)) == len(names) == nodes,
        f"a partition must name each of {nodes} institutions, or none; got {', '.join(names)}",
    )
    return names or institution_names(nodes)


# ------------------------------------------------------------------------------------------------- test examples


def _shards(
    held: Examples, split: str, train: Examples, owned: Sequence[Indices], config: PartitionConfig, seed: int
) -> list[Indices]:
    """Deal test or validation examples, each patient's all to the same institution."""
    rng, patients = derived_rng(seed, "partition", split), patients_of(held)
    if split == "test" and config.test == "iid":
        return patients.examples(np.array_split(rng.permutation(len(patients.labels)), len(owned)))
    groups = label_groups(patients.labels, train.labels)
    groups_train = label_groups(train.labels, train.labels)
    shards: list[list[Indices]] = [[np.empty(0, np.int64)] for _ in owned]
    for group in np.unique(groups):
        members = rng.permutation(np.flatnonzero(groups == group))
        owned_K = np.asarray([np.count_nonzero(groups_train[indices] == group) for indices in owned])
        if split == "val":  # one for as many training examples as in the whole set: the rest is nobody's
            whole = max(np.count_nonzero(groups_train == group), 1)
            members = members[: -(-len(members) * owned_K.sum() // whole)]
        if not owned_K.any():  # no institution trains on this class: deal it by size
            owned_K = np.asarray([*map(len, owned)])
        ends = np.cumsum(_apportion(len(members), owned_K, rng))
        for shard, dealt in zip(shards, np.split(members, ends[:-1]), strict=True):
            shard.append(dealt)
    return patients.examples([np.concatenate(shard) for shard in shards])


def _apportion(total: int, weights_K: Indices, rng: np.random.Generator) -> Indices:
    """Divide a count in proportion to weights by largest remainders, with ties at random."""
    # In integers, since floating-point remainders of shares such as 1/3 would differ by rounding only.
    whole_K, remainder_K = np.divmod(total * weights_K.astype(np.int64), weights_K.sum())
    ranked = np.lexsort((rng.permutation(len(weights_K)), -remainder_K))
    whole_K[ranked[: total - whole_K.sum()]] += 1
    return np.asarray(whole_K)
