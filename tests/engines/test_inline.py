"""The grid that calls a ClientApp in this process drops late answers, as Flower's SuperLink does."""

import pytest
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from flwr_replay.engines.inline import EXPIRED, InlineGrid


@pytest.mark.parametrize(("seconds", "dropped"), [(60.0, False), (1e-9, True)])
def test_an_answer_that_took_longer_than_its_time_to_live_is_dropped(seconds, dropped):
    app = ClientApp()
    app.train()(lambda message, context: Message(RecordDict(), reply_to=message))
    grid = InlineGrid.simulated(app, {}, 1)
    (node,) = grid.get_node_ids()
    (answer,) = grid.send_and_receive([grid.create_message(RecordDict(), "train", node, "", ttl=seconds)])
    assert (answer.error.code if answer.has_error() else None) == (EXPIRED if dropped else None)
