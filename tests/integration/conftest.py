"""A real deployment on the loopback, which a module's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from deployed import Deployment, deployed


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "deployment: starts Flower's own server and node processes, a minute or more")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """See `deployed.deployed`."""
    with deployed(tmp_path_factory.mktemp("deployment")) as place:
        yield place
