"""Attacks on trainings in pieces: messages in any order, repeated, of another run or exchange, with other weights."""

import shutil

import numpy as np
import pytest
from harness import same, write_shards
from hostile_server import HostileServer, metrics, refusal, weights
from replay_runs import JOB

from flwr_replay.files.tensors import nested
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.institution.budget import DPTraining
from flwr_replay.institution.trainings import GeneratorTraining
from flwr_replay.memory import forget
from flwr_replay.payloads.replay import KeepCodes, KeepDecoder, TrainGenerator, TrainPrior
from flwr_replay.privacy.accounting import SampledGaussian, epsilon
from flwr_replay.wire.weights import to_arrays

EACH_STEP = "generator.piece_seconds=1e-9"
PLAIN = [*JOB, "strategy=cwt", "generator.epochs=3", "prior.epochs=2", EACH_STEP]
CODES, DRAWN = [*PLAIN, "replay=vqvae2"], [*PLAIN, "replay=pixelcnn"]
PRIVATE = [*DRAWN, "codebook=gradient", "model.norm=group", "dp=end-to-end", "sigma=1", "privacy.delta=0.01"]
STEPS = 6  # of 40 images in batches of 16, three times


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path, {"a": 40})
    return tmp_path


def generator(server, other=0.0):
    """Return the run's first generator; `other` makes it another."""
    fresh = to_arrays(ReplayPlan.of(server.config).fresh_generator())
    return {name: array + np.asarray(other, array.dtype) for name, array in fresh.items()}


def begin(server, other=0.0, run="r", exchange=1, stated=0.0):
    return server.send(
        TrainGenerator(arrays=generator(server, other), run=run, exchange=exchange, replayed=0, stated=stated)
    )


def train_generator(server, run="r", exchange=1, stated=0.0, replayed=0):
    return server.send(TrainGenerator(run=run, exchange=exchange, replayed=replayed, stated=stated))


def prior(server):
    plan = ReplayPlan.of(server.config)
    fresh = to_arrays(plan.fresh_prior(plan.fresh_generator()))
    return TrainPrior(arrays=nested({"generator": generator(server), "prior": fresh}), run="r", exchange=1)


def finished(server, reply, **more):
    """Go on to the end; return the last answer."""
    while metrics(reply)["steps-left"]:
        assert not weights(reply)
        reply = train_generator(server, **more)
        assert not refusal(reply), refusal(reply)
    return reply


def charged(server, run="r", mechanism="generator"):
    return sum(charge["steps"] for charge in server.charges(run) if charge["mechanism"] == mechanism)


@pytest.mark.parametrize("where", [{"run": "s"}, {"exchange": 2}], ids=["another run", "another exchange"])
def test_nothing_goes_on_that_was_not_begun_there(folder, where):
    server = HostileServer(folder, *CODES)
    assert "a training goes on in the exchange in which it began" in refusal(train_generator(server))
    begin(server)
    assert "has begun none such of a generator" in refusal(train_generator(server, **where))
    assert metrics(train_generator(server))["steps"] == 2


def test_a_training_that_begins_anew_is_the_other_ones(folder):
    """Whatever was trained before with other weights has no part in it."""
    server = HostileServer(folder, *CODES)
    undisturbed = finished(server, begin(server, 0.01, run="s"), run="s")
    begin(server)
    reply = begin(server, 0.01)
    assert metrics(reply)["steps"] == 1
    assert same(weights(finished(server, reply)), weights(undisturbed))


def test_a_complete_training_is_answered_with_what_it_has_found(folder, monkeypatch):
    server = HostileServer(folder, *CODES)
    last = finished(server, begin(server))
    forget()
    monkeypatch.setattr(GeneratorTraining, "take", None)  # nothing is trained any more
    for reply in (begin(server), train_generator(server), begin(server, exchange=3)):
        assert same(weights(reply), weights(last))
        assert metrics(reply) == metrics(last)


def test_other_replays_or_examples_are_another_training(folder):
    server = HostileServer(folder, *CODES)
    begin(server)
    replays = {"codes": np.zeros((4, 2), np.uint8), "labels": np.zeros(4, np.int64)}
    server.send(KeepCodes(run="r", exchange=1, **replays))
    assert "same examples and replays" in refusal(train_generator(server, replayed=4))
    decoder = {
        name: array
        for name, array in generator(server).items()
        if ReplayPlan.of(server.config).fresh_generator().decodes.match(name)
    }
    begun = TrainGenerator(arrays=generator(server), run="r", exchange=1, replayed=4)
    assert metrics(server.send(begun))["steps"] == 1
    assert metrics(train_generator(server, replayed=4))["steps"] == 2
    server.send(KeepDecoder(run="r", exchange=1, arrays={name: array * 0.5 for name, array in decoder.items()}))
    assert "same examples and replays" in refusal(train_generator(server, replayed=4))
    begin(server)
    write_shards(folder, {"a": 41})
    forget()
    assert "same examples and replays" in refusal(train_generator(server))
    assert metrics(begin(server))["steps"] == 1


def test_a_piece_that_is_killed_is_all_that_is_lost(folder, monkeypatch):
    server = HostileServer(folder, *CODES)
    undisturbed = finished(server, begin(server, run="s"), run="s")
    begin(server)
    train_generator(server)
    with monkeypatch.context() as patch:
        step, made = GeneratorTraining.take, []

        def killed(self, *where):
            for taken in step(self, *where):
                made.append(taken)
                raise SystemExit  # after the step, before anything is written

        patch.setattr(GeneratorTraining, "take", killed)
        with pytest.raises(SystemExit):
            train_generator(server)
        assert made
    forget()
    reply = train_generator(server)
    assert metrics(reply)["steps"] == 3
    assert same(weights(finished(server, reply)), weights(undisturbed))


def test_a_damaged_file_is_one_line(folder):
    server = HostileServer(folder, *CODES)
    begin(server)
    [file] = (server.state / "runs" / "r").glob("training-generator-*")
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    forget()
    for reply in (train_generator(server), begin(server)):
        assert refusal(reply) == "DamagedError; the institution's own log says more"


# --- under DP ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2, of="slow replay")
def test_every_step_that_leaves_under_dp_was_charged_once_whatever_is_repeated(folder, monkeypatch):
    taken, step = [], DPTraining.step
    monkeypatch.setattr(DPTraining, "step", lambda self, *how: (taken.append(self), step(self, *how))[1])
    server = HostileServer(folder, *PRIVATE)
    reply = begin(server)
    assert (len(taken), charged(server)) == (2, 2)  # a block is an epoch here
    last = finished(server, begin(server))  # the same weights once more: it goes on
    assert len(taken) == charged(server) == STEPS
    assert metrics(reply)["epsilon"] < metrics(last)["epsilon"]
    for again in (begin(server), train_generator(server), begin(server, exchange=2)):
        assert same(weights(again), weights(last))
        assert metrics(again)["epsilon"] == metrics(last)["epsilon"]
    assert len(taken) == charged(server) == STEPS
    finished(server, begin(server, 0.01))  # another training is another release
    assert len(taken) == charged(server) == 2 * STEPS


def test_label_counts_have_noise_once(folder):
    server = HostileServer(folder, *PRIVATE)
    reply = server.send(prior(server))
    while metrics(reply)["steps-left"]:
        assert "label-counts" not in metrics(reply)
        reply = server.send(TrainPrior(run="r", exchange=1))
    assert charged(server, mechanism="label counts") == 1
    for again in (server.send(prior(server)), server.send(TrainPrior(run="r", exchange=1))):
        assert metrics(again) == metrics(reply)
        assert same(weights(again), weights(reply))
    assert [charge["steps"] for charge in server.charges("r")][-5:] == [1, 0, 0, 0, 0]  # each time prior and counts


def test_a_training_under_dp_that_the_budget_does_not_allow_as_a_whole_takes_no_step(folder):
    server = HostileServer(folder, *PRIVATE, f"privacy.epsilon={epsilon_of_steps(STEPS) - 1e-3}")
    assert f"{STEPS} steps of generator would make" in refusal(begin(server))
    assert not server.charges("r")
    assert "has begun none such" in refusal(train_generator(server))


def test_a_block_that_a_crash_has_repeated_is_charged_again_and_the_budget_ends_the_training(folder):
    server = HostileServer(folder, *PRIVATE, f"privacy.epsilon={epsilon_of_steps(STEPS) + 1e-3}")
    begin(server)
    before = {file: file.read_bytes() for file in (server.state / "runs" / "r").glob("training-generator-*")}
    train_generator(server)
    for file, content in before.items():  # as if the message had been killed before it was written
        file.write_bytes(content)
    forget()
    last = finished(server, train_generator(server))
    assert charged(server) == STEPS
    assert metrics(last)["steps"] == STEPS - 2
    assert weights(last)
    assert metrics(last)["epsilon"] <= epsilon_of_steps(STEPS) + 1e-3


def test_an_older_copy_of_the_account_is_noticed_between_pieces(folder):
    server = HostileServer(folder, *PRIVATE)
    reply = begin(server)
    run = server.state / "runs" / "r"
    shutil.copytree(run, folder / "copy")
    stated = metrics(finished(server, reply))["epsilon"]
    for older in (run / "privacy.jsonl", run):  # the training complete, and as it was then
        if older.is_dir():
            shutil.rmtree(older)
        (shutil.copytree if older == run else shutil.copy)(folder / "copy" / older.relative_to(run), older)
        forget()
        for again in (begin(server, stated=stated), train_generator(server, stated=stated * (older == run))):
            assert "a privacy account never states less than before" in refusal(again)
            assert not weights(again)


def epsilon_of_steps(steps):
    return epsilon([SampledGaussian(16 / 40, 1.0, steps)], 0.01)
