"""A partition with a given skew: the mean pairwise Kolmogorov-Smirnov statistic of the institutions' labels.

A random share of the examples is sorted by label and dealt in K consecutive runs. The rest is dealt IID. If none are
sorted, the institutions differ by chance only. If all are sorted, they differ as much as equal sizes allow. Bisection
finds the share.

The largest possible skew depends on the labels: with a rare class, most runs have the same labels. `partition.drop`
then leaves out examples of the most frequent class, as few as needed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.sections import PartitionConfig, require
from flwr_replay.data.dealing import Dealt, Indices
from flwr_replay.data.skew import is_continuous, ks_of_counts, mean_pairwise
from flwr_replay.errors import ConfigError
from flwr_replay.rng import derived_rng

__all__ = ["deal_by_ks"]

TOLERANCE = 0.02  # between achieved and target KS
DRAWS = 8  # random orders to try: with few examples, some orders step over the target
CAPS = 2048  # coarse steps in the search for the fewest examples to drop


def deal_by_ks(y: NDArray[Any], config: PartitionConfig, nodes: int, seed: int, classes: Sequence[str] = ()) -> Dealt:
    """Deal examples so that the mean pairwise KS statistic is `config.ks`, within 0.02.

    The parameters are a `LabelDealer`'s. Of `config`, `drop` allows leaving out examples of the most frequent
    class, and `size` is the number of examples per institution, 0 for as many as possible.

    Returns
    -------
    Dealt
        Sizes differ by at most one; `dropped` counts the examples left out to reach the target.

    Raises
    ------
    ConfigError
        If the target cannot be reached; the error states the possible range.
    """
    require(nodes >= 2, "partition=ks compares institutions two by two; got nodes=1: choose partition=iid")
    require(not (config.drop and is_continuous(y)), "partition.drop=true needs classes; got continuous labels")
    rng = derived_rng(seed, "partition", "ks")
    values, codes, counts_C = np.unique(y, return_inverse=True, return_counts=True)
    kept, dropped = np.arange(len(y)), 0
    if config.drop:
        cap, _ = _cap(counts_C, nodes, config.ks)
        members = [rng.permutation(np.flatnonzero(codes == c))[:cap] for c in range(len(values))]
        kept = np.sort(np.concatenate(members))
        dropped = len(y) - len(kept)
    require(
        nodes <= len(kept) and config.size * nodes <= len(kept),
        f"partition=ks deals {len(kept)} training examples"
        + f" ({dropped} dropped)" * bool(dropped)
        + f" to {nodes} institutions; got partition.size={config.size}: at most partition.size={len(kept) // nodes}",
    )
    total = config.size * nodes or len(kept)
    nearest, low, high = np.inf, 1.0, 0.0
    for _ in range(DRAWS):
        order = rng.permutation(kept)[:total]

        def achieved(share: int, order: Indices = order) -> float:
            shards = _deal(order, codes, share, nodes)
            counts_KC = np.stack([np.bincount(codes[shard], minlength=len(values)) for shard in shards])
            return mean_pairwise(ks_of_counts(counts_KC))

        share, ks = _bisect(achieved, config.ks, total)
        if abs(ks - config.ks) <= TOLERANCE:
            return Dealt(_deal(order, codes, share, nodes), dropped=dropped)
        nearest = ks if abs(ks - config.ks) < abs(nearest - config.ks) else nearest
        low, high = min(low, achieved(0)), max(high, achieved(total))
    raise ConfigError(_unreachable(config, nodes, low, high, nearest, counts_C if not is_continuous(y) else None))


def _deal(order: Indices, codes: Indices, share: int, nodes: int) -> list[Indices]:
    """Deal the first `share` examples of an order in sorted runs, the rest in order; sizes differ by at most one."""
    by_label = order[:share][np.argsort(codes[order[:share]], kind="stable")]
    runs = np.array_split(by_label, nodes)
    sizes = [len(shard) for shard in np.array_split(order, nodes)]
    ends = np.cumsum([size - len(run) for size, run in zip(sizes, runs, strict=True)])
    rest = np.split(order[share:], ends[:-1])
    return [np.concatenate(pair) for pair in zip(runs, rest, strict=True)]


def _bisect(achieved: Callable[[int], float], target: float, total: int) -> tuple[int, float]:
    """Find the number of sorted examples with the KS nearest to the target; apart from chance, KS grows with it."""
    low, high = 0, total
    by_count = {0: achieved(0), total: achieved(total)}
    while high - low > 1 and by_count[0] < target < by_count[total]:
        middle = (low + high) // 2
        by_count[middle] = achieved(middle)
        low, high = (middle, high) if by_count[middle] < target else (low, middle)
    share = min(by_count, key=lambda share: abs(by_count[share] - target))
    return share, by_count[share]


def _most(counts_C: Indices, nodes: int) -> float:
    """Compute the KS if all examples are sorted and dealt in equal runs, the largest for equal sizes."""
    sizes = np.full(nodes, counts_C.sum() // nodes)
    sizes[: counts_C.sum() % nodes] += 1
    ends_K, ends_C = np.cumsum(sizes)[:, None], np.cumsum(counts_C)[None]
    overlap_KC = np.minimum(ends_K, ends_C) - np.maximum(ends_K - sizes[:, None], ends_C - counts_C)
    return mean_pairwise(ks_of_counts(np.maximum(overlap_KC, 0)))


def _cap(counts_C: Indices, nodes: int, target: float) -> tuple[int, float]:
    """Find the highest cap on a class's examples that allows the target, and the KS that it allows.

    If no cap allows the target, return the cap that comes nearest.
    """
    top = int(counts_C.max())
    step = max(1, top // CAPS)
    best = (top, _most(counts_C, nodes))
    for cap in range(top, 0, -step):
        kept_C = np.minimum(counts_C, cap)
        if kept_C.sum() < nodes:
            break
        if (most := _most(kept_C, nodes)) > best[1] + 1e-12:
            best = (cap, most)
        if best[1] >= target:
            break
    for cap in range(min(best[0] + step - 1, top), best[0], -1):
        if (most := _most(np.minimum(counts_C, cap), nodes)) >= min(target, best[1]):
            return cap, most
    return best


def _unreachable(
    config: PartitionConfig, nodes: int, low: float, high: float, nearest: float, counts_C: Indices | None
) -> str:
    line = f"the mean KS between {nodes} institutions lies in {low:.2f}-{high:.2f} here; got partition.ks={config.ks}: "
    if config.ks < low:
        return line + "choose partition=iid, or more examples"
    if config.ks <= high:
        return line + f"so few examples come no nearer than {nearest:.3f}; set partition.ks={nearest:.3f}"
    if counts_C is not None and not config.drop:
        cap, most = _cap(counts_C, nodes, config.ks)
        if most > high + TOLERANCE:
            share = f"{np.maximum(counts_C - cap, 0).sum()} of {counts_C.sum()} examples"
            return line + f"lower it, or set partition.drop=true, which reaches {most:.2f} by leaving out {share}"
    return line + "lower it"
