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
    """An option, a name or a combination of options that cannot be."""


class DataError(FlwrReplayError):
    """Data that are missing, truncated, of the wrong shape or wrongly labelled."""


class PrivacyError(FlwrReplayError):
    """What would break a promise of privacy: a step beyond the budget, a secret key that others can read.

    The server is told its text.
    """


class BudgetError(PrivacyError):
    """A privacy budget that does not allow what is asked for."""


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
    """Say which known names lie nearest to a wrong one, and all of them where they are few or none is near.

    >>> nearest("fedreplya", ["cwt", "fedreplay"])
    'did you mean fedreplay? known: cwt, fedreplay'
    """
    names = sorted(known)
    hint = near_matches(value, names)
    listed = f"known: {', '.join(names)}" if len(names) <= FEW or not hint else ""
    return f"{hint} {listed}".strip()


def near_matches(value: str, known: Iterable[str]) -> str:
    """Ask whether a near name was meant; empty where none is near."""
    close = difflib.get_close_matches(value, sorted(known), n=2)
    return f"did you mean {' or '.join(close)}?" if close else ""
