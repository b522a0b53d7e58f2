"""An epsilon stands beside every accuracy that has one, and says where it is no proof."""

import pytest

from flwr_replay.report.comparison import overview, summarise
from flwr_replay.report.metrics import Stated, epsilon_suffix, largest, shown_epsilon
from flwr_replay.report.progress import shown_metrics


def reported(epsilon, proven=True):
    return {"epsilon": epsilon, "delta": 1e-5, "proven": proven, "mechanism": "DP-SGD", "dp": "proxy"}


def reported_before(epsilon):
    """As versions wrote it that had no `proven`."""
    return {"epsilon": epsilon, "delta": 1e-5, "mechanism": "DP-SGD", "accountant": "rdp", "dp": "proxy"}


@pytest.mark.parametrize(
    ("stated", "shown"),
    [
        ([], ""),
        ([None, None], ""),
        ([reported(7.971), None, reported(3.0)], ", epsilon 7.98 at delta 1e-05 (dp=proxy)"),
        ([reported(93.11, proven=False), reported(1.0)], ", epsilon 93.2 at delta 1e-05 (dp=proxy), no proof"),
        ([reported(None), reported(1.0)], ", epsilon inf at delta 1e-05 (dp=proxy)"),  # noise from the run's seed
        ([reported(2.0) | {"alone": 3.7301}], ", epsilon 2 of the sum, 3.74 alone, at delta 1e-05 (dp=proxy)"),
        ([reported_before(7.971)], ", epsilon 7.98 at delta 1e-05 (dp=proxy), no proof"),
    ],
)
def test_the_largest_of_a_run_stands_behind_its_metric(stated, shown):
    assert epsilon_suffix({"privacy": dict(enumerate(stated))}) == shown


def test_several_stand_in_order_unless_they_are_equal():
    assert shown_epsilon([Stated(12.14, True, "", 1e-5), Stated(28.6, True, "", 2e-5)]) == (
        "epsilon 12.2, 28.6 at delta 1e-05, 2e-05"
    )
    assert shown_epsilon([Stated(28.6, True, "proxy", 1e-5), None]) == "epsilon 28.6, none at delta 1e-05 (dp=proxy)"
    assert shown_epsilon([None, None]) == ""
    assert (
        shown_epsilon([Stated(28.6, True, "proxy", 1e-5), Stated(28.6, False, "proxy", 1e-5)])
        == "epsilon 28.6 at delta 1e-05 (dp=proxy), no proof"
    )


def test_tables_have_it_beside_every_mean():
    def cell(label, stated):
        result = {
            "final": {"global": {"accuracy": 0.5}, "institutions": {"a": {"accuracy": 0.5}}},
            "bytes": {"up": 0, "down": 0},
            "examples-seen": 0,
            "wall-seconds": 0.0,
            "privacy": {"a": stated},
        }
        return {"label": label, "strategy": label, "seed": 0, "result": result}

    cells = [cell("x", reported(7.971)), cell("y", reported(28.6, proven=False)), cell("z", None)]
    rows = summarise(cells, ["x", "y", "z"], "z", "accuracy", True)
    assert largest([reported(7.971)]) == rows["x"]["epsilon"] == Stated(7.971, True, "proxy", 1e-5)
    assert overview({"part": {"strategies": rows, "metric": "accuracy"}})[2:] == [
        "| x | 0.5000, epsilon 7.98 at delta 1e-05 (dp=proxy) |",
        "| y | 0.5000, epsilon 28.6 at delta 1e-05 (dp=proxy), no proof |",
        "| z | 0.5000 |",
    ]


def test_progress_has_it_too():
    shown = shown_metrics({"accuracy": 0.5, "f1": 0.4, "loss": 1.0, "epsilon (dp=proxy, no proof)": 28.6})
    assert shown == "accuracy 0.5000, loss 1.0000, epsilon (dp=proxy, no proof) 28.6000"
