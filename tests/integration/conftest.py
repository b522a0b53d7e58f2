"""A real deployment on the loopback, of what `deploy init` wrote: a SuperLink, and a SuperNode for each clinic."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flwr_replay.processes import MARK, family
from flwr_replay.runs.clinic import examine_clinic
from flwr_replay.runs.deployment import init
from flwr_replay.runs.superlink import free_port

HOSPITALS = Path(__file__).parents[2] / "docs" / "examples" / "hospitals"
CLINICS = ("clinic-a", "clinic-b")
REFUSES = "clinic-c"  # lets statistics leave, and nothing else
TASK = ("task=folder", "channels=1", "task.size=8", "classes=10", "model=cnn", "width=8", "device=cpu", "threads=1")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "deployment: starts Flower's own server and node processes, a minute or more")


@dataclass
class Deployment:
    """What runs, and where its files lie."""

    place: Path  # coordinator, and a folder for each clinic
    data: Path  # data/<clinic>, and data/manifest.csv over those that take part
    logs_of: Path  # each process's log
    environment: dict[str, str]
    checked: dict[str, tuple[bool, str]]  # what the doctor said at each clinic before it started
    task: tuple[str, ...] = TASK

    @property
    def runs(self) -> Path:
        """The server's run directories."""
        return self.place / "coordinator" / "runs"

    def run(self, name: str, *options: str) -> str:
        """Run to the end; return what it said."""
        said = self.said(name, *options)
        if not (self.runs / name / "result.json").exists():
            pytest.fail(f"the run {name} did not end well:\n{said}\n{self.logs()}")
        return said

    def said(self, name: str, *options: str, further: str = "") -> str:
        """Return what the coordinator's run.sh says."""
        config = f'run-name="{name}" overrides="{shlex.join([*TASK, *options])}" {further}'
        command = [self.place / "coordinator" / "run.sh", "--run-config", config]
        pipe = subprocess.PIPE
        return subprocess.run(
            command, env=self.environment, stdout=pipe, stderr=subprocess.STDOUT, text=True, check=False
        ).stdout

    def logs(self) -> str:
        """Return the ends of all processes' logs."""
        return "\n".join(f"--- {log.name}\n{log.read_text()[-5000:]}" for log in sorted(self.logs_of.glob("*.log")))

    def own_ledger(self, clinic: str) -> list[dict[str, Any]]:
        """Return what a clinic wrote down before it left."""
        return _json_lines(self.state(clinic) / "ledger.jsonl")

    def state(self, clinic: str) -> Path:
        """Return a clinic's own state directory."""
        return self.place / clinic / "state" / clinic

    def server_ledger(self, name: str) -> list[dict[str, Any]]:
        """Return what the server saw travel."""
        return _json_lines(self.runs / name / "ledger.jsonl")


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two clinics that take part, and a third whose policy forbids what all methods share.

    They run what `deploy init` wrote, by its scripts: over TLS, with keys that each clinic has made.
    """
    root = tmp_path_factory.mktemp("deployment")
    runpy.run_path(str(HOSPITALS / "make_data.py"))["write_clinics"](root / "data")
    manifest = root / "data" / "manifest.csv"
    rows = [row for row in manifest.read_text().splitlines() if not row.startswith(REFUSES)]
    manifest.write_text("\n".join(rows))
    open_policy = (HOSPITALS / "policy.yaml").read_text().replace("[fedreplay, cwt]", "[fedreplay, cwt, proxyfl]")
    place, port = root / "deployment", free_port()
    init((*CLINICS, REFUSES), f"127.0.0.1:{port}", TASK[1:], place)
    coordinator = place / "coordinator"
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    with family() as environment[MARK]:
        found = Deployment(place, root / "data", root, environment, {})
        script(coordinator / "superlink.sh", found)
        for clinic in (*CLINICS, REFUSES):
            own = place / clinic
            subprocess.run([own / "make-key.sh"], env=environment, check=True)
            shutil.copy(own / f"{clinic}.pub", coordinator / "keys")
            (own / "data").symlink_to(root / "data" / clinic)
            (own / "policy.yaml").write_text(open_policy if clinic != REFUSES else "kinds: [statistic]\n")
            values = (own / "clinic.env").read_text()
            (own / "clinic.env").write_text(re.sub("PORT=.*", f"PORT={free_port()}", values))
            start = (own / "start.sh").read_text()
            (own / "start.sh").write_text(start.replace('policy=\\"', 'record=\\"all\\" policy=\\"'))
        await_port(port)
        subprocess.run([coordinator / "register.sh"], env=environment, check=True)
        for clinic in (*CLINICS, REFUSES):
            found.checked[clinic] = examine_clinic(place / clinic)
            script(place / clinic / "start.sh", found)
        yield found


def script(file: Path, deployed: Deployment) -> None:
    """Start one of the scripts; its log is named after its folder."""
    with open(deployed.logs_of / f"{file.parent.name}.log", "w") as log:
        subprocess.Popen([file], env=deployed.environment, stdout=log, stderr=log, start_new_session=True)


def await_port(port: int) -> None:
    """Wait until the SuperLink answers."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    pytest.fail("the SuperLink did not start")
