"""A name belongs to the node that answered under it first; whoever returns as another node proves to be the same."""

import json
import shlex
import stat

import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from harness import node_configs, write_shards

from flwr_replay.client_app import app
from flwr_replay.config.compose import compose
from flwr_replay.errors import PrivacyError, RunError
from flwr_replay.institution.identity import KEY, proof_of
from flwr_replay.payloads.common import Failure
from flwr_replay.report.progress import Display
from flwr_replay.runs.engine import InlineGrid
from flwr_replay.runs.execute import execute
from flwr_replay.wire.records import config_in

JOB = ["task=medmnist", "task.size=8", "classes=3", "model=mlp", "model.width=4", "batch_size=16", "device=cpu"]
DP = ["strategy=fedavg", "dp=classifier", "target_epsilon=8"]
SIZES = {"a": 40, "b": 33, "c": 20}


class Grid(InlineGrid):
    """Nodes 2, 3, 4 are a, b, c; at the n-th look at who is there, `turns[n]` changes that."""

    looks, turns = 0, {}

    def get_node_ids(self):
        self.looks += 1
        self.turns.get(self.looks, lambda grid: None)(self)
        return super().get_node_ids()

    def leave(self, *nodes):
        self.away = {node: self.contexts.pop(node) for node in nodes}

    def join(self, node, folder, name, state, **more):
        config = {"name": name, "data": str(folder / f"{name}.npz"), "state": str(folder / state), **more}
        self.contexts[node] = Context(1, node, config, RecordDict(), self.run_config)

    def _answer(self, message):
        reply = super()._answer(message)
        self.__dict__.setdefault("asked", []).append(
            (message.metadata.dst_node_id, config_in(message.content)["stage"])
        )
        return reply


def run(folder, turns, *options, names="abc", resume="", rounds=3, state="state"):
    if not (folder / "a.npz").exists():
        write_shards(folder, SIZES)
    overrides = [*JOB, f"nodes={len(names)}", *(options or ["strategy=fedavg"]), f"rounds={rounds}"]
    overrides += [f"resume={resume}"] if resume else [f"runs_dir={folder / 'runs'}", "run_name=x"]
    run_config = {"overrides": shlex.join(overrides)}
    grid = Grid(app, run_config, node_configs(folder, folder / state, names))
    grid.turns, grid.run_config = turns, run_config
    result, path = execute(grid, compose(overrides), Display())
    return result, path, grid


def lines(path, name):
    return [json.loads(line) for line in (path / f"{name}.jsonl").read_text().splitlines()]


def reasons(result):
    return {failure["institution"]: failure["reason"] for failure in result["failures"]}


FIRST = 2  # looks: one while the run waits for nodes, one at the roll call; then one for every exchange


def test_who_answers_as_another_while_that_is_away_is_refused(tmp_path):
    def swap(grid):
        grid.leave(3)
        grid.join(9, tmp_path, "b", "other")

    result, path, grid = run(tmp_path, {FIRST + 2: swap}, *DP)
    assert reasons(result).keys() == {"9"}
    assert "must prove to be the same institution" in reasons(result)["9"]
    assert {stage for node, stage in grid.asked if node == 9} == {"roll-call"}
    stated = [line["round"] for line in lines(path, "privacy") if line["institution"] == "b"]
    assert stated == [1]
    assert all(line["round"] <= 1 for line in lines(path, "ledger") if line["institution"] == "b")
    assert result["privacy"]["b"] == {
        key: value for key, value in lines(path, "privacy")[1].items() if key not in ("round", "institution")
    }


def test_an_institution_that_returns_as_another_node_with_its_key_goes_on(tmp_path):
    def swap(grid):
        grid.leave(3)
        grid.join(9, tmp_path, "b", "state")

    result, path, _ = run(tmp_path, {FIRST + 2: swap}, *DP)
    assert reasons(result) == {}
    assert [line["round"] for line in lines(path, "privacy") if line["institution"] == "b"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"name": "d"}, "a node keeps its name in a run; it was 'b' and now answers as 'd'"),
        ({"data": "c.npz"}, "b had 33 training examples and now has 20"),
    ],
)
def test_who_was_away_is_asked_again_and_must_be_the_same(tmp_path, change, told):
    def back(grid):
        config = {**grid.away[3].node_config, **change}
        config["data"] = str(tmp_path / change.get("data", "b.npz"))
        grid.contexts[3] = Context(1, 3, config, RecordDict(), grid.run_config)

    turns = {FIRST + 2: lambda grid: grid.leave(3), FIRST + 3: back}
    result, _, grid = run(tmp_path, turns)
    assert told in reasons(result)["b"]
    assert [stage for node, stage in grid.asked if node == 3] == ["roll-call", "train", "evaluate", "roll-call"]


def test_who_was_away_and_is_the_same_goes_on(tmp_path):
    turns = {FIRST + 2: lambda grid: grid.leave(3), FIRST + 3: lambda grid: grid.contexts.update(grid.away)}
    result, _, grid = run(tmp_path, turns)
    assert reasons(result) == {}
    assert [stage for node, stage in grid.asked if node == 3].count("train") == 2


def test_two_that_begin_under_one_name_are_both_refused_and_the_others_go_on(tmp_path):
    result, _, _ = run(tmp_path, {1: lambda grid: grid.join(9, tmp_path, "b", "other")})
    assert reasons(result).keys() == {"3", "9"}
    assert all("two SuperNodes answer as 'b'" in reason for reason in reasons(result).values())
    assert sorted(result["final"]["institutions"]) == ["a", "c"]


def test_a_run_of_one_name_only_ends_with_the_reason(tmp_path):
    with pytest.raises(RunError, match=r"no institution takes part; 2, 3: .*two SuperNodes answer as 'b'"):
        run(tmp_path, {}, names="bb")


def test_a_name_in_use_is_free_once_its_owner_has_gone(tmp_path):
    turns = {
        FIRST + 1: lambda grid: grid.join(9, tmp_path, "b", "state"),  # restarted before Flower has noticed
        FIRST + 2: lambda grid: grid.leave(3),
    }
    result, _, grid = run(tmp_path, turns)
    assert list(reasons(result)) == ["9"]
    assert [stage for node, stage in grid.asked if node == 9].count("train") == 2


def test_a_resumed_run_knows_its_institutions(tmp_path):
    _, path, _ = run(tmp_path, {})

    def strangers(grid):
        grid.leave(2, 3)
        grid.join(8, tmp_path, "a", "state")
        grid.join(9, tmp_path, "b", "other")

    result, _, _ = run(tmp_path, {1: strangers}, resume=path, rounds=4)
    assert reasons(result).keys() == {"9"}
    assert sorted(result["final"]["institutions"]) == ["a", "c"]


class Renaming(Grid):
    """What node 4 answers to the roll call is another's notice, or tells what cannot be."""

    def _answer(self, message):
        reply = super()._answer(message)
        if (message.metadata.dst_node_id, config_in(message.content)["stage"]) == (4, "roll-call"):
            return Message(self.told, reply_to=message)
        return reply


@pytest.mark.parametrize(
    ("told", "name", "reason"),
    [
        (Failure(failure="no\nmore \x1b[1m", error="RefusedError", name="a").encode(), "4", "no more [1m"),
        (Failure(failure="no", error="RefusedError", name="../a").encode(), "4", "no"),
        (Failure(failure="no", error="RefusedError", name="d").encode(), "d", "no"),
        ({"label-sum": 1e200, "label-squares": 1e200}, "4", "sums of 20 labels that no labels below 1e+12 have"),
        ({"label-sum": 1e13, "label-squares": 1e26}, "4", "that no labels below 1e+12 have"),
        ({"label-sum": 1.0}, "4", "go together"),
        ({"num-examples": 10**12}, "4", "from 1 to 1,000,000,000 training examples"),
        ({"num-examples": 0}, "4", "from 1 to 1,000,000,000 training examples"),
        ({"raw-bytes": 10**18}, "4", "of at most 1,000,000,000,000,000 bytes"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_what_cannot_be_at_the_roll_call_is_one_institutions_failure(tmp_path, told, name, reason, late, monkeypatch):
    if isinstance(told, dict):
        numbers = {"num-examples": 20, "raw-bytes": 1, **told}
        told = RecordDict({"metrics": MetricRecord(numbers), "config": ConfigRecord({"name": "c"})})
    monkeypatch.setattr(f"{__name__}.Grid", Renaming)
    monkeypatch.setattr(Renaming, "told", told, raising=False)
    turns = {1: lambda grid: grid.leave(4), FIRST + 2: lambda grid: grid.contexts.update(grid.away)} if late else {}
    result, _, _ = run(tmp_path, turns, *(["strategy=fedavg", "nodes=2"] if late else []))
    assert reasons(result).keys() == {name}
    assert reason in reasons(result)[name]
    assert sorted(result["final"]["institutions"]) == ["a", "b"]


def test_an_identity_is_made_once_and_is_its_owners_only(tmp_path):
    proof = proof_of(tmp_path, "run-1")
    assert proof == proof_of(tmp_path, "run-1") != proof_of(tmp_path, "run-2")
    assert len(proof) == 64
    key = tmp_path / KEY
    assert [path.name for path in tmp_path.iterdir()] == [KEY]
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    key.chmod(0o644)
    with pytest.raises(PrivacyError, match="chmod 600"):
        proof_of(tmp_path, "run-1")
    key.chmod(0o600)
    key.write_bytes(b"short")
    with pytest.raises(PrivacyError, match="must hold 64 hexadecimal digits"):
        proof_of(tmp_path, "run-1")
