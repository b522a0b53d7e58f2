"""The cells of a comparison: one run for each method and seed.

A cell with a result.json is finished and not repeated. One with a checkpoint is resumed. Any other starts from scratch.
"""

import ctypes
import gc
import logging
import multiprocessing
import re
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr_replay.engines.simulate import run_inline
from flwr_replay.errors import FlwrReplayError, RunError, one_line
from flwr_replay.files.disk import entries, there
from flwr_replay.processes import end_with_parent
from flwr_replay.report.metrics import epsilon_suffix, missing_suffix
from flwr_replay.report.progress import Display, TerminalDisplay
from flwr_replay.report.run_files import read_result
from flwr_replay.report.run_page import PAGE
from flwr_replay.report.summary import untrained_lines
from flwr_replay.runs.options import resolve
from flwr_replay.studies.methods import Method, seeds_told

__all__ = ["Cell", "run_all", "run_cell"]

A_RUN_WRITES = re.compile(
    r"(config|environment|confusion|metrics|timings|ledger(-\d{4,})?|failures|forgetting|generator|prior|privacy|members|tracking)\.(yaml|json|jsonl|png)|"
    r"run-id|SHA256SUMS|ledger\.begun|ended\.txt|resume\.toml|report\.html|"
    r"checkpoints|models|best|tensorboard|wandb|latents|shared|replay|mailbox|messages|pictures|\.lock|\..*\.tmp"
)
KILLED = (
    "its process was killed, perhaps for lack of memory: lower --jobs, and repeat the command to run what is missing"
)


@dataclass(frozen=True)
class Cell:
    """One method with one seed."""

    method: Method
    seed: int
    folder: Path
    overrides: tuple[str, ...]  # of a fresh run
    metric: str = ""  # printed when the cell ends
    of_study: str = ""  # the name of its comparison there

    @property
    def done(self) -> bool:
        """Whether the run has its result."""
        return there(self.folder / "result.json")

    @property
    def begun(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return there(self.folder / "config.yaml") and bool(entries(self.folder / "checkpoints", "*.safetensors"))


def run_all(cells: Sequence[Cell], jobs: int) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Run the cells that are not finished; yield each cell's folder with its `result` or `error`, as they end."""
    todo = [cell for cell in cells if not cell.done]
    for cell in cells:
        if cell.done:
            yield cell.folder, run_cell(cell, Display())
    resumed = sum(cell.begun for cell in todo)
    state = f"{len(cells) - len(todo)} finished, {resumed} to resume, {len(todo) - resumed} to start"
    _say(f"{len(cells)} runs, {seeds_told(sorted({cell.seed for cell in cells}))}: {state}")
    in_turn = ((cell, run_cell(cell, TerminalDisplay() if sys.stderr.isatty() else Display())) for cell in todo)
    try:
        for count, (cell, outcome) in enumerate(in_turn if jobs == 1 else _at_once(todo, jobs), 1):
            named = f"{f'{cell.of_study}, ' if cell.of_study else ''}{cell.method.label} seed {cell.seed}"
            _say(f"[{count}/{len(todo)}] {named}: {_outcome_line(outcome, cell.metric)}")
            yield cell.folder, outcome
    except (KeyboardInterrupt, SystemExit):
        _say("interrupted; repeat the command to continue")
        raise


def _at_once(cells: Sequence[Cell], jobs: int) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Run cells in worker processes; if one dies, its cell fails and the comparison continues."""
    waiting = list(cells)
    while waiting:
        others = set(multiprocessing.active_children())
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(min(jobs, len(waiting)), spawn, initializer=end_with_parent)
        running: dict[Future[dict[str, Any]], Cell] = {pool.submit(run_cell, cell, Display()): cell for cell in waiting}
        ended = []
        try:
            for future in as_completed(running):
                cell = running[future]
                try:
                    outcome = future.result()
                except BrokenProcessPool:
                    break
                ended.append(cell)
                yield cell, outcome
        except BaseException:  # interrupted: without this, a worker would start the next cell
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        waiting = [cell for cell in waiting if cell not in ended]
        if waiting:  # which cell's process died is unknown: one of those that have a folder but no result
            suspects = [cell for cell in waiting if cell.folder.exists() and not cell.done] or waiting
            for cell in suspects:
                yield cell, {"error": KILLED}
            waiting = [cell for cell in waiting if cell not in suspects]


def _outcome_line(outcome: dict[str, Any], metric: str) -> str:
    if "error" in outcome:
        return f"failed: {outcome['error']}"
    result = outcome["result"]
    value = result["final"]["global"].get(metric)
    shown = "missing" if value is None else f"{value:.4f}"
    lacks = "".join(f", {line}" for line in untrained_lines(result))
    return f"{metric} {shown}{epsilon_suffix(result)}{missing_suffix(result)}{lacks}, {result['wall-seconds']:.1f} s"


def run_cell(cell: Cell, display: Display) -> dict[str, Any]:
    """Read, resume or run one cell; return its `result` or its `error`."""
    log, level = logging.getLogger("flwr"), logging.getLogger("flwr").level
    log.setLevel(logging.WARNING)
    try:
        whole = cell.done and there(cell.folder / PAGE)  # which is written last
        return {"result": read_result(cell.folder) if whole else _run(cell, display)}
    except FlwrReplayError as error:
        return {"error": one_line(error)}
    except Exception as error:  # a bug must not cost the other cells their results
        _say(traceback.format_exc())
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        log.setLevel(level)


def _run(cell: Cell, display: Display) -> dict[str, Any]:
    overrides = list(cell.overrides)
    if cell.done or cell.begun:
        overrides, _ = resolve([], "", str(cell.folder))
    elif there(cell.folder):
        _remove_unborn(cell.folder)
    try:
        return run_inline(overrides, display)[0]
    finally:  # freed memory goes back to the system: the runs of one process fragment its heap
        gc.collect()
        if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):  # glibc has it
            trim(0)


def _remove_unborn(folder: Path) -> None:
    """Remove a run that ended before its first checkpoint; refuse if the folder has files that no run writes."""
    for path in folder.iterdir():
        if not A_RUN_WRITES.fullmatch(path.name):
            raise RunError(f"{folder} has no run to resume, but a file that no run writes, {path.name}: move it away")
    shutil.rmtree(folder)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
