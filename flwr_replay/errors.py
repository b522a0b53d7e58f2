"""The errors a user can cause: one line each, with the rule, the value and what to do."""

import difflib
from collections.abc import Callable, Iterable, Sequence

__all__ = [
    "BudgetError",
    "ConfigError",
    "DamagedError",
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
    "one_line",
    "refuse_all",
    "refuse_each",
]

LONGEST = 1000  # characters of an error's line
FEW, MORE = 12, 24  # names that are listed beside a suggestion, and without one


class FlwrReplayError(Exception):
    """Base class; the command line prints each of its faults, `args`, as a line, and exits with code 2."""

    def __str__(self) -> str:
        return "; also: ".join(map(str, self.args))


class ConfigError(FlwrReplayError):
    """An unknown option or name, a wrong value, or options that do not go together."""


class DataError(FlwrReplayError):
    """Data that are missing, truncated, of the wrong shape or with wrong labels."""


class PrivacyError(FlwrReplayError):
    """A broken privacy promise: a step beyond the budget, or a secret key that others can read.

    Its text is sent to the server.
    """


class BudgetError(PrivacyError):
    """A request that the privacy budget does not allow."""


class RefusedError(FlwrReplayError):
    """An institution's policy forbids what the server asks for."""


class WireError(FlwrReplayError):
    """A field that its payload does not declare, or that has not the declared type or shape."""


class TrainingError(FlwrReplayError):
    """Training that cannot continue: saved state is missing, or batch norm gets a batch of one."""


class DivergedError(TrainingError):
    """A loss or weights that are not finite."""


class RunError(FlwrReplayError):
    """A run that cannot continue: a file is damaged or cannot be read or written, or no institution is left."""


class DamagedError(RunError):
    """A file that is missing or, read whole, is not as it was written; one that could not be read may be sound."""


def refuse_each(*checks: Callable[[], object]) -> None:
    """Make checks that do not depend on each other, and raise what they refuse: as the first is, all at once."""
    faults: list[FlwrReplayError] = []
    for check in checks:
        try:
            check()
        except FlwrReplayError as error:
            faults.append(error)
    if faults:
        refuse_all(list(dict.fromkeys(str(text) for fault in faults for text in fault.args)), type(faults[0]))


def refuse_all(faults: Sequence[str], kind: type[FlwrReplayError] | None = None) -> None:
    """Raise one error of a kind, by default `ConfigError`, if there are faults: the first of each rule, and how many.

    A fault's rule stands before its first semicolon.
    """
    by_rule: dict[str, list[str]] = {}
    for fault in faults:
        by_rule.setdefault(fault.partition(";")[0], []).append(fault)
    if by_rule:
        told = (same[0] + f" (the first of {len(same):,})" * (len(same) > 1) for same in by_rule.values())
        raise (kind or ConfigError)(*told)


def nearest(value: str, known: Iterable[str]) -> str:
    """Suggest the known names nearest to a wrong one; list all names if they are few.

    >>> nearest("fedreplya", ["cwt", "fedreplay"])
    'did you mean fedreplay? known: cwt, fedreplay'
    """
    names = sorted(set(known))
    hint = near_matches(value, names)
    listed = f"known: {', '.join(names)}" if len(names) <= (FEW if hint else MORE) else ""
    listed = listed or ("" if hint else f"none of {len(names)} is near")
    return f"{hint} {listed}".strip()


def near_matches(value: str, known: Iterable[str]) -> str:
    """Suggest the nearest name as a question, and one that is as near; empty if none is near.

    >>> near_matches("stratgy", ["strategy", "strategy.cut", "task"]), near_matches("fedav", ["fedavg", "fedavgm"])
    ('did you mean strategy?', 'did you mean fedavg or fedavgm?')
    """
    close = difflib.get_close_matches(value, sorted(set(known)), n=2)
    nearness = [difflib.SequenceMatcher(None, name, value).ratio() for name in close]
    close = [name for name, near in zip(close, nearness, strict=True) if near > nearness[0] - 0.1]
    return f"did you mean {' or '.join(close)}?" if close else ""


def one_line(error: object) -> str:
    r"""Return a text as one line that a terminal and a log show as it is, shortened in its middle.

    Whatever is not printable, such as ESC and the marks that turn the direction of writing, is written out.

    >>> one_line(f"no {chr(0x202e)}file\r\n{chr(27)}[2J")
    'no \\u202efile \\x1b[2J'
    """
    text = " ".join(str(error)[: 10 * LONGEST].split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 3 :]}"
