"""ProxyFL at an institution: your model and data, this package's training."""

from __future__ import annotations

from flwr.app import Context
from plan import PRIVACY, TRAINING
from task import load_data, net

from flwr_replay.clients.proxyfl import ProxyFLClient
from flwr_replay.institution.owner import Institution
from flwr_replay.learning.tasks import Classification
from flwr_replay.serve import serve


def make_client(context: Context) -> ProxyFLClient:
    """Hand the local data to ProxyFL; private model and proxy are both built by `net` here."""
    number, count = context.node_config["partition-id"], context.node_config["num-partitions"]
    train, test = load_data(number, count)
    owned = Institution.from_arrays(f"institution-{number + 1}", train, test)
    return ProxyFLClient(owned, net, Classification(classes=10), TRAINING, privacy=PRIVACY, private_model=net)


app = serve(make_client)
