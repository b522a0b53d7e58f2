"""Order, threads and memory of the tests: the longest files begin first, so that all workers end together."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: workers do not fight over the cores
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the processes of tests share what one has compiled

LONGEST = (
    "test_deployment.py",
    "test_readme.py",
    "test_rehearsal.py",
    "test_notebooks.py",
    "test_orphans.py",
    "test_engines.py",
    "test_examples.py",
    "test_contract.py",
    "test_fuzz_answers.py",
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_collection_finish():
    """What is imported by now stays; the garbage collector would look at it again and again, a tenth of all time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()
