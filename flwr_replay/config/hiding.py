"""What a run hides from its server: the options sealed and masked as one word, and what follows from it."""

from enum import StrEnum
from typing import Self

__all__ = ["Hiding"]


class Hiding(StrEnum):
    """What is hidden from a server; the words are those of options, of a policy's keys and of the ledger."""

    NOTHING = ""
    SEALED = "sealed"
    MASKED = "masked"

    @classmethod
    def of(cls, sealed: bool, masked: bool) -> Self:
        """Return what the two options hide."""
        return cls("sealed" if sealed else "masked" if masked else "")

    @property
    def readable(self) -> bool:
        """Whether the server can read models and images, if only the mean of all models."""
        return self is not Hiding.SEALED

    @property
    def sums_only(self) -> bool:
        """Whether the server reads nothing of institutions but sums, each of which needs them all."""
        return self is Hiding.MASKED

    @property
    def pinned(self) -> bool:
        """Whether institutions need each other's keys."""
        return self is not Hiding.NOTHING
