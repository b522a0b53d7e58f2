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
from flwr_replay.files.atomic import write_once

__all__ = ["KEY", "proof_of"]

KEY = "identity.key"


def proof_of(folder: Path, run: str, durable: bool = True) -> str:
    """Return an institution's proof for one run; of any other text, one that only this institution can make.

    Its key is made at first use in its state directory, `folder`; with `durable` it must outlive a loss of power. A
    proof has 64 hexadecimal digits. A damaged key, or one that others may read, is a PrivacyError.
    """
    path = folder / KEY
    key = write_once(path, secrets.token_hex(32), durable)
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise PrivacyError(f"only its owner may read {KEY} in the state directory; others can: chmod 600 it")
    if not re.fullmatch("[0-9a-f]{64}", key):
        raise PrivacyError(f"{KEY} in the state directory must hold 64 hexadecimal digits; it does not: remove it")
    return hmac.digest(bytes.fromhex(key), run.encode(), "sha256").hex()
