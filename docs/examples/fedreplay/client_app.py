"""A user's own ClientApp that also takes part in FedReplay: one line is changed and one function is new."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from task import load_data, net
from task import test as test_fn
from task import train as train_fn

from flwr_replay.clients.fedreplay import FedReplayClient
from flwr_replay.institution.owner import Institution
from flwr_replay.serve import serving
from flwr_replay.tasks import Classification


def institution(context: Context) -> FedReplayClient:  # new: who trains the encoder and extracts the latents
    """Hand the local data and the model to FedReplay."""
    train_data, _ = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    owned = Institution.from_arrays(f"institution-{context.node_config['partition-id']}", train_data)
    return FedReplayClient(owned, net, Classification(classes=10))


app = ClientApp(mods=[serving(institution)])  # changed: was ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model that came on the local data; FedReplay never asks for it."""
    model = net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    data, _ = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    train_loss = train_fn(model, data, context.run_config["local-epochs"], msg.content["config"]["lr"])
    metrics = MetricRecord({"train_loss": train_loss, "num-examples": len(data[1])})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Test the model that came on the local data."""
    model = net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, data = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    loss, accuracy = test_fn(model, data)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(data[1])})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
