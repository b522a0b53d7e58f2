"""Models, data and strategies of others, named as `mypkg.nets:build`: imported at an institution only if it allows.

A name in a run's options comes from the server, or from a study's folder that came by mail. So a process imports only
what was allowed in it: by an institution's own node config (`own-parts="mypkg.nets:build"`), by the words of a command
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

from flwr_replay.errors import ConfigError, FlwrReplayError, RefusedError

__all__ = ["OWN", "VARIABLE", "allow", "check_allowed", "import_allowed", "import_part", "is_part", "users_code"]

# Groups in which `own` is a choice, and the option that names the function.
OWN = {"model": "build", "task": "load", "partition": "deal"}
VARIABLE = "FLWR_REPLAY_OWN_PARTS"  # the parts that a process may import, with spaces between
LIBRARIES = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")})
OURS = __name__.partition(".")[0]
LONGEST = 300  # characters of a user's error that are told
PART = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_part(choice: str) -> bool:
    """Whether a choice names a function of the user's own.

    Examples
    --------
    >>> is_part("mypkg.nets:build"), is_part("resnet18"), is_part("a b:c")
    (True, False, False)
    """
    return bool(PART.fullmatch(choice))


def allow(parts: Iterable[str]) -> None:
    """Let this process, and those that it starts, import these parts."""
    os.environ[VARIABLE] = " ".join({**dict.fromkeys(os.environ.get(VARIABLE, "").split()), **dict.fromkeys(parts)})


def check_allowed(parts: Iterable[str], allowed: str, how: str) -> None:
    """Refuse the first part that is not among those allowed, before anything of it is imported.

    `allowed` has spaces between the parts; `how` says how to allow one.
    """
    for part in parts:
        if part not in allowed.split():
            raise RefusedError(f"the run names code of its own, {part}, which has not been allowed here: {how}")


def import_part(option: str, part: str) -> Callable[..., Any]:
    """Import a function by its name, `package.module:function`; modules in the current folder are found, too.

    Errors are those of `import_allowed`, and a `ConfigError` if there is no such function.
    """
    module, _, name = part.partition(":")
    if os.getcwd() not in sys.path:  # the command `flwr-replay` lies elsewhere
        sys.path.append(os.getcwd())
    function = getattr(import_allowed(part, module, f"{option}={part}"), name, None)
    if function is None:
        raise ConfigError(f"{option}={part}: {module} has no function {name}: write one, or correct the name")
    if not callable(function):
        raise ConfigError(f"{option}={part} must be a function; got {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def import_allowed(part: str, module: str, what: str) -> ModuleType:
    """Import a module of a part that was allowed in this process.

    Parameters
    ----------
    part : str
        `package.module:function`, or `package:strategy`.
    module : str
        The module's dotted name.
    what : str
        What needs it, for errors: `model=mypkg.nets:build`.

    Raises
    ------
    RefusedError
        If the part was not allowed.
    ConfigError
        If the module cannot be imported.
    """
    check_allowed([part], os.environ.get(VARIABLE, ""), f"export {VARIABLE}='{part}' if you trust its author")
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
        What failed, for the line. Empty: in a process with parts, an error that passed a user's file is turned.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        place, ours = _place(error)
        theirs = bool(what) or bool(place and os.environ.get(VARIABLE))
        if not theirs or (ours and isinstance(error, SystemExit | kind)):
            raise  # a signal's, or a line already
        first_line = str(error).strip().partition("\n")[0][:LONGEST]
        message = f"{type(error).__name__}: {first_line}".removesuffix(": ") + (f" ({place})" if place else "")
        raise kind(f"{what}: {message}" if what else f"the run's own code fails: {message}") from None


def _place(error: BaseException) -> tuple[str, bool]:
    """Return the last line of a user's that an error passed, and whether it arose in this package."""
    parts = {part.partition(":")[0].partition(".")[0] for part in os.environ.get(VARIABLE, "").split()}
    place, package = "", ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, name = frame.f_code.co_filename, frame.f_globals.get("__name__") or ""
        package = name.partition(".")[0]
        if package != OURS and (package in parts or not file.startswith((*LIBRARIES, "<"))):
            place = f"{'/'.join(Path(file).parts[-name.count('.') - 1 :])}, line {line}"
    return place, package == OURS
