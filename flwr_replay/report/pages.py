"""Renders a page from a template: Jinja2, everything escaped."""

from __future__ import annotations

from flwr_replay.report.templates import TEMPLATES

__all__ = ["render"]


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
