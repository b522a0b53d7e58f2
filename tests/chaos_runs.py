"""Runs that are killed by SIGKILL at any moment and go on, each in a forked process that has everything imported.

A kill strikes at a random time, or at a step on the disk: before a file is opened, renamed, removed, locked or flushed,
after it was flushed, or in the middle of a write. The memory that all processes share counts these steps, and the noisy
steps that institutions have taken, so that their accounts can be compared with what was really spent.
"""

import io
import itertools
import mmap
import os
import select
import shutil
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from flwr_replay.check import JOB as SMALL
from flwr_replay.check import NEEDED, OF_REPLAY, REPEATABLE
from flwr_replay.cli.main import main
from flwr_replay.config.catalogue import choices
from flwr_replay.config.halves import load_strategy
from flwr_replay.files import atomic, disk, lines
from flwr_replay.files.atomic import read_json
from flwr_replay.files.lines import read_lines
from flwr_replay.institution import state as institution_state
from flwr_replay.institution.budget import DPTraining, PrivacyBudget
from flwr_replay.learning import latents
from flwr_replay.privacy.plan import mechanisms_of

GENERATOR = ["generator.epochs=1", "generator.width=4", "prior.epochs=1", "prior.width=4", "prior.layers=1"]
NAME = "one"  # of every run
KINDS = ("time", "open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "fcntl.flock", "fsync", "write")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
PATCHED = (atomic, disk, lines, institution_state, latents)  # all modules that open files for writing


def jobs() -> dict[str, list[str]]:
    """Return the options of every strategy: plain, with replay, and under DP, where it has them."""
    found = {}
    for name in choices("strategy"):
        strategy = load_strategy(name)[0]
        noisy = REPEATABLE if load_strategy(name)[1].dp_by_default != "none" else ()
        plain = [f"strategy={name}", *SMALL, *GENERATOR, "partition.size=60", *noisy]
        found[name] = plain
        if strategy.supports_replay:
            found[f"{name} replay=vqvae2"] = [*plain, "replay=vqvae2"]
            found[f"{name} replay=buffer"] = [*plain, "replay=buffer", "replay.images=7"]
        for mechanism in sorted({*mechanisms_of(strategy)} - OF_REPLAY):
            found[f"{name} dp={mechanism}"] = [*plain, *REPEATABLE, f"dp={mechanism}", *NEEDED.get(mechanism, ())]
        if {*mechanisms_of(strategy)} >= OF_REPLAY and strategy.supports_replay:
            private = ["replay=vqvae2", "dp=generator", "codebook=gradient", *REPEATABLE]
            found[f"{name} replay=vqvae2 dp=generator"] = [*plain, *private]
    return found


class Shared:
    """Numbers that outlive a killed process: steps on the disk, what it died of, noisy steps by institution."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * 64)

    def __getitem__(self, slot: int) -> int:
        return struct.unpack_from("q", self._memory, 8 * slot)[0]

    def __setitem__(self, slot: int, number: int) -> None:
        struct.pack_into("q", self._memory, 8 * slot, number)

    def clear(self) -> None:
        self._memory[:] = bytes(len(self._memory))


STEPS, KIND, INSTITUTIONS = 0, 1, 2  # slots; those of the institutions come last


def slot(name: str) -> int:
    return INSTITUTIONS + int(name.rpartition("-")[2])


@dataclass
class Ended:
    """How a process ended: its exit code, negative if a signal killed it, and what it said."""

    code: int
    said: str
    seconds: float


class Place:
    """A folder with the run and its institutions, where one process after another works on it."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        self.folder, self.shared = folder, Shared()
        self.run = folder / "runs" / NAME
        self.words = ["run", *options, f"run_name={NAME}", "--runs-dir", str(folder / "runs")]
        folder.mkdir()

    def attempt(self, at: int = 0, after: float = 0.0, share: float = 0.5) -> Ended:
        """Begin the run or go on with it; die at a step on the disk, or be killed after some seconds."""
        words = ["run", "--resume", str(self.run)] if self.run.exists() else self.words
        began = time.monotonic()
        child = os.fork()
        if not child:
            self._work(words, at, share)
        if after:
            watched = os.pidfd_open(child)
            if not select.select([watched], [], [], after)[0]:
                self.shared[KIND] = 0
                os.kill(child, signal.SIGKILL)
            os.close(watched)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return Ended(code, (self.folder / "said").read_text(), time.monotonic() - began)

    def _work(self, words: list[str], at: int, share: float) -> None:
        """Run the command line in this forked process, and end it."""
        code = 99
        try:
            file = os.open(self.folder / "said", os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.environ["FLWR_REPLAY_HOME"] = str(self.folder)
            sys.argv = ["flwr-replay", *words]
            watch(self.shared, at, share)
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    @property
    def result(self) -> dict:
        return read_json(self.run / "result.json")

    def charges(self) -> dict[str, list[dict]]:
        """Return the lines of every institution's account of this run."""
        run_id = (self.run / "run-id").read_text().strip()
        states = sorted((self.folder / "state" / "simulation").iterdir())
        return {state.name: read_lines(state / "runs" / run_id / "privacy.jsonl") for state in states}

    def kept(self) -> set[str]:
        """Return the names of all files of the run and its institutions, the run's id left out."""
        run_id = (self.run / "run-id").read_text().strip()
        files = (path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file())
        return {str(path).replace(run_id, "ID") for path in files}


def watch(shared: Shared, at: int, share: float) -> None:
    """Count steps on the disk and noisy steps; die at the step of this number."""
    counted, fsync, beginning, step = itertools.count(1), os.fsync, PrivacyBudget.beginning, DPTraining.step

    def reached(kind: str) -> bool:
        shared[STEPS] = number = next(counted)
        if number == at:
            shared[KIND] = KINDS.index(kind)
        return number == at

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple) -> None:
        if event in KINDS and (event != "open" or arguments[2] & WRITING) and reached(event):
            die()

    class Torn(io.FileIO):
        def write(self, data: bytes) -> int:
            if reached("write"):
                super().write(memoryview(data).cast("B")[: int(share * memoryview(data).nbytes)])
                die()
            return super().write(data)

    def opened(path, mode="r", buffering=-1, opener=None, **more):
        if "b" not in mode or mode == "rb":
            return open(path, mode, buffering, opener=opener, **more)
        raw = Torn(path, mode.replace("b", ""), opener=opener)
        return raw if buffering == 0 else io.BufferedWriter(raw)

    def flushed(descriptor: int) -> None:
        for before in (True, False):
            if reached("fsync"):
                die()
            if before:
                fsync(descriptor)

    def begun(budget, *arguments):
        training = beginning(budget, *arguments)
        training.taken_at = slot(budget.institution.name)
        return training

    def stepped(training, *arguments, **more):
        shared[training.taken_at] += 1
        return step(training, *arguments, **more)

    for module in PATCHED:
        module.open = opened
    os.fsync, PrivacyBudget.beginning, DPTraining.step = flushed, begun, stepped
    sys.addaudithook(hook)


def whole(folder: Path, options: list[str]) -> tuple[Place, Ended]:
    """Run a job to its end, undisturbed."""
    place = Place(folder, options)
    ended = place.attempt()
    assert ended.code == 0, ended.said
    return place, ended


def killed(place: Place, rng: Random, steps: int, seconds: float, most: int) -> Iterator[str]:
    """Kill a run at random moments, at most so often, and go on each time until it ends; yield what each died of."""
    for _ in range(most):
        if rng.random() < 0.25:
            ended = place.attempt(after=rng.uniform(0.001, seconds))
        else:
            ended = place.attempt(at=rng.randint(1, steps), share=rng.random())
        if ended.code != -signal.SIGKILL:
            assert ended.code == 0, ended.said
            return
        yield KINDS[place.shared[KIND]]
    ended = place.attempt()
    assert ended.code == 0, ended.said


def check(one: Place, other: Place, kills: int) -> None:
    """Compare what a run has left that was killed so often with what an undisturbed one has."""
    expected, found = one.result, other.result
    for key in ("final", "best", "examples-seen", "forgetting", "failures"):
        assert found[key] == expected[key], f"{key} differs: {found[key]}, undisturbed {expected[key]}"
    for folder in ("models", "best"):
        files = [sorted((place.run / folder).glob("*")) for place in (one, other)]
        assert [file.name for file in files[0]] == [file.name for file in files[1]]
        for file, twin in zip(*files, strict=True):
            assert file.read_bytes() == twin.read_bytes(), f"{twin} has other bits"
    assert (one.run / "metrics.jsonl").read_bytes() == (other.run / "metrics.jsonl").read_bytes()
    sums = Counter()
    for row in read_lines(other.run / "ledger.jsonl"):
        sums[row["direction"]] += row["bytes"]
    assert {key: found["bytes"][key] for key in ("up", "down")} == sums
    assert other.kept() == one.kept(), f"files differ: {other.kept() ^ one.kept()}"
    check_accounts(one, other, kills)


def check_accounts(one: Place, other: Place, kills: int) -> None:
    """See that nothing was spent without a charge, and that a kill adds no more than what was repeated."""
    undisturbed, charges = one.charges(), other.charges()
    assert charges.keys() == undisturbed.keys()
    for name, written in charges.items():
        charged, once = (sum(line["steps"] for line in rows) for rows in (written, undisturbed[name]))
        taken = other.shared[slot(name)]
        assert charged >= max(taken, once), f"{name} took {taken} noisy steps and is charged for {charged}"
        assert len(written) <= len(undisturbed[name]) + 3 * kills, f"{name}: {len(written)} charges after {kills} kills"
    stated = other.result["privacy"]
    assert {name for name, written in charges.items() if written} <= stated.keys()


def clear(place: Place) -> None:
    shutil.rmtree(place.folder)
