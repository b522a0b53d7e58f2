"""The pages name files, modules and headings that are there; tables of results are those of their data."""

import importlib
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")] + sorted(
    [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/results/*.md")]
)
TOPS = ("flwr_replay", "strategies", "clients", "simulations", "conf", "tests", "benchmarks", "docs")
PLACE = re.compile(rf"(?<![\w/.$-])(?:{'|'.join(TOPS)})/[\w./-]*")  # a path from the root of the repository
SOURCE = re.compile(r"(?<![\w/.$-])(?:[\w-]+/)*\w+\.(?:py|toml)\b")  # by the last parts of its path, such as guard.py
MODULE = re.compile(r"(?<![\w/.-])flwr_replay(?:\.\w+)+")
EXAMPLE = "mine"  # the files that a reader of CONTRIBUTING makes
WRITTEN = "resume.toml"  # a file that a run writes


def anchors(page):
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def sources():
    files = [file for top in TOPS for file in (ROOT / top).rglob("*")] + list(ROOT.glob("*"))
    return [file.relative_to(ROOT).as_posix() for file in files]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_resolve(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_paths_are_there(page):
    text = page.read_text(encoding="utf-8")
    for place in PLACE.findall(text):
        assert (ROOT / place.rstrip(".")).exists() or EXAMPLE in place, place
    known = sources()
    for source in SOURCE.findall(text):
        assert any(f"/{path}".endswith(f"/{source}") for path in known) or EXAMPLE in source or source.endswith(WRITTEN)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_modules_are_there(page):
    for name in MODULE.findall(page.read_text(encoding="utf-8")):
        module, _, attribute = name.rpartition(".")
        if EXAMPLE not in name and not hasattr(importlib.import_module(module), attribute):
            importlib.import_module(name)


def test_tables_of_results_are_their_data():
    written = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))["written"]
    texts = [page.read_text(encoding="utf-8") for page in PAGES if page.parent.name == "results"]
    assert texts == [written(text) for text in texts]
    by_hand = re.findall(r"^(?<!csv-->\n\n)(?<!\|\n)\|.*", "".join(texts), re.M)
    assert by_hand == ["| paper's figure and finding | holds? | ours |"]  # which is words
    tables = {path.name for path in (ROOT / "docs" / "results" / "tables").glob("*.csv")}
    assert {*re.findall(r"^<!--(.*)-->$", "".join(texts), re.M)} == tables
