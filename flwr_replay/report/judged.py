"""By which examples rounds were judged: metrics of validation examples have names that begin with `validation-`."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

__all__ = ["VALIDATION", "judged", "judging"]

VALIDATION = "validation-"


def judged(metric: str, names: Container[str]) -> str:
    """Return the name under which rounds were judged by a metric, given all names of a run.

    >>> judged("accuracy", {"accuracy", "validation-accuracy"}), judged("accuracy", {"accuracy"})
    ('validation-accuracy', 'accuracy')
    """
    return f"{VALIDATION}{metric}" if f"{VALIDATION}{metric}" in names else metric


def judging(report: Mapping[str, Any]) -> str:
    """Return the name under which the rounds of a comparison's runs were judged by its metric."""
    names = {name for cell in report["cells"] if "result" in cell for name in cell["result"]["final"]["global"]}
    return judged(report["metric"], names)
