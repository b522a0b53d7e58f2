"""The orders in which models hop: always one cycle, queues first in first out, no model lost or doubled."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_replay.movements.hops import Cycles, Queues

NAMES = list("abcde")
ROUNDS = st.lists(
    st.tuples(st.sets(st.sampled_from(NAMES), min_size=1), st.lists(st.booleans(), min_size=5, max_size=5)), max_size=12
)
ORDERS = st.sampled_from(["cycles", "queues", "durations"])


def make_order(order, seed=0):
    if order == "cycles":
        return Cycles(seed)
    return Queues(seed, [1, 3, 2, 1, 5] if order == "durations" else ())


def played_turns(hops, exchange, present, outcomes):
    """Play a round, ending the turns in the order in which they began; return them."""
    hops.begin_round(exchange, present)
    turns, open_turns = [], []
    while True:
        while turn := hops.start():
            turns.append(turn)
            open_turns.append(turn)
        if not open_turns:
            return turns
        done = open_turns.pop(0)
        hops.pass_on(done.institution, trained=outcomes[len(turns) % len(outcomes)])


@given(ROUNDS, ORDERS)
def test_no_model_is_lost_or_doubled_whoever_is_absent_or_fails(rounds, order):
    hops, known = make_order(order), set()  # along cycles a model is there once it has been trained
    for exchange, (present, outcomes) in enumerate(rounds, 1):
        turns = played_turns(hops, exchange, sorted(present), outcomes)
        before, known = known, known | present if order != "cycles" else {*hops.at}
        assert before <= known <= before | present
        assert {turn.institution for turn in turns} <= present
        assert len(turns) <= len(present)
        where = (
            [model for models in hops.waiting.values() for _, model in models]
            if order != "cycles"
            else hops.at.values()
        )
        assert sorted(where) == sorted(known)
        assert sorted(hops.names().values()) == sorted(known)


@given(ROUNDS, ORDERS, st.integers(0, 12))
def test_a_restored_order_goes_on_as_it_would_have(rounds, order, broken):
    whole, other = make_order(order), make_order(order)
    for exchange, (present, outcomes) in enumerate(rounds, 1):
        if exchange == broken:
            state = json.loads(json.dumps(other.state()))
            other = make_order(order)
            other.restore(state)
        ours, theirs = (played_turns(queue, exchange, sorted(present), outcomes) for queue in (whole, other))
        assert ours == theirs


@given(st.integers(0, 50), st.integers(3, 5))
def test_every_round_is_one_cycle_over_those_present(seed, count):
    cycles = Cycles(seed)
    for exchange in range(1, 10):
        present = NAMES[:count] if exchange % 3 else NAMES[1:count]
        before = dict(cycles.at)
        turns = {turn.institution: turn for turn in played_turns(cycles, exchange, present, [True])}
        if exchange > 1:
            at, seen = present[0], []
            for _ in present:
                seen.append(at)
                at = turns[at].before
            assert sorted(seen) == sorted(present)
            assert all(turn.model == before[turn.before] for turn in turns.values())
        else:
            assert all(turn == (turn.institution, turn.institution, "") for turn in turns.values())


@pytest.mark.sampled(2, of="slow runs")
@given(st.integers(0, 50))
def test_the_fast_do_not_wait_for_the_slow_until_their_models_do(seed):
    queues, turns = Queues(seed, [1, 1, 9]), []
    for exchange in range(1, 201):
        turns += played_turns(queues, exchange, ["a", "b", "c"], [True])
    first = [turn.institution for turn in turns].index("c")
    assert first >= 2  # whoever is done before the slow has its turn counted first
    # Everyone is drawn equally often, so that models gather in the slow one's queue: turns even out.
    counts = [sum(turn.institution == name for turn in turns) for name in "abc"]
    assert max(counts) < 1.3 * min(counts)


def test_a_queue_is_first_in_first_out():
    queues = Queues(0, [1, 1, 1])
    queues.begin_round(1, ["a", "b", "c"])
    queues.waiting["a"] = [(0.0, "b"), (0.5, "a"), (0.7, "c")]
    queues.waiting["b"], queues.waiting["c"] = [], []
    turns = []
    for _ in range(3):
        turn = queues.start()
        if turn.institution == "a":
            turns.append(turn.model)
        queues.pass_on(turn.institution, trained=True)
    assert turns == ["b", "a", "c"][: len(turns)]
    assert len(turns) >= 2


def test_a_model_comes_from_where_it_was_trained_last():
    queues = Queues(3, [1, 2, 3])
    last = {}
    for exchange in range(1, 8):
        queues.begin_round(exchange, ["a", "b", "c"])
        while turn := queues.start():
            assert turn.before == last.get(turn.model, "")
            trained = turn.model != "b"
            queues.pass_on(turn.institution, trained=trained)
            if trained:
                last[turn.model] = turn.institution


@pytest.mark.parametrize("durations", [(), (2.0,)])
def test_who_is_alone_keeps_its_model(durations):
    queues = Queues(0, durations)
    for exchange in range(1, 4):
        (turn,) = played_turns(queues, exchange, ["a"], [True])
        assert turn[:2] == ("a", "a")
