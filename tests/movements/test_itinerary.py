"""Whose turn it is in a serial run is fixed when the run begins, and a resumed one goes on with it."""

import pytest
from flwr.app import ArrayRecord, ConfigRecord

from flwr_replay.movements.evaluating import RunState
from flwr_replay.server.members import Member
from flwr_replay.server.settings import Settings
from flwr_replay.strategies.central import Central, CentralConfig
from flwr_replay.strategies.cwt import CWT, CWTConfig


def begin_run_with(strategy, names):
    for node_id, name in enumerate(names):
        strategy.members.add(Member(name, node_id, 10))
    strategy.begin_run()
    return strategy


def names(strategy, exchanges, done=0):
    visited = []

    def train(run, exchange, arrays):
        visited.append(strategy.visited(exchange).name)
        assert exchange == done + len(visited)
        return arrays

    strategy.train, strategy.evaluate_if_due = train, lambda *args: None
    rounds, nothing = exchanges // strategy.exchanges_per_round(), ConfigRecord()
    run = RunState(
        grid=None, num_rounds=rounds, train_config=nothing, evaluate_config=nothing, evaluate_fn=None, done=done
    )
    strategy.rounds(run, ArrayRecord())
    return visited


@pytest.mark.parametrize("order", ["fixed", "shuffled"])
def test_every_cycle_visits_all_who_were_there_at_the_beginning(order):
    method = begin_run_with(CWT(CWTConfig(order=order), Settings(seed=3)), "cab")
    turns = names(method, 60)
    cycles = [turns[first : first + 3] for first in range(0, 60, 3)]
    assert method.exchanges_per_round() == 3
    assert all(sorted(cycle) == ["a", "b", "c"] for cycle in cycles)
    assert len({tuple(cycle) for cycle in cycles}) == (1 if order == "fixed" else 6)
    method.members.add(Member("d", 9, 10))  # joins later, and is visited in no cycle
    assert names(method, 60) == turns
    assert names(method, 60, done=7) == turns[7:]  # resumed


def test_central_visits_the_first_by_name():
    assert names(begin_run_with(Central(CentralConfig(), Settings()), "cab"), 3) == ["a", "a", "a"]


def test_a_resumed_run_keeps_its_itinerary_whoever_is_there_now():
    resumed = CWT(CWTConfig(), Settings())
    resumed.restore({}, {"itinerary": ["b", "c"]})
    assert names(begin_run_with(resumed, "abcd"), 6) == ["b", "c"] * 3
    assert resumed.state()[1] == {"itinerary": ["b", "c"]}
