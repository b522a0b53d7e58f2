"""Renders a page from a template: Jinja2, everything escaped; spares a result what a picture or page may raise."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr_replay.report.templates import TEMPLATES

__all__ = ["render", "spared"]


@contextmanager
def spared(file: Path) -> Iterator[None]:
    """Say in one line that a picture or page could not be written; the results that it would show are written before.

    Parameters
    ----------
    file : Path
        The picture or page.
    """
    try:
        yield
    except Exception as error:  # whatever it is, as what is drawn came from many
        why = " ".join(str(error).split())[:200]
        logging.getLogger("flwr").warning("%s is not written, all results are: %s %s", file, type(error).__name__, why)


def render(template: str, **values: object) -> str:
    """Return the text of a page.

    Parameters
    ----------
    template : str
        A name in `flwr_replay.report.templates`.
    **values
        What the template shows.
    """
    from jinja2 import DictLoader, Environment, StrictUndefined

    environment = Environment(loader=DictLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    return environment.get_template(template).render(**values)
