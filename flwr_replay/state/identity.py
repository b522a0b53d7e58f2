"""How an institution that returns as another node proves that it took part before.

A key of 32 random bytes is made once and kept in the state directory. Only its owner can read it, and it is never sent.
The proof for a run is HMAC-SHA256 of the key over the run's id: it cannot be used in other runs.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
from pathlib import Path

from flwr_replay.errors import PrivacyError
from flwr_replay.files.once import write_once

__all__ = ["KEY", "proof_of"]

KEY = "identity.key"


def proof_of(folder: Path, run: str, durable: bool = True) -> str:
    """Return an institution's proof for one run; of any other text, one that only this institution can make.

    Parameters
    ----------
    folder : Path
        Its state directory, where the key is made at first use.
    run : str
        The run's id.
    durable : bool
        Whether a new key must outlive a loss of power, as in a deployment.

    Returns
    -------
    str
        64 hexadecimal digits.

    Raises
    ------
    PrivacyError
        If the key is damaged, or others may read it.
    """
    path = folder / KEY
    key = write_once(path, secrets.token_hex(32), durable)
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise PrivacyError(f"only its owner may read {KEY} in the state directory; others can: chmod 600 it")
    if not re.fullmatch("[0-9a-f]{64}", key):
        raise PrivacyError(f"{KEY} in the state directory must hold 64 hexadecimal digits; it does not: remove it")
    return hmac.digest(bytes.fromhex(key), run.encode(), "sha256").hex()
