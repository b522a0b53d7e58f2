"""A user's plain NumPyClient under flwr-replay's strategies: one line is changed, beside its import."""

from __future__ import annotations

from typing import Any

import torch
from flwr.app import Context
from flwr.client import Client, NumPyClient
from numpy.typing import NDArray
from task import Split, load_data, net, test, train

from flwr_replay.serve import serve  # changed: was flwr.clientapp, ClientApp

Arrays = list[NDArray[Any]]


class DigitsClient(NumPyClient):
    """Trains and tests on one institution's data."""

    def __init__(self, train_data: Split, test_data: Split, epochs: int) -> None:
        self.model, self.train_data, self.test_data, self.epochs = net(), train_data, test_data, epochs

    def fit(self, parameters: Arrays, config: dict[str, Any]) -> tuple[Arrays, int, dict[str, Any]]:
        """Train the weights that came."""
        self.load(parameters)
        loss = train(self.model, self.train_data, self.epochs, config["lr"])
        weights = [value.numpy() for value in self.model.state_dict().values()]
        return weights, len(self.train_data[1]), {"train_loss": loss}

    def evaluate(self, parameters: Arrays, config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Test the weights that came."""
        self.load(parameters)
        loss, accuracy = test(self.model, self.test_data)
        return loss, len(self.test_data[1]), {"accuracy": accuracy}

    def load(self, parameters: Arrays) -> None:
        """Put the weights into the model."""
        self.model.load_state_dict(
            {name: torch.from_numpy(array) for name, array in zip(self.model.state_dict(), parameters, strict=True)}
        )


def client_fn(context: Context) -> Client:
    """Make the client of one node."""
    splits = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    return DigitsClient(*splits, context.run_config["local-epochs"]).to_client()


app = serve(client_fn)  # changed: was ClientApp(client_fn=client_fn)
