"""A SuperLink of one's own on the loopback, and `flwr run` on it."""

from __future__ import annotations

import json
import os
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

from flwr_replay.errors import RunError
from flwr_replay.runs.processes import MARK, family

__all__ = ["SuperLink", "flower", "flwr_run", "free_port", "streamed", "superlink"]

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
    """A SuperLink of one's own on the loopback."""

    port: int
    folder: Path  # its FLWR_HOME, with config.toml and superlink.log
    environment: dict[str, str]  # reaches it, and finds Flower's programs


@contextmanager
def superlink(scratch: Path, simulation: bool = True) -> Iterator[SuperLink]:
    """Start a SuperLink on the loopback; afterwards, or should this process be killed, all that it started is stopped.

    Parameters
    ----------
    scratch : Path
        An empty folder that becomes FLWR_HOME; its connection `replay` leads to this SuperLink.
    simulation : bool
        Simulate the SuperNodes with Ray; otherwise `flower-supernode` processes join.

    Raises
    ------
    RunError
        If it does not start.
    """
    port = free_port()
    (scratch / "config.toml").write_text(
        f'[superlink]\ndefault = "replay"\n[superlink.replay]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "FLWR_HOME": str(scratch),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [flower("flower-superlink"), "--insecure", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--simulation"] if simulation else []
    command += ["--control-api-address", f"127.0.0.1:{free_port()}", "--disable-runtime-dependency-installation"]
    with open(scratch / "superlink.log", "w") as log, family() as mark:
        environment[MARK] = mark
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 60
        while not _answers(port):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RunError(f"the SuperLink must start; it said: {(scratch / 'superlink.log').read_text()[-500:]}")
            time.sleep(0.1)
        yield SuperLink(port, scratch, environment)


def flwr_run(link: SuperLink, overrides: Sequence[str], *arguments: str) -> Iterator[str]:
    """Run this package's apps with `flwr run`; yield its output, line by line.

    The bundle that travels holds no code: the apps are those of the package installed at each place.
    """
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=link.folder))
    (folder / "app").mkdir()
    (folder / "app" / "pyproject.toml").write_text(APP)
    (folder / "run.toml").write_text(f"overrides = {json.dumps(shlex.join(overrides))}\n")
    yield from streamed(link, folder / "app", "--run-config", str(folder / "run.toml"), *arguments)


def streamed(link: SuperLink, app: Path, *arguments: str) -> Iterator[str]:
    """Run an app of anyone's with `flwr run … --stream`; yield its output, line by line."""
    command = [flower("flwr"), "run", str(app), "replay", "--stream", *arguments]
    stream = subprocess.Popen(
        command, env=link.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert stream.stdout is not None
    yield from stream.stdout
    stream.wait()


def free_port() -> int:
    """Return a port of the loopback that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def flower(name: str) -> str:
    """Find one of Flower's programs beside this interpreter, else on PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name
