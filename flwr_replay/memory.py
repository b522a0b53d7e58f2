"""Caches of files and models in a process, and one call that clears them."""

from collections.abc import Callable
from functools import lru_cache
from typing import ParamSpec, TypeVar, cast

__all__ = ["forget", "on_forget", "remembered"]

P = ParamSpec("P")
T = TypeVar("T")

_forgetting: list[Callable[[], object]] = []


def remembered(maxsize: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator like `functools.lru_cache(maxsize)`, whose cache `forget` clears.

    Use it for results that depend on files or take much memory: data, models, files of a state directory. Use
    `lru_cache` for results that depend on the arguments only, such as a composed configuration.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        cached = lru_cache(maxsize)(function)
        on_forget(cached.cache_clear)
        return cast(Callable[P, T], cached)  # the function's signature is unchanged

    return decorate


def on_forget(clear: Callable[[], object]) -> None:
    """Let `forget` call this function, too."""
    _forgetting.append(clear)


def forget() -> None:
    """Clear all caches of this process, so that the next run begins as in a new process.

    Call it in a notebook after data on the disk have changed, or to free memory, but never during a run.

    Examples
    --------
    >>> @remembered(maxsize=1)
    ... def lines() -> int:
    ...     print("reads")
    ...     return 3
    >>> lines(), lines()
    reads
    (3, 3)
    >>> forget()
    >>> lines()
    reads
    3
    """
    for clear in _forgetting:
        clear()
