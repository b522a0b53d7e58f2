"""An institution's own evidence: what its ledger, its state and its policy show, without the coordinator's word."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flwr_replay.errors import RunError
from flwr_replay.files.atomic import read_json, read_text
from flwr_replay.files.lines import read_lines, segments
from flwr_replay.institution.policy import read_policy
from flwr_replay.privacy.account import CHARGES
from flwr_replay.report.evidence_page import digests, kinds_in, seen_by, table, write_told
from flwr_replay.report.progress import shown_bytes
from flwr_replay.report.run_page import versions_table
from flwr_replay.runs.environment import versions
from flwr_replay.state.counts import FILE
from flwr_replay.state.kept import kept
from flwr_replay.state.store import OPTIONS, REMOVED, RUNS
from flwr_replay.wire.ledger import LEDGER, ledger_lines

__all__ = ["policy_beside", "write_own_evidence"]

CLAIM = (
    "The ledger has beside each field the (ε, δ) that the account here stated when it left, and none where nothing was "
    "differentially private. The ε of several runs add up: "
)


def policy_beside(state: Path) -> Path | None:
    """Return the policy file of a clinic's folder, from its state directory in it; None if there is none."""
    beside = state.parent.parent / "policy.yaml"
    return beside if beside.exists() else None


def write_own_evidence(
    state: Path, policy_file: Path | None, attacks: Sequence[str], sacroml: Mapping[str, Any] | None = None
) -> tuple[Path, Path]:
    """Write `evidence.html` and `evidence.json` into an institution's state directory; return their paths.

    Parameters
    ----------
    state : Path
        The state directory, `state/NAME`.
    policy_file : Path or None
        The policy in force now; None: there is none.
    attacks : sequence of str
        Sentences on what the institution's own attacks on its record found.
    sacroml : Mapping or None
        What `sacroml_found` returns.

    Raises
    ------
    RunError
        If it is no such directory, or nothing has left; if a file is damaged.
    """
    left: dict[tuple[str, ...], dict[str, Any]] = {}
    known = kept(state) if (state / RUNS).is_dir() else []  # none: it has refused all
    for line in ledger_lines(state):
        key = tuple(line[name] for name in ("run", "stage", "field", "kind"))
        row = left.setdefault(key, {"messages": 0, "bytes": 0, "first": line["time"]})
        row |= {"messages": row["messages"] + 1, "bytes": row["bytes"] + line["bytes"]}
        row |= {"last": line["time"], "protection": line["protection"]}
    if not left:
        raise RunError(f"evidence is of what has left; the ledger in {state} has no line: take part in a run first")
    policy, counts, here = read_policy(policy_file), read_lines(state / FILE), versions()
    untold = {"tests": "–"} if policy.min_count else {}  # of all runs together: the floor says how many
    runs = {folder.run: _run(state / RUNS / folder.run) | untold for folder in known}
    floor = (
        f"No count below {policy.min_count} leaves (min-count). In all runs {sum('test' in c for c in counts)} of "
        f"{policy.max_evaluations:,} tests have been asked for, and {sum('total' in c for c in counts)} different "
        "numbers of training examples have left."
        if policy.min_count
        else "No floor for small cells (min-count is off): a count that left may be of one patient."
    )
    told: dict[str, Any] = {
        "institution": state.name,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "left": [dict(zip(("run", "stage", "field", "kind"), key, strict=True)) | row for key, row in left.items()],
        "runs": runs,
        "small-cells": floor,
        "all-runs": policy.all_runs(state).sentence(),
        "policy": read_text(policy_file) if policy_file else "",
        "attacks": list(attacks),
        "sacroml": sacroml,
        "versions": here,
        "sha256": digests({path.name: path for path in segments(state / LEDGER) if path.exists()}, sacroml),
    }
    by_run: dict[str, list[list[object]]] = {}
    for (run, *of), row in left.items():
        shown = [*of, row["messages"], shown_bytes(row["bytes"]), row["last"], row["protection"]]
        by_run.setdefault(run, []).append(shown)
    heads = ["stage", "field", "kind", "messages", "size", "last left", "protection"]
    of_runs = [[name, *own.values()] for name, own in runs.items()]
    return write_told(
        state,
        told,
        title=f"Evidence of {state.name}, from its own files",
        about=f"Ledger, accounts and state of {state.name}, and its policy, as they stood on {told['written']}. What "
        "came down, and who else took part, is in the coordinator's evidence: compare the two.",
        left=[table(f"In run {run}", heads, rows) for run, rows in by_run.items()],
        runs=table("The runs", ["run", "method", "task", "tests", "charges", "models removed"], of_runs),
        kinds=kinds_in(key[3] for key in left),
        seen=[*seen_by({**row, "kind": key[3], "direction": "up"} for key, row in left.items())],
        claim=f"{CLAIM}{told['all-runs']}.",
        policy=told["policy"] or "There is no policy here: everything may leave.",
        attacks=told["attacks"] or ["No attack was run on this record: `flwr-replay privacy attack STATE --run RUN`."],
        audit="An audit by canaries is the coordinator's: see there.",
        versions=versions_table("Versions here, now", here),
    )


def _run(folder: Path) -> dict[str, Any]:
    """Say what a run was, and what it has cost: tests where no floor counts them, and charges of ε."""
    options = read_json(folder / OPTIONS) if (folder / OPTIONS).exists() else {}  # none: it was refused
    tests, charges = folder / "tests", folder / CHARGES
    return {
        "method": options.get("strategy.name", "none: refused"),
        "task": options.get("task.name", ""),
        "tests": tests.stat().st_size if tests.exists() else 0,
        "charges": len(read_lines(charges)) if charges.exists() else 0,
        "removed": "yes" if (folder / REMOVED).exists() else "no",
    }
