"""SynCentral: the institution's half; the server's half is `strategies/syncentral.py`.

Source: Pennisi et al. 2023, section IV-C.1. The generator's training and the buffer are stages that
`flwr_replay/institution/synthesis.py` has; tests of the server's model are those of all methods.
"""

from flwr_replay.institution.client import InstitutionClient

__all__ = ["SynCentralClient"]


class SynCentralClient(InstitutionClient):
    """Draws synthetic images for the server, and tests the server's model."""
