"""Mixing matrices: which share of its model each institution sends to which other in a round.

Source: Kalra et al., ProxyFL: Algorithm 1, lines 7-10; section 3.4; Fig. 2. PushSum: Kempe et al. 2003; Assran et al.
2019. Single random cycles: Pennisi et al., FedER.
Idea: A column-stochastic matrix P(t) says how each institution distributes what it has. In addition to θ_k every
institution has a weight w_k, 1 at first, that is distributed in the same way. Dividing by it undoes the bias of an
uneven P.

    at institution k, in round t:
        of each k' ≠ k with P[k, k'] > 0 take  (P[k, k'] w_k' θ_k', P[k, k'] w_k')
        z ← Σ_k' P[k, k'] w_k' θ_k',  w_k ← Σ_k' P[k, k'] w_k',  θ_k ← z / w_k
    which is computed in `flwr_replay/learning/pushsum.py`

Deviations: Line 7 sends the de-biased θ without its weight. That is right while w = 1, as under every topology with a
name here, and wrong otherwise. Multiplied by w as above, Σ_k w_k θ_k and Σ_k w_k are conserved under any P. The paper's
`exponential` is a permutation: institutions swap models and never average them. Without training, θ_k converges to the
mean of the first θ if every institution also keeps a share: the names in -half, and `complete`.

Membership: P(t) is for the K institutions present in round t, sorted by name; index k is the k-th of them. When K
changes, a topology with a name is that of the new K at the same t, and a user's matrix no longer fits. The sum over
those present is conserved: an institution that leaves takes its w with it, one that joins brings w = 1. A lost parcel
is lost with its weight: every θ_k is still an average, but the sum changes.

Legend: K institutions, T matrices, t rounds from 0.
"""

import csv
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.quoting import digits
from flwr_replay.config.sections import one_of, require
from flwr_replay.errors import ConfigError
from flwr_replay.rng import derived_rng

__all__ = ["TOPOLOGIES", "Matrix", "checked", "mixing_matrix", "read_matrices", "receivers"]

Matrix = NDArray[np.float64]

HALF = "-half"  # the same edges; half of everything is kept
TOPOLOGIES = (
    "exponential", "exponential-half", "ring", "ring-half", "random", "random-half", "complete", "none", "file",
)  # fmt: skip
TOLERANCE = 1e-9  # of a column's sum; the paper's condition is exact


def mixing_matrix(topology: str, institutions: int, t: int, seed: int = 0, matrices: Matrix | None = None) -> Matrix:
    """Return the mixing matrix P(t) of the institutions that are present.

    P[k', k] is the share of its model that institution k sends to k'; P[k, k] is the share that k keeps. A single
    institution keeps all.

    Parameters
    ----------
    topology : str
        `exponential`: each sends everything to the one 2^(t mod ⌈log2 K⌉) places further on (Fig. 2);
        `ring`: to the next; `random`: along one K-cycle, drawn uniformly for each round;
        `exponential-half`, `ring-half`, `random-half`: each keeps half and sends half the same way;
        `complete`: 1/K to each, itself included; `none`: each keeps all; `file`: `matrices[t mod T]`.
    institutions : int
        K >= 1, those present in this round; rows and columns are in the order of their names.
    t : int
        The round, from 0.
    seed : int
        The run's seed: `random` depends on seed, round and K alone.
    matrices : Matrix | None
        For `file`: a user's own from `read_matrices`, shape (T, K, K).

    Returns
    -------
    Matrix
        Shape (K, K), float64, column-stochastic.

    Raises
    ------
    ConfigError
        For an unknown name; for `matrices` without `file`, or `file` without `matrices`; for another K.

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
    """Read sender k's column: by receiver, ascending, its share; and the share that stays.

    Examples
    --------
    >>> receivers(mixing_matrix("ring-half", 3, 0), 2)
    ({0: 0.5}, 0.5)
    """
    return {int(to): float(p[to, k]) for to in np.flatnonzero(p[:, k]) if to != k}, float(p[k, k])


def read_matrices(path: Path, institutions: int = 0) -> Matrix:
    """Read a user's own mixing matrices and check them.

    Parameters
    ----------
    path : Path
        A .npy file of one array, a .json file of nested lists, or a .csv file without a header: one (K, K) matrix, or
        T of them, (T, K, K), used in turn over the rounds. A .csv file holds the T matrices one below the other.
    institutions : int
        K; 0: of any number.

    Returns
    -------
    Matrix
        Shape (T, K, K), T >= 1, every column divided by its sum, so that rounding in the file does not add up.

    Raises
    ------
    ConfigError
        If the file is missing or not readable; if a matrix is not square or not K x K; if it has an entry that is
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
    """Check mixing matrices, (T, K, K), as `read_matrices` does; return them with every column divided by its sum.

    `what` is their origin, for error messages; these number the matrix if there may be several, `stacked`.
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
            f"every column of {what} must sum to one, since an institution distributes all it has; "
            f"{place(bad, 'column')} (from 1) sums to {sums[tuple(bad)]:.12g}: column k holds what k keeps and sends, "
            "transpose the matrix if its rows do"
        )
    for bad in np.argwhere(~matrices.any(2)):
        raise ConfigError(
            f"every row of {what} must have a positive entry, since an institution without a share has no model left; "
            f"{place(bad, 'row')} (from 1) is all zeros: let it keep a share or receive one"
        )
    exact: Matrix = matrices / sums[:, None]
    return exact


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
                values = np.array([[float(digits(cell)) for cell in row] for row in csv.reader(text) if row])
        return values.astype(np.float64, casting="same_kind")
    except FileNotFoundError:
        raise ConfigError(f"strategy.topology-file must be a file of mixing matrices; {path} does not exist") from None
    except (OSError, ValueError, TypeError, csv.Error, RecursionError, MemoryError) as error:
        line = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{path} must hold a matrix of numbers; it cannot be read: {line}") from None
