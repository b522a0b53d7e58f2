"""Sweeps: a method for each value of an option, on the same data where the option does not change them."""

import pytest

from flwr_replay.errors import ConfigError
from flwr_replay.studies.compare import compare_strategies, planned
from flwr_replay.studies.methods import methods_of, options_of, swept


def test_a_sweep_makes_a_method_of_each_value():
    assert swept(["cwt", "fedreplay"], ["fedreplay.cut=conv1|layer1", "lr=1|2", "task.data-dir='a|b'"]) == (
        [f"{name}:lr={lr}" for name in ("cwt", "fedreplay:cut=conv1", "fedreplay:cut=layer1") for lr in (1, 2)],
        ["task.data-dir='a|b'"],
    )
    shared, own, _ = options_of([], ["cwt"])
    assert [method.label for method in methods_of(swept(["a := cwt"], ["lr=1|2"])[0], own)] == ["a:lr=1", "a:lr=2"]
    assert not shared


@pytest.mark.parametrize(
    ("names", "option", "message"),
    [
        (["fedavg"], "lr=0.1|0.10", "fedavg:lr=0.1 and fedavg:lr=0.10 are the same: remove one"),
        (["fedavg", "fedavg:rounds=10"], "nodes=2", "fedavg and fedavg:rounds=10 are the same: remove one"),
        (
            ["fedreplay", "cwt"],
            "cut=conv1|conv2",
            "cut is an option of fedreplay only: write fedreplay.cut=conv1|conv2",
        ),
    ],
)
def test_what_is_no_sweep_is_refused(names, option, message, tmp_path):
    with pytest.raises(ConfigError, match=message.replace("|", "[|]")):
        planned(names, [option], "", tmp_path)
    assert not list(tmp_path.iterdir())


def test_only_options_with_an_effect_are_named_as_not_tuned(tmp_path):
    untuned = planned(["fedreplay", "proxyfl", "local"], ["task=digits"], "", tmp_path).about["untuned"]
    assert "momentum 0.9" in untuned
    assert not {"clip", "holdout"} & {*untuned.split()}
    used = ["fedreplay.latents=drawn", "proxyfl.listen=pool", "proxyfl.alpha=0", "proxyfl.private-epochs=1"]
    options = ["task=digits", "model=gabor", "model.train=head", "training.optimizer=adam", *used]
    untuned = planned(["fedreplay", "proxyfl"], options, "", tmp_path).about["untuned"]
    assert "momentum" not in untuned
    assert "clip 10 (fedreplay)" in untuned
    assert "holdout 0.1 (proxyfl)" in untuned


@pytest.mark.sampled(2, of="slow studies")
def test_methods_on_several_partitions_are_compared_on_the_same_one(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    options = ["partition=iid|ks", "nodes=2", "rounds=1", "seeds=1", "model=mlp", "model.width=4"]
    text, report = compare_strategies(["fedavg", "local"], options, "", 1, tmp_path)
    assert "different partitions" in report["title"]
    mean = {label: row["mean"] for label, row in report["strategies"].items()}
    for way in ("iid", "ks"):
        difference = report["strategies"][f"fedavg:partition={way}"]["difference"]["mean"]
        assert difference == pytest.approx(mean[f"fedavg:partition={way}"] - mean[f"local:partition={way}"])
        assert report["strategies"][f"local:partition={way}"]["difference"] is None
        assert f"training labels with partition={way}: KS" in text
    assert "a difference is to the method on the same data: local:partition=iid, local:partition=ks" in text
    alone, report = compare_strategies(["fedavg"], options, "", 1, tmp_path)
    assert report["against"] == "fedavg:partition=iid"
    difference = report["strategies"]["fedavg:partition=ks"]["difference"]
    assert difference["mean"] == pytest.approx(mean["fedavg:partition=ks"] - mean["fedavg:partition=iid"])
    assert difference["seeds"] == [0]
    assert "where data differ, pairing takes out less" in alone


@pytest.mark.sampled(2, of="slow studies")
def test_a_sweep_takes_any_option_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    options = ["nodes=2|3", "forgetting=true|false", "rounds=1", "seeds=1", "model=mlp", "model.width=4"]
    _, report = compare_strategies(["fedavg"], options, "", 1, tmp_path)
    assert report["title"].startswith("digits, different numbers of institutions, ")
    assert [len(cell["result"]["final"]["institutions"]) for cell in report["cells"]] == [2, 2, 3, 3]
    assert report["strategies"]["fedavg:nodes=3:forgetting=false"]["difference"] is not None
