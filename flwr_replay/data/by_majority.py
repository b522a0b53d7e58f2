"""A partition in which one class makes up most of an institution's data (Kalra et al. 2023, section 4.1).

Letters: N examples, K institutions, C classes.

The rest of an institution's data comes from the other classes, by one of two rules. `as-left`: at random from what the
majors leave. Where these use up most of their classes, hardly anything is left of them. `uniform`: as many of every
other class; counts differ by at most one.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.sections import PartitionConfig, require
from flwr_replay.data.class_counts import ClassCounts
from flwr_replay.data.dealing import Dealt, Indices
from flwr_replay.data.skew import is_continuous
from flwr_replay.rng import derived_rng

__all__ = ["deal_by_majority"]


def deal_by_majority(
    y: NDArray[Any], config: PartitionConfig, nodes: int, seed: int, classes: Sequence[str] = ()
) -> Dealt:
    """Deal each institution a share p of one class, and the rest of its examples from the other classes.

    The parameters are a `LabelDealer`'s. Of `config`, `p` is the share of the major class, `majors` says whether
    two institutions may have the same one, `rest` is the rule for the other classes, and `size` is the number of
    examples per institution, 0 for as many as possible. Of one seed, both rules for the rest have the same majors.

    Returns
    -------
    Dealt
        As many examples for each institution; `classes` counts those of each class.

    Raises
    ------
    ConfigError
        For continuous labels, more distinct majors than classes, or a size without enough examples.
    """
    require(not is_continuous(y), "partition=majority needs classes; got continuous labels: choose partition=ks")
    rng = derived_rng(seed, "partition", "majority")
    values_C, codes, counts_C = np.unique(y, return_inverse=True, return_counts=True)
    C, distinct, uniform = len(values_C), config.majors == "distinct", config.rest == "uniform"
    require(
        not distinct or nodes <= C,
        f"partition.majors=distinct gives every institution a class of its own; got nodes={nodes} and {C} "
        "classes: take fewer nodes, or partition.majors=random",
    )
    majors_K = rng.permutation(C)[:nodes] if distinct else rng.integers(C, size=nodes)
    room = {rest: _largest(counts_C, majors_K, config.p, rest) for rest in ("as-left", "uniform")}
    largest = room[config.rest]
    size = config.size or largest
    require(
        1 <= size <= largest,
        "partition=majority" + " rest=uniform" * uniform + f" with p={config.p} and {nodes} institutions has room for "
        f"{largest} examples each in {len(y)}; got partition.size={config.size}: "
        + (f"at most partition.size={largest}" if largest else "take fewer nodes or another partition.p")
        + ", or partition.rest=as-left" * (max(config.size, 1) <= room["as-left"]),
    )
    major, rest = _sizes(size, config.p)
    if uniform:
        shards = _deal_evenly(codes, _even_counts(counts_C, majors_K, major, rest, rng), rng)
    else:
        shards = _deal_as_left(codes, majors_K, major, rest, rng)
    counts_KC = np.stack([np.bincount(codes[shard], minlength=C) for shard in shards])
    equal, names = rest / max(C - 1, 1), tuple(classes)
    return Dealt(shards, classes=ClassCounts(values_C, counts_KC, majors_K, equal, room["uniform"], names))


def _deal_as_left(codes: Indices, majors_K: Indices, major: int, rest: int, rng: np.random.Generator) -> list[Indices]:
    """Deal the majors; then deal the rest at random from what they leave."""
    K, C = len(majors_K), int(codes.max()) + 1
    held: list[list[Indices]] = [[] for _ in range(K)]
    left = []
    for c in range(C):
        members, used = rng.permutation(np.flatnonzero(codes == c)), 0
        for k in np.flatnonzero(majors_K == c):
            held[k].append(members[used : used + major])
            used += major
        left.append(members[used:])
    pool = rng.permutation(np.concatenate(left))
    # Then swap the examples that an institution got of its own major class.
    owner = np.full(len(pool), -1)
    owner[: K * rest] = np.repeat(np.arange(K), rest)
    major_of = np.where(owner >= 0, majors_K[owner], -1)
    for c in range(C):
        wrong = np.flatnonzero((codes[pool] == c) & (major_of == c))
        # At least as many as `wrong`, or `_largest` would have refused the size.
        partners = rng.choice(np.flatnonzero((codes[pool] != c) & (major_of != c)), len(wrong), replace=False)
        pool[wrong], pool[partners] = pool[partners], pool[wrong]
    return [np.concatenate([*held[k], pool[owner == k]]) for k in range(K)]


def _deal_evenly(codes: Indices, wanted_KC: Indices, rng: np.random.Generator) -> list[Indices]:
    """Deal each institution as many examples of each class as it wants, at random."""
    owner = np.full(len(codes), -1)
    for c, wanted_K in enumerate(wanted_KC.T):
        members = rng.permutation(np.flatnonzero(codes == c))
        owner[members[: wanted_K.sum()]] = np.repeat(np.arange(len(wanted_K)), wanted_K)
    return [np.flatnonzero(owner == k) for k in range(len(wanted_KC))]


def _even_counts(counts_C: Indices, majors_K: Indices, major: int, rest: int, rng: np.random.Generator) -> Indices:
    """Draw how many examples of each class every institution gets, shape (K, C), if the rest is uniform.

    The rest is r = q (C - 1) + e: q of every other class, and one more of e classes. Institutions draw these e one
    after another in a random order. Classes that have one for every institution still to come go first, since a scarce
    class serves a later institution as well. So the last one finds e classes too, as `_largest` has it.
    """
    K, C = len(majors_K), len(counts_C)
    each, more = divmod(rest, max(C - 1, 1))
    wanted_KC = np.full((K, C), each)
    wanted_KC[np.arange(K), majors_K] = major
    spare_C = counts_C - wanted_KC.sum(axis=0)
    to_come_C = K - np.bincount(majors_K, minlength=C)
    for k in rng.permutation(K):
        others = rng.permutation(np.flatnonzero(np.arange(C) != majors_K[k]))
        scarce, none = spare_C[others] < to_come_C[others], spare_C[others] == 0
        drawn = others[np.lexsort((scarce, none))[:more]]
        wanted_KC[k, drawn] += 1
        spare_C[drawn] -= 1
        to_come_C[others] -= 1
    return wanted_KC


def _sizes(size: int, p: float) -> tuple[int, int]:
    major = int(p * size + 0.5)
    return major, size - major


def _largest(counts_C: Indices, majors_K: Indices, p: float, rule: str) -> int:
    """Find the largest size at which majors and rest can be dealt without using an example twice."""
    N, K, C = int(counts_C.sum()), len(majors_K), len(counts_C)
    owners_C = np.bincount(majors_K, minlength=C)

    def too_large(size: int) -> bool:
        major, rest = _sizes(size, p)
        left_C = counts_C - owners_C * major
        if (left_C < 0).any():
            return True
        if rule == "uniform":
            # Each class has q for its takers, the institutions with another major. With at most q + 1 for each taker,
            # all classes together have enough. No other cut of the flow to the takers is smaller: e + 1 classes cut
            # off all of their takers already cut the whole demand.
            each, takers_C = rest // max(C - 1, 1), K - owners_C
            most_C = np.minimum(left_C, (each + 1) * takers_C)
            return bool((left_C < each * takers_C).any() or most_C.sum() < K * rest)
        # Hall's condition: what remains has enough for all institutions' rest; without class c, it has enough for the
        # rest of c's owners.
        others = left_C.sum() - left_C
        return bool(left_C.sum() < K * rest or (others < owners_C * rest).any())

    return bisect_left(range(1, N // K + 1), True, key=too_large)
