"""CWT with generative replay at the server: codes of all images and their labels go to all institutions."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from plan import REPLAY, TRAINING
from task import net

from flwr_replay.learning.tasks import Classification
from flwr_replay.movements.base import Settings
from flwr_replay.strategies.cwt import CWT

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy and keep the final model."""
    task = Classification(classes=10)
    settings = Settings(nodes=4, roll_call=True, model=net, task=task, training=TRAINING, replay_plan=REPLAY)
    result = CWT(settings=settings).start(
        grid=grid,
        initial_arrays=ArrayRecord(net().state_dict()),
        num_rounds=context.run_config["num-server-rounds"],
    )
    for number, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {number}: accuracy {metrics['accuracy']:.3f}")
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")
