"""Runs that faults strike at any moment and that go on, each in a forked process that has everything imported."""

import os
import re
import select
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import inf
from pathlib import Path
from random import Random

import psutil
from chaos_faults import STEPS, STRUCK, Fault, Shared, slot, watch
from forks import work

from flwr_replay.check.strategy import JOB as SMALL
from flwr_replay.check.strategy import NEEDED, OF_OPTIONS, OF_REPLAY, REPEATABLE
from flwr_replay.config.catalogue import choices
from flwr_replay.config.compose import compose, refuse_typed
from flwr_replay.config.halves import load_strategy
from flwr_replay.engines.simulate import Simulation
from flwr_replay.errors import ConfigError
from flwr_replay.files.atomic import read_json
from flwr_replay.files.lines import read_lines
from flwr_replay.files.tensors import digest, read_tensors
from flwr_replay.runs.options import resolve
from flwr_replay.wire.ledger import ledger_lines

GENERATOR = ["generator.epochs=1", "generator.width=4", "prior.epochs=1", "prior.width=4", "prior.layers=1"]
DRAWN = ["model=gabor", "model.train=head", "dp=statistics", "privacy.noise=seeded"]
NAME = "one"  # of every run
DELIVERED = re.compile(r"(/codes-\d+|/decoder-\d+|/pictures/prior)-\d{6}")  # again to all when a run resumes
KINDS = ("kill", "full", "no more files", "read-only", "forbidden")  # of faults
NONE = Fault()
LONGEST = 600  # seconds of a run or another command; a rehearsal takes 36 of a processor


def jobs() -> dict[str, list[str]]:
    """Return the options of every strategy: plain, with replay, and under DP, where it has them."""
    chosen = {}
    for name in choices("strategy"):
        config = load_strategy(name)[1]
        traits, by_option = config.traits, OF_OPTIONS - {*config().dp_passes(1)}
        noisy = REPEATABLE if traits.dp_by_default != "none" else ()
        plain = [f"strategy={name}", *SMALL, *GENERATOR, "partition.size=60", *noisy]
        chosen[name] = plain
        if traits.supports_replay:
            chosen[f"{name} replay=vqvae2"] = [*plain, "replay=vqvae2"]
            chosen[f"{name} replay=buffer"] = [*plain, "replay=buffer", "replay.images=7"]
        if traits.summed:
            chosen[f"{name} masked"] = [*plain, "masked=true"]
        if traits.relayed:
            chosen[f"{name} sealed"] = [*plain, "sealed=true"]
        for mechanism in sorted({*traits.dp_mechanisms} - OF_REPLAY - by_option):
            chosen[f"{name} dp={mechanism}"] = [*plain, *REPEATABLE, f"dp={mechanism}", *NEEDED.get(mechanism, ())]
        if by_option and by_option <= {*traits.dp_mechanisms}:
            way = "replay=statistics" if traits.supports_draws else "latents=drawn"
            chosen[f"{name} {way}"] = [*(word for word in plain if not word.startswith("model")), *DRAWN, way]
        if {*traits.dp_mechanisms} >= OF_REPLAY and traits.supports_replay:
            private = ["replay=vqvae2", "dp=generator", "codebook=gradient", *REPEATABLE]
            chosen[f"{name} replay=vqvae2 dp=generator"] = [*plain, *private]
    return {name: list(filter(partial(has_effect, options), options)) for name, options in chosen.items()}


def has_effect(options: list[str], option: str) -> bool:
    """Return whether a command would take an option of a job's: one that changes nothing is refused."""
    with suppress(ConfigError):
        refuse_typed([option], options, [compose(options)])
        return True
    return False


def secretly(options: list[str]) -> list[str]:
    """Return a job's options with noise that is secret, in place of seeded one, so that an epsilon is stated."""
    return [option for option in options if option != "privacy.noise=seeded"]


@dataclass
class Ended:
    """How a process ended: its exit code, negative if a signal killed it, and what it said."""

    code: int
    output: str
    seconds: float

    @property
    def error(self) -> str:
        """The one line with which it ended by itself; anything else is a finding."""
        lines = [line for line in self.output.splitlines() if line.startswith("error: ")]
        ending = self.code, len(lines), "Traceback" in self.output
        assert ending == (2, 1, False), f"exit code {self.code}: {self.output}"
        return lines[0]


class Place:
    """A folder with the run and its institutions, where one process after another works on it."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        self.folder, self.options, self.shared = folder, options, Shared()
        self.run, self.modules = folder / "runs" / NAME, folder.with_suffix(".modules")
        self.words = ["run", *options, f"run_name={NAME}", "--runs-dir", str(folder / "runs")]
        folder.mkdir()
        for k in range(1, 4 if "masked=true" in options else 1):  # masks round by the keys: the same bits need the same
            key = folder / "state" / "simulation" / f"institution-{k}" / "seal.key"
            key.parent.mkdir(mode=0o700, parents=True)
            key.touch(0o600)
            key.write_text(f"{k:064x}")

    def copy(self, folder: Path) -> "Place":
        """Return a copy of all that lies here, and of what was counted."""
        other = Place(folder, self.options)
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        other.shared = self.shared.copy()
        return other

    def clear(self) -> None:
        shutil.rmtree(self.folder)

    def attempt(self, fault: Fault = NONE, words: Sequence[str] = ()) -> Ended:
        """Begin the run or go on with it, or give another command these words, while a fault may strike."""
        words = words or (["run", "--resume", str(self.run)] if self.run.exists() else self.words)
        began = time.monotonic()
        child = os.fork()
        if not child:
            self._work(words, fault)
        watched = os.pidfd_open(child)
        ended = select.select([watched], [], [], fault.after or LONGEST)[0]
        os.close(watched)
        if not ended:
            self.shared[STRUCK] = 0
            os.kill(child, signal.SIGKILL)
            assert fault.after, f"{words} did not end within {LONGEST} s"
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        log = self.folder / "said"  # not there yet if the kill came before the process had begun
        return Ended(code, log.read_text() if log.exists() else "", time.monotonic() - began)

    def warm(self) -> None:
        """Import what the last process that succeeded had imported: the next ones have it from the start."""
        for name in self.modules.read_text().splitlines():
            with suppress(Exception):  # a part of another one, or made by hand
                import_module(name)

    def living(self) -> list[psutil.Process]:
        """Return the processes that were started here, whoever has died since."""
        own = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                own += [process] if process.environ().get("FLWR_REPLAY_HOME", "").startswith(str(self.folder)) else []
        return own

    @property
    def struck(self) -> str:
        """The step that the last fault struck first."""
        return STEPS[at - 1] if (at := self.shared[STRUCK]) else "no step"

    def _work(self, words: Sequence[str], fault: Fault) -> None:
        """Run the command line in this forked process, and end it."""
        code = 99
        try:
            file = os.open(self.folder / "said", os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
            os.environ |= {"FLWR_REPLAY_HOME": str(self.folder), "COLUMNS": "200"}  # a table in one piece
            code = work(words, file, before=lambda: watch(self.shared, fault, self.folder))
            if not code:
                self.modules.write_text("\n".join(sys.modules))
        finally:
            os._exit(code)

    @property
    def result(self) -> dict:
        return read_json(self.run / "result.json")

    def charges(self) -> dict[str, list[dict]]:
        """Return the lines of every institution's account of this run."""
        run_id = (self.run / "run-id").read_text().strip()
        states = self.states().items()
        return {name: read_lines(state / "runs" / run_id / "privacy.jsonl") for name, state in states}

    def states(self) -> dict[str, Path]:
        """Return the institutions' state directories."""
        return {state.name: state for state in sorted((self.folder / "state" / "simulation").iterdir())}

    def kept(self) -> set[str]:
        """Return the names of all files of the run and its institutions, without its id and exchanges of deliveries."""
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        return {self.named(path) for path in paths if path.name != "failures.jsonl" or path.stat().st_size}

    def named(self, path: Path) -> str:
        """Return a file's name as `kept` has it."""
        run_id = (self.run / "run-id").read_text().strip()
        return DELIVERED.sub(r"\1", str(path.relative_to(self.folder)).replace(run_id, "ID"))


def moments(name: str) -> Random:
    """Return what draws faults for a test: the same for a commit in CI, others for the next one."""
    return Random(f"{os.environ.get('FLWR_REPLAY_MOMENTS', '')} {name}")


def drawn_names(what: str, names: Iterable[str], number: int) -> list[str]:
    """Return some of the names for a test: the same for a commit in CI, others for the next one, or all."""
    names = [*names]
    return names if os.environ.get("FLWR_REPLAY_MOMENTS") == "all" else sorted(moments(what).sample(names, number))


def undisturbed_run(folder: Path, options: list[str]) -> tuple[Place, Ended]:
    """Run a job to its end, undisturbed; what it imported and composed the next processes have from the start."""
    place = Place(folder, options)
    ended = place.attempt()
    assert ended.code == 0, ended.output
    place.warm()
    for words, resumed in ((options, ""), ([], str(place.run))):
        Simulation.of(resolve(words, str(place.run.parent), resumed)[1])
    return place, ended


def struck(place: Place, rng: Random, undisturbed: Ended, steps: int, most: int, kinds=KINDS) -> Iterator[str]:
    """Let faults strike a run, at most so often, and go on each time until it ends; yield what struck where."""
    for _ in range(most):
        fault = Fault.drawn(rng, kinds, steps, undisturbed.seconds)
        ended = place.attempt(fault)
        if ended.code == 0:
            return
        if fault.kind == "kill":
            assert ended.code == -signal.SIGKILL, ended.output
        else:
            assert str(place.folder) in ended.error, f"{fault.kind} at {place.struck}: {ended.output}"
        yield f"{fault.kind}: {place.struck}"
    ended = place.attempt()
    assert ended.code == 0, ended.output


def check(undisturbed: Place, struck: Place, faults: int) -> None:
    """Compare what a run has left that faults have struck with what an undisturbed one has."""
    missed = check_failures(undisturbed, struck)
    if not missed:
        check_results(undisturbed, struck)
    check_accounts(undisturbed, struck, faults, whole=not missed)
    check_ledgers(struck.run, struck.states())


def stated_epsilon(stated: dict | None) -> float:
    """Return the epsilon that a result states of an institution; without a bound it is infinite."""
    return 0 if not stated else inf if stated["epsilon"] is None else stated["epsilon"]


def check_stated(undisturbed: Place, struck: Place, faults: int) -> None:
    """See that a run with secret noise, which nobody can repeat, states no smaller epsilon than an undisturbed one.

    It states the same where no step was repeated.
    """
    whole = not check_failures(undisturbed, struck)
    check_accounts(undisturbed, struck, faults, whole=whole)
    check_ledgers(struck.run, struck.states())
    for name, written in undisturbed.charges().items() if whole else ():
        once, repeated = (sum(line["steps"] for line in rows) for rows in (written, struck.charges()[name]))
        expected, stated = (stated_epsilon(place.result["privacy"][name]) for place in (undisturbed, struck))
        assert (stated == expected) if once == repeated else (stated > expected), f"{name}: {stated}, once {expected}"


def check_ledgers(run: Path, states: dict[str, Path]) -> None:
    """See that each institution has written down what the server got of it; notices leave from a full disk, too."""
    run_id = (run / "run-id").read_text().strip()
    for name, state in states.items():
        came = (row for row in ledger_lines(run) if (row["institution"], row["direction"]) == (name, "up"))
        got = Counter(_what_left(row) for row in came if row["kind"] not in ("notice", "not received"))
        written = Counter(_what_left(row) for row in ledger_lines(state) if row["run"] == run_id)
        assert got <= written, f"{name} has no line of {got - written}"


def _what_left(row: dict) -> tuple:
    return tuple(row[key] for key in ("round", "stage", "field", "kind", "bytes"))


def check_failures(undisturbed: Place, struck: Place) -> list[str]:
    """Return the reasons why institutions were left out, if any: a full disk of theirs, and nothing else."""
    reasons = [failure["reason"] for failure in struck.result["failures"]]
    assert not undisturbed.result["failures"]
    for reason in reasons:
        assert str(struck.folder / "state") in reason, reason
        assert "\n" not in reason, reason
    return reasons


# A kill may cost what a generator's earlier messages said of their loss; the last one alone makes no picture.
PICTURE = {"runs/one/generator.png"}
PAGE = "runs/one/report.html"  # of a disk that fails for it alone, the run says so and ends with all results
PAGE_OR_TEMPORARY = r"runs/one/\.?report\.html(\.\d+\.tmp)?"  # from a disk that is read-only nothing can be removed


def check_results(undisturbed: Place, struck: Place, but: frozenset[str] = frozenset()) -> None:
    """See that two runs have the same results, bit by bit, and the same files but perhaps a few."""
    check_bits(undisturbed.run, struck.run)
    sums = Counter()
    for row in ledger_lines(struck.run):
        sums[row["direction"]] += row["bytes"]
    assert {key: struck.result["bytes"][key] for key in ("up", "down")} == sums
    differing = (struck.kept() ^ undisturbed.kept()) - but - PICTURE
    if f"{PAGE} is not written, all results are" in (struck.folder / "said").read_text():
        differing = {name for name in differing if not re.fullmatch(PAGE_OR_TEMPORARY, name)}
    assert not differing, f"files differ: {differing}"


def check_bits(undisturbed: Path, struck: Path) -> None:
    """See that two run directories have the same metrics and models, bit by bit."""
    expected, results = (read_json(run / "result.json") for run in (undisturbed, struck))
    for key in ("final", "best", "examples-seen", "forgetting"):
        assert results[key] == expected[key], f"{key} differs: {results[key]}, undisturbed {expected[key]}"
    for folder in ("models", "best"):
        files = [sorted((run / folder).glob("*")) for run in (undisturbed, struck)]
        assert [file.name for file in files[0]] == [file.name for file in files[1]]
        for file, twin in zip(*files, strict=True):
            weights = [digest(read_tensors(path)) for path in (file, twin)]  # the best one's file names its run
            assert weights[0] == weights[1], f"{twin} has other bits"
    assert (undisturbed / "metrics.jsonl").read_bytes() == (struck / "metrics.jsonl").read_bytes(), "other metrics"


def check_accounts(expected: Place, struck: Place, faults: int, whole: bool) -> None:
    """See that nothing was spent without a charge, and that a fault adds no more than what was repeated."""
    undisturbed, charges = expected.charges(), struck.charges()
    assert charges.keys() == undisturbed.keys()
    for name, written in charges.items():
        charged, once = (sum(line["steps"] for line in rows) for rows in (written, undisturbed[name]))
        taken = struck.shared[slot(name)]
        assert charged >= max(taken, once if whole else 0), (
            f"{name} took {taken} noisy steps and is charged for {charged}"
        )
        assert len(written) <= len(undisturbed[name]) + 3 * faults, (
            f"{name}: {len(written)} charges after {faults} faults"
        )
    stated = struck.result["privacy"]
    assert {name for name, written in charges.items() if written} <= stated.keys()
