"""Differential privacy at an institution: accounting, DP-SGD, secret noise, budgets, and the tools for epsilon.

Two data sets are neighbours if one has one *example* more than the other; their number is taken as known. With
dp=latents they are if one example is *replaced* by another. The two are never put into one epsilon.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["importing_opacus"]


@contextmanager
def importing_opacus() -> Iterator[None]:
    """Keep the root logger as it is: Opacus' first import gives it a handler, and Flower's lines would come twice."""
    handlers = list(logging.root.handlers)
    yield
    logging.root.handlers[:] = handlers
