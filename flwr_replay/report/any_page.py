"""The page of whatever has one: a run, a comparison, a study."""

from __future__ import annotations

import base64
import re
from importlib import metadata
from pathlib import Path

from flwr_replay.errors import RunError
from flwr_replay.files.atomic import fits, read_bytes, read_json, read_text, write_atomic
from flwr_replay.files.disk import there
from flwr_replay.report.compare_page import write_compare_page
from flwr_replay.report.comparison import summarise
from flwr_replay.report.run_files import FORMS, RESULT
from flwr_replay.report.run_page import write_run_page
from flwr_replay.report.templates import render

__all__ = ["write_page", "write_study_page"]

PICTURE = re.compile(r'<img src="([\w.-]+\.png)"')
COMPARISON = "compare.json"
CELL = {"label": str, "strategy": str, "seed": int, "folder": str, "options": [str]}
COMPARED = {
    **dict.fromkeys(("title", "against", "metric"), str),
    "options": [str],
    "higher-is-better": bool,
    "seeds": [int],
    "strategies": {...: dict},
    "cells": [lambda cell: fits(cell, CELL | ({"error": str} if "error" in cell else {"result": FORMS[RESULT]}))],
}


def write_page(place: Path) -> Path:
    """Write the page of a run, a comparison or a study; return its path.

    Parameters
    ----------
    place : Path
        The directory of a run or comparison, or a study's `study-<name>.md`. A folder of runs with one comparison
        means that one.

    Raises
    ------
    RunError
        If it is none of these, has not finished, or is damaged.
    """
    if place.suffix == ".md" and place.is_file():
        return write_study_page(place)
    if there(place / RESULT):
        return write_run_page(place)
    if len(comparisons := [file.parent.name for file in sorted(place.glob("*/compare.json"))]) > 1:
        raise RunError(
            f"a report is of one comparison; {place} has {', '.join(comparisons)}: give one of these folders in it"
        )
    place = place / comparisons[0] if comparisons else place
    if there(place / COMPARISON):
        report = read_json(place / COMPARISON, COMPARED)
        known = report["cells"], list(report["strategies"]), report["against"], report["metric"]
        report["strategies"] = summarise(*known, report["higher-is-better"])
        return write_compare_page(place, report)
    raise RunError(
        f"a report is of a finished run (result.json), a comparison (compare.json) or a study (study-….md); {place} is "
        "none of these"
    )


def write_study_page(file: Path) -> Path:
    """Write a study's page beside its `study-<name>.md`; return its path."""
    from markdown_it import MarkdownIt
    from markupsafe import Markup

    def inside(match: re.Match[str]) -> str:
        picture = file.parent / match[1]
        text = base64.b64encode(read_bytes(picture)).decode() if picture.exists() else ""
        return f'<img src="data:image/png;base64,{text}"'

    heading, _, text = read_text(file).partition("\n")
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = body.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace("</table>", "</table></div>")
    page = file.with_suffix(".html")
    title, version = heading.removeprefix("# "), metadata.version("flwr-replay")
    write_atomic(page, render("study", title=title, body=Markup(PICTURE.sub(inside, body)), version=version))
    return page
