"""Average ranks: Demšar's own example, SciPy's Friedman test, and what a comparison says of them."""

import pytest
from scipy.stats import f, friedmanchisquare

from flwr_replay.report.comparison import mean_ranks_of, ranks
from flwr_replay.report.ranks import MeanRanks
from flwr_replay.report.texts import findings


def test_demsars_example_has_his_figures():
    # Demšar 2006, pages 11 and 12: 14 data sets, 4 methods, F = 3.69, a critical difference of 1.25
    means = {"C4.5": 3.143, "C4.5+m": 2.000, "C4.5+cf": 2.893, "C4.5+m+cf": 1.964}
    ranks = MeanRanks({name: {str(n): mean for n in range(14)} for name, mean in means.items()})
    assert f.isf(ranks.p, 3, 39) == pytest.approx(3.69, abs=0.01)
    assert ranks.apart == pytest.approx(1.25, abs=0.005)
    assert ranks.told.endswith("by Nemenyi, 1.25 apart, none differ")


def test_the_statistic_is_scipys_and_equal_orders_are_no_surer_than_their_number_allows():
    values = {
        "a": [0.9, 0.8, 0.7, 0.6, 0.2, 0.6],
        "b": [0.5, 0.9, 0.6, 0.4, 0.3, 0.1],
        "c": [0.1, 0.2, 0.8, 0.3, 0.1, 0.5],
    }
    ranks = MeanRanks.of({name: dict(enumerate(map(float, row))) for name, row in values.items()}, True)
    chi_squared, n, k = friedmanchisquare(*values.values()).statistic, 6, 3
    assert ranks.p == pytest.approx(f.sf((n - 1) * chi_squared / (n * (k - 1) - chi_squared), k - 1, (k - 1) * (n - 1)))
    alike = MeanRanks.of(
        {name: dict.fromkeys("12345", value) for name, value in zip("abc", (3.0, 2.0, 1.0), strict=True)}, True
    )
    assert alike.p == pytest.approx(6**-4)  # 3! orders; the last four seeds repeat the first one's
    assert alike.means == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert alike.told.endswith("by Nemenyi, 1.48 apart, these differ: a and c")
    assert len(alike.chart.rows) == 15 + 3


def report(*labels, seeds=5, options=(), higher=True):
    rows = {
        label: {"mean": at / 9, "values": dict.fromkeys(range(seeds), at / 9), "difference": None, "epsilon": None}
        for at, label in enumerate(labels, 1)
    }
    cells = [{"label": label, "strategy": label, "seed": 0, "options": [*options]} for label in labels]
    return {
        "metric": "accuracy",
        "higher-is-better": higher,
        "against": labels[-1],
        "seeds": [*range(seeds)],
        "cells": cells,
        "strategies": rows,
    }


def test_a_comparison_ranks_methods_on_the_same_data_and_on_seeds_enough():
    assert ranks(report("a", "b", "c")).means == {"c": 1.0, "b": 2.0, "a": 3.0}
    assert ranks(report("a", "b", "c", higher=False)).means == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert ranks(report("a", "b")) is None
    assert ranks(report("a", "b", "c", seeds=4)) is None
    assert ranks(report("a", "b", "c", options=["partition.ks=0.5"])) is None
    text = findings(
        report("a", "b", "c") | {"untuned": "not tuned, one value only: lr 0.01; another may change the order"}
    )
    assert any("average ranks, 1 is best: c 1.00" in line and "seeds of the same data" in line for line in text)
    assert any(line.startswith("not tuned") for line in text)
    assert mean_ranks_of({str(n): report("a", "b", "c") for n in range(5)}).means == {"c": 1.0, "b": 2.0, "a": 3.0}
    assert mean_ranks_of({str(n): report("a", "b", "c") for n in range(4)}) is None
