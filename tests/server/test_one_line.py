"""What Flower's log says of the exception with which a ServerApp ends."""

import importlib
import logging

import pytest

from flwr_replay.errors import ConfigError
from flwr_replay.server.one_line import errors_in_one_line, in_one_line

FLOWER = logging.getLogger("flwr")


@pytest.fixture
def logged(caplog):
    """Log exceptions as Flower does; return the text of the log."""
    errors_in_one_line()

    def log(raised):
        try:
            raise raised
        except Exception as error:
            FLOWER.log(logging.ERROR, "%s raised an exception", "Simulation", exc_info=error)
        return caplog.text

    return log


def test_a_mistake_of_the_users_is_one_line(logged):
    text = logged(ConfigError("nodes must be\nat least 0; got -1"))
    assert text.endswith("Simulation raised an exception: error: nodes must be at least 0; got -1\n")
    assert "Traceback" not in text


def test_a_bug_keeps_its_traceback(logged):
    text = logged(KeyError("arrays"))
    assert "Traceback (most recent call last)" in text
    assert "in log\n    raise raised\nKeyError: 'arrays'" in text


def test_other_records_pass_unchanged(caplog):
    with caplog.at_level(logging.INFO, "flwr"):
        FLOWER.info("%s of %s", 1, 2)
    assert caplog.messages == ["1 of 2"]


def test_importing_a_strategy_is_enough_and_twice_is_once(monkeypatch):
    monkeypatch.setattr(FLOWER, "filters", [])
    importlib.reload(importlib.import_module("flwr_replay.movements.base"))
    errors_in_one_line()
    assert FLOWER.filters == [in_one_line]
