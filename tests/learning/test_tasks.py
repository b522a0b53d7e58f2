"""Metrics: pooled over shards, they are those of the shards laid together."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    f1_score,
    log_loss,
    mean_absolute_error,
    roc_auc_score,
    root_mean_squared_error,
)
from torch import nn

from flwr_replay.errors import WireError
from flwr_replay.learning.tasks import Classification, Regression, Segmentation
from flwr_replay.payloads.common import Evaluation


@st.composite
def shards(draw):
    """Draw C, and for each institution logits (n, C) and labels (n,); some institutions lack some classes."""
    classes = draw(st.integers(2, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    return classes, [
        (
            rng.normal(size=(n, classes)).astype(np.float32),
            rng.choice(rng.permutation(classes)[: rng.integers(1, classes + 1)], n),
        )
        for n in sizes
    ]


def evaluations(classes, shards, batch_size=512):
    task, model = Classification(classes), nn.Identity()
    return [task.evaluate(model, torch.from_numpy(x), torch.from_numpy(y), batch_size) for x, y in shards]


@settings(max_examples=60)
@given(drawn=shards())
@pytest.mark.filterwarnings("ignore:y_pred contains classes", "ignore:A single label")
def test_pooled_metrics_are_sklearns_on_the_shards_laid_together(drawn):
    classes, shards = drawn
    pooled = Classification(classes).pool(evaluations(classes, shards))
    logits, y = (np.concatenate(column) for column in zip(*shards, strict=True))
    guesses, probabilities = logits.argmax(1), torch.from_numpy(logits).double().softmax(1).numpy()
    if "auc" in pooled:  # the server sees 256 bins; what falls into one counts half
        margins = logits[:, 1] - logits[:, 0]
        bins = np.floor((margins / (8 + np.abs(margins)) + 1) * 128)
        assert pooled.pop("auc") == pytest.approx(roc_auc_score(y, bins))
    assert pooled == pytest.approx(
        {
            "accuracy": accuracy_score(y, guesses),
            "balanced-accuracy": balanced_accuracy_score(y, guesses),
            "macro-f1": f1_score(y, guesses, average="macro"),
            "loss": log_loss(y, probabilities, labels=np.arange(classes)),
        },
        rel=1e-5,
    )


@settings(max_examples=30)
@given(drawn=shards(), batch_size=st.integers(1, 7))
def test_neither_batches_nor_order_nor_empty_answers_change_the_metrics(drawn, batch_size):
    classes, shards = drawn
    task, whole = Classification(classes), evaluations(classes, shards)
    split = evaluations(classes, shards, batch_size)
    assert [e.confusion for e in split] == [e.confusion for e in whole]
    assert task.pool([*split[::-1], task.empty()]) == pytest.approx(task.pool(whole), rel=1e-5)


def test_evaluation_is_of_the_model_as_it_will_be_used_and_leaves_it_so():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, y = torch.arange(12).reshape(4, 3).float(), torch.tensor([0, 1, 2, 0])
    first, again = (Classification(3).evaluate(model.train(), x, y) for _ in range(2))
    assert first == again
    assert first.num_examples == 4
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_confusion_has_labels_in_rows_and_predictions_in_columns():
    x, y = torch.tensor([[0.0, 1, 0], [0, 1, 0], [1, 0, 0]]), torch.tensor([2, 1, 2])
    [evaluation] = evaluations(3, [(x.numpy(), y.numpy())])
    assert np.reshape(evaluation.confusion, (3, 3)).tolist() == [[0, 0, 0], [0, 1, 0], [1, 1, 0]]


def test_the_auc_is_of_class_1_and_missing_where_one_class_is():
    logits = torch.tensor([[0.0, -3], [0, 1], [0, 0], [0, 3]])
    good, alone = evaluations(2, [(logits.numpy(), np.array([0, 1, 0, 1])), (logits.numpy(), np.array([1, 1, 1, 1]))])
    task = Classification(2)
    assert task.pool([good])["auc"] == 1
    assert "auc" not in task.pool([alone])
    assert task.pool([good, alone])["auc"] == pytest.approx(roc_auc_score([0, 1, 0, 1, 1, 1, 1, 1], [-3, 1, 0, 3] * 2))


def test_bins_of_scores_cost_the_auc_little():
    rng = np.random.default_rng(0)
    y, logits = rng.integers(0, 2, 3000), np.zeros((3000, 2), np.float32)
    for scale in (0.3, 1, 10, 40):  # however confident the model
        logits[:, 1] = scale * rng.normal(1.5 * y, 2)
        [evaluation] = evaluations(2, [(logits, y)])
        assert Classification(2).pool([evaluation])["auc"] == pytest.approx(roc_auc_score(y, logits[:, 1]), abs=3e-3)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_errors_of_a_regression_are_in_the_labels_unit(seed, sizes):
    rng = np.random.default_rng(seed)
    shards = [(rng.normal(size=(n, 1)).astype(np.float32), rng.normal(100, 40, n).astype(np.float32)) for n in sizes]
    x, y = (np.concatenate(column) for column in zip(*shards, strict=True))
    task = Regression().scaled(float(y.mean()), float(y.std()) or 1.0)
    evaluated = [task.evaluate(nn.Identity(), torch.from_numpy(x), torch.from_numpy(y), 7) for x, y in shards]
    guesses = x[:, 0].astype(float) * task.scale + task.mean
    pooled = task.pool(evaluated)
    assert pooled["mae"] == pytest.approx(mean_absolute_error(y, guesses), rel=1e-5)
    assert pooled["rmse"] == pytest.approx(root_mean_squared_error(y, guesses), rel=1e-5)
    assert pooled["loss"] == pytest.approx(float(task.loss(torch.from_numpy(x), torch.from_numpy(y))), rel=1e-4)


def test_dice_is_of_all_pixels_together_and_its_mean_is_over_institutions():
    rng = np.random.default_rng(0)
    logits, masks = rng.normal(size=(5, 1, 8, 8)).astype(np.float32), rng.integers(0, 2, (5, 8, 8), dtype=np.uint8)
    task, shards = Segmentation(), [slice(0, 1), slice(1, 5)]
    evaluated = [
        task.evaluate(nn.Identity(), torch.from_numpy(logits[s]), torch.from_numpy(masks[s]), 2) for s in shards
    ]
    guesses = logits[:, 0] > 0
    assert task.pool(evaluated)["dice"] == pytest.approx(f1_score(masks.ravel(), guesses.ravel()))
    assert task.pool(evaluated)["pixel-accuracy"] == pytest.approx(accuracy_score(masks.ravel(), guesses.ravel()))
    apart = [f1_score(masks[s].ravel(), guesses[s].ravel()) for s in shards]  # four images weigh as much as one
    assert task.pool(evaluated)["dice-mean"] == pytest.approx(np.mean(apart))
    assert task.pool([*evaluated, task.empty()])["dice-mean"] == pytest.approx(np.mean(apart))
    assert [task.pool([evaluation])["dice-mean"] for evaluation in evaluated] == pytest.approx(apart)
    assert abs(np.mean(apart) - task.pool(evaluated)["dice"]) > 1e-4
    assert set(task.pool(evaluated)) == set(task.metrics)
    right = torch.from_numpy(np.where(masks == 1, 50.0, -50.0)).float()[:, None]
    assert float(task.loss(right, torch.from_numpy(masks))) == pytest.approx(0, abs=1e-6)
    assert float(task.loss(-right, torch.from_numpy(masks))) > 2
    losses = [
        task.evaluate(nn.Identity(), torch.from_numpy(logits), torch.from_numpy(masks), b).loss for b in (1, 2, 5)
    ]
    assert losses == pytest.approx([losses[0]] * 3)


@pytest.mark.parametrize("task", [Classification(3), Classification(2), Regression(), Segmentation()])
def test_an_answer_about_no_example_is_refused(task):
    with pytest.raises(WireError, match="at least one example"):
        task.pool([task.empty()])
    with pytest.raises(WireError):
        task.pool([Evaluation(num_examples=5, loss=0.1)])


def test_labels_that_an_institution_uploads_are_the_tasks():
    masks = np.zeros((2, 4, 4), np.uint8)
    for task, good in (
        (Classification(3), np.array([0, 2])),
        (Regression(), np.ones(2, "f4")),
        (Segmentation(), masks),
    ):
        others = [np.array([0, 3]), np.array([-1, 0]), np.array([np.nan, 1], "f4"), masks + 2]
        assert task.accepts(good)
        assert not any(task.accepts(labels) for labels in others)
        blank = task.blank_labels(2, (1, 4, 4))
        assert (blank.shape, blank.dtype) == (good.shape, good.dtype)
