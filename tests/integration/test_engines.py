"""Flower's Ray simulation and worker processes leave the same bits at the institutions as this process does."""

import pytest

from flwr_replay.config.compose import compose
from flwr_replay.engines.simulate import Simulation, run_inline, run_ray, simulate_by
from flwr_replay.files.tensors import read_tensors
from flwr_replay.report.progress import Display
from flwr_replay.report.run_files import read_run_id

JOB = ["strategy=proxyfl", "task=digits", "partition=iid", "partition.size=60", "nodes=3", "rounds=2", "batch_size=20"]
JOB += ["model=mlp", "width=8", "private-models=[mlp,lenet5]", "topology=complete", "device=cpu", "threads=1"]
JOB += ["proxy-optimizer=travels", "noise=seeded", "sigma=1", "delta=0.01"]  # secret noise is never the same


@pytest.fixture
def at(tmp_path, monkeypatch):
    """Return the state of a run's institutions after it was run by an engine, by institution and file."""

    def at(engine):
        home = tmp_path / engine
        monkeypatch.setenv("FLWR_REPLAY_HOME", str(home))
        monkeypatch.setenv("FLWR_HOME", str(home / "flwr"))
        options = [*JOB, f"runs_dir='{home / 'runs'}'"]
        if engine == "ray":
            result, folder = run_ray(Simulation.of(compose(options)), options)
        elif engine == "workers":
            result, folder = simulate_by(2, Simulation.of(compose(options)), options, Display())
        else:
            result, folder = run_inline(options, Display())
        run, states = read_run_id(folder), {}
        for path in sorted((home / "state" / "simulation").glob(f"*/runs/{run}/*.safetensors")):
            states[path.parts[-4], path.name] = {name: array.tobytes() for name, array in read_tensors(path).items()}
        return result["final"], states

    return at


@pytest.mark.parametrize("engine", ["workers", pytest.param("ray", marks=pytest.mark.sampled(1, of="Ray"))])
def test_proxyfl_leaves_the_same_proxies_optimizers_and_private_models(at, engine, forks):
    (inline, ours), (other, theirs) = at("inline"), at(engine)
    kinds = {name.rpartition("-")[0] for _, name in ours}
    assert kinds == {"pair", "released", "mixed"}
    assert ours.keys() == theirs.keys()
    assert {institution for institution, _ in ours} == {"institution-1", "institution-2", "institution-3"}
    assert ours == theirs
    assert inline == other
