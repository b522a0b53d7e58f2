"""ProxyFL at the server: it forwards proxies, has no model of its own, and so returns none."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from plan import OPTIONS, PRIVACY, ROUNDS, TRAINING
from task import net

from flwr_replay.learning.tasks import Classification
from flwr_replay.movements.base import Settings
from flwr_replay.strategies.proxyfl import ProxyFL

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy; the private models stay in the institutions' state directories."""
    task = Classification(classes=10)
    settings = Settings(nodes=4, roll_call=True, model=net, task=task, training=TRAINING, privacy=PRIVACY)
    strategy = ProxyFL(OPTIONS, settings)
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(), num_rounds=ROUNDS)
    for number, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {number}: private models {metrics['accuracy']:.3f}, proxies {metrics['proxy-accuracy']:.3f}")
    for name, spent in strategy.recorder.released.items():
        print(f"{name}: epsilon {spent['epsilon']:.2f} at delta {spent['delta']:.1e}, for its proxies")
