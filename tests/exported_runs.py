"""Small runs on digits whose models are used."""

from flwr_replay.engines.simulate import run_inline
from flwr_replay.report.progress import Display

TINY = ["nodes=2", "rounds=1", "model.width=4", "partition=iid"]


def run_at(place, patch, *options):
    patch.setenv("FLWR_REPLAY_HOME", str(place / "home"))
    return run_inline([*TINY, *options, f"runs_dir={place / 'runs'}"], Display())
