"""Order, threads, memory and samples of the tests: the longest files begin first, so that all workers end together.

Their folders lie in memory where there is room: a run writes many small files and waits for each to be on the disk,
milliseconds in which its core rests. What a real disk does is tested on mounted ones (tests/chaos/test_real_disks.py).
"""

import gc
import os
import socket
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: workers do not fight over the cores
os.environ.pop("UV_RUN_RECURSION_DEPTH", None)  # hints name `uv run` under it, and the tests may run so
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # none for nothing: actors have their own environment
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the processes of tests share what one has compiled

settings.register_profile("no deadline", deadline=None)  # time is not what a test judges
settings.load_profile("no deadline")

PORTS = ("FLWR_LOCAL_SUPERLINK_HTTP_API_PORT", "FLWR_LOCAL_CONTROL_API_PORT")  # of the SuperLink that `flwr run` starts
IN_MEMORY = Path("/dev/shm")
ROOM = 2**31  # bytes; all tests leave a fifth of it
LONGEST = (
    "test_deployment.py",
    "test_readme.py",
    "test_rehearsal.py",
    "test_notebooks.py",
    "test_cluster.py",
    "test_orphans.py",
    "test_engines.py",
    "test_examples.py",
    "test_contract.py",
    "test_kills.py",
    "test_pieces.py",
    "test_compare.py",
    "test_attack.py",
    "test_study.py",
    "test_clinical_studies.py",
    "test_fuzz_answers.py",
    "test_processes.py",
    "test_encoders.py",
    "test_own_encoders.py",
    "test_feder.py",
    "test_packaging.py",
    "test_own_app.py",
)


with socket.socket() as first, socket.socket() as second:  # each worker's own: else the runs of two meet in one
    for name, free in zip(PORTS, (first, second), strict=True):
        free.bind(("127.0.0.1", 0))
        os.environ[name] = str(free.getsockname()[1])


def in_memory():
    """Return whether there is a folder in memory with enough room, whose scripts can be executed."""
    try:
        disk = os.statvfs(IN_MEMORY)
    except OSError:
        return False
    return os.access(IN_MEMORY, os.W_OK) and disk.f_bavail * disk.f_frsize > ROOM and not disk.f_flag & os.ST_NOEXEC


if in_memory():
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))  # of tmp_path, and of nothing else


@pytest.fixture(scope="module", autouse=True)
def own_code():
    """Begin each file with no code of its own allowed: what one file allows, the next must not inherit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLWR_REPLAY_OWN_CODE", "")
        yield


@pytest.fixture
def forks(monkeypatch):
    """See `forks.forking`."""
    from forks import forking  # imports torch

    forking(monkeypatch)


class Examples:
    """Leaves out the package's modules without a doctest: every worker would import them for nothing."""

    def pytest_ignore_collect(self, collection_path: Path):
        tests = Path(__file__).parent
        if collection_path.suffix == ".py" and tests not in collection_path.parents:
            return ">>> " not in collection_path.read_text(encoding="utf-8") or None
        return None


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "sampled(n, *names, of=function): of the cases with the same values of these parameters run n, for each commit "
        "in CI others; `of` names what tests of several functions have in common",
    )
    config.pluginmanager.register(Examples())  # a hook in this file would be asked about tests/ only


def pytest_collectstart():
    gc.disable()  # while a worker imports; the process that deals out the tests never gets here


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    left = surplus(items, os.environ.get("FLWR_REPLAY_MOMENTS", ""))
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=[*left])
    getattr(config, "workeroutput", {})["left"] = len(left)


def surplus(items, commit):
    """Return the cases that are left out: of each kind all but the first few in an order that the commit draws."""
    kinds = {}
    for item in items:
        if commit != "all" and (mark := item.get_closest_marker("sampled")):
            most, *names = mark.args
            of = mark.kwargs.get("of", (item.path, item.originalname))
            kind = (of, most, *(repr(item.callspec.params[name]) for name in names))
            kinds.setdefault(kind, []).append(item)
    for cases in kinds.values():
        cases.sort(key=lambda item: sha256(f"{commit} {item.nodeid}".encode()).digest())
    return {item for (_, most, *_), cases in kinds.items() for item in cases[most:]}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Count what each worker left out once, as pytest does where there are no workers."""
    stats = node.config.pluginmanager.get_plugin("terminalreporter").stats
    stats["deselected"] = [node] * getattr(node, "workeroutput", {}).get("left", 0)


def pytest_collection_finish():
    """What is imported by now stays; the garbage collector would look at it again and again, a tenth of all time."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish():
    gc.unfreeze()
