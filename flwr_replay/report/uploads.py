"""How large uploads of latents or activations will be beside the raw data, and which cut sends less."""

from __future__ import annotations

from collections.abc import Mapping

from flwr_replay.report.progress import shown_bytes

__all__ = ["RECONSTRUCT", "upload_advice"]

RECONSTRUCT = "Anyone who holds them and the part of the model that computed them may try to reconstruct the images."


def upload_advice(uploads: str, sizes: Mapping[str, int], cut: str, rows: int, raw_bytes: int, but: str) -> str:
    """Compare uploads with the raw data; empty if they are smaller.

    Parameters
    ----------
    uploads : str
        What they are called.
    sizes : Mapping
        For every cut of the model, in order: bytes of one row, its label included.
    cut : str
        The cut of this run.
    rows : int
        Rows of all institutions' uploads.
    raw_bytes : int
        Bytes of all institutions' raw training data.
    but : str
        What a deeper cut costs.

    Examples
    --------
    >>> print(upload_advice("uploads", {"conv1": 1024, "fc": 32}, "conv1", 1000, 64_000, "freezes more"))
    uploads will be 1.02 MB, 16 times the raw data (64 kB): cut=fc sends 32 kB, but freezes more
    >>> upload_advice("uploads", {"conv1": 1024}, "conv1", 1000, 64_000, "")
    'uploads will be 1.02 MB, 16 times the raw data (64 kB); no deeper cut of this model sends less than the raw data'
    >>> upload_advice("uploads", {"conv1": 10}, "conv1", 1000, 64_000, "")
    ''
    """
    total = rows * sizes[cut]
    if not 0 < raw_bytes < total:
        return ""
    times = float(f"{total / raw_bytes:.2g}")
    line = f"{uploads} will be {shown_bytes(total)}, {times:g} times the raw data ({shown_bytes(raw_bytes)})"
    deeper = list(sizes)[list(sizes).index(cut) + 1 :]
    smaller = next((name for name in deeper if rows * sizes[name] <= raw_bytes), "")
    if not smaller:
        return f"{line}; no deeper cut of this model sends less than the raw data"
    return f"{line}: cut={smaller} sends {shown_bytes(rows * sizes[smaller])}, but {but}"
