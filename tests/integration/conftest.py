"""A real deployment on the loopback: one SuperLink, and one SuperNode process for each institution."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flwr_replay.runs.rehearsal import supernode
from flwr_replay.runs.superlink import SuperLink, flwr_run, superlink

HOSPITALS = Path(__file__).parents[2] / "docs" / "examples" / "hospitals"
CLINICS = ("clinic-a", "clinic-b")
REFUSES = "clinic-c"  # lets statistics leave, and nothing else
TASK = ("task=folder", "channels=1", "task.size=8", "classes=10", "model=cnn", "width=8", "device=cpu", "threads=1")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "deployment: starts Flower's own server and node processes, a minute or more")


@dataclass
class Deployment:
    """What runs, and where its files lie."""

    link: SuperLink
    data: Path  # data/<clinic>, and data/manifest.csv over those that take part
    state: Path  # state/<clinic>/ledger.jsonl, each clinic's own
    runs: Path  # the server's run directories
    task: tuple[str, ...] = TASK

    def run(self, name: str, *options: str) -> str:
        """Run `flwr run … --stream` to its end; return what it said."""
        overrides = [*TASK, *options, f"nodes={len(CLINICS) + 1}", f"runs_dir='{self.runs}'", f"run_name={name}"]
        said = "".join(flwr_run(self.link, overrides))
        if not (self.runs / name / "result.json").exists():
            pytest.fail(f"the run {name} did not end well:\n{said}\n{self.logs()}")
        return said

    def logs(self) -> str:
        """Return the ends of all processes' logs."""
        return "\n".join(f"--- {log.name}\n{log.read_text()[-5000:]}" for log in sorted(self.link.folder.glob("*.log")))

    def own_ledger(self, clinic: str) -> list[dict[str, Any]]:
        """Return what a clinic wrote down before it left."""
        return _json_lines(self.state / clinic / "ledger.jsonl")

    def server_ledger(self, name: str) -> list[dict[str, Any]]:
        """Return what the server saw travel."""
        return _json_lines(self.runs / name / "ledger.jsonl")


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two clinics that take part, and a third whose policy forbids what all methods share."""
    root = tmp_path_factory.mktemp("deployment")
    runpy.run_path(str(HOSPITALS / "make_data.py"))["write_clinics"](root / "data")
    manifest = root / "data" / "manifest.csv"
    rows = [row for row in manifest.read_text().splitlines() if not row.startswith(REFUSES)]
    manifest.write_text("\n".join(rows))
    (root / "link").mkdir()
    open_policy, closed_policy = root / "policy.yaml", root / "closed.yaml"
    example = (HOSPITALS / "policy.yaml").read_text()
    open_policy.write_text(example.replace("[fedreplay, cwt]", "[fedreplay, cwt, proxyfl]"))
    closed_policy.write_text("kinds: [statistic]\n")
    with ExitStack() as stack:
        link = stack.enter_context(superlink(root / "link", simulation=False))
        for clinic in (*CLINICS, REFUSES):
            policy = open_policy if clinic != REFUSES else closed_policy
            owned = {"name": clinic, "data": str(root / "data" / clinic), "state": str(root / "state")}
            stack.enter_context(supernode(link, clinic, owned | {"policy": str(policy), "record": "all"}))
        yield Deployment(link, root / "data", root / "state", root / "runs")
