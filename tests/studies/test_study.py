"""Studies: their comparisons compose, their report holds what the runs found, and wrong names are reported."""

import csv
import json
import os
import re
from pathlib import Path

import pytest

from flwr_replay.cli.main import app
from flwr_replay.config.compose import compose_own
from flwr_replay.engines.simulate import run_inline
from flwr_replay.errors import ConfigError, DataError
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.generators.synthesis import SynthesisPlan
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.report.comparison import gaps
from flwr_replay.report.metrics import by_epsilon
from flwr_replay.report.progress import Display
from flwr_replay.simulations import (
    boneage,
    brats,
    encoders,
    feder,
    leakage,
    partitions,
    private,
    proxyfl,
    replay,
    retina,
    skew,
)
from flwr_replay.studies import study
from flwr_replay.studies.leakage import share_of_cores
from flwr_replay.studies.methods import methods_of, named, options_of
from flwr_replay.studies.study import Compared, comparisons_of, run_study, studies


def test_the_comparisons_fit_the_data_that_they_name():
    """FedER's eight institutions take all 8,000 images, so none can be held out for validation."""
    mnist = Path("../shared/data/mnist").resolve()
    if not mnist.exists():
        pytest.skip("needs ../shared/data/mnist")
    app(["study", "feder", "--data", str(mnist.parent), "--only", "iid-8", "--dry-run"], standalone_mode=False)


MODULES = (boneage, brats, encoders, feder, leakage, partitions, private, proxyfl, replay, retina, skew)


def test_every_study_is_known():
    assert set(studies()) >= {module.__name__.rpartition(".")[2] for module in MODULES}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_comparison_composes(module):
    """Each comparison's options with a method, and each method with a comparison's options; ε is as the label says."""
    seen = set()
    for comparison in (study._with(comparison, []) for comparison in module.COMPARISONS):
        names = [named(method)[1].partition(":")[0] for method in comparison.methods]
        shared, own, _ = options_of(comparison.options, names)
        methods = methods_of(comparison.methods, own)
        assert comparison.against in [method.label for method in methods]
        for method in methods:
            options = (method.strategy, *method.options)
            if {tuple(shared), options} <= seen:
                continue
            seen |= {tuple(shared), options}
            config = compose_own([f"strategy={method.strategy}", *shared, *method.options], method.options)
            ReplayPlan.of(config)
            SynthesisPlan.of(config)
            PrivacyPlan.of(config)
            if epsilon := re.search(r"ε (\d+)", method.label):
                assert config.privacy.limit == int(epsilon[1])


@pytest.mark.sampled(2, of="slow studies")
def test_a_report_has_all_tables_and_the_overview_of_a_group(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    common = ["task=diabetes", "nodes=2", "rounds=1", "seeds=2", "model.width=4"]
    comparisons = [
        Compared(name=name, about="Tiny.", methods=["cwt", "fedreplay"], options=[*common, option], group="Tiny, MLP")
        for name, option in (("alike", "partition=iid"), ("apart", "forgetting=true"))
    ]
    monkeypatch.setattr(skew, "COMPARISONS", comparisons)
    file, whole = run_study("skew", "", 1, tmp_path)
    assert (file, whole) == (tmp_path / "study-skew.md", True)
    text = file.read_text()
    app(["study", "skew", "--runs-dir", str(tmp_path), "--dry-run", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["apart"] == {"runs": 4, "finished": 4, "shared": 0}
    assert "| method | alike (mae) | apart (mae) |" in text
    assert text.count("| cwt |") == 1  # the overview
    numbers = list(csv.DictReader((tmp_path / "study-skew.csv").open()))
    assert [(row["comparison"], row["method"]) for row in numbers] == [
        (comparison, method) for comparison in ("alike", "apart") for method in ("cwt", "fedreplay")
    ]
    values = [
        json.loads((tmp_path / folder / "result.json").read_text())["final"]["global"]["mae"]
        for folder in sorted(path.parent.relative_to(tmp_path) for path in tmp_path.rglob("cwt-seed*/result.json"))
    ]
    told = [
        float(value.partition(":")[2])
        for row in numbers
        if row["method"] == "cwt"
        for value in row["values"].split(";")
    ]
    assert sorted(told) == pytest.approx(sorted(values))
    assert all(float(row["bytes-up"]) > 0 for row in numbers)
    assert text.count("0: the same labels") == 1  # once, not for each comparison
    assert "cwt seed 1: mean drop" in text
    assert (tmp_path / "study-skew-tiny.png").read_bytes().startswith(b"\x89PNG")
    report, _ = run_study("skew", "", 1, tmp_path, ["apart"])
    assert report == tmp_path / "study-skew-apart.md"
    assert "### alike" not in report.read_text()
    assert (tmp_path / "study-skew.md").read_text() == text  # the whole study's report is not lost
    for file in [tmp_path / "study-skew-tiny.png", tmp_path / "study-skew.html"]:
        file.unlink()
        file.mkdir()
    (tmp_path / "study-skew.md").unlink()
    run_study("skew", "", 1, tmp_path)  # no picture or page costs the report
    assert (tmp_path / "study-skew.md").exists()


def test_a_quick_study_has_every_method_with_the_first_seed_and_two_rounds(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    options = ["task=diabetes", "nodes=2", "rounds=300", "evaluate_every=10", "seeds=7,9", "model.width=4"]
    comparison = Compared(
        name="tiny", about="Tiny.", methods=["cwt", "long := local:rounds=30"], options=options, against="cwt"
    )
    monkeypatch.setattr(skew, "COMPARISONS", [comparison])
    assert run_study("skew", "", 1, tmp_path, quick=True) == (tmp_path / "study-skew-quick.md", True)
    results = [json.loads(path.read_text()) for path in tmp_path.rglob("result.json")]
    assert [(result["rounds"], result["seed"]) for result in results] == [(2, 7), (2, 7)]


def test_an_institutions_own_head_is_trained_by_its_own_examples_alone(tmp_path, monkeypatch):
    """ProxyFL's control: the head that is pooled with the private model is the one that `local` trains."""
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    options = [
        "task=digits",
        "partition=majority",
        "nodes=2",
        "preset=sound",
        "rounds=2",
        "seed=3",
        f"runs_dir={tmp_path}",
    ]
    alone, pooled = (
        run_inline([f"strategy={method.strategy}", *options, *method.options], Display())[0]["final"]["institutions"]
        for method in methods_of(proxyfl.OWN_HEADS, {"local": [], "proxyfl": []})
    )
    for name, metrics in alone.items():
        assert pooled[name]["proxy-loss"] == metrics["loss"]
        assert pooled[name]["loss"] != metrics["loss"]


def test_a_studys_comparisons_are_listed_with_what_they_are(capsys):
    app(["study", "proxyfl", "--list"], standalone_mode=False)
    listed = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in listed] == [comparison.name for comparison in comparisons_of("proxyfl")]


def test_what_is_not_there_is_reported_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match="unknown study 'partition': did you mean partitions"):
        run_study("partition", "", 1, tmp_path)
    with pytest.raises(ConfigError, match="study partitions has no comparison 'mnist-bad'"):
        run_study("partitions", "", 1, tmp_path, ["mnist-bad"])
    for quick in (False, True):
        with pytest.raises(ConfigError, match="seeds is a number"):
            run_study("partitions", str(tmp_path), 1, tmp_path, ["mnist-iid"], quick, seeds="x")
    with pytest.raises(DataError, match="needs mnist under --data"):
        run_study("partitions", str(tmp_path), 1, tmp_path, ["mnist-iid"])
    assert not list(tmp_path.iterdir())


def test_a_gap_is_what_lies_between_the_plain_method_and_central():
    def cell(label, accuracy, epsilon=None):
        stated = (
            {"a": {"epsilon": epsilon, "delta": 1e-3, "dp": "generator"}, "b": {"epsilon": 1.0, "delta": 1e-3}}
            if epsilon
            else {}
        )
        strategy, _, option = label.partition(":")
        replay = "vqvae2" if option else "none"
        result = {"final": {"global": {"accuracy": accuracy}}, "privacy": stated, "replay": replay}
        return {"label": label, "strategy": strategy, "result": result}

    codes, private = "cwt:replay=vqvae2", "cwt:replay=vqvae2:dp=generator"
    keep = "strategy.optimizer_state=keep"
    cells = [cell("central", 0.9), cell("cwt", 0.1), cell(codes, 0.8), cell(codes, 0.6), cell(private, 0.5, 7.25)]
    report = {"cells": [*cells, {"label": codes, "error": "none"}], "metric": "accuracy", "against": "central"}
    assert gaps(report)[2:] == [
        f"| {codes} | 0.7000 | 75.0% | none |",
        f"| {private} | 0.5000 | 50.0% | 7.25 at δ = 0.001, these weights only |",
    ]
    assert gaps({**report, "cells": cells[:2]}) == []
    kept = [
        {**cell("cwt:kept", 0.5), "options": [keep]},
        {**cell("cwt:kept+", 0.7), "options": [keep, "replay=vqvae2"]},
    ]
    kept[0]["result"]["replay"] = "none"
    assert gaps({**report, "cells": [*cells[:2], *kept]})[2:] == ["| cwt:kept+ | 0.7000 | 50.0% | none |"]
    assert gaps({**report, "against": "cwt"}) == []


def test_comparisons_with_different_runs_in_one_folder_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    common = ["task=digits", "nodes=4", "rounds=1", "seeds=1", "model.width=4"]
    comparisons = [
        Compared(name=name, about="", methods=["avgpush"], options=[*common, f"topology={name}"], against="avgpush")
        for name in ("ring", "complete")
    ]
    monkeypatch.setattr(skew, "COMPARISONS", comparisons)
    with pytest.raises(ConfigError, match="ring and complete have different runs in avgpush-seed0"):
        run_study("skew", "", 1, tmp_path)
    assert not list(tmp_path.rglob("result.json"))


def test_the_metric_by_epsilon_has_what_was_spent_by_then(tmp_path):
    lines = [
        {"round": at, "exchange": at, "institution": "", "metric": "accuracy", "value": at / 10} for at in (1, 2, 4)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    stated = [(1, "a", None), (2, "a", 1.5), (2, "b", 1.0), (3, "a", 2.0)]
    rows = [
        {"round": at, "institution": name, "epsilon": epsilon, "delta": 1e-5, "mechanism": "DP-SGD"}
        for at, name, epsilon in stated
    ]
    (tmp_path / "privacy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert by_epsilon([tmp_path], "accuracy") == [[(1.5, 0.2), (2.0, 0.4)]]


@pytest.mark.sampled(1, of="whole studies")
def test_a_comparison_whose_messages_are_attacked_has_a_table_of_what_they_show(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    options = ["task=digits", "partition=iid", "partition.size=4", "nodes=2", "rounds=1", "seeds=1", "record=all"]
    comparison = Compared(
        name="tiny", about="", methods=["fedsgd"], options=[*options, "model=mlp"], against="fedsgd", attack="undealt"
    )
    monkeypatch.setattr(leakage, "COMPARISONS", [comparison])
    file, whole = run_study("leakage", "", 2, tmp_path, quick=True)
    assert whole
    text = file.read_text()
    assert "| fedsgd | " in text
    assert "| differentiate arrays | gradient matching | " in text
    assert len(list(tmp_path.rglob("attacks.json"))) == 1


def test_attacks_at_the_same_time_share_the_cores(monkeypatch):
    """Two processes with all cores each took six times as long as two with one each."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with share_of_cores(3):
        assert os.environ["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    with share_of_cores(3):
        assert os.environ["OMP_NUM_THREADS"] == "5"
    assert os.environ["OMP_NUM_THREADS"] == "5"
