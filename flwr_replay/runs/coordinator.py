"""Checks of a deployment from the coordinator's folder, as `flwr-replay deploy init` wrote it: what is wrong.

What the SuperLink knows it is asked by Flower's own `flwr supernode list` and `flwr list`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from flwr_replay.errors import ConfigError, RunError
from flwr_replay.files.atomic import read_bytes, read_text
from flwr_replay.runs.certificates import CA, SERVER, SERVER_KEY
from flwr_replay.runs.examining import certificate, connection, examined, is_authority, validity
from flwr_replay.runs.superlink import flower

__all__ = ["examine_coordinator"]

ANEW = "make the deployment's folders anew with `flwr-replay deploy init`"
STRANGER = "stop what runs there, and start ./superlink.sh"
SECONDS = 60  # for an answer of Flower's `flwr`
FREE_GB = 1  # below, a disk is nearly full
ADDRESS = re.compile(r'^address = "(.+)"$', re.MULTILINE)
NAMES = re.compile(r"^for name in (.+); do$", re.MULTILINE)


def examine_coordinator(folder: Path) -> tuple[bool, str]:
    """Check a deployment.

    Parameters
    ----------
    folder : Path
        The coordinator's, as `deploy init` wrote it.

    Returns
    -------
    bool
        Whether nothing is wrong.
    str
        A line for each finding.

    Raises
    ------
    ConfigError
        If it is no coordinator's folder.
    """
    found = []
    for script, form in (("connect.sh", ADDRESS), ("register.sh", NAMES)):
        written = form.search(read_text(folder / script)) if (folder / script).is_file() else None
        if not written:
            raise ConfigError(f"--deployment must be a coordinator's folder, as `deploy init` writes it; got {folder}")
        found.append(written[1])
    address, names = found[0], found[1].split()
    return examined(
        {
            "certificates": partial(_certificates, folder),
            "keys": partial(_keys, folder, names),
            "connection": partial(_connection, folder, address),
            "SuperNodes": partial(_supernodes, folder, names),
            "runs": partial(_runs, folder),
            "run directories": partial(_directories, folder),
            "disk": partial(_disk, folder),
        }
    )


def _certificates(folder: Path) -> Iterator[str]:
    place = folder / "certificates"
    authority, server = (certificate(place / name, ANEW) for name in (CA, SERVER))
    try:
        server.verify_directly_issued_by(authority)
        key: Any = serialization.load_pem_private_key(read_bytes(place / SERVER_KEY), None)
    except (ValueError, TypeError, InvalidSignature):
        raise RunError(
            f"{SERVER} must be signed by {CA}, and {SERVER_KEY} a private key; they are not: {ANEW}"
        ) from None
    if not is_authority(authority) or key.public_key() != server.public_key():
        raise RunError(f"{SERVER_KEY} must be the key of {SERVER}, and {CA} an authority's; they are not: {ANEW}")
    if os.name == "posix" and (place / SERVER_KEY).stat().st_mode & 0o077:
        raise RunError(f"{place / SERVER_KEY} must be its owner's only: chmod 600 it")
    addresses = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    yield f"certificates: {validity(server, ANEW)}, for {', '.join(str(one.value) for one in addresses)}"


def _keys(folder: Path, names: Sequence[str]) -> Iterator[str]:
    waiting = [name for name in names if not (folder / "keys" / f"{name}.registered").exists()]
    if waiting:
        came = [name for name in waiting if (folder / "keys" / f"{name}.pub").exists()]
        what = "run ./register.sh" if came == waiting else "put the clinic's file into keys/, then ./register.sh"
        raise RunError(f"not registered: {', '.join(waiting)}: {what}")
    yield f"keys: {', '.join(names)} are registered"


def _connection(folder: Path, address: str) -> Iterator[str]:
    silent = "start ./superlink.sh; does the firewall let you?"
    yield connection(address, folder / "certificates" / CA, silent, STRANGER)


def _supernodes(folder: Path, names: Sequence[str]) -> Iterator[str]:
    nodes = _asked(folder, "supernode", "list", "superlink")["nodes"]
    online = [node for node in nodes if node["status"] == "online"]
    if len(online) < len(names):
        away = "; ".join(
            f"{node['node-id']} {node['status']} since {node['offline-at']}" for node in nodes if node not in online
        )
        raise RunError(
            f"{len(online)} of {len(names)} SuperNodes are online ({away or 'no other is known'}): ask the clinics to "
            "run ./start.sh; a killed one is admitted again after about a minute"
        )
    yield f"SuperNodes: {len(online)} online"


def _runs(folder: Path) -> Iterator[str]:
    runs = _asked(folder, "list", "superlink")["runs"]
    live = [run for run in runs if not run["status"].startswith("finished")]
    last = max((run for run in runs if run not in live), key=lambda run: run["finished-at"], default=None)
    if last and not live and last["status"] == "finished:failed":
        raise RunError(
            f"the last run, {last['run-id']}, failed ({last['status-details'] or 'no details'}): `. ./connect.sh`, "
            f"then `flwr log {last['run-id']} superlink --show`"
        )
    together = ", which share the clinics' machines" * (len(live) > 1)
    yield f"runs: {len(live)} live{together}, {len(runs) - len(live)} ended"


def _directories(folder: Path) -> Iterator[str]:
    runs = [file.parent for file in (folder / "runs").glob("*/config.yaml")]
    open_runs = sorted(run.name for run in runs if not (run / "result.json").exists())
    live = bool(open_runs) and any(
        not run["status"].startswith("finished") for run in _asked(folder, "list", "superlink")["runs"]
    )
    if open_runs and not live:
        name = open_runs[-1]
        raise RunError(
            f"not finished: {', '.join(open_runs)}: ./run.sh --run-config 'resume=\"{folder / 'runs' / name}\"' goes "
            "on where it was"
        )
    yield f"run directories: {len(runs) - len(open_runs)} finished{', one goes on' * live}"


def _disk(folder: Path) -> Iterator[str]:
    free = shutil.disk_usage(folder).free / 1e9
    if free < FREE_GB:
        raise RunError(f"{free:.1f} GB are free for runs/ and superlink.db: `flwr-replay runs clean` says what can go")
    used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink()) / 1e9
    yield f"disk: this folder takes {used:.1f} GB, {free:.0f} GB are free"


def _asked(folder: Path, *words: str) -> dict[str, Any]:
    """Return the JSON answer of Flower's `flwr`."""
    if not (folder / "flower" / "config.toml").is_file():
        raise RunError("Flower does not know this SuperLink yet: run ./register.sh")
    environment = {**os.environ, "FLWR_HOME": str(folder / "flower"), "FLWR_DISABLE_UPDATE_CHECK": "1"}
    command = [flower("flwr"), *words, "--format", "json"]
    try:
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=SECONDS
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        raise RunError(f"`flwr {' '.join(words)}` must answer; it does not: see the line connection") from None
    if not answer.get("success"):
        raise RunError(f"`flwr {' '.join(words)}` is refused: {answer.get('error-message', 'without a reason')}")
    return answer
