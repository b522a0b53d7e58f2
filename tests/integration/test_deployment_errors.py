"""What the ServerApp refuses is shown by `flwr run --stream`, at once and with its reason."""

from __future__ import annotations

import runpy
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from integration.conftest import HOSPITALS, TASK, supernode

from flwr_replay.runs.simulate import FAILED
from flwr_replay.runs.superlink import SuperLink, flwr_run, superlink

pytestmark = [pytest.mark.deployment, pytest.mark.xdist_group("deployment")]
AT_ONCE = 60  # seconds; without a reason Flower waits as long for a sign of life


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuperLink]:
    """Two SuperNodes of one name."""
    root = tmp_path_factory.mktemp("errors")
    runpy.run_path(str(HOSPITALS / "make_data.py"))["write_clinics"](root / "data")
    (root / "link").mkdir()
    with ExitStack() as stack:
        link = stack.enter_context(superlink(root / "link", simulation=False))
        for home in ("one", "two"):
            data, policy = root / "data" / "clinic-a", HOSPITALS / "policy.yaml"
            stack.enter_context(supernode(link, "clinic-a", data, root / home, policy, home))
        yield link


def test_each_reason_is_shown_by_flwr_run(link: SuperLink, tmp_path: Path) -> None:
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "runs" / "taken" / "mine.txt").touch()  # an empty folder is nobody's
    wrong = {
        "run-name must be new; ": ["strategy=cwt", "run_name=taken"],
        "cut is an option of strategy=fedreplay, splitnn; got strategy=cwt": ["strategy=cwt", "cut=layer2"],
        "this run needs at least 9 institutions; ": ["strategy=cwt", "nodes=9", "wait=1"],
        "two SuperNodes answer as 'clinic-a'": ["strategy=cwt", "nodes=2"],
    }

    def said(options: list[str]) -> tuple[list[str], float]:
        began = time.monotonic()
        lines = list(flwr_run(link, [*TASK, *options, f"runs_dir='{tmp_path / 'runs'}'"]))
        return lines, time.monotonic() - began

    with ThreadPoolExecutor(len(wrong)) as pool:
        for reason, (lines, seconds) in zip(wrong, pool.map(said, wrong.values()), strict=True):
            shown = [found[1] for line in lines if (found := FAILED.match(line))]
            assert len(shown) == 1, "".join(lines)
            assert reason in shown[0]
            assert "Traceback" not in shown[0]
            assert seconds < AT_ONCE, "".join(lines)
