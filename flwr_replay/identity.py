"""How an institution proves that it is the one that took part before, when it returns as another node.

A key of 32 random bytes is made once and kept in the state directory, readable by its owner only; it is never sent. The
proof for a run is HMAC-SHA256 of the key over the run's id, so that it says nothing of the institution in other runs.
"""

from __future__ import annotations

import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

from flwr_replay.errors import PrivacyError
from flwr_replay.files import write_atomic

__all__ = ["KEY", "proof_of"]

KEY = "identity.key"


def proof_of(folder: Path, run: str) -> str:
    """Return what an institution shows the server of a run.

    Parameters
    ----------
    folder : Path
        Its state directory, where the key is made at first use.
    run : str
        The run's id.

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
    if not path.exists():
        made = folder / f"{KEY}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        write_atomic(made, secrets.token_bytes(32), mode=0o600)
        with suppress(FileExistsError):  # another process of this institution was first: its key stays
            os.link(made, path)
        made.unlink()
    with open(path, "rb") as file:
        if os.name == "posix" and os.fstat(file.fileno()).st_mode & 0o077:
            raise PrivacyError(f"only its owner may read {KEY} in the state directory; others can: chmod 600 it")
        key = file.read()
    if len(key) != 32:
        raise PrivacyError(f"{KEY} in the state directory must hold 32 bytes; it holds {len(key)}: remove it")
    return hmac.digest(key, run.encode(), "sha256").hex()
