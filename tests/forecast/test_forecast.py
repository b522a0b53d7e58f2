"""The forecast of any method does not grow with rounds: those alike are one."""

import pytest

from flwr_replay.config.catalogue import choices
from flwr_replay.config.compose import compose
from flwr_replay.engines.simulate import Simulation
from flwr_replay.forecast.forecast import expected

SMALL = ["model=cnn", "model.width=4", "generator.width=4", "prior.width=4", "nodes=3"]


@pytest.mark.parametrize("name", choices("strategy"))
def test_ten_times_as_many_rounds_are_as_many_kinds_of_exchange(name):
    def forecast(rounds):
        _, exchanges = expected(Simulation.of(compose([f"strategy={name}", *SMALL, f"rounds={rounds}"])))
        return len(exchanges), sum(exchange.times for exchange in exchanges)

    (kinds, few), (as_many, many) = forecast(50), forecast(500)
    assert kinds == as_many
    assert few < many
