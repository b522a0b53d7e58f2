"""CWT with generative replay at an institution: your model and data, this package's training."""

from __future__ import annotations

from flwr.app import Context
from plan import REPLAY, TRAINING
from task import load_data, net

from flwr_replay.clients.cwt import CWTClient
from flwr_replay.institution.owner import Institution
from flwr_replay.learning.tasks import Classification
from flwr_replay.serve import serve


def make_client(context: Context) -> CWTClient:
    """Hand the local data to CWT with replay; images are numbers in [0, 1]."""
    number, count = context.node_config["partition-id"], context.node_config["num-partitions"]
    train, test = load_data(number, count)
    owned = Institution.from_arrays(f"institution-{number + 1}", train, test)
    return CWTClient(owned, net, Classification(classes=10), TRAINING, replay_plan=REPLAY)


app = serve(make_client)
