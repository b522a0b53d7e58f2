"""Order and threads of the tests: the longest files begin first, so that all workers end together."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: workers do not fight over the cores

LONGEST = ("test_deployment.py", "test_readme.py", "test_orphans.py", "test_examples.py")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
