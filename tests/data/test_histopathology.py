"""Kalra et al.'s second experiment in small: slides of four hospitals, tested at home and on the others' patients."""

import json

import pytest
from slides import TASK, write_slides

from flwr_replay.config.compose import compose
from flwr_replay.engines.simulate import Simulation, run_inline
from flwr_replay.errors import ConfigError, RefusedError
from flwr_replay.forecast.forecast import forecast
from flwr_replay.report.progress import Display


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    write_slides(tmp_path)
    folders = [f"task.data-dir={tmp_path}", f"runs_dir={tmp_path}/runs"]
    return ["preset=paper", *TASK, *folders, "nodes=4", "device=cpu", "evaluate_every=2"]


def test_the_preset_is_the_paper_s():
    config = compose(["strategy=proxyfl", "task=histopathology", "preset=paper"])
    assert (config.rounds, config.training.batch_size, config.privacy.sigma, config.privacy.clip) == (50, 16, 1.4, 0.7)
    assert (config.training.optimizer, config.training.lr, config.model.width) == ("sgd", 0.01, 256)
    assert (config.strategy.private_optimizer, config.strategy.private_lr) == ("adam", 0.001)
    assert config.external


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["proxyfl", "fml", "fedavg dp=classifier"])
def test_all_methods_are_tested_at_home_and_elsewhere(job, method):
    strategy, *options = method.split()
    overrides = [f"strategy={strategy}", *job, *options, "rounds=3", "batch_size=5"]
    result, folder = run_inline(overrides, Display())
    names = {"accuracy", "subtype-accuracy"}
    names |= {f"proxy-{name}" for name in names} if strategy != "fedavg" else set()
    names |= {f"external-{name}" for name in names}
    assert names <= set(result["final"]["global"])
    assert all(names <= set(own) for own in result["final"]["institutions"].values())
    known = result["final"]["global"]
    assert known["accuracy"] <= known["subtype-accuracy"] <= 1
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    reported = sum(line.bytes for line in forecast(Simulation.of(compose(overrides))))
    assert reported == sum(line["bytes"] for line in lines)


@pytest.mark.sampled(2, of="slow runs")
def test_it_is_learned(job):
    result, _ = run_inline(["strategy=proxyfl", *job, "rounds=30", "batch_size=5", "private_lr=0.01"], Display())
    assert result["final"]["global"]["external-subtype-accuracy"] > 0.8


def test_who_has_no_external_examples_says_so_before_any_training(job, tmp_path):
    write_slides(tmp_path, sites={"a": (0,), "b": (1,)})
    with pytest.raises(RefusedError, match="external=true tests on other institutions' examples; 'a' holds none"):
        run_inline(["strategy=proxyfl", *job, "nodes=2", "batch_size=5"], Display())


def test_the_sound_preset_shifts_no_vectors():
    config = compose(["strategy=proxyfl", "task=histopathology", "preset=sound"])
    assert (config.model.name, config.partition.name, config.strategy.private_shift) == ("deepset", "natural", 0)
    assert config.strategy.private_models == ("deepset",)
    with pytest.raises(ConfigError, match="private-shift moves images; task=histopathology has none"):
        compose(["strategy=proxyfl", "task=histopathology", "preset=sound", "private_shift=1"])
