"""What the doctor does at institutions and the coordinator: checks in order, certificates, the SuperLink's answer."""

import shutil
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from flwr_replay.deploy.deployment import host_of
from flwr_replay.errors import FlwrReplayError, RunError
from flwr_replay.files.atomic import read_bytes
from flwr_replay.report.progress import shown_bytes

__all__ = ["certificate", "connection", "examined", "free_space", "is_authority", "validity"]

SECONDS = 10  # to wait for the SuperLink's answer
FREE = 10**9  # bytes; below, a disk is nearly full
OFTEN = 30  # days; a certificate that ends sooner is pointed out


def examined(checks: Mapping[str, Callable[[], Iterator[str]]]) -> tuple[bool, str]:
    """Make checks in their order; return whether none found a fault, and a line for each finding."""
    healthy, lines = True, []
    for name, check in checks.items():
        try:
            for line in check():
                lines.append(f"ok  {line}")
        except (FlwrReplayError, OSError) as error:
            healthy = False
            lines.append(f"NO  {name}: {' '.join(str(error).split())}")
    return healthy, "\n".join(lines)


def certificate(file: Path, advice: str) -> x509.Certificate:
    """Read a certificate; a RunError if it is none, or not valid now."""
    try:
        held = x509.load_pem_x509_certificate(read_bytes(file))
    except ValueError:
        raise RunError(f"{file} must be a certificate in PEM: {advice}") from None
    ends, now = held.not_valid_after_utc, datetime.now(UTC)
    if not held.not_valid_before_utc <= now < ends:
        raise RunError(f"{file} is valid until {ends:%Y-%m-%d}, and it is {now:%Y-%m-%d}: {advice}")
    return held


def is_authority(held: x509.Certificate) -> bool:
    """Say whether a certificate may sign others."""
    try:
        return held.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def validity(held: x509.Certificate, advice: str) -> str:
    """Say until when a certificate is valid; with advice if that is soon."""
    ends = held.not_valid_after_utc
    soon = f": soon over, {advice}" if (ends - datetime.now(UTC)).days < OFTEN else ""
    return f"valid until {ends:%Y-%m-%d}{soon}"


def connection(address: str, authority: Path, advice: str, wrong: str) -> str:
    """Say how the SuperLink at HOST:PORT answers.

    Raises
    ------
    RunError
        If nothing answers there, or without a certificate of this authority for that address; if the authority's own
        certificate cannot be read.
    """
    host, port = host_of(address)
    try:
        context = ssl.create_default_context(cafile=str(authority))
    except OSError:
        raise RunError(f"{authority} must be a certificate, by which to know the server; it is none") from None
    try:
        with (
            socket.create_connection((host.strip("[]"), port), timeout=SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host.strip("[]")) as secured,
        ):
            how = secured.version()
    except ssl.SSLCertVerificationError as error:
        raise RunError(
            f"what answers at {address} has no certificate of this study for that address "
            f"({error.verify_message}): {wrong}"
        ) from None
    except ssl.SSLError as error:
        raise RunError(f"what answers at {address} speaks no TLS ({error.reason}): {wrong}") from None
    except OSError as error:
        raise RunError(f"nothing answers at {address} ({error}): {advice}") from None
    return f"connection: {address} answers by {how}, with the certificate of this study"


def free_space(folder: Path, advice: str) -> str:
    """Say how much is free on a folder's disk; a RunError if it is nearly full."""
    free = shutil.disk_usage(folder).free
    if free < FREE:
        raise RunError(f"the disk of {folder} is nearly full, {shown_bytes(free)} are free: {advice}")
    return f"{shown_bytes(free)} are free"
