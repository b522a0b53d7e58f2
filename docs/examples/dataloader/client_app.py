"""ProxyFL at an institution whose data are DataLoaders."""

from __future__ import annotations

from functools import cache

from flwr.app import Context
from plan import TASK, TRAINING, net
from task import load_data

from flwr_replay.clients.proxyfl import ProxyFLClient
from flwr_replay.institution.owner import Institution
from flwr_replay.serve import serve


@cache  # once in a process, in place of once for every message
def institution(number: int, count: int) -> Institution:
    """Read the whole data sets behind the loaders; their batches and shuffling do not count."""
    trainloader, testloader = load_data(number, count, TRAINING.batch_size)
    return Institution.from_arrays(f"institution-{number + 1}", trainloader, testloader)


def make_client(context: Context) -> ProxyFLClient:
    """Hand the data and the model to ProxyFL."""
    owned = institution(context.node_config["partition-id"], context.node_config["num-partitions"])
    return ProxyFLClient(owned, net, TASK, TRAINING)


app = serve(make_client)
