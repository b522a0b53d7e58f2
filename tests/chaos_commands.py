"""Commands that are killed at any moment, under a clock that jumps, and repeated.

What they read stays as it was, no process is left, and repeated they end as undisturbed ones.
"""

import os
import re
import runpy
import shutil
import signal
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path
from pprint import pformat
from random import Random
from typing import Any

from chaos_faults import TAKEN, Fault
from chaos_runs import Ended, Place
from deployed import HOSPITALS, until
from harness import forked

from flwr_replay.files.atomic import read_json

FEW = "task=digits partition=iid model=mlp model.width=8 nodes=2 device=cpu partition.size=60"
DIFFER = re.compile("seconds|bytes|memory|sentence|folder")  # keys of values that differ from one time to the next
LONGEST = 60  # seconds until all has ended that a killed command had started


class Command:
    """A command's words, what it reads, and what it leaves."""

    words: str  # HERE is the place

    def prepare(self, place: Place) -> None:
        """Make what it reads."""

    def read(self, place: Place) -> dict[str, bytes]:
        """Return what it must leave as it is."""
        return {}

    def left(self, place: Place, output: str) -> Any:
        """Return what must be as after an undisturbed one."""
        raise NotImplementedError

    def attempt(self, place: Place, fault: Fault) -> Ended:
        return place.attempt(fault, [word.replace("HERE", str(place.folder)) for word in self.words.split()])

    def again(self, place: Place, fault: Fault) -> Ended:
        """Repeat it after a kill, when all has ended that it had started."""
        ended_by_now(place)
        return self.attempt(place, fault)


def ended_by_now(place: Place) -> None:
    """Wait until all processes have ended; one that keeps count of others' resources outlives them by milliseconds."""
    until(lambda: not place.living(), LONGEST, lambda: f"processes are left: {place.living()}")


class Attack(Command):
    words = "privacy attack HERE/runs/one --minutes 0.001 --institution institution-1"

    def prepare(self, place: Place) -> None:
        """Make a run, or copy it: the names of its messages are its own."""
        if not hasattr(self, "made"):
            assert (ended := place.attempt()).code == 0, ended.output
            self.made = place.run
        else:
            shutil.copytree(self.made, place.run, ignore=shutil.ignore_patterns("attacks"))

    def read(self, place: Place) -> dict[str, bytes]:
        return {name: data for name, data in contents(place.run).items() if not name.startswith("attacks/")}

    def left(self, place: Place, output: str) -> Any:
        files = contents(place.run / "attacks")
        assert files.pop("report.html").rstrip().endswith(b"</html>")
        return files | {"attacks.json": steady(read_json(place.run / "attacks" / "attacks.json"))}


class Audit(Command):
    words = f"privacy audit strategy=fedavg {FEW} rounds=1 --kind images --canaries 20 --runs-dir HERE/runs"

    def left(self, place: Place, output: str) -> Any:
        """Each time is a run of its own; nobody goes on with a killed one, so it stays as it was."""
        *killed, last = sorted(place.folder.glob("runs/*/"))
        for folder in killed:
            shutil.rmtree(folder)
        return steady(read_json(last / "audit.json"))


class Compare(Command):
    words = f"compare fedavg,cwt {FEW} rounds=2 seeds=1 --jobs 2 --runs-dir HERE/runs"

    def left(self, place: Place, output: str) -> Any:
        [report] = place.folder.glob("runs/*/*/compare.json")
        names = {name for name in contents(place.folder / "runs") if not re.search("checkpoints", name)}
        cells = [line.split("│")[1:5] for line in output.splitlines() if line.startswith("│")]
        models = [contents(cell / "models") for cell in sorted(report.parents[1].glob("*-seed0"))]
        assert len(cells) == len(models) == 2
        return steady(read_json(report)), names, cells, models


class Rehearse(Command):
    words = "rehearse HERE/data strategy=cwt width=4 device=cpu rounds=1 --out HERE/out"

    def prepare(self, place: Place) -> None:
        runpy.run_path(str(HOSPITALS / "make_data.py"))["write_clinics"](place.folder / "data")

    def read(self, place: Place) -> dict[str, bytes]:
        return contents(place.folder / "data")

    def left(self, place: Place, output: str) -> Any:
        run = place.folder / "out" / "runs" / "rehearsal"
        dealt = contents(place.folder / "out" / "data")
        return steady(read_json(run / "result.json")["final"]), contents(run / "models"), dealt

    def again(self, place: Place, fault: Fault) -> Ended:
        """Repeat it in a new folder; what a kill has left is refused."""
        if (place.folder / "out").exists():
            assert "delete it" in super().again(place, fault).error
            shutil.rmtree(place.folder / "out")
        return super().again(place, fault)


class Watch(Command):
    words = "watch HERE/going/runs/one"

    def prepare(self, place: Place) -> None:
        """Begin a run, and let it go on."""
        self.going = Place(place.folder / "going", place.options)
        self.runs = forked(self.going.attempt)
        until((self.going.run / "config.yaml").exists, LONGEST, lambda: "the run did not begin")

    def left(self, place: Place, output: str) -> Any:
        os.waitpid(self.runs, 0)
        assert self.going.result["failures"] == []
        return (
            re.findall(r"exchange \d+|loss \S+", output),
            contents(self.going.run / "models"),
            (self.going.run / "metrics.jsonl").read_bytes(),
        )


COMMANDS = {
    "privacy attack": Attack,
    "privacy audit": Audit,
    "compare --jobs": Compare,
    "rehearse": Rehearse,
    "watch": Watch,
}


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files below a folder, by their names."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def steady(value: Any) -> Any:
    """Return JSON's values without those that differ from one time to the next."""
    if isinstance(value, dict):
        return {key: steady(element) for key, element in value.items() if not DIFFER.search(key)}
    return [steady(element) for element in value] if isinstance(value, list) else value


def struck_commands(name: str, folder: Path, rng: Random, kills: int) -> Iterator[str]:
    """Kill a command so many times, each time in a new place, and repeat it; yield what struck it where."""
    command, number = COMMANDS[name](), 0
    options = ["strategy=fedavg", *FEW.split(), "rounds=4", "record=all"]
    once = Place(folder / "once", options)
    command.prepare(once)
    once.shared[TAKEN] = 0
    ended = command.attempt(once, Fault())
    assert ended.code == 0, ended.output
    once.warm()
    expected, steps, seconds = command.left(once, ended.output), once.shared[TAKEN], ended.seconds
    while kills:
        number += 1
        place = Place(folder / f"struck-{number}", options)
        command.prepare(place)
        read = command.read(place)
        if steps and rng.random() < 0.5:
            fault = Fault("kill", at=rng.randint(1, steps), share=rng.random(), clock=number)
        else:
            fault = Fault("kill", after=rng.uniform(0.001, seconds), clock=number)
        ended = command.attempt(place, fault)
        if ended.code:
            assert ended.code == -signal.SIGKILL, ended.output
            kills -= 1
            yield place.struck if fault.at else f"{fault.after:.1f} of {seconds:.1f} s"
            assert command.read(place) == read
            ended = command.again(place, Fault(clock=-number))
        else:
            seconds = min(seconds, ended.seconds)
        assert ended.code == 0, ended.output
        assert "Traceback" not in ended.output, ended.output
        result = command.left(place, ended.output)
        assert result == expected, "\n".join(unified_diff(pformat(expected).splitlines(), pformat(result).splitlines()))
        assert command.read(place) == read
        half = [str(path) for path in place.folder.rglob(".*") if path.name != ".lock"]
        assert not half, f"half-written: {half}"
        ended_by_now(place)
        place.clear()
