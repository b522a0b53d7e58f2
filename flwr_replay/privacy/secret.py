"""Noise and Poisson masks that nobody outside the institution can draw again.

A key of 32 random bytes is made once and kept in the institution's state directory, readable by its owner only. It is
never sent, and does not derive from the run's seed. Every stream has a key of its own: HMAC-SHA256 of the secret key
over 32 fresh bytes of the operating system's rng and the stream's purpose. The fresh bytes are not kept. So

- a stream is never repeated: not after a crash, nor from a restored backup. No counter must be kept on disk;
- whoever steals the key later cannot draw earlier noise and subtract it from what was released;
- whoever predicts the operating system's rng still lacks the key.

PyTorch's rngs do not serve: the CPU's uses 32 bits of its seed, which can be tried out, and is not cryptographic.
"""

import hmac
import math
import os
import secrets
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from flwr_replay.errors import PrivacyError
from flwr_replay.files.atomic import alone, write_atomic
from flwr_replay.files.disk import there
from flwr_replay.rng import derived_seed

__all__ = ["Stream", "noise_stream", "secret_key"]

KEY = "privacy.key"
AT_ONCE = 32_768  # numbers drawn at a time: they stay in the processor's cache


class Stream:
    """Random numbers in double precision from AES-256 in counter mode.

    Parameters
    ----------
    key : bytes
        32 bytes; equal keys give equal numbers, on the CPU, in the order of the calls.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()

    def words(self, n: int) -> NDArray[np.uint64]:
        """Return n numbers of 64 random bits."""
        drawn = np.empty(n + 2, np.uint64)  # `update_into` wants room for one block more
        self._cipher.update_into(bytes(8 * n), drawn.data.cast("B"))
        return drawn[:n]

    def uniform(self, n: int) -> Tensor:
        """Return n numbers in (0, 1), float64: odd multiples of 2^-53."""
        bits = self.words(n)
        bits >>= np.uint64(12)
        bits |= np.uint64(0x3FF << 52)  # now they are those of a number in [1, 2)
        return torch.from_numpy(bits.view(np.float64)).sub_(1 - 2.0**-53)

    def normal(self, shape: torch.Size) -> Tensor:
        """Return standard normal numbers, float64, by Box and Muller's transform; the largest possible is 8.6."""
        n = shape.numel()
        drawn = torch.empty(n + n % 2, dtype=torch.float64)
        for chunk in torch.split(drawn, AT_ONCE):
            radius, angle = self.uniform(len(chunk)).chunk(2)
            radius, angle = radius.log_().mul_(-2).sqrt_(), angle.mul_(2 * math.pi)
            cosines, sines = chunk.chunk(2)
            torch.cos(angle, out=cosines).mul_(radius)
            torch.sin(angle, out=sines).mul_(radius)
        return drawn[:n].reshape(shape)


def secret_key(folder: Path) -> bytes:
    """Return the institution's key, made at first use.

    Parameters
    ----------
    folder : Path
        Its state directory.

    Raises
    ------
    PrivacyError
        If the key is damaged, or others may read it.
    """
    path = folder / KEY
    if not there(path):
        with alone(folder, wait=True):
            if not there(path):  # no other process has made it meanwhile
                write_atomic(path, secrets.token_bytes(32), mode=0o600)
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise PrivacyError(
            f"{KEY} in the state directory could not be read; {error.strerror}: mend that, and try again"
        ) from None
    with file:
        if os.name == "posix" and os.fstat(file.fileno()).st_mode & 0o077:
            raise PrivacyError(f"only its owner may read {KEY} in the state directory; others can: chmod 600 it")
        key = file.read()
    if len(key) != 32:
        raise PrivacyError(f"{KEY} in the state directory must hold 32 bytes; it holds {len(key)}: remove it")
    return key


def noise_stream(noise: str, folder: Path, *purpose: object) -> Stream:
    """Open a stream for the noise and masks of one training, or for the noise of label counts.

    Parameters
    ----------
    noise : str
        secret: no two calls give the same stream. seeded: the purpose alone gives it, so that tests can repeat a run;
        whoever knows the run's seed can subtract such noise.
    folder : Path
        The institution's state directory.
    *purpose : int or str
        (seed, institution, mechanism, round) or the like.
    """
    meant = str(derived_seed(*purpose)).encode()
    if noise == "seeded":
        return Stream(sha256(meant).digest())
    return Stream(hmac.digest(secret_key(folder), os.urandom(32) + meant, "sha256"))
