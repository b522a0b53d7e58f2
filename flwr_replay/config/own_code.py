"""Models, data and strategies of others, named as `mypkg.nets:build`: imported at an institution only if it allows.

A name in a run's options comes from the server, or from a study's folder that came by mail. So a process imports only
what was allowed in it: by an institution's own node config (`own-code="mypkg.nets:build"`), by the words of a command
line, or by the environment variable.
"""

import importlib
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from flwr_replay.config.renamed import told
from flwr_replay.errors import ConfigError, FlwrReplayError, RefusedError

__all__ = [
    "OWN",
    "VARIABLE",
    "VARIABLE_BEFORE",
    "allow",
    "allowed",
    "check_allowed",
    "import_allowed",
    "import_own",
    "is_own",
    "users_code",
]

# Groups in which `own` is a choice, and the option that names the function.
OWN = {"model": "build", "task": "load", "partition": "deal"}
VARIABLE_BEFORE = "FLWR_REPLAY_OWN_PARTS"  # until 0.1.0
VARIABLE = "FLWR_REPLAY_OWN_CODE"  # what a process may import, with spaces between
LIBRARIES = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")})
OURS = __name__.partition(".")[0]
LONGEST = 300  # characters of a user's error that are told
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_own(choice: str) -> bool:
    """Whether a choice names a function of the user's own.

    Examples
    --------
    >>> is_own("mypkg.nets:build"), is_own("resnet18"), is_own("a b:c")
    (True, False, False)
    """
    return bool(NAME.fullmatch(choice))


def allowed() -> str:
    """Return what this process may import, with spaces between; the variable's old name goes on."""
    if VARIABLE_BEFORE in os.environ:
        told(VARIABLE_BEFORE, VARIABLE)
        allow(os.environ.pop(VARIABLE_BEFORE).split())
    return os.environ.get(VARIABLE, "")


def allow(names: Iterable[str]) -> None:
    """Let this process, and those that it starts, import this code."""
    os.environ[VARIABLE] = " ".join(dict.fromkeys([*allowed().split(), *names]))


def check_allowed(names: Iterable[str], here: str, how: str) -> None:
    """Refuse the first name that is not among those allowed here, before anything of it is imported.

    `here` has spaces between the names; `how` says how to allow one.
    """
    for name in names:
        if name not in here.split():
            raise RefusedError(f"the run names code of its own, {name}, which has not been allowed here: {how}")


def import_own(option: str, code: str) -> Callable[..., Any]:
    """Import a function by its name, `package.module:function`; modules in the current folder are found, too.

    Errors are those of `import_allowed`, and a `ConfigError` if there is no such function.
    """
    module, _, name = code.partition(":")
    if os.getcwd() not in sys.path:  # the command `flwr-replay` lies elsewhere
        sys.path.append(os.getcwd())
    found = import_allowed(code, module, f"{option}={code}")
    if (function := getattr(found, name, None)) is None:
        if hasattr(found, "__path__") and not getattr(found, "__file__", ""):
            fault = f"{module} is a folder without __init__.py: start in it, or write {module}.FILE:{name}"
        else:
            fault = f"{module} has no function {name}: write one, or correct the name"
        raise ConfigError(f"{option}={code}: {fault}")
    if not callable(function):
        raise ConfigError(f"{option}={code} must be a function; got {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def import_allowed(code: str, module: str, what: str) -> ModuleType:
    """Import a module of code that was allowed in this process.

    Parameters
    ----------
    code : str
        `package.module:function`, or `package:strategy`.
    module : str
        The module's dotted name.
    what : str
        What needs it, for errors: `model=mypkg.nets:build`.

    Raises
    ------
    RefusedError
        If the code was not allowed.
    ConfigError
        If the module cannot be imported.
    """
    check_allowed([code], allowed(), f"export {VARIABLE}='{code}' if you trust its author")
    with users_code(ConfigError, f"{what} cannot be imported: install the package, start in its folder, or mend it"):
        return importlib.import_module(module)


@contextmanager
def users_code(kind: type[FlwrReplayError], what: str = "") -> Iterator[None]:
    """Turn whatever a user's code raises into one line, with its file and line.

    Parameters
    ----------
    kind : type[FlwrReplayError]
        The error that is raised in its place.
    what : str
        What failed, for the line. Empty: in a process with own code, an error that passed a user's file is turned.
    """
    try:
        yield
    except BaseException as error:
        place, ours = _place(error)
        theirs = bool(what) or bool(place and allowed())
        if not theirs or isinstance(error, KeyboardInterrupt) or (ours and isinstance(error, SystemExit | kind)):
            raise  # a signal's, or a line already
        first_line = str(error).strip().partition("\n")[0][:LONGEST]
        message = f"{type(error).__name__}: {first_line}".removesuffix(": ") + (f" ({place})" if place else "")
        raise kind(f"{what}: {message}" if what else f"the run's own code fails: {message}") from None


def _place(error: BaseException) -> tuple[str, bool]:
    """Return the last line of a user's that an error passed, and whether it arose in this package."""
    packages = {name.partition(":")[0].partition(".")[0] for name in allowed().split()}
    place, package = "", ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, name = frame.f_code.co_filename, frame.f_globals.get("__name__") or ""
        package = name.partition(".")[0]
        if package != OURS and (package in packages or not file.startswith((*LIBRARIES, "<"))):
            place = f"{'/'.join(Path(file).parts[-name.count('.') - 1 :])}, line {line}"
    return place, package == OURS
