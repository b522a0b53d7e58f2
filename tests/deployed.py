"""A real deployment on the loopback, of what `deploy init` wrote: a SuperLink, and a SuperNode for each clinic."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import timm
import torch
import yaml
from safetensors.torch import save_file

from flwr_replay.deploy.clinic import examine_clinic
from flwr_replay.deploy.deployment import init
from flwr_replay.engines.superlink import free_port
from flwr_replay.files.lines import read_lines
from flwr_replay.processes import MARK, family, members

HOSPITALS = Path(__file__).parents[1] / "docs" / "examples" / "hospitals"
STUDY = ["strategy=fedreplay", "channels=1", "task.size=8", "classes=10", "model=cnn", "width=4", "cut=conv1"]
COORDINATOR, CLINICS = "coordinator", ("clinic-a", "clinic-b")
REFUSES = "clinic-c"  # lets statistics leave, and nothing else
TASK = ("task=folder", "channels=1", "task.size=8", "classes=10", "model=cnn", "width=8", "device=cpu", "threads=1")
OF_A_RUN = ("flwr-serverapp", "flower-superexec")  # processes that the SuperLink starts


@dataclass
class Deployment:
    """What runs, and where its files lie."""

    place: Path  # coordinator, and a folder for each clinic
    data: Path  # data/<clinic>, and data/manifest.csv over those that take part
    logs_of: Path  # each process's log
    environment: dict[str, str]
    port: int
    checked: dict[str, tuple[bool, str]] = field(default_factory=dict)  # by clinic: the doctor's word before it started
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)  # by place: SuperLink or SuperNode
    task: tuple[str, ...] = TASK
    clinics: tuple[str, ...] = CLINICS  # that take part
    contained: bool = False  # as in the containers of compose.yaml

    def words_of(self, name: str, *words: Any) -> dict[str, Any]:
        """Return a command of a place, and what it sees of the environment, as `subprocess` takes them."""
        if not self.contained:
            return {"args": list(words), "env": self.environment}
        recipe = (self.place / name / "Containerfile").read_text()
        seen = dict(word.split("=") for word in re.search("^ENV (.+)", recipe, re.M)[1].split())
        if name != COORDINATOR:
            assert seen["FLWR_REPLAY_DATA"] == "/data"
            seen["FLWR_REPLAY_DATA"] = str(self.data / name)
        seen |= {"HOME": str(self.logs_of / "tmp"), "TMPDIR": str(self.logs_of / "tmp")}  # as the tmpfs
        bare = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"] if os.geteuid() == 0 else []
        return {"args": [*bare, *words], "env": {key: self.environment[key] for key in ("PATH", MARK)} | seen}

    @property
    def coordinator(self) -> Path:
        """The coordinator's folder."""
        return self.place / COORDINATOR

    @property
    def runs(self) -> Path:
        """The server's run directories."""
        return self.coordinator / "runs"

    def start(self, name: str, again: bool = False) -> None:
        """Start the SuperLink or a clinic's SuperNode by its script, if asked again and again; its log is added to."""
        script: list[Any] = [self.place / name / ("superlink.sh" if name == COORDINATOR else "start.sh")]
        script = ["sh", "-c", f"until {script[0]}; do sleep 10; done"] if again else script
        with open(self.logs_of / f"{name}.log", "a") as log:
            options = {"stdout": log, "stderr": log, "start_new_session": True}
            self.started[name] = subprocess.Popen(**self.words_of(name, *script), **options)
        if name == COORDINATOR:
            until(lambda: _answers(self.port), 60, self.logs)

    def kill(self, name: str) -> None:
        """End the SuperLink or a SuperNode by SIGKILL, but none of the processes that it has started."""
        self.started[name].send_signal(signal.SIGKILL)
        self.started[name].wait()

    def of_a_run(self) -> list[psutil.Process]:
        """Return the processes that the SuperLink has started."""
        processes = []
        for process in members(self.environment[MARK]):
            with suppress(psutil.Error):
                names = any(name in word for word in process.cmdline()[:3] for name in OF_A_RUN)
                processes += [process] if names and process.cwd() == str(self.coordinator) else []
        return processes

    def run(self, name: str, *options: str) -> str:
        """Run to the end; return what it said."""
        begun = self.begun(name, *options)
        output, well = begun.communicate()[0], (self.runs / name / "result.json").exists()
        assert (begun.returncode, well) == (0, True), f"{name} did not end well:\n{output}\n{self.logs()}"
        return output

    def output_of(self, name: str, *options: str, further: str = "") -> str:
        """Return the output of the coordinator's run.sh."""
        return self.begun(name, *options, further=further).communicate()[0]

    def begun(self, name: str, *options: str, further: str = "") -> subprocess.Popen[str]:
        """Begin a run by the coordinator's run.sh."""
        config = f'run-name="{name}" overrides="{shlex.join([*self.task, *options])}" {further}'
        command = self.words_of(COORDINATOR, self.coordinator / "run.sh", "--run-config", config)
        return subprocess.Popen(**command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def logs(self) -> str:
        """Return the ends of all processes' logs."""
        return "\n".join(f"--- {log.name}\n{log.read_text()[-5000:]}" for log in sorted(self.logs_of.glob("*.log")))

    def own_ledger(self, clinic: str) -> list[dict[str, Any]]:
        """Return what a clinic wrote down before it left."""
        return read_lines(self.state(clinic) / "ledger.jsonl")

    def state(self, clinic: str) -> Path:
        """Return a clinic's own state directory."""
        return self.place / clinic / "state" / clinic

    def server_ledger(self, name: str) -> list[dict[str, Any]]:
        """Return what the server saw travel."""
        return read_lines(self.runs / name / "ledger.jsonl")


def until(true: Callable[[], Any], seconds: float, otherwise: Callable[[], str]) -> float:
    """Wait until something is true; return the seconds that it took."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, otherwise()
        time.sleep(0.1)
    return time.monotonic() - began


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _only_mounts_can_be_written(folder: Path) -> None:
    """Take the right to write from all of a folder but what its compose file mounts for writing."""
    (service,) = yaml.safe_load((folder / "compose.yaml").read_text())["services"].values()
    open_ones = [folder / mount["source"] for mount in service["volumes"] if not mount.get("read_only")]
    for file in [folder, *folder.rglob("*")]:
        if not file.is_symlink() and not any(file.is_relative_to(file_open) for file_open in open_ones):
            file.chmod(file.stat().st_mode & 0o555)


@contextmanager
def deployed(
    root: Path,
    refusing: bool = True,
    taking_part: tuple[str, ...] = CLINICS,
    study: tuple[str, ...] = (),
    contained: bool = False,
) -> Iterator[Deployment]:
    """Clinics that take part, and perhaps one whose policy forbids what all methods share.

    They run what `deploy init` wrote for the study, by its scripts: over TLS, with keys that each clinic has made. In a
    sealed or masked study each has pinned the others'. If `contained`, they find what they would in containers:
    Flower's own programs, the Containerfile's environment, no capabilities, no place to write but compose.yaml's.
    """
    clinics = (*taking_part, REFUSES) if refusing else taking_part
    runpy.run_path(str(HOSPITALS / "make_data.py"))["write_clinics"](root / "data")
    for clinic in taking_part[3:]:  # more than it writes
        shutil.copytree(root / "data" / CLINICS[0], root / "data" / clinic)
    manifest = root / "data" / "manifest.csv"
    head, *rows = manifest.read_text().splitlines()
    manifest.write_text("\n".join([head, *(row for row in rows if row.startswith(taking_part))]))
    policy = (HOSPITALS / "policy.yaml").read_text()
    open_policy = policy.replace("[fedreplay, cwt]", "[fedreplay, cwt, proxyfl, fedavg, local]")
    for seed, clinic in enumerate(CLINICS):  # each has an encoder of its own, for tests of who has another
        torch.manual_seed(seed)
        save_file(timm.create_model("resnet18").state_dict(), root / f"{clinic}.safetensors")
    place, port = root / "deployment", free_port()
    init(clinics, f"127.0.0.1:{port}", [*TASK[1:], *study], place)
    programs = root / "programs"
    programs.mkdir()
    (programs / "flower-superexec").symlink_to(Path(__file__).with_name("warm.py"))
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([*[str(programs)][contained:], str(Path(sys.executable).parent), os.environ["PATH"]]),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    with family() as environment[MARK]:
        place_deployed = Deployment(
            place, root / "data", root, environment, port, clinics=taking_part, contained=contained
        )
        pins = ""
        for clinic in clinics:
            own = place / clinic
            made = subprocess.run([own / "make-key.sh"], env=environment, check=True, stdout=subprocess.PIPE, text=True)
            pins += "".join(line + "\n" for line in made.stdout.splitlines() if re.fullmatch(rf"{clinic} \S+", line))
            shutil.copy(own / f"{clinic}.pub", place_deployed.coordinator / "keys")
            (own / "data").symlink_to(root / "data" / clinic)
            (own / "policy.yaml").write_text(open_policy if clinic != REFUSES else "kinds: [statistic]\n")
            values = (own / "clinic.env").read_text()
            (own / "clinic.env").write_text(re.sub("PORT=.*", f"PORT={free_port()}", values))
            start = (own / "start.sh").read_text()
            keys = 'record=\\"all\\" ' + f'weights=\\"{root}/{clinic}.safetensors\\" ' * (clinic in CLINICS)
            (own / "start.sh").write_text(start.replace('policy=\\"', f'{keys}policy=\\"'))
        for clinic in clinics if pins else ():
            (place / clinic / "peers.txt").write_text(pins)
        if contained:
            (root / "tmp").mkdir()
            for name in (COORDINATOR, *clinics):
                _only_mounts_can_be_written(place / name)
        place_deployed.start(COORDINATOR)
        subprocess.run(**place_deployed.words_of(COORDINATOR, place_deployed.coordinator / "register.sh"), check=True)
        for clinic in clinics:
            place_deployed.checked[clinic] = examine_clinic(place / clinic)
            place_deployed.start(clinic)
        yield place_deployed
