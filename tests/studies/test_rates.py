"""`lr=auto` and `--tune`: whose trial is best, what is refused, that trials are runs, and what they cost."""

import re
from pathlib import Path

import pytest

from flwr_replay.errors import ConfigError
from flwr_replay.report.run_files import options_of, read_result
from flwr_replay.studies import tuning
from flwr_replay.studies.compare import compare_strategies
from flwr_replay.studies.rates import RATES, trials, with_rates
from flwr_replay.studies.tuning import compare_tuned

TINY = ["task=digits", "nodes=2", "rounds=1", "model=mlp", "model.width=4", "device=cpu"]


def comparison_of_rates(metrics, higher=True):
    cells = [
        {
            "label": f"{label}, lr {rate}",
            **(
                {"error": "diverged"}
                if value is None
                else {"result": {"final": {"global": {"validation-rmse": value}}, "examples-seen": 10}}
            ),
        }
        for label, values in metrics.items()
        for rate, value in zip(RATES, values, strict=True)
    ]
    return {"metric": "rmse", "higher-is-better": higher, "cells": cells, "seeds": [3], "folder": "runs/x"}


@pytest.mark.parametrize(("higher", "best"), [(True, "0.03"), (False, "0.003")])
def test_the_rate_is_that_of_the_best_trial_and_what_diverged_is_none(higher, best):
    report = comparison_of_rates(
        {"a": [0.5, 0.2, None, 0.9, float("nan")], "alike": [0.1] * 5, "lost": [None] * 5}, higher
    )
    names, told = with_rates(["a := cwt:mu=1", "alike := fedstats", "lost := local", "own := cwt:lr=7"], report)
    assert names == [f"a := cwt:mu=1:lr={best}", "alike := fedstats", "lost := local", "own := cwt:lr=7"]
    assert f"a {best}, alike its default" in told
    assert "own its own or none" in told
    assert "by validation-rmse with seed 3; these trials saw 90 examples: ../x" in told
    names, told = with_rates(["a := cwt"], comparison_of_rates({"a": [0.5, 0.4, 0.3, 0.2, 0.1]}))
    assert names == ["a := cwt:lr=0.001"]
    assert "a 0.001 (an end of what was tried)" in told


def test_trials_are_runs_of_the_comparison_and_the_best_is_not_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    options = [*TINY, "seeds=4,6", "lr=auto", "fedprox.lr=1e-9"]  # of a method that is not tried
    text, report = compare_strategies(["cwt", "slow := fedprox"], options, "", 1, tmp_path)
    errors = capsys.readouterr().err.splitlines()
    assert sum("lr=auto, cwt, lr " in line and ": validation-accuracy " in line for line in errors) == len(RATES)
    assert any("runs, seed 4: " in line for line in errors)
    runs = sorted(file.parent.name for file in tmp_path.glob("compare-*/*/result.json"))
    assert len(runs) == 5 + 1 + 2  # the trials with seed 4, of which one counts, the other seed, and slow's two
    assert list(report["strategies"]) == ["cwt", "slow"]
    assert report["against"] == "slow"
    own = {rate: read_result(next(tmp_path.glob(f"compare-*/cwt-training.lr-{rate}-seed4"))) for rate in RATES}
    judged = {rate: result["final"]["global"]["validation-accuracy"] for rate, result in own.items()}
    best = max(judged, key=lambda rate: judged[rate])
    assert {tuple(cell["options"]) for cell in report["cells"] if cell["label"] == "cwt"} == {(f"training.lr={best}",)}
    assert f"lr=auto: cwt {best}" in text
    assert str(tmp_path) not in (Path(report["folder"]) / "report.html").read_text()
    assert "slow its own" in report["rates"]
    assert not re.search(r"\blr\b", report["untuned"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["split=test"], "lr=auto chooses by validation examples"),
        (["dp=classifier", "target-epsilon=8"], "each would be charged; got fedavg: give it a rate of its own"),
        (["rounds=0"], "rounds"),
        (["fedavg.lr=1"], "each has its own, or takes no steps"),
    ],
)
def test_what_cannot_be_tuned_fairly_is_refused_before_any_run(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        compare_strategies(["fedavg"], [*TINY, "lr=auto", *options], "", 1, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_methods_that_take_no_steps_are_not_tried(tmp_path):
    tried, _ = trials(["fedstats", "cwt"], ["rounds=1"], {"fedstats"})
    assert [name.partition(",")[0] for name in tried] == ["cwt"] * len(RATES)
    with pytest.raises(ConfigError, match="each has its own, or takes no steps"):
        compare_strategies(["fedstats"], [*TINY, "lr=auto"], "", 1, tmp_path)


@pytest.mark.sampled(2, of="slow studies")
def test_optuna_tries_on_a_seed_that_is_not_reported_and_repeats_none(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    methods = ["cwt", "fixed := cwt:lr=1e-9", "noisy := fedavg:dp=classifier:sigma=2:delta=1e-3"]
    methods += ["lost := fedavg:dp=classifier:sigma=3:delta=1e-3:lr=1e30"]  # diverges
    options = [*TINY[:-2], "model.width=32", "device=cpu", "seeds=6,", "lr=0.001..1", "fedavg.batch-size=16..64"]
    runs, lines = [], []
    for tries in (2, 3):  # the second command goes on with the first one's tries
        text, report = compare_tuned(methods, options, "", 1, tmp_path, "", tries)
        runs.append({file.parent.name: file.stat().st_mtime_ns for file in tmp_path.glob("compare-*/*/result.json")})
        lines.append(capsys.readouterr().err)
    own = {name for name in runs[1] if name.endswith("seed7")}
    assert len(own) == 2 * 3  # none of lost's, for the page of all tries
    assert {name for name in runs[0] if name in own} < own
    assert runs[0].items() <= runs[1].items()
    assert report["seeds"] == [6]
    for label, strategy in (("cwt", "cwt"), ("noisy", "fedavg")):
        judged = {}
        for folder in (file.parent for name in own for file in tmp_path.glob(f"compare-*/{name}/result.json")):
            if options_of(folder)["strategy"]["name"] == strategy:
                rate = options_of(folder)["training"]["lr"]
                judged[rate] = read_result(folder)["final"]["global"]["validation-accuracy"]
        cell = next(cell for cell in report["cells"] if cell["label"] == label)
        chosen = options_of(tmp_path / report["folder"] / cell["folder"])["training"]["lr"]
        assert sorted(judged) == pytest.approx([0.01, 0.0316, 0.178], rel=0.01)  # the default; the middle, and so on
        assert judged[chosen] == max(judged.values())
    assert {cell["options"][0] for cell in report["cells"] if cell["label"] == "fixed"} == {"training.lr=1e-9"}
    epsilons = [
        max(account["epsilon"] for account in read_result(folder.parent)["privacy"].values())
        for folder in tmp_path.glob("compare-*/fedavg-*seed7/result.json")
    ]
    spent, delta, of_lost, its_delta = re.search(
        r"spent epsilon beside that of a run: noisy ([\d.]+) at delta ([\d.]+), lost ([\d.]+) at delta ([\d.]+)", text
    ).groups()
    assert sum(epsilons) <= float(spent) <= sum(epsilons) * 1.01
    assert float(delta) == pytest.approx(3e-3)
    assert "; 3 of them failed, which counts, and are not tried again" in report["rates"]
    assert 0 < float(of_lost) < float(spent)  # its sigma is larger
    assert float(its_delta) == pytest.approx(3e-3)
    assert [line.count("is not tried again, as it has spent epsilon: failed: ") for line in lines] == [0, 2]
    assert "of 3 tries each the best by validation-accuracy with seed 7, which is not reported" in report["rates"]
    assert not re.search(r"\blr\b", report["untuned"])


def test_a_try_under_dp_that_failed_is_not_run_once_more_for_the_page_of_all_tries(tmp_path, monkeypatch):
    """It may succeed then, or be charged, and what the tries have spent was told without it."""
    ran = []
    monkeypatch.setattr(tuning, "run_all", lambda cells, jobs: [(cell.folder, {"error": "killed"}) for cell in cells])
    monkeypatch.setattr(tuning, "run_comparisons", lambda every, jobs: ran.append(every) or [("", {"folder": ""})])
    methods = ["plain := fedavg", "noisy := fedavg:dp=classifier:sigma=2:delta=1e-3", "fedprox"]
    compare_tuned(methods, [*TINY, "seeds=6,", "lr=0.001..1", "fedprox.lr=1"], "plain", 1, tmp_path, "", 2)
    [tries], [_] = ran
    assert {cell.method.label.partition(",")[0] for cell in tries.cells} == {"plain"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["lr=auto", "split=test"], "--tune chooses by validation examples"),
        (["lr=auto", "fedavg.lr=1"], "a range that no method sets itself"),
        (["lr=0.1|0.2"], "a range that no method sets itself"),
        (["ks=0.1..0.9"], "no option of the data"),
        (["lr=1.0..0.1"], "a range is low..high, two numbers; got lr=1.0..0.1: write one such as lr=0.001..0.1"),
        (["lr=0.1..0.1"], "a range is low..high"),
        (["lr=1.."], "a range is low..high"),
        (["lr=1e-3..abc"], "a range is low..high"),
        (["lr=low..high", "batch-size=16..32"], "a range is low..high"),
        (["lr=1..2..3"], "a range is low..high"),
        (["lr=0..0.1"], r"fedavg, training.lr=0: training.lr must be positive"),
        (["lr=0.1..1e400"], "training.lr=inf: training.lr must be positive and finite"),
        (["momentum=0.5..0.9996"], r"training.momentum lies in \[0, 1\); got 1"),  # as a value is written
        (["batch-size=16..64.5"], r"training.batch_size=64.5: training.batch-size must be a whole number"),
        (["mu=0.1..1"], "unknown option 'mu' of the method fedavg"),
        (["lr=auto", "rounds=0"], "rounds"),
        (["lr=0.1..1", "lr=0.2..0.3"], r"training\.lr of fedavg has two, also lr=0\.2\.\.0\.3: leave one out"),
        (["training.lr=0.1..1", "lr=auto"], "has two, also lr=0.001..0.1"),
    ],
)
def test_what_optuna_cannot_tune_is_refused_before_any_run(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        compare_tuned(["fedavg"], [*TINY, *options], "", 1, tmp_path, "", 3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("usual", "ends", "kind"), [(0.01, ("0", "1"), "Float"), (32, ("16", "64"), "Int"), (None, ("1", "2"), "Int")]
)
def test_a_range_of_an_option_with_fractions_is_searched_between_whole_numbers_too(usual, ends, kind):
    assert type(tuning._space(usual, *ends)).__name__ == f"{kind}Distribution"
