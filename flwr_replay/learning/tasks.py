"""What is learned: the loss, the sums an institution reports over its test shard, and the metrics pooled from them.

A metric of several institutions is computed from summed counts and errors; `dice-mean` alone is an average over
institutions. `B` is a batch, `C` the number of classes, `H` and `W` height and width in pixels.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from flwr_replay.config.sections import TaskConfig
from flwr_replay.errors import WireError
from flwr_replay.learning.training import at_once
from flwr_replay.models.layers import as_input
from flwr_replay.payloads.common import Evaluation
from flwr_replay.wire.bounds import LARGEST

__all__ = ["BINS", "ERRORS", "Classification", "Regression", "Segmentation", "Task", "make_task"]

BINS = 256  # of a histogram of scores, from which the AUC is computed
ERRORS = ("loss", "mae", "rmse")  # metrics of which less is better
HALFWAY = 8.0  # logits; the score at which half the bins of its side are used up


@dataclass(frozen=True)
class Task(ABC):
    """Base of the three kinds of task."""

    metric: ClassVar[str]  # the leading metric

    @property
    @abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """All that `pool` may return."""

    @property
    def higher_is_better(self) -> bool:
        """Whether more of the leading metric is better."""
        return self.metric not in ERRORS

    @abstractmethod
    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch."""

    @abstractmethod
    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return each example's loss, (B,), as `loss` gives it for a batch of this example alone."""

    def evaluate(self, model: nn.Module, x: Tensor, y: Tensor, batch_size: int = 0) -> Evaluation:
        """Sum up a model's errors or counts over a test shard, in evaluation mode.

        The shard is examples (n, ...) and labels (n,) or masks (n, H, W). So many as `batch_size` pass the model at a
        time, which bounds memory and changes results by rounding only. 0: as many as fit.
        """
        model.eval()
        batch_size = batch_size or at_once(x, 512, model)
        summed: dict[str, Tensor] = {}
        with torch.inference_mode():
            for x_B, y_B in zip(torch.split(x, batch_size), torch.split(y, batch_size), strict=True):
                for name, value in self.sums(model(as_input(x_B)), y_B).items():
                    summed[name] = summed[name] + value if name in summed else value
        loss = float(summed.pop("loss")) / len(y)
        sums: dict[str, Any] = {name: value.tolist() for name, value in summed.items()}
        return Evaluation(num_examples=len(y), loss=loss, **sums)

    @abstractmethod
    def sums(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return what a batch adds to the fields of an `Evaluation`; `loss` is summed over examples."""

    @abstractmethod
    def empty(self) -> Evaluation:
        """Return the evaluation of no example, with every field that an answer has."""

    def pool(self, evaluations: Sequence[Evaluation]) -> dict[str, float]:
        """Compute each metric from the institutions' sums.

        Raises
        ------
        WireError
            If they hold no example.
        """
        n = sum(evaluation.num_examples for evaluation in evaluations)
        if n < 1:
            raise WireError(f"an evaluation must be of at least one example; got {n}")
        losses = [(test.loss, test.num_examples) for test in evaluations if test.loss is not None]
        loss = {"loss": float(sum(loss * n_k for loss, n_k in losses) / n)} if len(losses) == len(evaluations) else {}
        return {**self.pooled(evaluations), **loss}

    @abstractmethod
    def pooled(self, evaluations: Sequence[Evaluation]) -> dict[str, float]:
        """Compute all metrics but the loss."""

    @abstractmethod
    def accepts(self, labels: NDArray[Any]) -> bool:
        """Return whether labels that an institution uploaded can be this task's."""

    @abstractmethod
    def blank_labels(self, n: int, input_shape: tuple[int, ...]) -> NDArray[Any]:
        """Return n blank labels of the shape and dtype of real ones."""

    def label_sums(self, y: Tensor) -> dict[str, float]:
        """Return the sums of labels that an institution reports at the roll call, for one scale everywhere."""
        return {}

    def scaled(self, mean: float, scale: float) -> Self:
        """Return the task with labels standardised by a mean and a standard deviation."""
        return self


@dataclass(frozen=True)
class Classification(Task):
    """One label of C per example; cross-entropy, nats; accuracy leads.

    Parameters
    ----------
    classes : int
        C.
    groups : tuple of str
        One for each class, such as its tumour type, or none. With groups there is also subtype-accuracy: the predicted
        class is then the likeliest of the label's group (Kalra et al. 2023, section 4.3).
    """

    classes: int
    groups: tuple[str, ...] = ()
    metric: ClassVar[str] = "accuracy"

    @property
    def metrics(self) -> tuple[str, ...]:
        """All metrics; with two classes also the AUC of class 1, with groups accuracy within the label's group."""
        more = [*(["subtype-accuracy"] if self.groups else []), *(["auc"] if self.classes == 2 else [])]
        return ("accuracy", "balanced-accuracy", "macro-f1", *more, "loss")

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy of logits (B, C) and labels (B,), nats."""
        return functional.cross_entropy(outputs, y)

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy of each example's logits, nats, (B,)."""
        return functional.cross_entropy(outputs, y, reduction="none")

    def sums(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Count labels against predictions, and with two classes labels against scores."""
        C = self.classes
        sums = {
            "loss": functional.cross_entropy(outputs, y, reduction="sum"),
            "confusion": torch.bincount(y * C + outputs.argmax(1), minlength=C * C),
        }
        if self.groups:
            numbers_C = torch.tensor([self.groups.index(group) for group in self.groups], device=y.device)
            elsewhere_BC = numbers_C[y].unsqueeze(1) != numbers_C
            sums["hits_in_group"] = (outputs.masked_fill(elsewhere_BC, -torch.inf).argmax(1) == y).sum()
        if C == 2:
            margins_B = outputs[:, 1] - outputs[:, 0]
            squashed_B = margins_B / (HALFWAY + margins_B.abs())  # keeps the order, however confident the model
            bins_B = ((squashed_B + 1) * (BINS / 2)).nan_to_num(0).clamp(0, BINS - 1).long()
            sums["scores"] = torch.bincount(y * BINS + bins_B, minlength=2 * BINS)
        return sums

    def empty(self) -> Evaluation:
        """Return an evaluation of no example."""
        scores = [0] * (2 * BINS) if self.classes == 2 else []
        hits = 0 if self.groups else None
        confusion = [0] * self.classes**2
        return Evaluation(num_examples=0, loss=0.0, confusion=confusion, hits_in_group=hits, scores=scores)

    def pooled(self, evaluations: Sequence[Evaluation]) -> dict[str, float]:
        """Compute the metrics from the summed confusion matrices and histograms.

        Balanced accuracy averages over the classes that the pooled shards hold, macro-F1 over those that they hold or
        the model predicts (one that is only predicted has F1 0), as scikit-learn does. There is no AUC of one class.

        >>> a = Evaluation(num_examples=4, loss=0.5, confusion=[3, 0, 1, 0])
        >>> b = Evaluation(num_examples=1, loss=1.0, confusion=[0, 0, 0, 1])
        >>> {name: round(value, 3) for name, value in Classification(2).pool([a, b]).items()}
        {'accuracy': 0.8, 'balanced-accuracy': 0.75, 'macro-f1': 0.762, 'loss': 0.6}
        """
        C = self.classes
        if any(evaluation.hits is not None for evaluation in evaluations):  # a policy's min-count keeps the cells
            right = sum(_right(evaluation, C) for evaluation in evaluations)
            return {"accuracy": right / sum(evaluation.num_examples for evaluation in evaluations)}
        confusion_CC = _summed(evaluations, "confusion", C * C).reshape(C, C)
        hits_C, labels_C, guesses_C = confusion_CC.diagonal(), confusion_CC.sum(1), confusion_CC.sum(0)
        held, met = labels_C > 0, labels_C + guesses_C > 0
        metrics = {
            "accuracy": float(hits_C.sum() / confusion_CC.sum()),
            "balanced-accuracy": float((hits_C[held] / labels_C[held]).mean()),
            "macro-f1": float((2 * hits_C[met] / (labels_C + guesses_C)[met]).mean()),
        }
        if self.groups:
            metrics["subtype-accuracy"] = _hits_in_group(evaluations) / float(confusion_CC.sum())
        if C == 2 and held.all() and all(len(evaluation.scores) for evaluation in evaluations):
            metrics["auc"] = _auc(_summed(evaluations, "scores", 2 * BINS).reshape(2, BINS))
        return metrics

    def accepts(self, labels: NDArray[Any]) -> bool:
        """Accept class numbers."""
        return labels.ndim == 1 and labels.dtype == np.int64 and bool(((labels >= 0) & (labels < self.classes)).all())

    def blank_labels(self, n: int, input_shape: tuple[int, ...]) -> NDArray[Any]:
        """Return n class numbers."""
        return np.zeros(n, np.int64)


def _right(test: Evaluation, classes: int) -> int:
    if test.hits is None:
        return int(_summed([test], "confusion", classes**2)[:: classes + 1].sum()) if test.num_examples else 0
    if len(test.confusion) or not 0 <= test.hits <= test.num_examples:
        raise WireError(f"hits must count examples of the shard, without a confusion; got {test.hits}")
    return test.hits


def _hits_in_group(evaluations: Sequence[Evaluation]) -> int:
    total = 0
    for test in evaluations:
        if test.hits_in_group is None or not 0 <= test.hits_in_group <= test.num_examples:
            raise WireError(f"hits-in-group must count examples of the shard; got {test.hits_in_group}")
        total += test.hits_in_group
    return total


def _auc(scores_2S: NDArray[np.int64]) -> float:
    """Compute the area under the ROC curve from histograms of both classes' scores; ties count half."""
    negatives_S, positives_S = scores_2S
    below_S = np.cumsum(negatives_S) - negatives_S / 2
    return float((positives_S * below_S).sum() / (positives_S.sum() * negatives_S.sum()))


@dataclass(frozen=True)
class Regression(Task):
    """One number per example; the model's output is standardised; the mean absolute error in the label's unit leads.

    Parameters
    ----------
    mean, scale : float
        Of the labels, in their unit: a label y is learned as (y - mean) / scale. All institutions use the same, which
        the server computes from the sums that they report at the roll call.
    bounded : bool
        Whether they are the middle and half of a public range, to which labels are clipped: no sums are reported.
    """

    mean: float = 0.0
    scale: float = 1.0
    bounded: bool = False
    metric: ClassVar[str] = "mae"
    metrics = ("mae", "rmse", "loss")  # the loss is in squared standard deviations

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean squared error of outputs (B, 1) and labels (B,), in squared standard deviations."""
        return functional.mse_loss(outputs[:, 0], self.learned(y))

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the squared error of each example, in squared standard deviations, (B,)."""
        return (outputs[:, 0] - self.learned(y)).square()

    def learned(self, y: Tensor) -> Tensor:
        """Return labels as they are learned."""
        learned = (y - self.mean) / self.scale
        return learned.clamp(-1, 1) if self.bounded else learned

    def sums(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Add up errors, in float64."""
        errors_B = outputs[:, 0].double() * self.scale + self.mean - y.double()
        squares = errors_B.square().sum()
        absolute = errors_B.abs().sum()
        return {"loss": squares / self.scale**2, "absolute_error": absolute, "squared_error": squares}

    def empty(self) -> Evaluation:
        """Return an evaluation of no example."""
        return Evaluation(num_examples=0, loss=0.0, absolute_error=0.0, squared_error=0.0)

    def pooled(self, evaluations: Sequence[Evaluation]) -> dict[str, float]:
        """Compute the errors in the label's unit from their sums.

        >>> a = Evaluation(num_examples=3, loss=0.0, absolute_error=6.0, squared_error=12.0)
        >>> b = Evaluation(num_examples=1, loss=0.0, absolute_error=4.0, squared_error=16.0)
        >>> {name: round(value, 3) for name, value in Regression().pool([a, b]).items()}
        {'mae': 2.5, 'rmse': 2.646, 'loss': 0.0}
        """
        n = sum(evaluation.num_examples for evaluation in evaluations)
        errors = [(test.absolute_error, test.squared_error) for test in evaluations]
        if any(a is None or s is None or min(a, s) < 0 for a, s in errors):
            raise WireError("an evaluation of a regression must hold absolute-error and squared-error, not below 0")
        absolute, squared = (sum(error or 0.0 for error in kind) for kind in zip(*errors, strict=True))
        return {"mae": absolute / n, "rmse": (squared / n) ** 0.5}

    def accepts(self, labels: NDArray[Any]) -> bool:
        """Accept finite numbers that are not absurdly far from the mean label."""
        numbers = labels.ndim == 1 and labels.dtype == np.float32
        return numbers and bool((np.abs((labels - self.mean) / self.scale) <= LARGEST).all())  # NaN is not

    def blank_labels(self, n: int, input_shape: tuple[int, ...]) -> NDArray[Any]:
        """Return n numbers."""
        return np.zeros(n, np.float32)

    def label_sums(self, y: Tensor) -> dict[str, float]:
        """Return the sum and the sum of squares of labels (n,), where no range is known."""
        if self.bounded:
            return {}
        return {"label_sum": float(y.double().sum()), "label_squares": float(y.double().square().sum())}

    def scaled(self, mean: float, scale: float) -> Self:
        """Return the task with these statistics of the labels; a known range stays."""
        return self if self.bounded else replace(self, mean=mean, scale=scale)


@dataclass(frozen=True)
class Segmentation(Task):
    """One mask of 0 and 1 per example; the Dice coefficient leads.

    The loss is cross-entropy per pixel plus soft Dice; Qu et al. 2022, section 4.3, do not say theirs.
    """

    metric: ClassVar[str] = "dice"
    metrics = ("dice", "dice-mean", "pixel-accuracy", "loss")

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return cross-entropy plus 1 - soft Dice of logits (B, 1, H, W) and masks (B, H, W), a mean over images."""
        entropy = functional.binary_cross_entropy_with_logits(outputs[:, 0], y.to(outputs.dtype))
        return entropy + (1 - soft_dice(outputs, y)).mean()

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each image, (B,)."""
        logits_BHW, masks_BHW = outputs[:, 0], y.to(outputs.dtype)
        entropies_BHW = functional.binary_cross_entropy_with_logits(logits_BHW, masks_BHW, reduction="none")
        return entropies_BHW.mean((1, 2)) + 1 - soft_dice(outputs, y)

    def sums(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Count pixels."""
        guesses_BHW = (outputs[:, 0] > 0).long()
        confusion = torch.bincount((y.long() * 2 + guesses_BHW).flatten(), minlength=4)
        return {"loss": self.loss(outputs, y) * len(y), "confusion": confusion}

    def empty(self) -> Evaluation:
        """Return an evaluation of no example."""
        return Evaluation(num_examples=0, loss=0.0, confusion=[0] * 4)

    def pooled(self, evaluations: Sequence[Evaluation]) -> dict[str, float]:
        """Compute Dice, 2 TP / (2 TP + FP + FN), from summed pixels; 1 where neither mask nor prediction has any.

        `dice-mean` is the unweighted mean of the institutions' own coefficients, as in Qu et al. 2022, section 4.3.

        >>> a = Evaluation(num_examples=1, loss=0.0, confusion=[5, 1, 2, 8])
        >>> b = Evaluation(num_examples=1, loss=0.0, confusion=[15, 1, 0, 0])
        >>> {name: round(value, 4) for name, value in Segmentation().pooled([a, b]).items()}
        {'dice': 0.8, 'dice-mean': 0.4211, 'pixel-accuracy': 0.875}
        """
        counts_4 = _summed(evaluations, "confusion", 4)
        own = [_dice(_summed([test], "confusion", 4)) for test in evaluations if test.num_examples]
        pixel_accuracy = float((counts_4[0] + counts_4[3]) / counts_4.sum())
        return {"dice": _dice(counts_4), "dice-mean": sum(own) / len(own), "pixel-accuracy": pixel_accuracy}

    def accepts(self, labels: NDArray[Any]) -> bool:
        """Accept masks."""
        return labels.ndim == 3 and labels.dtype == np.uint8 and bool((labels <= 1).all())

    def blank_labels(self, n: int, input_shape: tuple[int, ...]) -> NDArray[Any]:
        """Return n empty masks."""
        return np.broadcast_to(np.zeros((), np.uint8), (n, *input_shape[1:]))


def _dice(counts_4: NDArray[np.int64]) -> float:
    """Compute Dice from pixels by label and prediction, row by row."""
    _, false_1, false_0, right_1 = counts_4.tolist()
    sizes = 2 * right_1 + false_0 + false_1  # of mask and prediction together
    return 2 * right_1 / sizes if sizes else 1.0


def _summed(evaluations: Sequence[Evaluation], field: str, size: int) -> NDArray[np.int64]:
    """Add up one field of counts; refuse those that are not `size` of them, or all zero."""
    lists = [getattr(evaluation, field) for evaluation in evaluations if evaluation.num_examples]
    for counts in lists:
        if len(counts) != size or min(counts) < 0 or not any(counts):
            raise WireError(f"{field} must hold {size} counts that are not all zero; got {list(counts)[:6]} …")
    return np.asarray(np.sum(lists, axis=0, dtype=np.int64))


def soft_dice(outputs: Tensor, y: Tensor) -> Tensor:
    """Return 2 Σ p y / (Σ p + Σ y) over each image's pixels, one added to both, (B,)."""
    p_BHW, masks_BHW = outputs[:, 0].sigmoid(), y.to(outputs.dtype)
    overlap_B, sizes_B = (p_BHW * masks_BHW).sum((1, 2)), (p_BHW + masks_BHW).sum((1, 2))
    return (2 * overlap_B + 1) / (sizes_B + 1)


def make_task(config: TaskConfig) -> Task:
    """Build the task that a configuration names."""
    if config.kind == "regression":
        low, high = config.label_range or (-1.0, 1.0)
        return Regression((low + high) / 2, (high - low) / 2, bounded=bool(config.label_range))
    return Segmentation() if config.kind == "segmentation" else Classification(config.classes, config.class_groups)
