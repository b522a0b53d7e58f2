"""Central: the institution's half; the server's half is `strategies/central.py`.

The loop is that of `clients/cwt.py`: a cycle over a single institution, which has the data of all.
"""

from flwr_replay.clients.cwt import CWTClient

__all__ = ["CentralClient"]


class CentralClient(CWTClient):
    """Trains on the union of all institutions' data."""
