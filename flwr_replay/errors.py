"""The errors a user can cause: one line each, with the rule, the value received and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ConfigError",
    "DataError",
    "DivergedError",
    "FlwrReplayError",
    "RefusedError",
    "RunError",
    "TrainingError",
    "WireError",
    "nearest",
]


class FlwrReplayError(Exception):
    """Base class; the command line prints its message as one line and exits with code 2."""


class ConfigError(FlwrReplayError):
    """An option, a name or a combination of options that cannot be."""


class DataError(FlwrReplayError):
    """Data that are missing, truncated, of the wrong shape or wrongly labelled."""


class RefusedError(FlwrReplayError):
    """An institution's policy forbids what the server asks for."""


class WireError(FlwrReplayError):
    """A payload field that was not declared, or that does not have the declared form."""


class TrainingError(FlwrReplayError):
    """Training that cannot go on: the loss is not finite, a batch of one meets batch norm."""


class DivergedError(TrainingError):
    """A loss that is not finite: the run stops and keeps its last good checkpoint."""


class RunError(FlwrReplayError):
    """A run directory that cannot be written, or a run that lacks institutions."""


def nearest(value: str, known: Iterable[str]) -> str:
    """Say which known names lie nearest to a wrong one.

    >>> nearest("fedreplya", ["cwt", "fedreplay"])
    'did you mean fedreplay? known: cwt, fedreplay'
    """
    names = sorted(known)
    close = difflib.get_close_matches(value, names, n=2)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}known: {', '.join(names)}"
