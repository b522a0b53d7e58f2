"""CSV files that people open in a spreadsheet, which takes a cell that begins with =, +, - or @ for a formula.

Names in them come from institutions and from files. So such a cell gets an apostrophe in front, as OWASP's page on CSV
injection says, unless it is a number; a cell that begins with apostrophes and such a sign gets one more. `plain` takes
it away again, so that a name that is read back is the same.
"""

import csv
import io
import re
from collections.abc import Iterable

__all__ = ["csv_text", "plain"]

FORMULA = re.compile(r"'*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")  # the last four are full-width signs
NUMBER = re.compile(r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|inf|nan)", re.IGNORECASE)


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    r"""Write rows of cells; None is an empty cell.

    >>> csv_text([["=1+1", "-0.5", None, "a,b"]])
    '\'=1+1,-0.5,,"a,b"\n'
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_safe(cell) for cell in row] for row in rows)
    return text.getvalue()


def _safe(cell: object) -> str:
    text = "" if cell is None else str(cell)
    return f"'{text}" if FORMULA.match(text) and not NUMBER.fullmatch(text) else text


def plain(cell: str) -> str:
    """Return a cell that `csv_text` has written as it was.

    >>> plain("'=1+1"), plain("'tis"), plain("-0.5")
    ('=1+1', "'tis", '-0.5')
    """
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell) else cell
