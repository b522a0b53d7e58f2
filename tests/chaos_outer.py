"""Runs on a real deployment, or on Ray, of which a process is killed at a random moment, and that go on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

import psutil
from chaos_runs import check_bits, check_ledgers, stated_epsilon
from deployed import CLINICS, COORDINATOR, REFUSES, TASK, until

from flwr_replay.deploy.coordinator import examine_coordinator
from flwr_replay.files.atomic import LEFT, in_use, read_json
from flwr_replay.files.lines import read_lines
from flwr_replay.processes import GRACE, MARK, members

STRIKES = {  # of a run, in turn
    "deployed": [
        ("clientapp", "serverapp"),
        ("supernode", "superlink"),
        ("clientapp", "superlink"),
        ("supernode", "serverapp"),
    ],
    "ray": [("actor",), ("driver",), ("command",)],
}
PROCESSES = {"serverapp": "flwr-serverapp", "clientapp": "flwr-clientapp", "supernode": "flower-supernode"}
PROCESSES |= {
    "superlink": "flower-superlink",
    "actor": "ClientAppActor",
    "driver": "flwr-simulation",
    "command": "flwr_replay.cli.main",
}
COMMAND = [sys.executable, "-c", "from flwr_replay.cli.main import main; main()"]
LONGEST = 420  # seconds of a run, struck or resumed
TRIES = 3  # resumed runs that may end before their time
APART = {  # by a word of their names, jobs that need institutions or a study of their own: who takes part, and options
    "central": (CLINICS[:1], ("strategy=central",)),
    "sealed": (CLINICS, ("strategy=avgpush", "sealed=true")),
    "masked": ((*CLINICS, REFUSES), ("strategy=fedavg", "masked=true")),
}
OWN = ("evaluate_every=2", "timeout=400")
OTHERS = ("task=", "partition", "nodes=", "model=", "model.width=", "device=")  # a deployment has its own


class Struck:
    """A run that is struck at random moments, and goes on until it ends.

    Parameters
    ----------
    folder : Path
        The run directory.
    rng : Random
        Draws the moments: a line of the run's ledger, and some seconds more.
    lines : int
        Of the undisturbed run's ledger.
    most : float
        How many seconds more.
    """

    def __init__(self, folder: Path, rng: Random, lines: int, most: float) -> None:
        self.folder, self.rng, self.lines, self.most = folder, rng, lines, most
        self.output, self.resumed, self.moments = "", 0, list[str]()
        self.away = set[str]()  # institutions whose SuperNode was killed

    def strike(self, command: subprocess.Popen, kind: str, living, within: tuple[float, float] = (0, 1)) -> bool:
        """Wait for a moment within a share of the run, and kill a process of the kind; False: it had ended."""
        line, pause = int(self.rng.uniform(*within) * self.lines), self.rng.uniform(0, self.most)
        if self.moments and self.moments[-1].startswith("supernode"):  # without it the ledger grows less
            line, pause = 0, self.rng.uniform(0, 60)
        until(lambda: self.reached(line) or command.poll() is not None, LONGEST, lambda: f"line {line} never reached")
        time.sleep(pause)
        while command.poll() is None and not self.ended():
            if matching := processes_with(PROCESSES[kind], living()):
                with suppress(psutil.NoSuchProcess):
                    self.rng.choice(matching).kill()
                    self.moments.append(f"{kind} {pause:.1f} s after line {line} of {self.lines}")
                    return True
            time.sleep(0.02)
        return False

    def reached(self, line: int) -> bool:
        ledger = self.folder / "ledger.jsonl"
        return line == 0 or (ledger.exists() and ledger.read_bytes().count(b"\n") >= line)

    def ended(self) -> bool:
        return (self.folder / "result.json").exists()


def processes_with(program: str, processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes with a word in the first words of their command lines."""
    matching = []
    for process in processes:
        with suppress(psutil.Error):
            words = process.cmdline()
            matching += [process] if any(program in word for word in words[:3]) and words[0] != "sh" else []
    return matching


def reason_shown(output: str) -> str:
    """Return the last line that says why a run ended; a traceback is a finding."""
    assert "Traceback" not in output, output[-3000:]
    return next((line for line in reversed(output.splitlines()) if "error: " in line), "")


class OnDeployment:
    """Jobs on one deployment, whose policies allow everything: those of a word in `APART`, or all others."""

    def __init__(self, deployment, apart: str = "") -> None:
        self.deployment, self.apart, self.number = deployment, apart, 0
        self.clinics = deployment.clinics
        for clinic in self.clinics:
            (deployment.place / clinic / "policy.yaml").write_text("")
        until(self.online, 120, deployment.logs)

    def online(self) -> bool:
        return "ok  SuperNodes" in examine_coordinator(self.deployment.coordinator)[1]

    def options(self, options: list[str]) -> list[str]:
        return [*(word for word in options if not word.startswith(OTHERS)), f"nodes={len(self.clinics)}", *OWN]

    def refuses(self, name: str) -> bool:
        """Say whether a job is none for these institutions, each with data and pins of its own."""
        return next((word for word in name.split() if word in APART), "") != self.apart

    def undisturbed(self, options: list[str]) -> list[str]:
        own = [word for word in self.options(options) if not word.startswith("timeout=")]
        return [*TASK, *own, "partition=natural", f"task.data-dir={self.deployment.data}"]

    def strikes(self, options: list[str], kinds: list[str], rng: Random, lines: int) -> Struck:
        """Strike a run of a job, each kind in its share of it, and go on with it until it ends."""
        self.number += 1
        name, options, deployment = f"struck-{self.number}", self.options(options), self.deployment
        self.without_those_left()
        strike, at_once = Struck(deployment.runs / name, rng, lines, 2), False
        with deployment.begun(name, *options) as command:
            for at, kind in enumerate(kinds):
                clinic = rng.choice(self.clinics)
                places = {"serverapp": [COORDINATOR], "superlink": [COORDINATOR], "clientapp": self.clinics}
                living = partial(self.of, places.get(kind, [clinic]))
                if not strike.strike(command, kind, living, (at / len(kinds), (at + 1) / len(kinds))):
                    strike.moments.append(f"{kind} too late")
                    continue
                if kind == "supernode":
                    strike.away.add(clinic)
                    with suppress(subprocess.TimeoutExpired):  # of the loop that starts it again from then on
                        deployment.started[clinic].wait(2)
                        deployment.start(clinic, again=True)
                if kind == "superlink":
                    deployment.started[COORDINATOR].wait()  # while it is a zombie, its children take it for alive
                if kind in ("superlink", "serverapp"):
                    until(lambda: not in_use(strike.folder), 90, deployment.logs)
                    at_once = kind == "serverapp" and rng.random() < 0.5  # before Flower has noticed
                if kind == "superlink":
                    until(lambda: not deployment.of_a_run(), 90, deployment.logs)
                    deployment.start(COORDINATOR)
                    until(self.online, 180, deployment.logs)
            if not at_once:
                strike.output = command.communicate(timeout=LONGEST)[0]
            while not strike.ended():
                strike.resumed += 1
                assert strike.resumed <= TRIES, f"not resumed: {strike.output[-1500:]}\n{deployment.logs()[-1500:]}"
                strike.output += self.goes_on(strike.folder) or deployment.output_of(name, *options)
        return strike

    def without_those_left(self) -> None:
        """Start a SuperNode again that has a ClientApp left: killed next, that one would make all answers late."""
        left = [
            clinic
            for clinic in self.clinics
            if any(map(self.waits, processes_with(PROCESSES["clientapp"], self.of([clinic]))))
        ]
        self.start_again(left)

    def start_again(self, clinics: Iterable[str]) -> None:
        """End the SuperNodes of clinics and all that they have started; start them again."""
        for clinic in clinics:
            os.killpg(self.deployment.started[clinic].pid, signal.SIGTERM)
            self.deployment.started[clinic].wait()
            self.deployment.start(clinic)
            until(self.online, 180, self.deployment.logs)

    def goes_on(self, folder: Path) -> str:
        """Resume a run; empty where the kill came before there was anything to resume."""
        if not folder.exists():
            return ""
        resume, pipe = [self.deployment.coordinator / "run.sh", folder / "resume.toml"], subprocess.PIPE
        options = {"env": self.deployment.environment, "stdout": pipe, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.run(resume, timeout=LONGEST, check=False, **options).stdout

    def of(self, places: Iterable[str]) -> list[psutil.Process]:
        """Return the processes of SuperLink and SuperNodes, as far as they have parents."""
        family = []
        for place in places:
            with suppress(psutil.NoSuchProcess):
                started = psutil.Process(self.deployment.started[place].pid)
                family += [started, *started.children(recursive=True)]
        return family

    def left(self) -> list[str]:
        living = members(self.deployment.environment[MARK])
        apps = [process for kind in ("serverapp", "clientapp") for process in processes_with(PROCESSES[kind], living)]
        orphans = [
            process
            for process in processes_with("flower-superexec", living)
            if process.ppid() not in {own.pid for own in living}
        ]
        return [str(process) for process in (*apps, *orphans) if not self.waits(process)]

    def waits(self, process: psutil.Process) -> bool:
        """Say whether a ClientApp still waits for a message's content: Flower leaves it so if the run has ended."""
        with suppress(psutil.Error):
            living = psutil.pid_exists(process.ppid()) and process.name() == "flwr-clientapp"
            return living and "torch" not in " ".join(mapped.path for mapped in process.memory_maps())
        return False

    def may_fail(self, struck: Struck) -> set[str]:
        """Return the institutions that a run may go on without; with one fewer no masked sum is made."""
        return {*self.clinics} if struck.away and self.apart == "masked" else struck.away

    def states(self) -> dict[str, Path]:
        return {clinic: self.deployment.state(clinic) for clinic in self.clinics}

    def places(self, folder: Path) -> list[Path]:
        return [folder.parent, *(self.deployment.state(clinic) for clinic in self.clinics)]


class OnRay:
    """Jobs on `--engine ray`, each in a folder of its own."""

    def __init__(self, root: Path) -> None:
        self.root, self.number = root, 0

    def refuses(self, name: str) -> bool:
        return False

    def undisturbed(self, options: list[str]) -> list[str]:
        return options

    def strikes(self, options: list[str], kinds: list[str], rng: Random, lines: int) -> Struck:
        """Strike a run of a job, each kind in its share of it, and go on with it until it ends."""
        self.number += 1
        self.folder = self.root / f"ray-{self.number}"
        self.folder.mkdir()
        words = ["run", "--engine", "ray", *options, "run-name=struck", "--runs-dir", str(self.folder)]
        strike, left = Struck(self.folder / "struck", rng, lines, 0.3), [*enumerate(kinds)]
        while not strike.ended():
            assert strike.resumed < len(kinds) + TRIES, f"not resumed: {strike.output}"
            with open(self.folder / "said", "w") as log:
                own = {**os.environ, "FLWR_REPLAY_HOME": str(self.folder)}
                command = subprocess.Popen([*COMMAND, *words], env=own, stdout=log, stderr=log, cwd=self.folder)
            while left and command.poll() is None:
                at, kind = left[0]
                if not strike.strike(command, kind, self.living, (at / len(kinds), (at + 1) / len(kinds))):
                    break
                left.pop(0)
                if kind != "actor":  # the run ends with it
                    break
            command.wait(LONGEST)
            until(lambda: not self.living(), 60, lambda: f"processes are left: {self.left()}")
            logged = (self.folder / "said").read_text().splitlines()
            strike.output = "".join(logged[-1:])  # Flower's own tracebacks stand above it
            strike.resumed += not strike.ended()
            if not strike.ended() and command.returncode > 0 and strike.folder.exists():
                assert f"run --resume {strike.folder}" in reason_shown(strike.output), f"no command: {logged[-9:]}"
            if strike.folder.exists():
                words = ["run", "--resume", str(strike.folder)]
        strike.moments += [f"{kind} too late" for _, kind in left]
        return strike

    def living(self) -> list[psutil.Process]:
        own = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                own += [process] if process.environ().get("FLWR_REPLAY_HOME") == str(self.folder) else []
        return own

    def left(self) -> list[str]:
        return [str(process) for process in self.living()]

    def may_fail(self, struck: Struck) -> set[str]:
        """Return those that a run may go on without: an actor serves any, and may end before the driver does."""
        struck_by = {moment.partition(" ")[0] for moment in struck.moments if "too late" not in moment}
        return {*self.states()} if struck_by & {"actor", "command"} else set()

    def states(self) -> dict[str, Path]:
        return {state.name: state for state in (self.folder / "state" / "simulation").iterdir()}

    def places(self, folder: Path) -> list[Path]:
        return [self.folder]


def verdict_on(engine, once, struck: Struck) -> str:
    """Compare a run with the undisturbed one; say in one line what is as there, and what is lost."""
    reason = reason_shown(struck.output)
    failures = read_json(struck.folder / "result.json")["failures"]
    assert all("\n" not in failure["reason"] for failure in failures), failures
    lacked = {failure["institution"] for failure in failures}
    if struck.away:  # a node that has not answered the roll call has no name yet
        lacked = {name for name in lacked if not name.isdigit()}
    assert lacked <= engine.may_fail(struck), f"{lacked} failed: {failures}"
    if not failures:
        check_bits(once.run, struck.folder)
    states, run_id = engine.states(), (struck.folder / "run-id").read_text().strip()
    check_ledgers(struck.folder, states)
    undisturbed = {name: sum(line["steps"] for line in rows) for name, rows in once.charges().items()}
    accounts = {name: states[name] / "runs" / run_id / "privacy.jsonl" for name in undisturbed}
    charged = {name: sum(line["steps"] for line in read_lines(path)) for name, path in accounts.items()}
    assert failures or all(charged[name] >= undisturbed[name] for name in charged), f"{charged}, not {undisturbed}"
    stated, expected = (read_json(run / "result.json")["privacy"] for run in (struck.folder, once.run))
    if not failures:
        less = [name for name in expected if stated_epsilon(stated[name]) < stated_epsilon(expected[name])]
        assert not less, f"{less} state less than undisturbed: {stated}, {expected}"
    if charged == undisturbed and not failures:
        assert stated == expected, f"privacy is {stated}, undisturbed {expected}"
    began = time.monotonic()
    while (left := engine.left()) and time.monotonic() < began + 4 * GRACE:
        time.sleep(1)
    assert not left, f"processes are left: {left}"
    half = [
        str(path) for place in engine.places(struck.folder) for path in place.rglob("*") if LEFT.fullmatch(path.name)
    ]
    assert not half, f"half-written: {half}"
    reasons = [f"{failure['institution']} in exchange {failure['round']}: {failure['reason']}" for failure in failures]
    more = "" if charged == undisturbed else f"; charged {charged}, undisturbed {undisturbed}"
    how = f"failures: {reasons}" if failures else "same bits"
    return f"{how}{more}; resumed {struck.resumed} times" + (f"; said: {reason}" if reason else "")
