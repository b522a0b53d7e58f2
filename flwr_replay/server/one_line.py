"""A user's mistake in Flower's log: one line, where Flower would write its traceback."""

import logging

from flwr_replay.errors import FlwrReplayError, one_line

__all__ = ["errors_in_one_line", "in_one_line"]


def in_one_line(record: logging.LogRecord) -> bool:
    """Let every record pass; one with an error of this package without its traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, FlwrReplayError):
        line = f"{record.getMessage()}: error: {one_line(error)}"
        record.msg, record.args, record.exc_info = line, None, None
    return True


def errors_in_one_line() -> None:
    """Let Flower's log of this process have them as one line from now on.

    Flower logs the exception with which a ServerApp ends. The run fails as before, since the exception is still raised.
    """
    logging.getLogger("flwr").addFilter(in_one_line)  # which adds a filter once
