"""A name belongs to the node that answered under it first; whoever returns as another node proves to be the same."""

import json
import shlex
import stat

import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from grid import Grid
from harness import SHARDS, node_configs, write_shards

from flwr_replay.client_app import app
from flwr_replay.config.compose import compose
from flwr_replay.errors import PrivacyError, RunError
from flwr_replay.payloads.common import Failure
from flwr_replay.report.progress import Display
from flwr_replay.report.run_page import write_run_page
from flwr_replay.runs.execute import execute
from flwr_replay.state.store import KEY, proof_of

JOB = [*SHARDS, "classes=3", "model=mlp", "model.width=4", "batch_size=16", "device=cpu"]
DP = ["strategy=fedavg", "dp=classifier", "sigma=2"]
SIZES = {"a": 40, "b": 33, "c": 20}


def remove_nodes(grid, *nodes):
    return {node: grid.contexts.pop(node) for node in nodes}


def add_node(grid, node, folder, name, state):
    config = {"name": name, "data": str(folder / f"{name}.npz"), "state": str(folder / state)}
    run_config = next(iter(grid.contexts.values())).run_config
    grid.contexts[node] = Context(1, node, config, RecordDict(), run_config)


def send_away(grid, node):
    """Let a node leave; it comes back with `back`."""
    grid.away = remove_nodes(grid, node)


def bring_back(grid):
    grid.contexts.update(grid.away)


def stages(grid, node):
    """Return what a node was asked for."""
    return [at.stage for at, message, _ in grid.log if message.metadata.dst_node_id == node]


def at_looks(turns):
    def there(grid):
        if turn := turns.get(grid.looks):
            turn(grid)

    return there


def run(folder, turns, *options, names="abc", resume="", rounds=3, after=None):
    """Nodes 2, 3, 4 are a, b, c; at the n-th look at who is there, `turns[n]` changes that."""
    if not (folder / "a.npz").exists():
        write_shards(folder, SIZES)
    overrides = [*JOB, f"nodes={len(names)}", *(options or ["strategy=fedavg"]), f"rounds={rounds}"]
    overrides += [f"resume={resume}"] if resume else [f"runs_dir={folder / 'runs'}", "run_name=x"]
    grid = Grid(app, {"overrides": shlex.join(overrides)}, node_configs(folder, folder / "state", names))
    grid.there, grid.after = at_looks(turns), after
    result, path = execute(grid, compose(overrides), Display())
    return result, path, grid


def json_lines(path, name):
    return [json.loads(line) for line in (path / f"{name}.jsonl").read_text().splitlines()]


def reasons(result):
    return {failure["institution"]: failure["reason"] for failure in result["failures"]}


GONE = "its node has gone; the run goes on without it until it returns"
FIRST = 2  # looks: one while the run waits for nodes, one at the roll call; then one for every exchange


def test_who_answers_as_another_while_that_is_away_is_refused(tmp_path):
    def swap(grid):
        remove_nodes(grid, 3)
        add_node(grid, 9, tmp_path, "b", "other")

    result, path, grid = run(tmp_path, {FIRST + 2: swap}, *DP)
    assert reasons(result).keys() == {"9", "b"}
    assert reasons(result)["b"] == GONE
    assert "must prove to be the same institution" in reasons(result)["9"]
    assert set(stages(grid, 9)) == {"roll-call"}
    stated = [line["round"] for line in json_lines(path, "privacy") if line["institution"] == "b"]
    assert stated == [1]
    assert all(line["round"] <= 1 for line in json_lines(path, "ledger") if line["institution"] == "b")
    assert result["privacy"]["b"] == {
        key: value for key, value in json_lines(path, "privacy")[1].items() if key not in ("round", "institution")
    }


def test_an_institution_that_returns_as_another_node_with_its_key_goes_on(tmp_path):
    def swap(grid):
        remove_nodes(grid, 3)
        add_node(grid, 9, tmp_path, "b", "state")

    result, path, _ = run(tmp_path, {FIRST + 2: swap}, *DP)
    assert reasons(result) == {}
    assert [line["round"] for line in json_lines(path, "privacy") if line["institution"] == "b"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"name": "d"}, "a node keeps its name in a run; it was 'b' and now answers as 'd'"),
        ({"data": "c.npz"}, "b had 33 training examples and now has 20"),
    ],
)
def test_who_was_away_is_asked_again_and_must_be_the_same(tmp_path, change, reported):
    def changed(grid):
        bring_back(grid)
        config = {"data": "b.npz", **change}
        grid.contexts[3].node_config |= {**config, "data": str(tmp_path / config["data"])}

    turns = {FIRST + 2: lambda grid: send_away(grid, 3), FIRST + 3: changed}
    result, _, grid = run(tmp_path, turns)
    assert reported in reasons(result)["b"]
    assert stages(grid, 3) == ["roll-call", "train", "evaluate", "roll-call"]


def test_who_was_away_and_is_the_same_goes_on(tmp_path):
    turns = {FIRST + 2: lambda grid: send_away(grid, 3), FIRST + 3: bring_back}
    result, _, grid = run(tmp_path, turns)
    assert result["failures"] == [{"round": 2, "institution": "b", "reason": GONE}]
    assert stages(grid, 3).count("train") == 2


def test_two_that_begin_under_one_name_are_both_refused_and_the_others_go_on(tmp_path):
    result, _, _ = run(tmp_path, {1: lambda grid: add_node(grid, 9, tmp_path, "b", "other")})
    assert reasons(result).keys() == {"3", "9"}
    assert all("two SuperNodes answer as 'b'" in reason for reason in reasons(result).values())
    assert sorted(result["final"]["institutions"]) == ["a", "c"]


def test_a_run_of_one_name_only_ends_with_the_reason(tmp_path):
    with pytest.raises(RunError, match=r"no institution takes part; 2, 3: .*two SuperNodes answer as 'b'"):
        run(tmp_path, {}, names="bb")


def test_a_name_in_use_is_free_once_its_owner_has_gone(tmp_path):
    turns = {
        FIRST + 1: lambda grid: add_node(grid, 9, tmp_path, "b", "state"),  # restarted before Flower has noticed
        FIRST + 2: lambda grid: remove_nodes(grid, 3),
    }
    result, _, grid = run(tmp_path, turns)
    assert list(reasons(result)) == ["9"]
    assert stages(grid, 9).count("train") == 2


def test_a_resumed_run_knows_its_institutions(tmp_path):
    _, path, _ = run(tmp_path, {})

    def strangers(grid):
        remove_nodes(grid, 2, 3)
        add_node(grid, 8, tmp_path, "a", "state")
        add_node(grid, 9, tmp_path, "b", "other")

    result, _, _ = run(tmp_path, {1: strangers}, resume=path, rounds=4)
    assert reasons(result).keys() == {"9", "b"}
    assert sorted(result["final"]["institutions"]) == ["a", "c"]


def test_a_node_keeps_its_name_in_a_resumed_run(tmp_path):
    _, path, _ = run(tmp_path, {})
    renamed = {1: lambda grid: grid.contexts[3].node_config.update({"name": "d"})}
    result, _, _ = run(tmp_path, renamed, resume=path, rounds=4)
    assert reasons(result) == {
        "b": "a node keeps its name in a run; it was 'b' and now answers as 'd': begin a new run"
    }
    assert sorted(result["final"]["institutions"]) == ["a", "c"]


def test_a_node_whose_name_another_has_by_now_is_not_called_by_it(tmp_path):
    def swap(grid):
        send_away(grid, 3)
        add_node(grid, 9, tmp_path, "b", "state")

    result, _, _ = run(tmp_path, {FIRST + 1: swap, FIRST + 2: bring_back})
    assert reasons(result).keys() == {"3"}
    assert "b" in result["final"]["institutions"]


@pytest.mark.parametrize(
    ("reported", "name", "reason"),
    [
        (Failure(failure="no\nmore \x1b[1m", error="RefusedError", name="a").encode(), "4", "no more [1m"),
        (Failure(failure="no", error="RefusedError", name="../a").encode(), "4", "no"),
        (Failure(failure="no", error="RefusedError", name="d").encode(), "d", "no"),
        ({"label-sum": 1e99, "label-squares": 1e99}, "4", "sums of 20 labels that no labels below 1e+12 have"),
        ({"label-sum": 1e13, "label-squares": 1e26}, "4", "that no labels below 1e+12 have"),
        ({"label-sum": 1.0}, "4", "go together"),
        ({"num-examples": 10**12}, "4", "from 1 to 1,000,000,000 training examples"),
        ({"num-examples": 0}, "4", "from 1 to 1,000,000,000 training examples"),
        ({"raw-bytes": 10**18}, "4", "counts to 1e+15"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_what_cannot_be_at_the_roll_call_is_one_institutions_failure(tmp_path, reported, name, reason, late):
    if isinstance(reported, dict):
        numbers = {"num-examples": 20, "raw-bytes": 1, **reported}
        reported = RecordDict({"metrics": MetricRecord(numbers), "config": ConfigRecord({"name": "c"})})

    def tells(grid, message, reply):
        """Answer node 4's roll call with another's notice, or with what cannot be."""
        if (message.metadata.dst_node_id, grid.asked[-1].stage) == (4, "roll-call"):
            return Message(reported, reply_to=message)
        return reply

    turns = {1: lambda grid: send_away(grid, 4), FIRST + 2: bring_back} if late else {}
    result, _, _ = run(tmp_path, turns, *(["strategy=fedavg", "nodes=2"] if late else []), after=tells)
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


def test_who_has_gone_is_said_once_by_name_and_stands_on_the_page(tmp_path, caplog):
    turns = {
        FIRST + 2: lambda grid: send_away(grid, 3),
        FIRST + 4: bring_back,
        FIRST + 5: lambda grid: send_away(grid, 3),
    }
    result, path, grid = run(tmp_path, turns, rounds=5)
    assert [(failure["round"], failure["institution"], failure["reason"]) for failure in result["failures"]] == [
        (2, "b", GONE),
        (5, "b", GONE),
    ]
    assert stages(grid, 3).count("train") == 2  # in exchanges 1 and 4
    assert f"b takes no part in exchange 2: {GONE}" in caplog.text
    assert f"b, exchange 5: {GONE}" in write_run_page(path).read_text()
