"""FedAvgM: the institution's half, which is that of FedAvg; the server's half is `strategies/fedavgm.py`."""

from flwr_replay.clients.fedavg import FedAvgClient

__all__ = ["FedAvgMClient"]


class FedAvgMClient(FedAvgClient):
    """Trains the global model on the institution's data."""
