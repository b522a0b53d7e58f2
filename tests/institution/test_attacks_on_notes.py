"""Attacks on what an institution notes in a sealed run: old models, more of its own, notes that grow, bad parcels."""

import json
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from struct import pack as packed

import numpy as np
import pytest
from flwr.app import ArrayRecord
from hostile_server import HostileServer, refusal
from peers import hospitals, run
from sealed_runs import ABC, CWT, MODEL, SEALED, deliver, parcel, parcels_in, pinned_keys, seal_of, train

from flwr_replay.config.binding import shared_digest
from flwr_replay.files.atomic import alone, private_folder, read_json
from flwr_replay.payloads.avgpush import Push
from flwr_replay.payloads.common import Train
from flwr_replay.payloads.synthetic import DrawBuffer
from flwr_replay.wire.records import array_record
from flwr_replay.wire.sealed import SEALED_NAME

MORE = "no more of its own model comes back"


def released_parcel(server, exchange, committed):
    """Have the own model released; return its parcel, or None if it was refused."""
    reply = server.send(Push(run="r", exchange=exchange, lr=0.1, init_seed=1, committed=committed))
    return None if refusal(reply) else parcels_in([reply])[0][1]


def notes(server):
    return read_json(server.state / "runs" / "r" / "parcels.json")


def test_negative_shares_do_not_add_to_what_may_come_back(server):
    own = released_parcel(server, 1, 0)
    assert "shares lie in [0, 1]" in deliver(server, kept=-5.0)
    assert "shares lie in [0, 1]" in deliver(server, parcel(server, "b"), shares=[-1.0])
    released_parcel(server, 2, 0)
    assert MORE in deliver(server, own, own, exchange=2, shares=[1.0, 1.0], kept=0.0)


@pytest.mark.parametrize("failing", ["another method's stage", "a mixing that is gone"])
def test_a_training_that_fails_undoes_the_mixing_too(server, failing):
    """Otherwise the notes would forget what the model still has."""
    own = released_parcel(server, 1, 0)
    assert not deliver(server, kept=0.5)
    released_parcel(server, 2, 1)
    assert not deliver(server, own, exchange=2, kept=0.5, shares=[0.5])
    if failing == "a mixing that is gone":
        assert released_parcel(server, 3, 2)
        assert released_parcel(server, 3, 0)
        assert released_parcel(server, 2, 1) is None
    else:
        assert refusal(server.send(DrawBuffer(run="r", exchange=2, buffer=5, buffer_refresh="never")))
    assert released_parcel(server, 3, 2) is None
    assert deliver(server, own, exchange=3, kept=0.5, shares=[0.5])


def test_only_the_last_release_is_mixed(server):
    """An earlier one may have an own model in it that the notes count as undone."""
    own = released_parcel(server, 1, 0)
    released_parcel(server, 2, 0)
    assert not deliver(server, exchange=2)
    released_parcel(server, 3, 2)
    assert not deliver(server, own, exchange=3, kept=0.0, shares=[1.0])
    released_parcel(server, 4, 3)
    released_parcel(server, 3, 2)
    assert "the model that was released last" in deliver(server, own, exchange=4, kept=0.5, shares=[1.0])
    assert released_parcel(server, 5, 4) is None
    assert released_parcel(server, 4, 2)
    assert not deliver(server, own, exchange=4, kept=0.0, shares=[1.0])  # what was mixed in 3 is undone


def test_what_was_mixed_and_then_undone_may_come_again(server):
    """A server that crashed while an own model came back, and whose institution missed the repeated exchange."""
    own = released_parcel(server, 1, 0)
    assert not deliver(server, kept=0.5)
    released_parcel(server, 2, 1)
    assert not deliver(server, own, exchange=2, kept=0.5, shares=[0.5])
    released_parcel(server, 3, 1)
    assert not deliver(server, own, exchange=3, kept=0.5, shares=[0.5])


def test_notes_do_not_grow_with_messages(server, folder):
    for exchange in range(1000, 1020):
        assert "the model that was released last" in deliver(server, released_in=exchange, exchange=1)
    assert not notes(server)["parcels"]
    cwt = HostileServer(folder, *CWT, **{"seal-peers": str(folder / "peers-abc.txt")})
    other = HostileServer(folder, *CWT, "seed=7", **{"seal-peers": str(folder / "peers-abc.txt")})
    assert "was begun with others" in refusal(train(cwt, 9))
    assert notes(server)["newest"] == 1
    for _ in range(5):
        cwt.send(again := train_request(parcel(cwt, "b", run="s")))
    assert len(read_json(folder / "state/a/runs/s/parcels.json")["parcels"]) == 1
    assert "was begun with others" in refusal(other.send(again))


def train_request(array):
    return Train(arrays=ArrayRecord({SEALED_NAME: array}), run="s", exchange=2, lr=0.1)


def test_an_exchange_is_not_mixed_anew_for_ever(server, monkeypatch):
    monkeypatch.setattr("flwr_replay.ciphers.arrivals.TRIES", 3)
    for _ in range(3):
        assert released_parcel(server, 2, 0)
        assert not deliver(server, parcel(server, "b", 2), exchange=2)
    assert released_parcel(server, 2, 0) is None
    assert len(notes(server)["parcels"]) == 6


def strange(kind):
    """Return the body of a parcel that no institution of this package would seal."""
    name, array = ("\ud800", np.zeros(2)) if kind == "a name" else ("proxy-optimizer.0.step", np.array(["u", "v"]))
    [record] = array_record({"x": array}).values()
    form = json.dumps([[name, record.dtype, [2], record.stype, len(record.data)]]).encode()
    return b"no model" if kind == "no arrays" else packed(">I", len(form)) + form + record.data


@pytest.mark.parametrize("kind", ["no arrays", "a name", "a text for a number"])
def test_no_body_of_a_parcel_stops_its_receivers(server, folder, monkeypatch, kind):
    monkeypatch.setattr("flwr_replay.ciphers.seal.joined_body", lambda arrays: strange(kind))
    told = MODEL | {"options": shared_digest(server.config), "exchange": 1}
    record = seal_of(folder, "b", ABC).close(array_record(server.weights), **told)
    assert not deliver(server, record[SEALED_NAME])
    assert (server.state / "runs/r/mixed-000001.safetensors").exists()


@pytest.mark.parametrize("wrong", ["weight", "exchange", "run", "kind", "name"])
def test_a_head_that_is_not_true_is_its_senders_failure(tmp_path, wrong):
    """b's own code lies to the receivers only; they would all refuse what the server hands on."""
    hospitals(tmp_path, "abc")
    own = pinned_keys(tmp_path, ABC)

    def lies(grid, message, reply):
        record = reply.content.array_records.get("arrays", {})
        if grid.name_of(message.metadata.dst_node_id) != "b" or not record:
            return None
        seal = seal_of(tmp_path, "b", ABC)
        head, theirs = (parcel := seal.open(record[SEALED_NAME])).head, parcel.arrays
        told = {"weight": 2.0, "exchange": 2**40, "run": "s", "kind": "synthetic"}
        values = {name: told[name] if name == wrong else getattr(head, name) for name in told}
        sealed = seal.close(theirs, **values, options=head.options)
        reply.content["arrays"] = ArrayRecord({"x.sealed": sealed[SEALED_NAME]}) if wrong == "name" else sealed
        return reply

    ran = run(tmp_path, "strategy=avgpush", "topology=complete", SEALED, names=ABC, own=own, after=lies)
    assert {failure["institution"] for failure in ran.result["failures"]} == {"b"}
    assert (
        sum("sent an invalid answer" in failure["reason"] for failure in ran.result["failures"]) == 2
    )  # in both rounds


def test_messages_of_a_run_are_answered_one_after_the_other(server):
    """Two at once could both pass before either is noted."""
    folder = private_folder(server.state / "runs" / "r" / "parcels")
    with ThreadPoolExecutor() as others:
        with alone(folder, wait=True):
            waits = others.submit(deliver, server, parcel(server, "b"))
            with pytest.raises(TimeoutError):
                waits.result(timeout=2)
            assert not notes(server)["parcels"]
        assert not waits.result(timeout=60)
    assert notes(server)["parcels"]
