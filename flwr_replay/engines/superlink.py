"""A private SuperLink on the loopback interface, and `flwr run` on it."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flwr_replay.config.quoting import toml_text
from flwr_replay.engines.certificates import CA, SERVER, SERVER_KEY, write_certificates
from flwr_replay.errors import RunError
from flwr_replay.processes import MARK, family

__all__ = ["COLOUR", "SuperLink", "answers", "flower", "flwr_run", "free_port", "streamed", "superlink"]

COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # in Flower's log
WAITED = 60  # seconds for a SuperLink to start
PATIENCE = 10  # seconds that an address may take to answer
DAYS = 7  # that the certificates of one run are valid
APP = """\
[project]
name = "flwr-replay-run"
version = "1.0.0"
description = "One run of flwr-replay."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "flwr-replay"

[tool.flwr.app.components]
serverapp = "flwr_replay.server_app:app"
clientapp = "flwr_replay.client_app:app"

[tool.flwr.app.config]
overrides = ""
"""


@dataclass(frozen=True)
class SuperLink:
    """A private SuperLink on the loopback interface."""

    port: int
    folder: Path  # its FLWR_HOME, with config.toml and superlink.log
    environment: dict[str, str]  # for Flower's programs: how to reach it, and PATH
    secured: bool = False  # TLS by the certificates in `folder`, and only SuperNodes with a registered key


@contextmanager
def superlink(scratch: Path, simulation: bool = True, secured: bool = False) -> Iterator[SuperLink]:
    """Start a SuperLink on the loopback; end it and its processes afterwards, even if this process is killed.

    Parameters
    ----------
    scratch : Path
        An empty folder to use as FLWR_HOME; its connection `replay` leads to this SuperLink.
    simulation : bool
        If true, Ray simulates the SuperNodes; otherwise `flower-supernode` processes join.
    secured : bool
        With TLS, whose certificates are made here, and with keys for the SuperNodes.

    Raises
    ------
    RunError
        If it does not start.
    """
    port = free_port()
    trust, security = "insecure = true", ["--insecure"]
    if secured:
        write_certificates(scratch, ["127.0.0.1", "localhost"], DAYS)
        trust = f"root-certificates = {toml_text(str(scratch / CA))}"
        files = {"--ssl-ca-certfile": CA, "--ssl-certfile": SERVER, "--ssl-keyfile": SERVER_KEY}
        security = [word for option, name in files.items() for word in (option, str(scratch / name))]
        security.append("--enable-supernode-auth")
    (scratch / "config.toml").write_text(
        f'[superlink]\ndefault = "replay"\n[superlink.replay]\naddress = "127.0.0.1:{port}"\n{trust}\n'
    )
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "FLWR_HOME": str(scratch),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",  # seconds; each poll costs a few milliseconds in two processes
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_register_timeout_seconds": "600",  # else 60, after which Ray gives up a worker that starts slowly
        "SPT_NOENV": "1",  # Ray's agents write their titles over their environment otherwise, and with it over the mark
    }
    command = [flower("flower-superlink"), *security, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--simulation"] if simulation else []
    command += ["--control-api-address", f"127.0.0.1:{free_port()}", "--disable-runtime-dependency-installation"]
    with open(scratch / "superlink.log", "w") as log, family() as mark:
        environment[MARK] = mark
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + WAITED
        while not answers(f"127.0.0.1:{port}", patience=0.5):
            if server.poll() is not None or time.monotonic() > deadline:
                ending = (scratch / "superlink.log").read_text()[-500:]
                busy = f"it said nothing in {WAITED} s: is the machine busy? Try again"
                raise RunError(f"the SuperLink must start; {f'its log: {ending}' if ending else busy}")
            time.sleep(0.1)
        yield SuperLink(port, scratch, environment, secured)


def flwr_run(link: SuperLink, overrides: Sequence[str], *arguments: str) -> Iterator[str]:
    """Run this package's apps with `flwr run`; yield its output, line by line.

    The app bundle holds no code: server and institutions run the apps of their installed package.
    """
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=link.folder))
    (folder / "app").mkdir()
    (folder / "app" / "pyproject.toml").write_text(APP)
    (folder / "run.toml").write_text(f"overrides = {json.dumps(shlex.join(overrides))}\n")
    yield from streamed(link, folder / "app", "--run-config", str(folder / "run.toml"), *arguments)


def streamed(link: SuperLink, app: Path, *arguments: str) -> Iterator[str]:
    """Run any app with `flwr run … --stream`; yield its output, line by line."""
    command = [flower("flwr"), "run", str(app), "replay", "--stream", *arguments]
    stream = subprocess.Popen(
        command, env=link.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert stream.stdout is not None
    yield from (COLOUR.sub("", line) for line in stream.stdout)
    stream.wait()


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers(address: str, patience: float = PATIENCE) -> bool:
    """Say whether something accepts connections at HOST:PORT, within so many seconds."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=patience).close()
    except (OSError, ValueError, OverflowError):  # nothing does at what is no port
        return False
    return True


def flower(name: str) -> str:
    """Find one of Flower's programs in this interpreter's folder, else on PATH."""
    program = Path(sys.executable).parent / name
    return str(program) if program.exists() else name
