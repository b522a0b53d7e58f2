"""The in-process engine and Flower's Ray simulation end with the same bits at equal torch threads."""

import shlex

import pytest
from safetensors.numpy import load_file

from flwr_replay.progress import Display
from flwr_replay.simulate import resolve, run_inline, run_ray


@pytest.mark.parametrize("job", ["strategy=fedreplay cut=conv1 rounds=2 encoder-epochs=2 model.width=8"])
def test_inline_and_ray_give_the_same_bits(job, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    results, weights = [], []
    for engine in ("inline", "ray"):
        overrides, _ = resolve(shlex.split(job), str(tmp_path / engine), "")
        result, folder = run_inline(overrides, Display()) if engine == "inline" else run_ray(overrides)
        results.append(result)
        weights.append(load_file(folder / "models" / "global.safetensors"))
    assert results[0]["final"] == results[1]["final"]
    assert {name: array.tobytes() for name, array in weights[0].items()} == {
        name: array.tobytes() for name, array in weights[1].items()
    }
