"""What a process remembers of the world outside it, and one call that makes it forget."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import ParamSpec, TypeVar, cast

__all__ = ["forget", "on_forget", "remembered"]

P = ParamSpec("P")
T = TypeVar("T")

_forgetting: list[Callable[[], object]] = []


def remembered(maxsize: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator as `functools.lru_cache(maxsize)`, whose results `forget` drops.

    It is for what depends on files or takes much memory: data, models, what lies in a state directory. What follows
    from the arguments alone, such as a composed configuration, stays in an `lru_cache`: forgetting it changes nothing.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        cached = lru_cache(maxsize)(function)
        on_forget(cached.cache_clear)
        return cast(Callable[P, T], cached)  # which still takes the function's own arguments only

    return decorate


def on_forget(clear: Callable[[], object]) -> None:
    """Have `forget` call this, too."""
    _forgetting.append(clear)


def forget() -> None:
    """Forget all that this process has read or built, so that the next run begins as in a new process.

    Call it in a notebook once data on the disk have changed, or to free the memory; never while a run goes on.

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
