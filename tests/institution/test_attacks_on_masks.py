"""Attacks of a server on an institution whose weights leave under masks: each is refused, or gives nothing to read."""

import shutil

import numpy as np
import pytest
from harness import write_shards
from hostile_server import HostileServer, metrics, refusal, weights
from sealed_runs import SMALL, pinned_keys, seal_of

from flwr_replay.ciphers.masking import Masking
from flwr_replay.payloads.common import Evaluate, Train
from flwr_replay.payloads.ditto import EvaluatePersonal, TrainPersonal
from flwr_replay.payloads.fedreplay import Extract
from flwr_replay.payloads.fedsgd import Differentiate
from flwr_replay.payloads.scaffold import CONTROL, TrainControlled
from flwr_replay.wire.masked import MASKED
from flwr_replay.wire.sealed import SEALED_NAME

ABC = "abc"
EXTRACT = {"cut": "a", "latent_dtype": "float32", "first": 0, "chunk_bytes": 10**6, "views": 1}
JOB = [*SMALL, "strategy=fedavg", "masked=true"]
FEDSGD = [*SMALL, "strategy=fedsgd", "masked=true"]


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path, dict.fromkeys(ABC, 40))
    pinned_keys(tmp_path, ABC)
    return tmp_path


def server_of(folder, name="a", options=JOB, **own):
    return HostileServer(folder, *options, name=name, **{"seal-peers": str(folder / "peers-abc.txt")} | own)


@pytest.fixture
def server(folder):
    return server_of(folder)


def train(server, exchange=1, scale=1.0, **other):
    theta = {name: (scale * array).astype(array.dtype) for name, array in server.weights.items()}
    asked = {"run": "r", "exchange": exchange, "lr": 0.1, "total": 3 * 40} | other
    return server.send(Train(arrays=theta, **asked))


def masked_total(answers):
    return sum(np.int64(answer[MASKED].view(np.int64)) for answer in answers)


def test_masks_cancel_for_one_request_only(folder):
    """A server that sends another model, rate or run to one of them reads nothing (Pasquini et al. 2022)."""
    servers = [server_of(folder, name) for name in ABC]

    def check(exchange, *others):
        return masked_total([weights(train(s, exchange, **other)) for s, other in zip(servers, others, strict=True)])

    assert not check(1, {}, {}, {}).any()
    assert not check(2, {"stated": 0.0}, {}, {}).any()  # what differs between honest requests
    others = ({"scale": 2.0}, {"lr": 0.01}, {"total": 121}, {"local_epochs": 2}, {"run": "s"})
    for exchange, other in enumerate(others, 3):
        asked = [{}, {}, other]
        if "local_epochs" in other:  # an option of the run: it is refused before
            assert "asks for what its run says" in refusal(train(servers[2], exchange, **other))
            continue
        assert check(exchange, *asked).any()


def test_masks_cancel_only_if_all_go_on_from_the_same_training(folder):
    """With SCAFFOLD the difference of two sums would be the own control of the one that goes on from another."""
    servers = [server_of(folder, name, [*SMALL, "strategy=scaffold", "masked=true"]) for name in ABC]
    theta = servers[0].weights
    arrays = {**theta, **{f"{CONTROL}{name}": 0 * array for name, array in theta.items()}}

    def check(exchange, *continues):
        asked = {"arrays": arrays, "run": "r", "exchange": exchange, "lr": 0.1, "total": 3 * 40}
        requests = [TrainControlled(**asked, continues=last) for last in continues]
        return masked_total([weights(s.send(request)) for s, request in zip(servers, requests, strict=True)])

    assert not check(1, 0, 0, 0).any()
    assert not check(2, 1, 1, 1).any()
    assert check(3, 2, 1, 1).any()


def test_masks_cancel_for_one_scale_of_labels_only(folder):
    """Under a scale of 1e30 labels are zeros and weights that give 0 stay: what is left is the third one's training."""
    options = ["task=diabetes", "model=mlp", "device=cpu", "strategy=fedavg", "masked=true"]
    servers = [server_of(folder, name, options) for name in ABC]

    def answers(exchange, *scales):
        asked = ({"label_mean": 150.0, "label_scale": scale, "total": 1000} for scale in scales)
        return [weights(train(s, exchange, **other)) for s, other in zip(servers, asked, strict=True)]

    assert not masked_total(answers(1, 70.0, 70.0, 70.0)).any()
    assert masked_total(answers(2, 1e30, 1e30, 70.0)).any()


@pytest.mark.parametrize("kept", ["keep", "reset"])
def test_masks_cancel_for_one_history_only(folder, kept):
    """One momentum would show in the sum if the others had none: at weights of zeros a gradient is zero."""
    servers = [server_of(folder, name, [*JOB, f"strategy.optimizer-state={kept}"]) for name in ABC]

    def answers(exchange, *scales):
        asked = zip(servers, scales, strict=True)
        return [weights(train(s, exchange, scale, optimizer_state=kept)) for s, scale in asked]

    assert not masked_total(answers(1, 1.0, 1.0, 1.0)).any()
    assert not masked_total(answers(2, 0.5, 0.5, 0.5)).any()
    assert masked_total(answers(3, 0.0, 0.0, 1.0)).any()
    again = answers(2, 0.5, 0.5, 0.5)  # as after a crash
    assert not masked_total(again).any()
    assert masked_total(answers(4, 0.0, 0.0, 0.0)).any()


@pytest.mark.parametrize("again", [False, True])
def test_a_training_that_fails_after_it_has_saved_its_state_is_in_the_history(folder, monkeypatch, again):
    """As for lack of memory, which a server brings about by the size of a model: its momentum would be the odd one."""
    servers, closed = [server_of(folder, name, [*JOB, "strategy.optimizer-state=keep"]) for name in ABC], Masking.closed

    def answers(exchange, scale):
        return [weights(train(s, exchange, scale, optimizer_state="keep")) for s in servers]

    monkeypatch.setattr(Masking, "closed", lambda *_: 1 / 0)
    assert not weights(train(servers[2], 1, optimizer_state="keep"))
    assert list((servers[2].state / "runs" / "r").glob("optimizer-*"))
    monkeypatch.setattr(Masking, "closed", closed)
    if again:  # the same request of all
        assert not masked_total(answers(1, 1.0)).any()
    else:
        assert "one answer" in refusal(train(servers[2], 1, 2.0, optimizer_state="keep"))
    assert masked_total(answers(2, 0.0)).any() != again


def test_a_personal_model_that_diverges_is_no_failure(folder):
    """It says whose it is. And before, the global model's momentum was saved, and read from the sum of exchange 2."""
    own = ["strategy=ditto", "strategy.lam=1e7", "batch_size=4", "masked=true", "strategy.optimizer-state=keep"]
    servers = [server_of(folder, name, [*SMALL, *own]) for name in ABC]

    def ask(server, exchange, scale, lr):
        theta = {name: (scale * array).astype(array.dtype) for name, array in server.weights.items()}
        asked = {"run": "r", "exchange": exchange, "lr": lr, "total": 120, "optimizer_state": "keep"}
        return server.send(TrainPersonal(arrays=theta, lam=1e7, **asked))

    assert weights(ask(servers[2], 1, 1.0, 0.1))
    tested = servers[2].send(EvaluatePersonal(arrays=servers[2].weights, run="r", exchange=1))
    assert "the personal model's loss must stay finite" in refusal(tested)
    assert masked_total([weights(ask(server, 2, 0.0, 1e-6)) for server in servers]).any()


def test_an_exchange_has_one_answer(server):
    first = weights(train(server))
    again = weights(train(server))
    assert all((first[name] == again[name]).all() for name in first)
    for other in ({"scale": 1.5}, {"lr": 0.2}, {"optimizer_state": "keep"}):
        assert refusal(train(server, **other))
    assert "an exchange has one answer; exchange 1 is asked again" in refusal(train(server, scale=1.5))
    assert weights(train(server, 2, scale=1.5))
    assert all((first[name] == array).all() for name, array in weights(train(server)).items())


def test_the_answer_is_the_same_bytes_even_if_training_would_end_elsewhere(server, folder):
    """Data that change, or a GPU: under the same masks the difference of two answers would be one of weights."""
    first = weights(train(server))
    write_shards(folder, {"b": 40, "a": 40})  # other images in a's file
    server.grid.contexts[2].node_config["data"] = str(folder / "a.npz")
    again = train(server_of(folder))
    assert refusal(again) or all((first[name] == array).all() for name, array in weights(again).items())


def test_no_exchange_of_long_ago_is_answered_under_the_same_masks(server):
    for exchange in range(1, 6):
        assert weights(train(server, exchange))
    for exchange in (0, 1, 2):
        assert "not repeated; 5 is answered" in refusal(train(server, exchange))
    assert weights(train(server, 9))
    assert "not repeated; 9 is answered" in refusal(train(server, 7))
    assert refusal(train(server, -1))


def test_the_largest_numbers_are_of_long_ago_too(folder):
    """Flower sends whole numbers below 2^64, for an institution whose policy lets it."""
    server = server_of(folder, policy="limits:\n  round: 1.0e+30\n")
    for exchange in range(2**63, 2**63 + 4):
        assert weights(train(server, exchange))
    assert "not repeated" in refusal(train(server, 2**63))


def test_a_lost_state_directory_is_said(server, folder):
    """Its masks would not cancel with the others', who have a history."""
    assert weights(train(server))
    shutil.rmtree(server.state / "runs" / "r")
    assert "exchange 1 is answered, and this institution's state knows of none" in refusal(
        train(server_of(folder), 2, continues=1)
    )


def test_what_was_kept_and_is_damaged_is_not_masked_again(server):
    train(server)
    [file] = (server.state / "runs" / "r").glob("masked-*")
    file.write_bytes(file.read_bytes()[:-9])
    assert refusal(train(server))


def test_the_pinned_keys_stay_the_same_in_a_run(server, folder):
    assert weights(train(server))
    other = server_of(folder, **{"seal-peers": pinned_keys(folder, "abcd")["a"]["seal-peers"]})
    assert "a masked run keeps its pinned keys" in refusal(train(other, 2))
    assert weights(train(other, 2, run="s"))


@pytest.mark.parametrize("names", ["a", "ab"])
def test_fewer_than_three_institutions_are_no_crowd(server, folder, names):
    few = server_of(folder, **{"seal-peers": pinned_keys(folder, names)["a"]["seal-peers"]})
    assert f"at least 3 institutions with pinned keys; got {len(names)}" in refusal(train(few))


@pytest.mark.parametrize("policy", ["", "masked: true\n"])
def test_a_server_cannot_do_without_masks(folder, policy):
    plain = server_of(folder, options=[*SMALL, "strategy=fedavg"], policy=policy)
    assert refusal(train(plain))
    unpinned = HostileServer(folder, *SMALL, "strategy=fedavg", policy="masked: true\n")
    assert "policy asks for a masked run" in refusal(train(unpinned))
    unpinned = HostileServer(folder, *JOB)
    assert "a masked run needs pinned keys" in refusal(train(unpinned))


@pytest.mark.parametrize(
    "option", ["strategy=cwt", "replay=vqvae2", "evaluate-before-mixing=true", "fraction=0.5", "forgetting=true"]
)
def test_an_institution_refuses_options_that_masks_do_not_go_with(server, option):
    """Whatever the server's own code would say of them."""
    server.grid.contexts[2].run_config["overrides"] += f" {option}"
    reply = train(server)
    assert refusal(reply)
    assert not weights(reply)


def test_no_loss_on_training_examples_leaves(server):
    """Losses at weights of the server's choice, moved along each axis, would give the gradient, and so the weights."""
    assert metrics(train(server)).keys() == {"num-examples", "examples-seen", "num-steps"}
    asked = Evaluate(arrays=server.weights, run="r", exchange=2, split="train")
    assert "this run asks for split='train' without it: refused" in refusal(server.send(asked))
    assert "loss" in metrics(server.send(Evaluate(arrays=server.weights, run="r", exchange=2)))


def test_nothing_but_whole_weights_leaves(server):
    theta = server.weights
    assert "nothing but whole weights leaves; stage extract" in refusal(
        server.send(Extract(arrays=theta, run="r", exchange=1, **EXTRACT))
    )
    assert refusal(server.send(Differentiate(arrays=theta, run="r", exchange=1)))
    assert not refusal(server.send(Evaluate(arrays=theta, run="r", exchange=1)))
    content = Train(arrays=theta, run="r", exchange=1, lr=0.1).encode()
    content["config"]["stage"] = "another"
    assert "its own method's requests only" in refusal(server.send_content(content))


def test_a_sealed_run_is_hidden_from_the_server_only(folder):
    """Any one institution that helps the server opens each other one's parcels: `masked: true` refuses that, too."""
    for policy, refused in (("masked: true\n", True), ("", False)):
        sealed = server_of(folder, options=[*SMALL, "strategy=cwt", "sealed=true"], policy=policy)
        reply = sealed.send(Train(arrays={}, run="r", exchange=1, lr=0.1))
        assert ("policy asks for a masked run" in refusal(reply)) == refused
    parcel = reply.content["arrays"][SEALED_NAME]
    assert seal_of(folder, "b", ABC).open(parcel).arrays.keys() == sealed.weights.keys()
    assert "policy asks for a sealed run" in refusal(train(server_of(folder, policy="sealed: true\n")))


@pytest.mark.parametrize("job", [JOB, FEDSGD])
def test_no_failure_tells_that_one_institutions_training_diverged(folder, job):
    """By learning rates and weights of its choice a server would read how large a gradient is, a bit a message."""
    servers = [server_of(folder, name, job) for name in ABC]
    for exchange, scale in enumerate((1.0, 9e5), 1):

        def ask(server, exchange=exchange, scale=scale):
            if job is JOB:
                return train(server, exchange, scale, lr=0.1 if scale == 1 else 1e13)
            theta = {name: (scale * array).astype(array.dtype) for name, array in server.weights.items()}
            return server.send(Differentiate(arrays=theta, run="r", exchange=exchange, total=120))

        replies = [ask(server) for server in servers]
        assert not any(map(refusal, replies))
        counts = [{name: metrics(r)[name] for name in ("num-examples", "examples-seen", "num-steps")} for r in replies]
        assert counts[0] == counts[1] == counts[2]
        diverged, zero = masked_total([weights(reply) for reply in replies])
        assert zero == 0
        assert (diverged != 0) == (exchange == 2)
