"""ProxyFL at the server: private models learn from proxies, which are trained without noise here."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from plan import TASK, TRAINING, net

from flwr_replay.movements.base import Settings
from flwr_replay.strategies.proxyfl import ProxyFL, ProxyFLConfig

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy; private models stay at their institutions."""
    settings = Settings(nodes=4, roll_call=True, model=net, task=TASK, training=TRAINING)
    result = ProxyFL(ProxyFLConfig(), settings).start(grid, ArrayRecord(net(0).state_dict()), num_rounds=4)
    for number, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {number}: private models {metrics['accuracy']:.3f}, proxies {metrics['proxy-accuracy']:.3f}")
