"""Codes as bytes: each code takes ⌈log2 K⌉ bits, for K codes in the book; each image's codes fill whole bytes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.errors import WireError

__all__ = ["bits_per_code", "pack_codes", "unpack_codes"]


def bits_per_code(codebook_size: int) -> int:
    """Return ⌈log2 K⌉.

    >>> [bits_per_code(size) for size in (2, 3, 128, 129, 512)]
    [1, 2, 7, 8, 9]
    """
    return (codebook_size - 1).bit_length()


def pack_codes(codes: NDArray[Any], codebook_size: int) -> NDArray[np.uint8]:
    """Pack codes (n, N), integers in [0, K) for K of at least 2; the first bit of a byte is the highest.

    Returns
    -------
    NDArray of uint8
        Shape (n, ⌈N · ⌈log2 K⌉ / 8⌉); unused bits of a row's last byte are zero.

    Raises
    ------
    WireError
        If a code lies outside the codebook.

    Examples
    --------
    >>> pack_codes(np.array([[1, 2, 3]]), codebook_size=8)  # 001 010 011
    array([[ 41, 128]], dtype=uint8)
    """
    _check(codes, codebook_size)
    bits = bits_per_code(codebook_size)
    planes = np.empty((*codes.shape, bits), np.uint8)
    for place in range(bits):
        planes[..., bits - 1 - place] = codes >> place & 1
    return np.packbits(planes.reshape(len(codes), codes.shape[1] * bits), axis=1)


def unpack_codes(packed: NDArray[np.uint8], codes_per_image: int, codebook_size: int) -> NDArray[np.int64]:
    """Undo `pack_codes`: return codes (n, N).

    Raises
    ------
    WireError
        If rows have another length, or hold a code outside the codebook.
    """
    bits = bits_per_code(codebook_size)
    expected = -(-codes_per_image * bits // 8)
    if packed.ndim != 2 or packed.shape[1] != expected or packed.dtype != np.uint8:
        raise WireError(
            f"{codes_per_image} codes of {bits} bits take {expected} bytes an image; got {packed.dtype} of shape "
            f"{packed.shape}: use the same generator.* and task.size everywhere"
        )
    flat = np.unpackbits(packed, axis=1, count=codes_per_image * bits)
    planes = flat.reshape(len(packed), codes_per_image, bits)
    codes = np.zeros((len(packed), codes_per_image), np.int64)
    for place in range(bits):
        codes |= planes[..., bits - 1 - place].astype(np.int64) << place
    _check(codes, codebook_size)
    return codes


def _check(codes: NDArray[Any], codebook_size: int) -> None:
    if codes.size and not (codes.min() >= 0 and codes.max() < codebook_size):
        raise WireError(
            f"a code must lie in 0 .. {codebook_size - 1}; got {codes.min()} to {codes.max()}: use the same "
            "generator.codes everywhere"
        )
