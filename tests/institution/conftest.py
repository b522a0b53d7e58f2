"""An institution with pinned keys, for attacks on its parcels. Other modules have their own fixtures."""

import pytest
from harness import write_shards
from hostile_server import HostileServer, weights
from sealed_runs import ABC, PUSH, pinned_keys, push_again


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path, {"a": 40})
    pinned_keys(tmp_path, ABC)
    return tmp_path


@pytest.fixture
def server(folder):
    """A server whose institution, a, has released its model of exchange 1."""
    server = HostileServer(folder, *PUSH, **{"seal-peers": str(folder / "peers-abc.txt")})
    assert weights(server.send(push_again(1)))
    return server
