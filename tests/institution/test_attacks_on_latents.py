"""More attacks on dp=latents and on recordings, by a server that sends what it likes."""

import shutil

import numpy as np
import pytest
import torch
from flwr.app import Error, Message, RecordDict
from harness import write_shards
from hostile_server import HostileServer, refusal, weights

from flwr_replay.institution.guard import guard
from flwr_replay.memory import forget
from flwr_replay.payloads.common import RollCall
from flwr_replay.payloads.fedreplay import Extract
from flwr_replay.privacy.local import LocalDP
from flwr_replay.privacy.secret import Stream

TASK = ["task=medmnist", "task.size=8", "classes=3", "model=mlp", "model.width=8", "batch_size=16", "device=cpu"]
JOB = [*TASK, "strategy=fedreplay", "encoder=random"]
CALL = {"strategy": "fedreplay", "run": "called", "stages": ["extract"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    write_shards(folder, {"a": 40})
    return folder


class NearlyCancels:
    """Noise that leaves only the last bits of a value: these say which double the value was (Mironov 2012)."""

    def __init__(self, values, spread):
        self.noise = -values / spread

    def normal(self, shape):
        return self.noise.reshape(shape)


def test_where_noise_cancels_a_value_its_last_bits_do_not_leave():
    local = LocalDP(3.0, 8.0, 2.0, 1, 3, False)
    latents = torch.rand(50, 64, generator=torch.Generator().manual_seed(0))
    values = latents.double() * (3 / torch.linalg.vector_norm(latents.double(), dim=1, keepdim=True))
    noisy = local.noisy(latents, 0.7, NearlyCancels(values, 2 * 3 * 0.7))
    assert not noisy[noisy.abs() < 1e-9].any()


def test_noise_keeps_its_size():
    local = LocalDP(3.0, 8.0, 2.0, 1, 3, False)
    noisy = local.noisy(torch.zeros(100, 1000), 0.7, Stream(bytes(32)))
    assert noisy.dtype == torch.float32
    assert float(noisy.std()) == pytest.approx(2 * 3 * 0.7, rel=0.01)
    assert len(np.unique(noisy.numpy())) > 90_000


def test_a_server_that_records_and_calls_it_none_is_refused(folder):
    server = HostileServer(folder, *JOB, "record=all", policy="recording: false")
    assert "keeps messages" in refusal(server.send(RollCall(**CALL, record="none")))
    server = HostileServer(folder, *JOB, policy="recording: false")
    assert "keeps messages" in refusal(server.send(RollCall(**CALL, record="up")))


def test_room_on_the_servers_own_disk_is_no_limit_of_the_policy(folder):
    server = HostileServer(folder, *JOB, "record=all", "record-mb=200000")
    assert not refusal(server.send(RollCall(**CALL)))


@pytest.mark.parametrize("record", ["none", "all"])
def test_the_refusal_of_a_message_without_content_is_in_the_institutions_ledger(folder, record):
    server = HostileServer(folder, *JOB)
    [context] = server.grid.contexts.values()
    context.node_config["record"] = record
    server.send(RollCall(**CALL))
    before = len(server.ledger)
    empty = Message(Error(0, "no content"), reply_to=Message(RecordDict(), 2, "train"))
    assert refusal(guard(empty, context, lambda message, context: message))
    assert len(server.ledger) > before


NOISY = [*JOB, "dp=latents", "latent-clip=3", "latent-epsilon=8", "label-epsilon=2", "delta=0.001"]


def extracted(server, run, change=1.0):
    arrays = {name: array * change for name, array in server.weights.items() if name.startswith("hidden1")}
    asked = {"cut": "hidden1", "latent_dtype": "float32", "views": 1, "first": 0, "chunk_bytes": 10**6}
    return server.send(Extract(arrays=arrays, run=run, **asked))


@pytest.mark.parametrize("harm", ["gone", "empty", "last byte"])
def test_an_account_that_lost_its_charge_lets_no_fresh_noise_leave(folder, harm):
    server, run = HostileServer(folder, *NOISY), f"account {harm}"
    assert weights(extracted(server, run))
    forget()
    path = server.state / "runs" / run / "privacy.jsonl"
    path.write_bytes({"gone": b"", "empty": b"", "last byte": path.read_bytes()[:-1] + b"\x8a"}[harm])
    if harm == "gone":
        path.unlink()
    for change in (1.0, 1.001):
        reply = extracted(server, run, change)
        assert "one here has lost it" in refusal(reply)
        assert not weights(reply)


def test_an_upload_of_before_the_mark_gets_one_when_it_leaves_again(folder):
    server = HostileServer(folder, *NOISY)
    arrays = weights(extracted(server, "older"))
    (server.state / "runs" / "older" / "noisy-latents" / "released").unlink()
    assert weights(extracted(server, "older"))["latents"].tobytes() == arrays["latents"].tobytes()
    assert (server.state / "runs" / "older" / "noisy-latents" / "released").exists()


def test_where_runs_add_up_an_account_that_lost_its_charge_stops_all_of_them(folder):
    policy = HostileServer(folder, *NOISY, policy="{max-local-epsilon: 15, max-delta: 0.001}")
    shutil.rmtree(policy.state / "runs", ignore_errors=True)  # of the other tests
    assert weights(extracted(policy, "one"))
    (policy.state / "runs" / "one" / "privacy.jsonl").unlink()
    forget()
    reply = extracted(policy, "two")
    assert "one here has lost it" in refusal(reply)
    assert not weights(reply)
    assert weights(extracted(HostileServer(folder, *NOISY), "three"))
