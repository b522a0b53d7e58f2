"""A study's page: its Markdown with the pictures inside, as one file."""

from __future__ import annotations

import base64
import re
from importlib import metadata
from pathlib import Path

from flwr_replay.files.atomic import read_bytes, read_text, write_atomic
from flwr_replay.report.pages import render

__all__ = ["write_study_page"]

PICTURE = re.compile(r'<img src="([\w.-]+\.png)"')


def write_study_page(file: Path) -> Path:
    """Write a study's page beside its `study-<name>.md`; return its path."""
    from markdown_it import MarkdownIt
    from markupsafe import Markup

    def inside(found: re.Match[str]) -> str:
        picture = file.parent / found[1]
        text = base64.b64encode(read_bytes(picture)).decode() if picture.exists() else ""
        return f'<img src="data:image/png;base64,{text}"'

    heading, _, text = read_text(file).partition("\n")
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = body.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace("</table>", "</table></div>")
    page = file.with_suffix(".html")
    title, version = heading.removeprefix("# "), metadata.version("flwr-replay")
    write_atomic(page, render("study", title=title, body=Markup(PICTURE.sub(inside, body)), version=version))
    return page
