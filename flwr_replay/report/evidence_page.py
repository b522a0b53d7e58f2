"""A finished run's evidence, `evidence.html` and `evidence.json`: what a board and an egress reviewer can file.

What left, under which ε, who could see it, who took no part, what ran, what was attacked; and how far our controls
answer what SATRE and the NHS toolkit ask. SATRE's statements are numbered as sa-tre/satre-specification has them at
commit 020b572; releases may number them otherwise. Of the NHS toolkit (DSPT) the names of its ten standards and the
assertions of the first were found, the outcomes of its CAF edition were not.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flwr_replay.config.catalogue import conf_dir
from flwr_replay.errors import RunError
from flwr_replay.files.atomic import read_bytes, write_atomic
from flwr_replay.files.disk import there
from flwr_replay.report.progress import shown_time
from flwr_replay.report.run_files import CONFIG, RESULT, ledger_of, read_result, read_run_id
from flwr_replay.report.run_page import KINDS, left_table, privacy_table, travelled_by_kind, versions_table
from flwr_replay.report.templates import render
from flwr_replay.wire.masked import MASKED
from flwr_replay.wire.sealed import SEALED

__all__ = [
    "CONTROLS",
    "NOT_RUN",
    "PAGE",
    "code_digest",
    "digests",
    "kinds_in",
    "seen_by",
    "table",
    "write_evidence",
    "write_told",
]

PAGE = "evidence"
NOT_RUN = {
    "attacks": "No attack was run on this run's messages: `flwr-replay privacy attack RUN`, where they were recorded.",
    "audit": "No audit by canaries was given: `flwr-replay privacy audit` on the same options, then --audit FILE.",
    "sacroml": "This page has no SACRO-ML report. `uv run docs/examples/sacroml/attack.py MODEL DATA REPORT` in a "
    "checkout makes one of what `flwr-replay export` wrote, in an environment of its own; then --sacroml FILE. Beside "
    "pandas 3, as here, sacroml 2.0.1 gets acro 0.4.2: later ones want pandas below 3.",
}
CONTROLS = (  # asked by, what is asked, what is here
    ("SATRE 3.1.2", "records of data handling decisions", "the policy file, officer.json, this page"),
    (
        "SATRE 3.1.4",
        "an egress process that enforces governance rules",
        "the policy, at every message; nobody approves",
    ),
    ("SATRE 3.1.6", "a record of what data the environment holds", "none: numbers of examples only"),
    ("SATRE 3.1.7", "a policy on deletion", "none; deploy remove deletes a state, with a receipt; backups are yours"),
    ("SATRE 3.1.10", "no unauthorised egress", "the guard binds honest code; the account's rights bind the rest"),
    ("SATRE 3.2.3", "users see only the data they need", "none: the operating system's rights"),
    ("SATRE 3.2.4", "multi-factor authentication", "none: nodes have keys, people have no accounts here"),
    ("SATRE 3.3.2", "intended outputs, from the outset", "the officer's page, by field, before the run"),
    (
        "SATRE 3.3.3",
        "a documented process of disclosure control",
        "min-count, kinds, max-epsilon; the rest is yours",
    ),
    ("SATRE 3.3.4", "a process that assigns output checking", "none: lines to sign, below"),
    (
        "SATRE 3.3.5",
        "outputs that nobody can check by hand",
        "none: weights are such; ε, attacks, audits and SACRO-ML inform one",
    ),
    ("SATRE 3.3.6", "a statistical basis of these decisions", "a proven ε where there is one; attacks with intervals"),
    (
        "SATRE 3.3.8",
        "outputs limited to the minimum",
        "the policy; deploy init proposes what the study needs",
    ),
    ("SATRE 3.5.2", "penetration tests", "none by outsiders; hostile servers in the tests, docs/audit.md"),
    ("SATRE 3.5.4", "incident response", "none"),
    ("SATRE 3.5.6", "encryption at rest", "none: files are their owner's only; encrypt the disk"),
    (
        "SATRE 3.5.7",
        "encryption in transit",
        "TLS as `deploy init` writes it, not by force; sealed runs hide weights, too",
    ),
    ("DSPT 1.5", "personal information is used and shared lawfully", "none: which law applies is the controller's"),
    ("DSPT 1.6", "data protection by design and by default", "refusals before data are read; DP is off by default"),
    (
        "DSPT 1.7",
        "data quality controls",
        "`data check`: unreadable and double images, patients in two splits",
    ),
    ("DSPT 1.8", "risks are understood and managed", "attacks, audits and their limits; no register of risks"),
    ("DSPT: Staff Responsibilities", "staff know their duties", "the officer's page, to sign; else none"),
    ("DSPT: Training", "staff are trained", "none"),
    ("DSPT: Managing Data Access", "access is managed", "none: as SATRE 3.2.3"),
    ("DSPT: Process Reviews", "processes are reviewed each year", "none"),
    ("DSPT: Responding to Incidents", "incidents are reported", "none"),
    ("DSPT: Continuity Planning", "a plan for when systems fail", "runs resume, budgets survive a restart; no plan"),
    ("DSPT: Unsupported Systems", "no unsupported software", "versions above; nothing checks them against advisories"),
    ("DSPT: IT Protection", "systems are protected", "the guard, against messages of a run only"),
    ("DSPT: Accountable Suppliers", "suppliers are accountable", "none: open source, without warranty"),
)


def write_evidence(
    folder: Path,
    attacks: Sequence[str],
    audit: Mapping[str, Any] | None,
    sacroml: Mapping[str, Any] | None = None,
) -> tuple[Path, Path]:
    """Write page and data into a run's directory; return their paths.

    `attacks` are sentences on what attacks found, none if none ran; `audit` is the content of an `audit.json`, and
    `sacroml` what `sacroml_found` returns.

    Raises
    ------
    RunError
        If the run has not finished, or a file of its directory is damaged.
    """
    if not there(folder / RESULT):
        raise RunError(
            f"evidence is of a finished run; {folder} has no {RESULT}: flwr-replay runs show says how it stands"
        )
    result, models = read_result(folder), sorted(folder.glob("models/**/*.safetensors"))
    files = {str(path.relative_to(folder)): path for path in [folder / CONFIG, folder / RESULT, *models]}
    told: dict[str, Any] = {
        "run": read_run_id(folder),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: result[name] for name in ("strategy", "task", "model", "rounds", "seed", "wall-seconds")},
        "left": travelled_by_kind(folder),
        "seen": list(seen_by(ledger_of(folder))),
        "small-cells": _floor(ledger_of(folder)),
        "claim": result["privacy-claim"],
        "privacy": result["privacy"],
        "absent": result["failures"],
        "untested": result.get("untested") or [],
        "attacks": list(attacks),
        "audit": audit,
        "sacroml": sacroml,
        "versions": result["versions"],
        "sha256": digests(files, sacroml),
        "controls": [dict(zip(("asked by", "asked", "here"), row, strict=True)) for row in CONTROLS],
    }
    return write_told(
        folder,
        told,
        title=f"Evidence of run {told['run']}",
        about=f"{told['strategy']} on {told['task']}, rounds: {told['rounds']}, seed {told['seed']}, the network "
        f"{told['model']}. It took {shown_time(told['wall-seconds'])}. Written {told['written']} from the "
        "coordinator's own files. Each institution has a ledger of its own: compare.",
        left=[left_table(told["left"])],
        kinds=kinds_in(kind for own in told["left"].values() for kind in own),
        seen=told["seen"],
        claim=told["claim"],
        privacy=privacy_table(result),
        absent=[f"{no['institution']}, exchange {no['round']}: {no['reason']}" for no in told["absent"]],
        untested=told["untested"],
        attacks=told["attacks"] or [NOT_RUN["attacks"]],
        audit=_audited(audit) if audit else NOT_RUN["audit"],
        versions=versions_table("Versions of the run", told["versions"]),
    )


def write_told(folder: Path, told: Mapping[str, Any], **values: object) -> tuple[Path, Path]:
    """Write what is told of a run or an institution as `evidence.html` and `evidence.json`; return their paths.

    `values` are what the page has beside that in words and tables.
    """
    page, data, sacroml = folder / f"{PAGE}.html", folder / f"{PAGE}.json", told["sacroml"]
    rows = sacroml["figures"] if sacroml else []
    text = render(
        PAGE,
        floor=told["small-cells"],
        sacroml=sacroml["said"] if sacroml else NOT_RUN["sacroml"],
        figures=table("SACRO-ML", [*rows[0]], [[*row.values()] for row in rows]) if sacroml else None,
        sums=table("SHA-256", ["file", "digest"], list(told["sha256"].items())),
        controls=table("What is asked, and what is here", ["asked by", "asked", "here"], CONTROLS),
        version=told["versions"]["flwr-replay"],
        **values,
    )
    write_atomic(data, json.dumps(told, indent=2, ensure_ascii=False) + "\n")
    write_atomic(page, text)
    return page, data


def digests(files: Mapping[str, Path], sacroml: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the SHA-256 of files by name, of what SACRO-ML's report is of, and of the package's code."""
    of_files = {name: _digest(path) for name, path in files.items()}
    model = sacroml["model"] if sacroml else {}
    return {**of_files, **model, "the package's code, where this was written": code_digest()}


def code_digest() -> str:
    """Return the SHA-256 of the package's Python and YAML files and names, equal in a checkout and a wheel."""
    specs = [find_spec(f"flwr_replay.{name}") for name in ("strategies", "clients")]
    wings = [Path(spec.origin).parent for spec in specs if spec and spec.origin]
    whole = sha256()
    for root in (Path(__file__).parents[1], *wings, conf_dir()):
        for path in sorted([*root.rglob("*.py"), *root.rglob("*.yaml")]):
            name = path.relative_to(root)
            if root.name == "flwr_replay" and name.parts[0] in ("strategies", "clients", "simulations", "conf"):
                continue
            whole.update(f"{root.name}/{name.as_posix()} {_digest(path)}\n".encode())
    return whole.hexdigest()


def _digest(path: Path) -> str:
    return sha256(read_bytes(path)).hexdigest()


def table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> dict[str, Any]:
    """Return a table as the templates draw it."""
    return {"caption": caption, "heads": heads, "rows": rows}


def kinds_in(kinds: Iterable[str]) -> list[str]:
    """Say what the kinds among these are, each once."""
    named = {*kinds}
    return [f"{kind}: {KINDS[kind]}." for kind in KINDS if kind in named]


def _floor(entries: Iterable[Mapping[str, Any]]) -> str:
    """Say what the ledger tells of floors for small cells."""
    floored = sorted({line["institution"] for line in entries if line["field"] == "hits"})
    of = f"Tests of {', '.join(floored)} came as numbers of right answers only, as under a floor. " if floored else ""
    return (
        f"{of}Whether an institution lets small cells leave is in its policy (min-count), which is not here: without "
        "one, a count may be of one patient."
    )


def seen_by(entries: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Say who could read what left, and what institutions got, by the lines of a ledger."""
    up: dict[tuple[str, str], None] = {}
    down: dict[str, set[str]] = {}
    for line in entries:
        if line["direction"] == "up":
            up[line["kind"], next((word for word in (SEALED, MASKED) if word in line["protection"]), "")] = None
        elif line["kind"] not in ("instruction", "notice"):
            down.setdefault(line["kind"], set()).add(line["institution"])
    readers = {
        "": "the server, as it is",
        SEALED: "the institutions whose keys were pinned; not the server",
        MASKED: "the server, as a mean over institutions only",
    }
    for kind, hidden in up:
        yield f"{kind}: {readers[hidden]}."
    for kind, names in down.items():
        yield f"{kind} came down to {', '.join(sorted(names))}: made from what all sent, or what others sent."
    yield "Whoever runs the server can hand on what it reads. TLS hides messages from the network only."


def _audited(audit: Mapping[str, Any]) -> str:
    epsilon = audit["claim"]["epsilon"]
    claim = f"claims ε {epsilon:.4g}" if epsilon is not None else "claims no ε"
    untested = " Its sums were not tested." if audit["claim"].get("untested") else ""
    return (
        f"{audit['institution']}, {audit['canaries']:,} canaries ({audit['kind']}): the account {claim}; "
        f"{'REFUTED' if audit['refuted'] else 'not refuted'}.{untested} An audit ruins a run's accuracy, so it is of "
        "another run."
    )
