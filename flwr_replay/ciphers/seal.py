"""Seals what an institution sends to other institutions, and opens what they send: the server has no key.

The same keys make the masks of `flwr_replay/ciphers/masking.py`, under another label.

    key of a parcel:     32 random bytes, which seal the arrays by ChaCha20-Poly1305
    wrapped for each k': K = HKDF-SHA256(X25519(own private key, pinned public key of k'), salt, both names and keys)
                         ChaCha20-Poly1305 under K of the parcel's key

The head (run, options, kind, sender, receivers, exchange, weight) and the salt are associated data of the body. The
same, the receiver and the SHA-256 of the sealed body are associated data of each wrapped key. So only the pinned sender
can have made a parcel as a receiver sees it: no server, and no other receiver, who knows the parcel's key but not K.

Sources: X25519: RFC 7748. HKDF: RFC 5869. ChaCha20-Poly1305: RFC 8439. The salt is fresh for every parcel, so each key
is used once, with a nonce of zeros.

Not given: forward secrecy. Keys are static, and every parcel is sealed for all pinned institutions, its sender too. Who
records parcels and later gets any one institution's private key opens all of them.
"""

import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from struct import pack as packed

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from flwr.app import Array, ArrayRecord

from flwr_replay.errors import ConfigError, PrivacyError, RefusedError
from flwr_replay.files.atomic import NAME, private_folder, read_text, write_once
from flwr_replay.files.disk import looked
from flwr_replay.memory import remembered
from flwr_replay.wire.sealed import SALT, Head, SealedParcel, joined_body, pack, parted_body, unpack

__all__ = ["KEY", "Opened", "Seal", "line_of", "make_key", "read_pins", "simulated"]

KEY = "seal.key"  # an institution's private key, in its state directory unless its node config names another file
LABEL = b"flwr-replay sealed parcel 1"
MASKS = b"flwr-replay masks of a sum 1"
NONCE = bytes(12)  # every key is used once
LARGEST = 2**31 - 1 - 16  # bytes that ChaCha20-Poly1305 seals at once
DIGITS = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Opened:
    """A parcel that was opened: its head, what it holds, and 64 hexadecimal digits that no other parcel has."""

    head: Head
    body: bytes
    mark: str

    @property
    def arrays(self) -> ArrayRecord:
        """Read the named arrays anew; a WireError if its sender has sealed something else."""
        return parted_body(self.body)


class Seal:
    """An institution's private key, and the public keys that it has pinned.

    `pins` are, by name, the public keys of all institutions with which it exchanges parcels, 64 hexadecimal digits
    each.

    Raises
    ------
    ConfigError
        If its own key is missing there or another, two institutions have one key, or one has no key of X25519.
    """

    def __init__(self, name: str, key: X25519PrivateKey, pins: Mapping[str, str]) -> None:
        public = key.public_key().public_bytes_raw().hex()
        if pins.get(name) != public:
            raise ConfigError(
                f"the pinned keys must have {name}'s own, {public}; they have {pins.get(name, 'none')}: correct the "
                "file of pinned keys"
            )
        if len(set(pins.values())) < len(pins):
            raise ConfigError("every institution has a key of its own; two pinned keys are the same: correct the file")
        self.name, self.key, self.pins = name, key, dict(sorted(pins.items()))
        self.secrets = {other: self._secret(other) for other in self.pins}  # static, and most of the time of a mask

    @property
    def digest(self) -> str:
        """SHA-256 of all pinned names and keys, the same at every institution that has pinned the same."""
        return sha256("".join(f"{name} {key}\n" for name, key in self.pins.items()).encode()).hexdigest()

    def close(
        self, arrays: ArrayRecord, run: str, options: str, kind: str, exchange: int, weight: float
    ) -> ArrayRecord:
        """Seal named arrays for all pinned institutions; refuse them if they are too large."""
        body = joined_body(arrays)
        if len(body) > LARGEST:
            raise RefusedError(f"a sealed parcel has at most {LARGEST:,} bytes; got {len(body):,}: a smaller model")
        head = Head(run, options, kind, self.name, tuple(self.pins), exchange, weight).pack()
        salt, key = secrets.token_bytes(SALT), secrets.token_bytes(32)
        sealed = ChaCha20Poly1305(key).encrypt(NONCE, body, head + salt)
        digest = sha256(sealed).digest()
        wrapped = [
            ChaCha20Poly1305(self._shared(name, salt, sends=True)).encrypt(NONCE, key, _bound(head, salt, name, digest))
            for name in self.pins
        ]
        return pack(SealedParcel(head, salt, wrapped, sealed))

    def open(self, array: Array) -> Opened:
        """Open a parcel that another institution, or this one, has sealed.

        Raises
        ------
        RefusedError
            If its sender's key is not pinned here, it was not sealed for this institution, or anything in it is not as
            it was sealed.
        WireError
            If it is no parcel.
        """
        head, parcel = unpack(array)
        if head.sender not in self.pins:
            raise RefusedError(
                f"parcels come from institutions whose keys are pinned; the key of {head.sender[:40]!r} is not: refused"
            )
        if self.name not in head.receivers:
            raise RefusedError(
                f"a parcel of {head.sender} is sealed for those whose keys {head.sender} has pinned; {self.name} is "
                f"not among them: refused; have {head.sender} pin its key"
            )
        wrapped, digest = parcel.wrapped[head.receivers.index(self.name)], sha256(parcel.body).digest()
        try:
            shared = self._shared(head.sender, parcel.salt, sends=False)
            bound = _bound(parcel.head, parcel.salt, self.name, digest)
            key = ChaCha20Poly1305(shared).decrypt(NONCE, wrapped, bound)
            body = ChaCha20Poly1305(key).decrypt(NONCE, parcel.body, parcel.head + parcel.salt)
        except InvalidTag:
            raise RefusedError(
                f"a parcel must be as {head.sender} has sealed it for {self.name}; this one does not open: it was "
                "altered or misdirected, or sealed with another key than the pinned one: refused"
            ) from None
        return Opened(head, body, sha256(parcel.head + parcel.salt + digest).hexdigest())

    def pair_keys(self, context: bytes, others: Iterable[str]) -> dict[str, bytes]:
        """Return the 32 bytes that this institution shares with each of some others in a context, by their names."""
        salt = sha256(context).digest()
        return {other: self._derived(other, salt, MASKS, sorted((self.name, other))) for other in others}

    def _shared(self, other: str, salt: bytes, sends: bool) -> bytes:
        """Return K for one direction between this institution and another."""
        return self._derived(other, salt, LABEL, (self.name, other) if sends else (other, self.name))

    def _derived(self, other: str, salt: bytes, label: bytes, names: Sequence[str]) -> bytes:
        info = label + b"".join(_text(f"{name} {self.pins[name]}".encode()) for name in names)
        return HKDF(SHA256(), 32, salt, info).derive(self.secrets[other])

    def _secret(self, other: str) -> bytes:
        """Return what X25519 makes of this institution's private key and another's public one."""
        try:
            return self.key.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(self.pins[other])))
        except ValueError:
            raise ConfigError(f"the pinned key of {other} is no public key of X25519: correct the file") from None


def _bound(head: bytes, salt: bytes, receiver: str, body: bytes) -> bytes:
    return _text(head) + salt + _text(receiver.encode()) + body


def _text(data: bytes) -> bytes:
    return packed(">I", len(data)) + data


def make_key(file: Path) -> tuple[X25519PrivateKey, str]:
    """Return the private key in a file, which is made at first use, and its public key.

    A damaged file, or one that others may read, is a PrivacyError.
    """
    text = write_once(file, X25519PrivateKey.generate().private_bytes_raw().hex()).strip()
    if os.name == "posix" and file.stat().st_mode & 0o077:
        raise PrivacyError(f"only its owner may read {file.name}, an institution's key; others can: chmod 600 it")
    if not DIGITS.fullmatch(text):
        raise PrivacyError(f"{file.name} must hold a private key, 64 hexadecimal digits; it does not: restore it")
    key = X25519PrivateKey.from_private_bytes(bytes.fromhex(text))
    return key, key.public_key().public_bytes_raw().hex()


def line_of(name: str, public: str) -> str:
    """Return an institution's line in a file of pinned keys; a ConfigError if it cannot have this name."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"a name has letters, digits, spaces, dots, hyphens and underscores; got {name!r}")
    return f"{name} {public}"


def read_pins(file: Path) -> dict[str, str]:
    """Read a file of pinned keys: a line for each institution, its name and 64 hexadecimal digits; # begins a comment.

    A missing file or a wrong line is a ConfigError.
    """
    if not file.is_file():
        raise ConfigError(f"the file of pinned keys must exist; got {file}: correct seal-peers in --node-config")
    lines = [line.partition("#")[0].strip() for line in read_text(file).splitlines()]
    pins: dict[str, str] = {}
    for line in filter(None, lines):
        name, _, key = line.rpartition(" ")
        name = name.strip()
        if not NAME.fullmatch(name) or not DIGITS.fullmatch(key) or name in pins:
            raise ConfigError(
                f"a line of {file} is an institution's name and its public key of 64 hexadecimal digits, each once; "
                f"got {line[:120]!r}: `flwr-replay deploy seal-key` shows the line"
            )
        pins[name] = key
    return pins


def simulated(root: Path, names: Sequence[str], name: str) -> Seal:
    """Return the seal of a simulated institution: all keys lie in the state directories on this machine."""
    key, _ = make_key(private_folder(root / name) / KEY)
    return Seal(name, key, _simulated_pins(root, tuple(names), looked([root])[root].st_mtime_ns))


@remembered(maxsize=1)  # all institutions of a process have pinned the same; until a state directory comes or goes
def _simulated_pins(root: Path, names: tuple[str, ...], changed: int) -> Mapping[str, str]:
    return {other: make_key(private_folder(root / other) / KEY)[1] for other in names}
