"""Metrics: pooled over shards, they are those of the shards laid together."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score, log_loss
from torch import nn

from flwr_replay.tasks import Classification


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


def evaluations(classes, parts, batch_size=512):
    task, model = Classification(classes), nn.Identity()
    return [task.evaluate(model, torch.from_numpy(x), torch.from_numpy(y), batch_size) for x, y in parts]


@settings(max_examples=60, deadline=None)
@given(drawn=shards())
@pytest.mark.filterwarnings("ignore:y_pred contains classes", "ignore:A single label")
def test_pooled_metrics_are_sklearns_on_the_shards_laid_together(drawn):
    classes, parts = drawn
    pooled = Classification(classes).pool(evaluations(classes, parts))
    logits, y = (np.concatenate(column) for column in zip(*parts, strict=True))
    guesses, probabilities = logits.argmax(1), torch.from_numpy(logits).double().softmax(1).numpy()
    assert pooled == pytest.approx(
        {
            "accuracy": accuracy_score(y, guesses),
            "balanced-accuracy": balanced_accuracy_score(y, guesses),
            "macro-f1": f1_score(y, guesses, labels=np.unique(y), average="macro"),
            "loss": log_loss(y, probabilities, labels=np.arange(classes)),
        },
        rel=1e-5,
    )


@settings(max_examples=30, deadline=None)
@given(drawn=shards(), batch_size=st.integers(1, 7))
def test_neither_batches_nor_order_nor_empty_answers_change_the_metrics(drawn, batch_size):
    classes, parts = drawn
    task, whole = Classification(classes), evaluations(classes, parts)
    split = evaluations(classes, parts, batch_size)
    assert [e.confusion for e in split] == [e.confusion for e in whole]
    assert task.pool([*split[::-1], task.empty()]) == pytest.approx(task.pool(whole), rel=1e-5)


def test_evaluation_is_of_the_model_as_it_will_be_used_and_leaves_it_so():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, y = torch.arange(12).reshape(4, 3).float(), torch.tensor([0, 1, 2, 0])
    one, again = (Classification(3).evaluate(model.train(), x, y) for _ in range(2))
    assert one == again
    assert one.num_examples == 4
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_confusion_has_labels_in_rows_and_predictions_in_columns():
    x, y = torch.tensor([[0.0, 1, 0], [0, 1, 0], [1, 0, 0]]), torch.tensor([2, 1, 2])
    [found] = evaluations(3, [(x.numpy(), y.numpy())])
    assert np.reshape(found.confusion, (3, 3)).tolist() == [[0, 0, 0], [0, 1, 0], [1, 1, 0]]
