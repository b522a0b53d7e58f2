"""Pages of the site that are made from other files: README, methods, notebooks, linked code, the Python reference.

A link in a page means the same file in the checkout and on the site. `placed` says where the site has it.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TOP = {"README.md": "index.md"} | {f"{name}.md": f"{name}.md" for name in ("ARCHITECTURE", "CONTRIBUTING", "CHANGELOG")}
METHODS = sorted(path.stem for path in (ROOT / "strategies").glob("[!_]*.py"))
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
PUBLIC = ("api", "finished.trained", "tasks", "check", "serve", "errors")  # modules of flwr_replay for users
CODE = "code/"  # the site's folder for what lies outside docs/
LABEL = re.compile(r"^(Source|Idea|Travels|What is protected|Not protected|Deviations): ", re.M)
DOORS = re.compile(r"(?<=## Where to go on\n\n)(- .*?\n)(?=\n)", re.S)
LINK = re.compile(r"(\]\()(?!https?:|#)([^)#\s]+)")
SHOWN = (".py", ".toml", ".yaml", ".md")


def on_config(config: Any) -> None:
    """Put a page for each method into the navigation."""
    (methods,) = (entry["Methods"] for entry in config.nav if "Methods" in entry)
    methods += [f"methods/{name}.md" for name in METHODS]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made from files outside docs/, or from files that are no Markdown, and the style."""
    made = {there: relinked((ROOT / here).read_text(encoding="utf-8"), ROOT, there) for here, there in TOP.items()}
    made["index.md"] = DOORS.sub(r'<div class="grid cards" markdown>\n\n\1\n</div>\n', made["index.md"])
    made["site.css"] = (DOCS / "site" / "site.css").read_text(encoding="utf-8")
    made |= {f"methods/{name}.md": method(name) for name in METHODS}
    made["methods/index.md"] = "# Methods\n\n" + "\n".join(
        f"- [{title(method)}]({method}.md): {idea(method)}" for method in METHODS
    )
    made |= {f"notebooks/{path.stem}.md": notebook(path) for path in NOTEBOOKS}
    made["reference.md"] = "# Python reference\n\n" + "\n\n".join(f"::: flwr_replay.{name}" for name in PUBLIC)
    pages = [ROOT / name for name in TOP] + sorted(DOCS.rglob("*.md"))
    made |= {there: code(path) for page in pages for path in linked(page) if (there := placed(path)).startswith(CODE)}
    made |= {coded(half): code(half) for name in METHODS for half in halves(name)}
    for there, text in made.items():
        files.append(File.generated(config, there, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let the links of a page in docs/ that leave it lead to pages of the site."""
    source = DOCS / page.file.src_uri
    return relinked(markdown, source.parent, page.file.src_uri) if source.exists() else markdown


def linked(page: Path) -> Iterator[Path]:
    """Yield the files and folders that a page links to."""
    for _, target in LINK.findall(page.read_text(encoding="utf-8")):
        if (path := (page.parent / target).resolve()).exists():
            yield path


def placed(path: Path) -> str:
    """Return where the site has a file or folder of the checkout."""
    name = path.relative_to(ROOT).as_posix()
    if name in TOP:
        return TOP[name]
    if path.parent == ROOT / "strategies" and path.stem in METHODS:
        return f"methods/{path.stem}.md"
    if path.suffix == ".ipynb":
        return path.relative_to(DOCS).with_suffix(".md").as_posix()
    return path.relative_to(DOCS).as_posix() if DOCS in path.parents and path.is_file() else coded(path)


def coded(path: Path) -> str:
    """Return where the site shows the text of a file, or of a folder's files."""
    return f"{CODE}{path.relative_to(ROOT).as_posix()}.md"


def halves(name: str) -> tuple[Path, Path]:
    """Return the two files of a method."""
    return ROOT / "strategies" / f"{name}.py", ROOT / "clients" / f"{name}.py"


def relinked(markdown: str, folder: Path, there: str) -> str:
    """Rewrite the links of a page that lies in `folder` for its place on the site."""

    def moved(link: re.Match[str]) -> str:
        path = (folder / link[2]).resolve()
        return link[1] + (relative(placed(path), there) if path.exists() else link[2])

    return LINK.sub(moved, markdown)


def relative(target: str, there: str) -> str:
    """Return the way from a page of the site to another."""
    return os.path.relpath(target, os.path.dirname(there))


def opening(name: str) -> tuple[str, str]:
    """Return the first sentence of a method's file, and all that follows."""
    text = ast.get_docstring(ast.parse(halves(name)[0].read_text(encoding="utf-8"))) or ""
    first, _, rest = text.partition("\n\n")
    return first, rest


def title(name: str) -> str:
    """Return the method's name as its file writes it."""
    return opening(name)[0].partition(": the server's half")[0]


def idea(name: str) -> str:
    """Return the paragraph of a method's file that says what it does."""
    match = re.search(r"^Idea: (.*?)\n(?:\n|Travels)", opening(name)[1], re.M | re.S)
    return " ".join(match[1].split()) if match else ""


def method(name: str) -> str:
    """Write a method's page from the docstring of its server's half."""
    text = opening(name)[1].replace("<", "&lt;")
    body = "\n\n".join(
        f"```text\n{dedent(block)}\n```" if block.startswith("    ") else LABEL.sub(r"\n\n## \1\n\n", block)
        for block in re.split(r"\n\n", text)
    )
    links = ", ".join(f"[{file.relative_to(ROOT)}](../{coded(file)})" for file in halves(name))
    return (
        f"# {title(name)}\n\n`flwr-replay run strategy={name}`. [Its options](../options.md#methods). "
        f"The code: {links}.\n\n{body}\n"
    )


def notebook(path: Path) -> str:
    """Write a notebook's texts and code; what it prints is left to whoever runs it."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ("".join(cell["source"]) for cell in cells)
    shown = [
        text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
        for cell, text in zip(cells, texts, strict=True)
    ]
    return relinked("\n\n".join(shown), path.parent, placed(path))


def code(path: Path) -> str:
    """Write a file, or all files of a folder, with their names."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in SHOWN)
    blocks = [
        f"## {file.relative_to(ROOT)}\n\n````{file.suffix[1:]}\n{file.read_text(encoding='utf-8')}\n````"
        for file in files
    ]
    return f"# {path.relative_to(ROOT)}\n\n" + "\n\n".join(blocks)
