"""Who sends which share of its proxy to whom in a round, and what an institution makes of the shares that arrive.

Source: Kalra et al., ProxyFL: Algorithm 1, lines 7-10; section 3.4; Fig. 2. PushSum: Kempe et al. 2003; Assran et al.
2019. Single random cycles: Pennisi et al., FedER.
Idea: a column-stochastic matrix P(t) says how each institution deals out what it has. Besides θ_k everyone keeps a
weight w_k, 1 at first, that is dealt out alike; dividing by it undoes the bias of an uneven P.

    at institution k, in round t:
        of each k' ≠ k with P[k, k'] > 0 take  (P[k, k'] w_k' θ_k', P[k, k'] w_k')      `parcel`
        z ← Σ_k' P[k, k'] w_k' θ_k'                                                     `mixed`
        w_k ← Σ_k' P[k, k'] w_k'
        θ_k ← z / w_k

Deviations: line 7 sends the de-biased θ without its weight. That is right while w = 1, as it stays under every topology
with a name here, and wrong otherwise; multiplied by w as above, Σ_k w_k θ_k and Σ_k w_k are conserved under any P. The
paper's `exponential` is a permutation: models change places and are never averaged. Without training, θ_k goes to the
mean of the first θ where everyone also keeps a share: the names in -half, and `complete`.

Membership: P(t) is asked for over the K institutions present in round t, sorted by name; index k is the k-th of them.
When K changes, a topology with a name is that of the new K at the same t, and a user's matrix no longer fits. What is
conserved is the sum over those present: who leaves takes its w with it, who joins brings w = 1. A parcel that gets
lost is lost with its weight: every θ_k is still an average, though the sum is then another.

Legend: K institutions, T matrices, t rounds from 0.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config import one_of, require
from flwr_replay.errors import ConfigError, RunError, WireError
from flwr_replay.rng import derived_rng

if TYPE_CHECKING:
    from flwr_replay.wire import StateDict

__all__ = ["TOPOLOGIES", "Matrix", "checked", "mixed", "mixing_matrix", "parcel", "read_matrices", "receivers"]

Matrix = NDArray[np.float64]

HALF = "-half"  # the same edges, half of everything kept
TOPOLOGIES = (
    "exponential", "exponential-half", "ring", "ring-half", "random", "random-half", "complete", "none", "file",
)  # fmt: skip
VANISHED = 1e-12  # a weight w; they are 1 on average
TOLERANCE = 1e-9  # of a column's sum; the paper's condition is exact


def mixing_matrix(topology: str, institutions: int, t: int, seed: int = 0, matrices: Matrix | None = None) -> Matrix:
    """Return the mixing matrix P(t) of the institutions that are present.

    P[k', k] is the share of what it has that institution k sends to k'; P[k, k] is what k keeps. A lone institution
    exchanges nothing.

    Parameters
    ----------
    topology : str
        `exponential`: everyone sends everything to the one 2^(t mod ⌈log2 K⌉) places on (Fig. 2);
        `ring`: to the next; `random`: along one K-cycle, drawn uniformly for each round;
        `exponential-half`, `ring-half`, `random-half`: half of it is kept, the other half goes the same way;
        `complete`: 1/K to everyone, itself included; `none`: everyone keeps all; `file`: `matrices[t mod T]`.
    institutions : int
        K >= 1, those present in this round; rows and columns are theirs in the order of their names.
    t : int
        The round, from 0.
    seed : int
        The run's seed: `random` depends on seed, round and K alone.
    matrices : Matrix | None
        A user's own from `read_matrices`, shape (T, K, K), for `file`.

    Returns
    -------
    Matrix
        Shape (K, K), float64, column-stochastic.

    Raises
    ------
    ConfigError
        For an unknown name; if `matrices` are given without `file`, the other way round, or for another K.

    Examples
    --------
    >>> mixing_matrix("exponential", 3, 1)
    array([[0., 1., 0.],
           [0., 0., 1.],
           [1., 0., 0.]])
    """
    one_of("strategy.topology", topology, TOPOLOGIES)
    require(
        (topology == "file") == (matrices is not None),
        f"strategy.topology=file and strategy.topology-file go together; got topology={topology} "
        f"{'without' if matrices is None else 'with'} a file: give both or neither",
    )
    if matrices is not None:
        _fits(matrices, institutions, "strategy.topology-file")
        turn: Matrix = matrices[t % len(matrices)]
        return turn.copy()
    if institutions == 1 or topology == "none":
        return np.eye(institutions)
    if topology == "complete":
        return np.full((institutions, institutions), 1 / institutions)
    senders = np.arange(institutions)
    graph = topology.removesuffix(HALF)
    if graph == "random":
        cycle = derived_rng(seed, "topology", t).permutation(institutions)
        senders, to = cycle, np.roll(cycle, -1)
    else:
        hops = (institutions - 1).bit_length()  # ⌈log2 K⌉, in integers; 2^(hops - 1) < K, so no hop leads back
        to = (senders + (2 ** (t % hops) if graph == "exponential" else 1)) % institutions
    p = np.zeros((institutions, institutions))
    p[to, senders] = 1
    return (p + np.eye(institutions)) / 2 if topology.endswith(HALF) else p


def receivers(p: Matrix, k: int) -> tuple[dict[int, float], float]:
    """Read a sender's column: who gets which share of it, and what it keeps.

    Parameters
    ----------
    p : Matrix
        Column-stochastic, shape (K, K).
    k : int
        The sender.

    Returns
    -------
    shares : dict[int, float]
        For every other institution that gets a share, ascending, its share.
    kept : float
        The share that stays.

    Examples
    --------
    >>> receivers(mixing_matrix("ring-half", 3, 0), 2)
    ({0: 0.5}, 0.5)
    """
    return {int(to): float(p[to, k]) for to in np.flatnonzero(p[:, k]) if to != k}, float(p[k, k])


def parcel(theta: StateDict, w: float, share: float) -> tuple[StateDict, float]:
    """Return what a receiver makes of what one sender gave away (Algorithm 1, line 7): share * w * θ, and share * w.

    Parameters
    ----------
    theta : StateDict
        The sender's de-biased θ. Floating arrays are multiplied in float64 and cast back; integer arrays travel as
        they are, so that names, shapes and dtypes are the model's.
    w : float
        The sender's weight, > 0.
    share : float
        P[k', k], in (0, 1].
    """
    weight = w * share
    if weight == 1:  # as in a permutation
        return theta, weight
    return {name: _times(array, weight).astype(array.dtype) for name, array in theta.items()}, weight


def mixed(
    theta: StateDict, w: float, kept: float, arrived: Sequence[tuple[StateDict, float]]
) -> tuple[StateDict, float]:
    """Add what arrived to what was kept, and divide by the sum of the weights (Algorithm 1, lines 8-10).

    Parameters
    ----------
    theta : StateDict
        The institution's own de-biased θ, as it was when it sent its parcels.
    w : float
        Its weight, > 0.
    kept : float
        P[k, k], in [0, 1].
    arrived : Sequence[tuple[StateDict, float]]
        The parcels, in the order of the senders' names: the last bits of a sum depend on it.

    Returns
    -------
    theta : StateDict
        De-biased: floating arrays summed and divided in float64, each of its old dtype; integer arrays, such as
        batch counters, are the institution's own.
    w : float
        The new weight: Σ_k' P[k, k'] w_k'.

    Raises
    ------
    WireError
        If a parcel's weight is negative or not finite, or its arrays have other names or shapes.
    RunError
        If the new weight is 0, as nothing was kept and nothing arrived, or below 1e-12: an institution that keeps
        sending more than it gets back; soon w θ would no longer be told from 0 in float32.
    """
    for arrays, weight in arrived:
        if not (isfinite(weight) and weight >= 0):
            raise WireError(f"the weight of a parcel must be finite and not negative; got {weight}")
        shapes, own = ({name: array.shape for name, array in state.items()} for state in (arrays, theta))
        if shapes != own:
            name = sorted(name for name in shapes | own if shapes.get(name) != own.get(name))[0]
            raise WireError(
                f"a parcel must hold the own model's arrays; {name!r} has shape {shapes.get(name)} in the parcel and "
                f"{own.get(name)} here"
            )
    total = w * kept + sum(weight for _, weight in arrived)  # line 9
    if not total >= VANISHED:  # nor NaN
        raise RunError(
            f"an institution's weight must not vanish; with {kept:g} kept and {len(arrived)} parcels it is {total:g}: "
            "choose a topology in which everyone keeps a share and gets as much as it sends, such as exponential-half"
        )
    result = {}
    for name, array in theta.items():
        if not np.issubdtype(array.dtype, np.floating):
            result[name] = array.copy()
            continue
        terms = [_times(array, w * kept)] if kept else []
        terms += [_times(arrays[name], 1.0) for arrays, _ in arrived]
        z = sum(terms[1:], terms[0])  # line 8
        result[name] = np.asarray(z / total, array.dtype)  # line 10
    return result, total


def read_matrices(path: Path, institutions: int = 0) -> Matrix:
    """Read a user's own mixing matrices and check them.

    Parameters
    ----------
    path : Path
        A .npy file of one array, a .json file of nested lists, or a .csv file without a header: one (K, K) matrix, or
        T of them, (T, K, K), taken in turns over the rounds. A .csv file holds the T matrices below each other.
    institutions : int
        K; 0: of any number.

    Returns
    -------
    Matrix
        Shape (T, K, K), T >= 1, every column divided by its sum, so that rounding in the file does not add up.

    Raises
    ------
    ConfigError
        If the file is missing or not readable; if the matrices are not square or not K x K, have an entry that is
        negative or not finite, a column that does not sum to one within 1e-9, or a row of zeros.
    """
    given = _read(path)
    stacked = given.ndim == 3
    if given.ndim == 2 and given.size and path.suffix.lower() == ".csv" and len(given) % given.shape[1] == 0:
        stacked = len(given) > given.shape[1]
        given = given.reshape(-1, given.shape[1], given.shape[1])
    matrices = given[None] if given.ndim == 2 else given
    require(
        matrices.ndim == 3 and matrices.size > 0 and matrices.shape[1] == matrices.shape[2],
        f"{path} must hold one square matrix or several of one size, (K, K) or (T, K, K); got shape {given.shape}: one "
        "row and one column for each institution",
    )
    return checked(matrices, str(path), institutions, stacked)


def checked(matrices: Matrix, what: str, institutions: int = 0, stacked: bool = True) -> Matrix:
    """Check mixing matrices, (T, K, K).

    Parameters
    ----------
    matrices : Matrix
        Where column k of each says how institution k deals out what it has.
    what : str
        Where they come from, for error lines.
    institutions : int
        K; 0: of any number.
    stacked : bool
        Whether error lines say which of several it is.

    Returns
    -------
    Matrix
        Every column divided by its sum, so that rounding does not add up.

    Raises
    ------
    ConfigError
        As `read_matrices` does.
    """
    if institutions:
        _fits(matrices, institutions, what)

    def place(index: NDArray[np.intp], *axes: str) -> str:
        names = ("matrix", *axes) if stacked else axes
        return ", ".join(f"{axis} {i + 1}" for axis, i in zip(names, index[-len(names) :], strict=True))

    for bad in np.argwhere(~(np.isfinite(matrices) & (matrices >= 0))):
        raise ConfigError(
            f"shares in {what} must be finite and not negative; {place(bad, 'row', 'column')} (from 1) is "
            f"{matrices[tuple(bad)]:g}: mend it"
        )
    sums = matrices.sum(1)
    for bad in np.argwhere(np.abs(sums - 1) > TOLERANCE):
        raise ConfigError(
            f"every column of {what} must sum to one, for an institution deals out all it has; "
            f"{place(bad, 'column')} (from 1) sums to {sums[tuple(bad)]:.12g}: column k holds what k keeps and sends, "
            "transpose the matrix if its rows do"
        )
    for bad in np.argwhere(~matrices.any(2)):
        raise ConfigError(
            f"every row of {what} must have a positive entry, for an institution without any share has no model left; "
            f"{place(bad, 'row')} (from 1) is all zeros: let it keep a share or receive one"
        )
    exact: Matrix = matrices / sums[:, None]
    return exact


def _times(array: NDArray[Any], factor: float) -> NDArray[Any]:
    if not np.issubdtype(array.dtype, np.floating):
        return array.copy()
    return np.asarray(np.multiply(array, factor, dtype=np.float64))


def _fits(matrices: Matrix, institutions: int, what: str) -> None:
    size = matrices.shape[1]
    require(
        size == institutions,
        f"{what} must have one row and one column for each institution; got {size} x {size} for {institutions} "
        "institutions: give a matrix of that size, or choose a topology by name, which fits any number",
    )


def _read(path: Path) -> Matrix:
    kind = path.suffix.lower()
    require(
        kind in (".npy", ".json", ".csv"),
        f"a file of mixing matrices must be .npy, .json or .csv; got {path}: save it as one of these",
    )
    try:
        if kind == ".npy":
            with open(path, "rb") as raw:
                values = np.lib.format.read_array(raw, allow_pickle=False)
        elif kind == ".json":
            values = np.array(json.loads(path.read_text("utf-8-sig")))
        else:
            with open(path, newline="", encoding="utf-8-sig") as text:
                values = np.array([[float(cell) for cell in row] for row in csv.reader(text) if row])
        return values.astype(np.float64, casting="same_kind")
    except FileNotFoundError:
        raise ConfigError(f"strategy.topology-file must be a file of mixing matrices; {path} does not exist") from None
    except (OSError, ValueError, TypeError, csv.Error, RecursionError, MemoryError) as error:
        line = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{path} must hold a matrix of numbers; it cannot be read: {line}") from None
