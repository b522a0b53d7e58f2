"""Write the tables of the pages of results from their data.

    python benchmarks/tables.py

In a page, `<!--NAME.csv-->` stands before the table of `docs/results/tables/NAME.csv`. A cell of it is text. It takes
figures of a study as `{0[PART][METHOD][mean]:.3f}`: by part, method and column of `docs/**/study-*.csv`, which studies
write. `lead` is `difference` with its sign turned. After a new run, put its rows in place of the old ones. Any other
figure is of a study whose file is gone.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
SHOWN = ("mean", "sd", "difference", "low", "high")  # columns of a study
TURNED = {"": "difference", "-low": "high", "-high": "low"}
TABLE = re.compile(r"^<!--(\S+\.csv)-->\n(?:\n|\|.*\n)*", re.M)


def lines(file: Path) -> list[list[str]]:
    """Return the cells of a CSV, line by line."""
    with file.open(encoding="utf-8", newline="") as opened:
        return list(csv.reader(opened))


def measured() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the figures of all studies in `docs/`, by part, method and column."""
    rows: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for file in sorted(DOCS.rglob("study-*.csv")):
        names, *values = lines(file)
        for part, method, *row in values:
            if method in rows[part]:
                raise ValueError(f"a part has a method once; {file.name}: {method!r} of {part!r}: remove the older row")
            figures = {
                name: float(value) for name, value in zip(names[2:], row, strict=True) if name in SHOWN and value
            }
            turned = {f"lead{of}": -figures[name] for of, name in TURNED.items() if name in figures}
            rows[part][method] = figures | turned
    return rows


def written(page: str) -> str:
    """Return a page's text with its tables written anew."""
    rows = measured()

    def table(found: re.Match[str]) -> str:
        head, *body = lines(DOCS / "results" / "tables" / found[1])
        first, *others = (
            "|" + "|".join(f" {cell.format(rows)} " if cell else " " for cell in row) + "|\n" for row in (head, *body)
        )
        return "".join((f"<!--{found[1]}-->\n\n", first, "|---" * len(head), "|\n", *others, "\n"))

    return TABLE.sub(table, page).rstrip("\n") + "\n"


if __name__ == "__main__":
    for file in sorted(DOCS.glob("results/*.md")):
        file.write_text(written(file.read_text(encoding="utf-8")), encoding="utf-8")
