"""Attacks on sealed parcels, by a server and by an institution: each is refused in one line (docs/audit.md)."""

from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from flwr.app import Array, ArrayRecord, RecordDict
from hostile_server import HostileServer, refusal, weights
from peers import hospitals, run
from safetensors.numpy import load_file
from sealed_runs import (
    ABC,
    CWT,
    MODEL,
    PUSH,
    SEALED,
    SMALL,
    deliver,
    parcel,
    parcels_in,
    pinned_keys,
    push_again,
    seal_of,
    train,
)

from flwr_replay.ciphers.seal import KEY, NONCE, Seal, _bound, make_key, read_pins
from flwr_replay.config.binding import shared_digest
from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError
from flwr_replay.files.atomic import read_json
from flwr_replay.files.tensors import nested
from flwr_replay.payloads.avgpush import EvaluatePeer, Push
from flwr_replay.payloads.common import Evaluate, RollCall, Train
from flwr_replay.payloads.relay import Deliver
from flwr_replay.wire.records import array_record, opened
from flwr_replay.wire.sealed import SEALED_NAME, WRAPPED, blank, joined_body, pack, unpack


def changed(array, at):
    """Flip one bit of a parcel; its place counts from the end if it is negative."""
    numbers = array.numpy().copy()
    numbers[at] ^= 1
    return array_record({"x": numbers})["x"]


def test_what_institutions_have_sealed_is_mixed_once(server):
    b, c = parcel(server, "b"), parcel(server, "c", scale=2.0)
    assert not deliver(server, b, c)
    file = server.state / "runs" / "r" / "mixed-000001.safetensors"
    before = file.read_bytes()
    assert not deliver(server, b, c)  # as a server that has lost the acknowledgement
    assert not deliver(server, parcel(server, "c"))
    assert file.read_bytes() == before


def test_what_leaves_can_be_opened_by_institutions_only(server, folder):
    reply = server.send(Push(run="r", exchange=2, lr=0.1, init_seed=1, committed=0))
    [(_, array)] = parcels_in([reply])
    theirs = [opened(seal_of(folder, name, ABC).open(array).arrays) for name in ABC]
    assert all(model.keys() == server.weights.keys() for model in theirs)
    whole = array.numpy().tobytes()
    assert not any(value.tobytes() in whole for value in theirs[0].values() if value.size > 4)
    key, public = make_key(folder / "the-servers.key")
    pins = {**read_pins(folder / "peers-abc.txt"), "server": public}
    with pytest.raises(Exception, match="server is not among them: refused"):
        Seal("server", key, pins).open(array)
    pins |= {"b": public, "server": make_key(folder / "other.key")[1]}
    as_b = Seal("b", key, pins)  # it takes b's name, with a key of its own
    with pytest.raises(Exception, match="does not open"):
        as_b.open(array)


@pytest.mark.parametrize("exchange", [1, 3])
def test_a_parcel_is_good_once_and_in_its_exchange(server, exchange):
    """Replayed: b's parcel of exchange 1 comes again in exchange 2, or in a repeated exchange 1; a future one, too."""
    b = parcel(server, "b", exchange)
    assert bool(deliver(server, b)) == (exchange == 3)
    server.send(Push(run="r", exchange=2, lr=0.1, init_seed=1, committed=1))
    assert f"has parcels of that exchange; one of b is of exchange {exchange}: refused" in deliver(
        server, b, exchange=2
    )
    server.send(Push(run="r", exchange=1, lr=0.1, init_seed=1, committed=0))  # as after a crash
    assert not (server.state / "runs" / "r" / "mixed-000001.safetensors").exists()
    assert "a parcel comes once" in deliver(server, b) or exchange == 3
    assert not deliver(server, parcel(server, "b"))  # b has sealed its model anew


def test_a_delivery_that_a_crash_interrupted_is_mixed_when_it_comes_again(server):
    """The parcel is noted, and the mixing is not finished; after a new release it is too late."""
    b, mixed = parcel(server, "b"), server.state / "runs" / "r" / "mixed-000001.safetensors"
    assert not deliver(server, b)
    before = mixed.read_bytes()
    mixed.unlink()
    assert not deliver(server, b)
    assert mixed.read_bytes() == before
    server.send(push_again(1))
    assert "a parcel comes once" in deliver(server, b)


def test_no_exchange_of_long_ago_is_asked_again(server):
    """Going back, a server could have an institution forget what it has mixed, and mix old parcels."""
    b, folder = parcel(server, "b"), server.state / "runs" / "r"
    assert not deliver(server, b)
    for exchange in range(2, 12):
        assert weights(server.send(push_again(exchange)))
    assert "repeats at most its last 3 exchanges; exchange 1 was asked for after 11" in refusal(
        server.send(push_again(1))
    )
    kept = {file.name for file in folder.glob("released-*")}
    assert "repeats at most its last 3 exchanges" in deliver(server, b)
    assert "the model that was released last" in deliver(server, b, released_in=1, exchange=11)
    assert "is mixed already" in refusal(server.send(replace(push_again(11), committed=11)))
    assert {file.name for file in folder.glob("released-*")} == kept
    assert len(read_json(folder / "parcels.json")["parcels"]) <= 12
    (folder / "parcels.json").write_text("{}")
    assert "begin a new run" in refusal(server.send(push_again(12)))


def test_what_is_kept_and_what_comes_back_is_one_model_at_most(server):
    [(_, own)] = parcels_in([server.send(push_again(2))])
    assert not deliver(server, exchange=2, kept=0.75)
    server.send(replace(push_again(3), committed=2))
    back = {"exchange": 3, "weights": [1.0], "parcels": [1], "kept": 0.5}
    assert "no more of its own model comes back" in deliver(server, own, **back, shares=[0.5])
    assert not deliver(server, own, **back, shares=[0.25])


def test_a_parcel_of_other_options_is_refused(server):
    """A server that gives two runs one name."""
    assert "or of other options" in deliver(server, parcel(server, "b", options="0" * 64))


def test_who_takes_anothers_salt_does_not_have_its_parcel_refused(server, monkeypatch):
    b = parcel(server, "b")
    monkeypatch.setattr("flwr_replay.ciphers.seal.secrets.token_bytes", lambda n: unpack(b)[1].salt[:n])
    assert not deliver(server, b, parcel(server, "c"))


def test_parcels_come_in_the_order_of_their_senders_and_one_of_each(server):
    b, c = parcel(server, "b"), parcel(server, "c")
    for wrong in ([c, b], [b, b], [b, c, parcel(server, "b")]):
        assert "senders come in the order of their names" in deliver(server, *wrong)
    assert not deliver(server, b, c)


def test_an_altered_parcel_does_not_open(server):
    b = parcel(server, "b")
    head, whole = unpack(b)
    key = len(b.numpy()) - len(whole.body) - 3 * WRAPPED  # of a; the keys of the others are theirs to check
    others = range(key + WRAPPED, key + 3 * WRAPPED)
    places = np.linspace(0, len(b.numpy()) - 1, 150).astype(int)
    assert head.receivers == tuple(ABC)
    for at in {*places.tolist(), *range(21, key + WRAPPED)}.difference(others):  # mark, head, salt, key, body
        reply = deliver(server, changed(b, at))
        assert reply, at
        assert "\n" not in reply
    for size in (0, 10, 30, len(b.numpy()) - 1):
        assert deliver(server, array_record({"x": b.numpy()[:size]})["x"])
    assert not deliver(server, b)


def test_nothing_of_the_head_can_be_changed(server):
    head, whole = unpack(parcel(server, "b"))
    for wrong in (
        head._replace(exchange=2),
        head._replace(weight=2.0),
        head._replace(sender="c"),
        head._replace(run="s"),
        head._replace(options="0" * 64),
        head._replace(kind="synthetic"),
        head._replace(receivers=("b", "a", "c")),
    ):
        record = pack(replace(whole, head=wrong.pack()))
        assert refused(server.state.parent.parent, record[SEALED_NAME])


def refused(folder, array, name="a"):
    """Return why an institution does not open a parcel, whatever comes with it."""
    with pytest.raises(Exception, match="refused") as caught:
        seal_of(folder, name, ABC).open(array)
    return str(caught.value)


def test_a_parcel_for_one_receiver_is_none_for_another(server, folder):
    """The server swaps the keys that are wrapped for a and for c."""
    head, whole = unpack(parcel(server, "b"))
    a, b, c = whole.wrapped
    swapped = pack(replace(whole, wrapped=[c, b, a]))[SEALED_NAME]
    assert "altered or misdirected" in deliver(server, swapped)
    assert "altered or misdirected" in refused(folder, swapped, "c")
    assert head.receivers == tuple(ABC)


def test_a_parcel_of_another_run_is_refused(server):
    assert "a parcel is good in its own run; one of b is of run 's'" in deliver(server, parcel(server, "b", run="s"))


def test_a_weight_is_the_one_that_was_sealed(server):
    assert "that of b has 1, the server says 2: refused" in deliver(server, parcel(server, "b"), weights=[2.0])


def test_an_institution_whose_key_is_not_pinned_is_refused(server, folder):
    (folder / "state" / "d").mkdir()
    pinned_keys(folder, "abcd")
    record = seal_of(folder, "d", "abcd").close(array_record(server.weights), **MODEL, options="0" * 64, exchange=1)
    assert "the key of 'd' is not: refused" in deliver(server, record[SEALED_NAME])


def test_a_server_with_keys_of_its_own_is_nobody(server, folder):
    """It takes b's name, and pins what it likes."""
    key, public = make_key(folder / "the-servers.key")
    pins = {**read_pins(folder / "peers-abc.txt"), "b": public}
    record = Seal("b", key, pins).close(array_record(server.weights), **MODEL, options="0" * 64, exchange=1)
    assert "sealed with another key than the pinned one: refused" in deliver(server, record[SEALED_NAME])


def test_a_receiver_cannot_send_in_the_senders_name(server, folder):
    """c has the key of b's parcel; with it, c seals another model, and keeps what b has wrapped for a."""
    head, whole = unpack(parcel(server, "b"))
    c = seal_of(folder, "c", ABC)
    digest = sha256(whole.body).digest()
    own = ChaCha20Poly1305(c._shared("b", whole.salt, sends=False)).decrypt(
        NONCE, whole.wrapped[2], _bound(whole.head, whole.salt, "c", digest)
    )
    body = joined_body(array_record({name: array + 9 for name, array in server.weights.items()}))
    forged = ChaCha20Poly1305(own).encrypt(NONCE, body, whole.head + whole.salt)
    assert head.sender == "b"
    assert "altered or misdirected" in deliver(server, pack(replace(whole, body=forged))[SEALED_NAME])


def test_no_more_of_an_own_model_comes_back_than_was_sent(server):
    own = [array for _, array in parcels_in([server.send(push) for push in (push_again(2), push_again(3))])]
    account = {"exchange": 3, "weights": [1.0], "parcels": [1], "kept": 0.2}
    assert "no more of its own model comes back" in deliver(server, own[1], **account, shares=[0.5])  # of this exchange
    assert not deliver(server, own[0], **account, shares=[0.7])
    server.send(replace(push_again(4), committed=3))
    assert "no more of its own model comes back" in deliver(server, own[0], **{**account, "exchange": 4}, shares=[0.7])
    assert not deliver(server, own[0], **{**account, "exchange": 4}, shares=[0.3])


@pytest.mark.parametrize("named", [False, True])
def test_plain_weights_are_refused(server, folder, named):
    plain = nested({f"{i:05d}": server.weights for i in range(1)})
    if named:  # under the name of a parcel
        plain = {f"00000.{SEALED_NAME}": np.zeros(9, np.float32)}
    asked = {"run": "r", "released_in": 1, "kept": 0.5, "parcels": [1], "shares": [0.5], "weights": [1.0]}
    reason = refusal(server.send(Deliver(arrays=array_record(plain), **asked)))
    assert ("is an array of bytes" if named else "came in plain: refused") in reason
    cwt = HostileServer(folder, *CWT, **{"seal-peers": str(folder / "peers-abc.txt")})
    for request in (Train(arrays=cwt.weights, run="s", lr=0.1), Evaluate(arrays=cwt.weights, run="s")):
        assert "came in plain: refused" in refusal(cwt.send(request))


@pytest.mark.parametrize("options", [[*SMALL, "strategy=avgpush"], [*SMALL, "strategy=fedavg"]])
def test_a_sealed_institution_takes_part_in_no_unsealed_run(folder, options):
    """Downgrade: the server says sealed=false, or runs a method that averages."""
    server = HostileServer(folder, *options, **{"seal-peers": str(folder / "peers-abc.txt")})
    for request in (
        RollCall(strategy="avgpush", run="r"),
        Push(run="r", exchange=1, lr=0.1, init_seed=1, committed=0),
        Train(arrays=server.weights, run="r", lr=0.1),
        EvaluatePeer(run="r"),
    ):
        reply = server.send(request)
        assert "the run says sealed=false and masked=false: nothing leaves" in refusal(reply)
        assert not weights(reply)


def test_a_method_that_averages_cannot_be_sealed():
    with pytest.raises(ConfigError, match="sealed=true is for methods whose server only hands on"):
        compose([*SMALL, "strategy=fedavg", SEALED])


def test_an_institution_without_keys_takes_part_in_no_sealed_run(folder):
    server = HostileServer(folder, *PUSH)
    assert "a sealed run needs pinned keys" in refusal(server.send(RollCall(strategy="avgpush", run="r")))
    plain = HostileServer(folder, *SMALL, "strategy=cwt")
    parcels = blank(plain.weights, "r", "model", ABC)
    assert "a sealed parcel came: refused" in refusal(plain.send(Train(arrays=parcels, run="r", lr=0.1)))


def test_a_policy_can_ask_for_a_sealed_run(folder):
    server = HostileServer(folder, *SMALL, "strategy=avgpush", policy="sealed: true\n")
    reason = refusal(server.send(RollCall(strategy="avgpush", run="r")))
    assert "policy asks for a sealed run (sealed: true)" in reason
    with_keys = HostileServer(folder, *PUSH, policy="sealed: true\n", **{"seal-peers": str(folder / "peers-abc.txt")})
    assert not refusal(with_keys.send(RollCall(strategy="avgpush", run="r")))


def test_a_request_of_no_method_is_refused(server):
    content = RecordDict({"arrays": array_record(server.weights)})
    assert "a sealed institution answers the requests of its own method only" in refusal(server.send_content(content))


def test_a_model_that_goes_round_does_not_become_older(folder):
    """A server hands a model of exchange 2 on after one of exchange 4, begins anew, or goes back ten exchanges."""
    server = HostileServer(folder, *CWT, **{"seal-peers": str(folder / "peers-abc.txt")})
    old, new = parcel(server, "b", 2), parcel(server, "c", 4)
    assert not refusal(train(server, 5, new))
    assert not refusal(train(server, 8, new))  # nobody else has answered since
    for answer in (train(server, 9, old), train(server, 9)):
        assert "no older model follows a newer one" in refusal(answer)
    assert "of exchange 12" in refusal(train(server, 9, parcel(server, "b", 12)))
    assert "repeats at most its last 3 exchanges" in refusal(train(server, 5, new))
    assert not refusal(train(server, 8, parcel(server, "b", 7)))  # as after a crash
    reply = server.send(Evaluate(arrays=ArrayRecord({SEALED_NAME: new}), run="r", exchange=9))
    assert not refusal(reply)
    assert "stage train brings one parcel" in refusal(
        server.send(Train(arrays=ArrayRecord({f"{i}.sealed": new for i in range(2)}), run="r", exchange=9, lr=0.1))
    )


@pytest.mark.parametrize("text", ["a zzz\n", "a {a}\na {a}\n", "b {a}\n", "a {a}\nb {a}\n", "", "../x {a}\n"])
def test_a_wrong_file_of_pinned_keys_lets_nothing_leave(folder, text):
    own = make_key(folder / "state" / "a" / KEY)[1]
    (folder / "wrong.txt").write_text(text.format(a=own))
    server = HostileServer(folder, *PUSH, **{"seal-peers": str(folder / "wrong.txt")})
    assert "ConfigError" in refusal(server.send(RollCall(strategy="avgpush", run="r")))


def test_a_key_that_others_can_read_is_not_used(folder):
    (folder / "state" / "a" / KEY).chmod(0o644)
    server = HostileServer(folder, *PUSH, **{"seal-peers": str(folder / "peers-abc.txt")})
    assert "only its owner may read seal.key" in refusal(server.send(RollCall(strategy="avgpush", run="r")))


def test_who_has_pinned_other_keys_does_not_take_part(tmp_path):
    """d's file has another key of c: a server that substitutes keys would have to change these files."""
    hospitals(tmp_path)
    own = pinned_keys(tmp_path, "abcd")
    other = make_key(tmp_path / "other.key")[1]
    lines = (tmp_path / "peers-abcd.txt").read_text().splitlines()
    lines[2] = f"c {other}"
    (tmp_path / "wrong.txt").write_text("\n".join(lines))
    own["d"] = {"seal-peers": str(tmp_path / "wrong.txt")}
    ran = run(tmp_path, "strategy=avgpush", SEALED, own=own)
    [failure] = ran.result["failures"]
    assert "all institutions of a sealed or masked run pin the same keys" in failure["reason"]
    assert ", d has " in failure["reason"]
    assert set(ran.result["final"]["institutions"]) == set("abc")


@pytest.mark.parametrize("strange", ["another form", "not finite", "no body"])
def test_a_bad_parcel_counts_as_the_receivers_own_model(server, folder, strange):
    """Institutions need not trust each other: b seals what is no model, and stops nobody."""
    worse = {name: np.full_like(array, np.nan) for name, array in server.weights.items()}
    body = {"another form": {"x": np.zeros(3)}, "not finite": worse, "no body": {}}[strange]
    arrays = array_record(body) if body else ArrayRecord({"x": Array("uint8", (2,), "numpy.ndarray", b"no")})
    told = MODEL | {"options": shared_digest(server.config), "exchange": 1}
    record = seal_of(folder, "b", ABC).close(arrays, **told)
    assert not deliver(server, record[SEALED_NAME], parcel(server, "c"), kept=0.0, shares=[0.5, 0.5])
    released, mixed = (load_file(server.state / "runs/r" / f"{of}-000001.safetensors") for of in ("released", "mixed"))
    for name, theirs in server.weights.items():
        own = released[f"theta.{name}"]
        if np.issubdtype(theirs.dtype, np.floating):
            np.testing.assert_allclose(mixed[f"theta.{name}"], (own + theirs) / 2, rtol=1e-5, atol=1e-6)


def test_no_old_model_goes_round_when_newer_notes_have_been_forgotten(folder):
    server = HostileServer(folder, *CWT, **{"seal-peers": str(folder / "peers-abc.txt")})
    old = parcel(server, "b", 3)
    assert not refusal(train(server, 5, parcel(server, "c", 4)))
    for exchange in range(6, 20):
        assert not refusal(train(server, exchange, parcel(server, "b", exchange - 1)))
    for late in (old, None):
        assert "no older model follows a newer one" in refusal(train(server, 20, late))


def test_a_pinned_key_that_is_none_is_refused(folder):
    own = make_key(folder / "state" / "a" / KEY)
    with pytest.raises(ConfigError, match="the pinned key of b is no public key of X25519"):
        Seal("a", own[0], {"a": own[1], "b": "0" * 64})
