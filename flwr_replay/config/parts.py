"""Models, data and strategies of others, named as `mypkg.nets:build`: imported at an institution only if it allows.

A name in a run's options comes from the server, or from a study's folder that came by mail. So a process imports only
what was allowed in it: by an institution's own node config (`own-parts="mypkg.nets:build"`), by the words of a command
line, or by the environment variable.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from flwr_replay.errors import ConfigError, RefusedError

__all__ = ["OWN", "VARIABLE", "allow", "check_allowed", "import_allowed", "import_part", "is_part"]

OWN = {"model": "build", "task": "load"}  # groups in which `own` is a choice, and the option that names the function
VARIABLE = "FLWR_REPLAY_OWN_PARTS"  # the parts that a process may import, with spaces between
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
    """Refuse a part that is not among those allowed, before anything of it is imported.

    Parameters
    ----------
    parts : iterable of str
        The run's own parts.
    allowed : str
        The allowed ones, with spaces between.
    how : str
        How to allow one, for the error.

    Raises
    ------
    RefusedError
        For the first that is not allowed.
    """
    for part in parts:
        if part not in allowed.split():
            raise RefusedError(f"the run names code of its own, {part}, which has not been allowed here: {how}")


def import_part(option: str, part: str) -> Callable[..., Any]:
    """Import a function by its name; modules in the current folder are found, too.

    Parameters
    ----------
    option : str
        For errors: `model`.
    part : str
        `package.module:function`.

    Raises
    ------
    RefusedError
        If it was not allowed in this process.
    ConfigError
        If there is no such module or function.
    """
    module, _, name = part.partition(":")
    if os.getcwd() not in sys.path:  # the command `flwr-replay` lies elsewhere
        sys.path.append(os.getcwd())
    found = getattr(import_allowed(part, module, f"{option}={part}"), name, None)
    if found is None:
        raise ConfigError(f"{option}={part}: {module} has no function {name}: write one, or correct the name")
    if not callable(found):
        raise ConfigError(f"{option}={part} must be a function; got {type(found).__name__}")
    return found  # type: ignore[no-any-return]


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
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{what} cannot be imported: {error}: install the package, or start in its folder") from None
    except Exception as error:  # the module is not ours
        detail = " ".join(str(error).split())
        raise ConfigError(f"{what} fails when it is imported: {type(error).__name__}: {detail}") from None
