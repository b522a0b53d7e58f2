"""Parcels wait until they are acknowledged, and nothing of Σ w θ gets lost or doubled."""

import re
import shlex
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from grid import Grid
from harness import node_configs, same
from peers import JOB as SMALL
from peers import NAMES, broken, hospitals, run, weighted_total
from safetensors.numpy import load_file

from flwr_replay.client_app import app
from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError, DamagedError
from flwr_replay.runs.execute import settings_of
from flwr_replay.server.mailbox import Delivery, Mailbox, ModelShare
from flwr_replay.strategies.avgpush import AvgPush
from flwr_replay.wire.records import array_record, opened

JOB = ["strategy=avgpush", "topology=exponential-half", "rounds=3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    hospitals(folder)
    return folder


def conserved(ran, exchange, names=NAMES):
    """Say whether mixing has left Σ w θ and Σ w of an exchange as they were."""
    before, w = weighted_total([ran.model(name, exchange, "released") for name in names])
    after, v = weighted_total([ran.model(name, exchange) for name in names])
    assert w == pytest.approx(v)
    for name in before:
        np.testing.assert_allclose(before[name], after[name], rtol=0, atol=1e-5)
    return w


def test_mixing_conserves(folder):
    ran = run(folder, *JOB, "lr=0.05")
    for exchange in (1, 2, 3):
        assert conserved(ran, exchange) == pytest.approx(len(NAMES))


def test_who_does_not_release_is_left_out_and_keeps_what_it_has(folder):
    ran = run(folder, *JOB, "lr=0.05", failing=[("push", "b", 2)])
    conserved(ran, 2, "acd")
    assert ran.kept("mixed", "b", 2) is None
    assert conserved(ran, 3) == pytest.approx(len(NAMES))  # it goes on with what it mixed in exchange 1
    assert [failure["institution"] for failure in ran.result["failures"]] == ["b"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["failing", "losing"])
def test_what_is_not_acknowledged_is_brought_again_and_mixed_once(folder, how):
    whole = run(folder, *JOB, "lr=0.05")
    ran = run(folder, *JOB, "lr=0.05", **{how: [("deliver", "b", 1)]})
    assert [asked for asked in ran.grid.asked if asked[:2] == ("deliver", "b")][:2] == [
        ("deliver", "b", 1),
        ("deliver", "b", 2),  # before anybody trains
    ]
    for name in NAMES:
        assert same(whole.model(name, 3)[0], ran.model(name, 3)[0])


def test_who_cannot_be_reached_does_not_train_until_it_has_its_parcels(folder):
    lost = [("deliver", "b", at) for at in (1, 2)]
    ran = run(folder, *JOB, "lr=0.05", failing=lost)
    assert ("push", "b", 2) not in ran.grid.asked
    conserved(ran, 1)  # at exchange 3 it has mixed what was released in exchange 1
    conserved(ran, 2, "acd")
    assert conserved(ran, 3) == pytest.approx(len(NAMES))


def test_what_nobody_fetches_goes_back_to_its_sender(folder):
    gone = {"failing": [("deliver", "b", 1)], "away": [("b", at) for at in range(2, 5)]}
    waits, back = (run(folder, *JOB, "lr=0.05", f"rounds={n}", **gone) for n in (3, 4))
    assert conserved(waits, 3, "acd") == pytest.approx(3)  # a half each of what a sent to b, and of what b kept
    after, w = weighted_total([back.model(name, 4) for name in "acd"])
    before, _ = weighted_total([back.model(name, 4, "released") for name in "acd"])
    sent = waits.model("a", 1, "released")[0]
    assert w == pytest.approx(3.5)
    for name in before:
        np.testing.assert_allclose(after[name], before[name] + sent[name] / 2, rtol=0, atol=1e-5)


def test_who_comes_back_after_that_goes_on_with_all_it_had(folder):
    away = [("b", at) for at in range(2, 6)]
    ran = run(folder, *JOB, "rounds=7", failing=[("deliver", "b", 1)], away=away)
    assert same(ran.model("b", 1)[0], ran.model("b", 1, "released")[0])
    assert conserved(ran, 7) == pytest.approx(len(NAMES) + 0.5)  # it joins with its w of 1; half had stayed with others


@pytest.mark.parametrize("options", [["topology=none"], ["strategy=proxyfl", "topology=none", "dp=none"]])
def test_where_nobody_receives_no_model_leaves(folder, options):
    ran = run(folder, *JOB, "lr=0.05", *options)
    assert not ran.result["failures"]
    assert not [entry for entry in ran.ledger if entry["kind"] == "model" and entry["bytes"] > 100]
    assert ran.model("a", 3)[0]  # it is there, at the institution


def test_who_is_alone_keeps_its_model(folder):
    ran = run(folder, *JOB, "lr=0.05", "nodes=1", names="a")
    assert not [entry for entry in ran.ledger if entry["kind"] == "model" and entry["bytes"] > 100]
    assert ran.model("a", 3)[1] == 1.0


def test_who_joins_later_comes_with_fresh_weights_and_a_w_of_one(folder):
    ran = run(folder, *JOB, "lr=0.05", "nodes=3", away=[("d", at) for at in (-1, 0, 1)])
    assert not [asked for asked in ran.grid.asked if asked[1:] == ("d", 1)]
    assert conserved(ran, 1, "abc") == pytest.approx(3)
    assert conserved(ran, 2) == conserved(ran, 3) == pytest.approx(4)
    assert not ran.result["failures"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at", [("push", "c", 2), ("deliver", "a", 2), ("deliver", "d", 3)])
def test_a_run_that_breaks_off_ends_with_the_same_bits(folder, at):
    whole, resumed = run(folder, *JOB, "lr=0.05"), broken(folder, *JOB, "lr=0.05", breaking=[at])
    for name in NAMES:
        assert same(whole.model(name, 3)[0], resumed.model(name, 3)[0])
    assert whole.result["final"] == resumed.result["final"]


def test_what_waits_outlives_a_restart_of_the_server(folder):
    lost = [("deliver", "b", at) for at in (1, 2)]
    whole = run(folder, *JOB, "lr=0.05", failing=lost)
    resumed = broken(folder, *JOB, "lr=0.05", failing=lost, breaking=[("push", "d", 3)])
    for name in NAMES:
        assert same(whole.model(name, 3)[0], resumed.model(name, 3)[0])
    assert list((resumed.folder / "mailbox").iterdir())


def test_models_that_nobody_waits_for_do_not_fill_the_disk(tmp_path):
    box = Mailbox()
    for exchange in range(1, 8):
        box.waiting["b"] = Delivery(
            exchange, 1.0, 0.5, [ModelShare(box.post(array_record({"w": np.ones(3)})), "a", 0.5, 1.0)]
        )
        box.keep(tmp_path, "r")
    assert sorted(file.stem for file in tmp_path.iterdir()) == ["000005", "000006", "000007"]


def test_a_lost_model_is_missed(folder):
    def empties(grid, message):
        if ("push", "a", 2) in grid.asked[-2:-1]:
            for file in folder.rglob("state/b/runs/*/mixed-*"):
                file.unlink()

    ran = run(folder, *JOB, before=empties)
    assert any("is gone: restore the state directory" in failure["reason"] for failure in ran.result["failures"])


def test_a_mailbox_is_read_back_as_it_was(tmp_path):
    box = Mailbox()
    number = box.post(array_record({"w": np.arange(3.0)}))
    box.waiting["b"] = Delivery(4, 1.0, 0.5, [ModelShare(number, "a", 0.25, 1.5)])
    box.coming_back["a"] = [ModelShare(number, "a", 0.5, 1.5)]
    box.committed["c"] = 3
    box.keep(tmp_path, "r")
    again = Mailbox.restored(box.state(), tmp_path, "r")
    assert (again.waiting, again.coming_back, again.committed, again.posted) == (
        box.waiting,
        box.coming_back,
        box.committed,
        1,
    )
    assert same(opened(again.models[number]), load_file(tmp_path / "000001.safetensors"))
    with pytest.raises(DamagedError, match="must be of the run another; it names r"):
        Mailbox.restored(box.state(), tmp_path, "another")


def test_a_parcel_that_went_back_and_is_acknowledged_late_goes_to_nobody_again():
    box = Mailbox()
    mine, theirs, gone = (ModelShare(box.post(array_record({"w": np.ones(2)})), name, 0.5, 1.0) for name in "acd")
    box.waiting["a"] = Delivery(3, 1.0, 0.5, [mine, theirs, gone])  # a's own, which nobody has fetched, among them
    box.give_back("a")
    assert box.coming_back.pop("d") == [gone]  # d has it again
    assert box.acknowledged("a", [mine.number, theirs.number, gone.number]) == 1
    assert not any(box.coming_back.values())
    assert box.weights["a"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["topology=file"], "go together"),
        (["topology=star"], r"strategy\.topology must be one of"),
        (["topology=file", "topology-file=gone.npy", "nodes=4"], "does not exist"),
        (["topology=file", "topology-file={folder}/p.npy", "nodes=3"], "4 x 4 for 3 institutions"),
        (["topology=file", "topology-file={folder}/q.npy", "nodes=4"], "column 1 .* sums to 0.5"),
        (["topology=file", "topology-file={folder}/p.npy"], "set nodes to their number"),
        (["model.weights=w.safetensors"], "begins with models of the institutions"),
    ],
)
def test_a_graph_that_cannot_be_is_refused_before_any_training(folder, options, says):
    np.save(folder / "p.npy", np.eye(4))
    np.save(folder / "q.npy", np.eye(4) * [0.5, 1, 1, 1])
    with pytest.raises(ConfigError, match=says):
        run(folder, "strategy=avgpush", *(option.format(folder=folder) for option in options), name="refused")
    assert not (folder / "runs" / "refused").exists()


def test_a_users_own_matrix_is_followed(folder):
    np.save(folder / "own.npy", np.array([[0.5, 0, 0, 0.5], [0.5, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0.5]]))
    ran = run(folder, *JOB, "topology=file", f"topology-file={folder}/own.npy", "nodes=4", "rounds=1")
    assert [ran.model(name, 1)[1] for name in NAMES] == [1.0, 1.5, 1.0, 0.5]
    conserved(ran, 1)


def with_matrix(folder, matrix):
    """Return AvgPush with a P(t) that a class of the user's own gives, and where it runs."""

    class Own(AvgPush):
        def matrix(self, exchange, institutions):
            return matrix

    overrides = [*SMALL, *JOB]
    grid = Grid(app, {"overrides": shlex.join(overrides)}, node_configs(folder, folder / "own", NAMES))
    config = replace(compose(overrides), nodes=4)
    return Own(config.strategy, settings_of(config)), grid


def test_a_class_of_ones_own_says_who_sends_to_whom(folder):
    own = np.array([[0.5, 0, 0, 0.5], [0.5, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0.5]])
    strategy, grid = with_matrix(folder, own)
    strategy.start(grid, ArrayRecord(), 1)
    assert strategy.mailbox.weights == {"a": 1.0, "b": 1.5, "c": 1.0, "d": 0.5}


@pytest.mark.parametrize(
    ("matrix", "says"),
    [
        (np.eye(4) * 0.9, r"every column of Own\.matrix must sum to one, .* column 1 .* sums to 0\.9"),
        (np.eye(3), r"one row and one column for each of 4 institutions; got \(3, 3\)"),
        (np.full((4, 4), np.nan), "finite and not negative"),
    ],
)
def test_a_class_that_cannot_be_is_refused_before_anybody_trains(folder, matrix, says):
    strategy, grid = with_matrix(folder, matrix)
    with pytest.raises(ConfigError, match=says):
        strategy.start(grid, ArrayRecord(), 1)
    assert {stage for stage, _, _ in grid.asked} == {"roll-call"}


def test_a_matrix_that_fits_no_longer_when_somebody_fails_loses_nothing(folder):
    strategy, grid = with_matrix(folder, np.full((4, 4), 0.25))
    grid.failing = [("push", "c", 2)]
    strategy.start(grid, ArrayRecord(), 3)
    assert ("push", "c", 3) in grid.asked
    assert all(w == pytest.approx(1) for w in strategy.mailbox.weights.values())


def test_a_model_of_another_form_is_refused_before_any_training(folder):
    def other(grid, message):
        node = message.metadata.dst_node_id
        if grid.name_of(node) == "c":
            grid.contexts[node].run_config = {"overrides": shlex.join([*SMALL, *JOB, "model.width=7"])}

    ran = run(folder, *JOB, "rounds=1", before=other)
    [reason] = {failure["reason"] for failure in ran.result["failures"] if "form" in failure["reason"]}
    assert {failure["institution"] for failure in ran.result["failures"]} == {"c"}
    assert "use one model" in reason
    assert ran.kept("released", "c", 1) is None


@pytest.mark.parametrize(
    ("weight", "value"), [(1e39, None), (2.0, None), (None, 3e38), (None, float("nan")), (None, "surplus")]
)
def test_who_releases_what_cannot_be_is_left_out(folder, weight, value):
    def wild(grid, message, reply):
        if grid.asked[-1][:2] == ("push", "b"):
            metrics, arrays = reply.content["metrics"], reply.content["arrays"]
            metrics["weight"] = weight or metrics["weight"]
            for name in list(arrays) if value else ():
                own = arrays[name]
                surplus = Array(own.dtype, own.shape, own.stype, own.data + b"more")
                arrays[name] = surplus if value == "surplus" else Array(np.full_like(own.numpy(), value))

    ran = run(folder, *JOB, "rounds=2", after=wild)
    assert {failure["institution"] for failure in ran.result["failures"]} == {"b"}
    assert any(re.search("released|numbers only|finite", failure["reason"]) for failure in ran.result["failures"])
    conserved(ran, 2, "acd")


def test_with_a_users_own_matrix_nothing_is_exchanged_while_somebody_is_missing(folder):
    np.save(folder / "four.npy", np.full((4, 4), 0.25))
    options = [*JOB, "topology=file", f"topology-file={folder}/four.npy", "nodes=4"]
    ran = run(folder, *options, away=[("b", 2)])
    left = {entry["round"] for entry in ran.ledger if entry["kind"] == "model" and entry["bytes"] > 100}
    assert left == {1, 3}
    for name in "acd":
        assert same(ran.model(name, 2)[0], ran.model(name, 2, "released")[0])
    conserved(ran, 3)
    assert same(ran.model("a", 3)[0], ran.model("d", 3)[0])


def test_who_is_there_but_does_not_acknowledge_is_not_waited_for_for_ever(folder):
    failing = [("deliver", "b", at) for at in (1, 2, 3, 4)]
    ran = run(folder, *JOB, "lr=0.05", "rounds=6", failing=failing)
    assert ("push", "b", 5) in ran.grid.asked
    assert conserved(ran, 6) == pytest.approx(len(NAMES) + 0.5)


def test_who_had_mixed_what_went_back_is_believed_when_it_is_heard_again(folder):
    ran = run(folder, *JOB, "lr=0.05", "rounds=6", losing=[("deliver", "b", at) for at in (1, 2, 3, 4)])
    assert ("push", "b", 5) in ran.grid.asked
    assert max(failure["round"] for failure in ran.result["failures"]) == 4
    assert conserved(ran, 6) == pytest.approx(len(NAMES) + 0.5)  # the half that a had sent counts twice
