"""A user's own ServerApp with FedReplay in place of FedAvg: one line is changed, beside its imports."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from task import net

from flwr_replay.config.sections import TrainingConfig  # changed: was flwr.serverapp.strategy, FedAvg
from flwr_replay.learning.tasks import Classification  # changed
from flwr_replay.movements.base import Settings  # changed
from flwr_replay.strategies.fedreplay import FedReplay, FedReplayConfig  # changed

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy and keep the final model."""
    lr = context.run_config["learning-rate"]
    # changed: was FedAvg(min_available_nodes=4); the server trains what follows the cut, so it needs model and task
    settings = Settings(nodes=4, model=net, task=Classification(classes=10), training=TrainingConfig(lr=lr))
    strategy = FedReplay(FedReplayConfig(cut="conv1"), settings)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(net().state_dict()),
        train_config=ConfigRecord({"lr": lr}),
        num_rounds=context.run_config["num-server-rounds"],
    )
    print(result.evaluate_metrics_clientapp)
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")
