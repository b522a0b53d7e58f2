"""A user's own ServerApp with cyclic weight transfer in place of FedAvg: one line is changed, beside its imports."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from task import net

from flwr_replay.movements.base import Settings  # changed: was flwr.serverapp.strategy, FedAvg
from flwr_replay.strategies.cwt import CWT  # changed

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy and keep the final model."""
    lr = context.run_config["learning-rate"]
    strategy = CWT(settings=Settings(nodes=4))  # changed: was FedAvg(min_available_nodes=4)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(net().state_dict()),
        train_config=ConfigRecord({"lr": lr}),
        num_rounds=context.run_config["num-server-rounds"],
    )
    print(result.evaluate_metrics_clientapp)
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")
