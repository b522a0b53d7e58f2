"""The app runs: two rounds in this process, with the ServerApp and the ClientApp as Flower calls them."""

import client_app
import server_app
import task
import torch
from flwr.app import Context, RecordDict

from flwr_replay.engines.inline import InlineGrid

NODES = 4
CONFIG = {"num-server-rounds": 2, "local-epochs": 2, "learning-rate": 0.05}


def test_the_app_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the final model is written here
    server_app.app(InlineGrid.simulated(client_app.app, CONFIG, NODES), Context(1, 1, {}, RecordDict(), CONFIG))
    model = task.net()
    model.load_state_dict(torch.load("final_model.pt", weights_only=True))
    assert sum(task.test(model, task.load_data(k, NODES)[1])[1] for k in range(NODES)) / NODES > 0.5
