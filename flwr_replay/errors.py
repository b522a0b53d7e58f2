"""The errors a user can cause: one line each, with the rule, the value received and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "BudgetError",
    "ConfigError",
    "DataError",
    "DivergedError",
    "FlwrReplayError",
    "PrivacyError",
    "RefusedError",
    "RunError",
    "TrainingError",
    "WireError",
    "near_matches",
    "nearest",
]

FEW = 12  # names that fit one line


class FlwrReplayError(Exception):
    """Base class; the command line prints its message as one line and exits with code 2."""


class ConfigError(FlwrReplayError):
    """An unknown option or name, a wrong value, or options that do not go together."""


class DataError(FlwrReplayError):
    """Data that are missing, truncated, of the wrong shape or wrongly labelled."""


class PrivacyError(FlwrReplayError):
    """A request that would break a privacy promise: a step beyond the budget, a secret key that others can read.

    Its text is sent to the server.
    """


class BudgetError(PrivacyError):
    """A request that the privacy budget does not allow."""


class RefusedError(FlwrReplayError):
    """An institution's policy forbids what the server asks for."""


class WireError(FlwrReplayError):
    """A field that its payload does not declare, or whose form is not the declared one."""


class TrainingError(FlwrReplayError):
    """Training that cannot go on: saved state is gone, or batch norm gets a batch of one."""


class DivergedError(TrainingError):
    """A loss or weights that are not finite."""


class RunError(FlwrReplayError):
    """A run that cannot go on: a file is damaged or cannot be written, or no institution is left."""


def nearest(value: str, known: Iterable[str]) -> str:
    """Suggest the known names nearest to a wrong one; list all of them where they are few or none is near.

    >>> nearest("fedreplya", ["cwt", "fedreplay"])
    'did you mean fedreplay? known: cwt, fedreplay'
    """
    names = sorted(known)
    hint = near_matches(value, names)
    listed = f"known: {', '.join(names)}" if len(names) <= FEW or not hint else ""
    return f"{hint} {listed}".strip()


def near_matches(value: str, known: Iterable[str]) -> str:
    """Ask whether a near name was meant; empty if none is near."""
    close = difflib.get_close_matches(value, sorted(known), n=2)
    return f"did you mean {' or '.join(close)}?" if close else ""
