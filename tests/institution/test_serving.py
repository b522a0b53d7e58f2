"""What a user's own ClientApp mistakes for its client is said in one line."""

import numpy as np
import pytest
from torch import nn

from flwr_replay.clients.cwt import CWTClient
from flwr_replay.errors import ConfigError
from flwr_replay.institution.owner import Institution
from flwr_replay.serve import serve, serving
from flwr_replay.tasks import Classification


@pytest.mark.parametrize("wrap", [serve, serving])
@pytest.mark.parametrize(("made", "kind"), [(nn.Flatten(), "Flatten"), ("client", "str")])
def test_what_is_made_already_is_no_function_of_a_context(wrap, made, kind):
    with pytest.raises(ConfigError, match=f"a function of Flower's Context; got a {kind}: write"):
        wrap(made)


def test_another_methods_client_is_told_which_to_take():
    data = np.zeros((4, 1, 8, 8), np.uint8), np.arange(4) % 2
    client = CWTClient(Institution.from_arrays("north", data, data), nn.Flatten, Classification(classes=2))
    with pytest.raises(ConfigError, match="CWTClient has no stage 'encode': take the client of the server's strategy"):
        client.answer({}, {"stage": "encode"})
