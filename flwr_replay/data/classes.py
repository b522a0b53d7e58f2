"""From a label to a class: the one mapping that training, tests and predictions share."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.sections import WHOLE, TaskConfig, spelled
from flwr_replay.data.readers import shortened
from flwr_replay.errors import DataError, nearest

__all__ = ["Classes"]


class Classes:
    """The classes of a task, by name. Without `task.class_names` they are called 0 to C - 1.

    A label that is no name is refused: it is never a position among the names. Spelling does not count, as `spelled`
    says.

    Attributes
    ----------
    names : tuple of C str
        In the order of a model's outputs.
    """

    def __init__(self, task: TaskConfig) -> None:
        self.task, self.names = task, task.class_names or tuple(map(str, range(task.classes)))
        self._numbers = {spelled(name): number for number, name in enumerate(self.names)}

    def number(self, label: str, where: str) -> int:
        """Return the number of a label's class, 0 to C - 1; the label of no class is refused, with where it stands."""
        if (number := self._numbers.get(spelled(label))) is not None:
            return number
        if self.task.class_names:
            raise DataError(f"unknown class {shortened(label)} ({where}): {nearest(label[:99], self.names)}")
        raise DataError(
            f"labels of task={self.task.name} must lie in 0..{self.task.classes - 1}; got {shortened(label)} "
            f"({where}): correct the label, or set task.classes, or name the classes by task.class-names"
        )

    def numbers(self, labels: NDArray[Any], source: str) -> NDArray[Any]:
        """Return the classes of an array of labels, shape (N,).

        Where classes are named by words, numbers are positions already, and are returned as they are. Booleans are
        not: the words must be true and false.

        Raises
        ------
        DataError
            For the first label that is no class, and for booleans where classes are called otherwise.
        """
        spoken = {name.casefold(): name for name in self.names}
        if labels.dtype.kind == "b" and spoken.keys() == {"false", "true"}:
            labels = np.where(labels, spoken["true"], spoken["false"])
        elif labels.dtype.kind == "b" and not any(map(WHOLE.fullmatch, self.names)):
            raise DataError(
                f"boolean labels are for classes true and false; got {shortened(', '.join(self.names))} ({source}): "
                "give the numbers of the classes"
            )
        numeric = labels.dtype.kind in "biuf"
        if numeric and not any(map(WHOLE.fullmatch, self.names)):
            return labels
        plain = labels.astype(np.int64) if labels.dtype.kind == "b" else labels
        return np.asarray(
            [self.number(str(label), f"example {n} of {source}") for n, label in enumerate(plain.tolist())], np.int64
        )
