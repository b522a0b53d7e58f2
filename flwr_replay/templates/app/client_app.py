"""A user's own ClientApp, as Flower's quickstart writes it; nothing in it is changed."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from task import load_data, net
from task import test as test_fn
from task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model that came on the local data."""
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
