"""Sums from which institutions are missing: what the server may ask for, and how a run goes on."""

import numpy as np
import pytest
from harness import node_configs, run, write_shards
from hostile_server import HostileServer, refusal, weights
from sealed_runs import SMALL, pinned

from flwr_replay.errors import ConfigError, RunError
from flwr_replay.payloads.fedsgd import Differentiate
from flwr_replay.payloads.fedstats import Summarise
from flwr_replay.wire.masked import MASKED

NAMES = "abcd"
SHARED = [*SMALL, "masked=true", "nodes=4", "noise=shared", "delta=0.001", "colluders=0", "dropouts=1"]
GRADIENT = [*SHARED, "strategy=fedsgd", "dp=gradient", "privacy.sigma=2"]
SUMS = [*SHARED, "strategy=fedstats", "dp=statistics", "privacy.sigma=2"]


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path, dict.fromkeys(NAMES, 40))
    pinned(tmp_path, NAMES)
    return tmp_path


def server_of(folder, name, options):
    return HostileServer(folder, *options, name=name, **{"seal-peers": str(folder / f"peers-{NAMES}.txt")})


def ask(server, cohort, exchange=1, kind=Differentiate, **other):
    asked = {"run": "r", "server_round": exchange, "total": 160, "cohort": cohort} | other
    return server.send(kind(arrays=server.weights, **asked))


def check(answers):
    return sum(np.int64(answer[MASKED].view(np.int64)) for answer in answers)


# --- a hostile server -------------------------------------------------------------------------------------------------


def test_masks_cancel_in_the_cohort_and_nowhere_else(folder):
    servers = {name: server_of(folder, name, GRADIENT) for name in NAMES}
    abc = {name: weights(ask(servers[name], list("abc"))) for name in "abc"}
    assert not check(abc.values()).any()
    assert check([abc["a"], abc["b"]]).any()
    split = [
        weights(ask(servers[name], list(cohort), 2)) for name, cohort in (("a", "abc"), ("b", "abc"), ("c", "bcd"))
    ]
    assert check(split).any()
    later = [weights(ask(servers[name], list("acd"), 3)) for name in "acd"]  # d was not asked before
    assert not check(later).any()


@pytest.mark.parametrize(
    "cohort", [["a"], ["a", "b"], ["b", "c", "d"], ["a", "a", "b", "c"], ["a", "b", "x"], [1, 2, 3]]
)
def test_a_cohort_is_of_enough_pinned_institutions(folder, cohort):
    server = server_of(folder, "a", GRADIENT)
    reply = ask(server, cohort)
    assert refusal(reply)
    assert not weights(reply)
    assert server.charges("r") == []


def test_an_exchange_has_one_cohort(folder):
    server = server_of(folder, "a", GRADIENT)
    one, again = ask(server, list("abc")), ask(server, list("abc"))
    assert all(weights(one)[name].tobytes() == array.tobytes() for name, array in weights(again).items())
    assert "an exchange has one answer" in refusal(ask(server, list("abd")))


def test_sums_that_are_made_once_are_added_to_those_of_the_same_institutions(folder):
    """The same bytes in two sums, one without d: the difference would show d's, with its own share of noise alone."""
    server = server_of(folder, "a", SUMS)
    assert weights(ask(server, list("abcd"), 1, Summarise, clip=10.0))
    assert "of the same institutions" in refusal(ask(server, list("abc"), 2, Summarise, clip=10.0))
    assert weights(ask(server, list("abcd"), 3, Summarise, clip=10.0))


# --- an honest run ----------------------------------------------------------------------------------------------------


def ran(folder, options, **script):
    nodes = node_configs(folder, folder / "state", names=NAMES)
    nodes = [{**node, "seal-peers": str(folder / f"peers-{NAMES}.txt")} for node in nodes]
    return run(folder, [*options, "rounds=4", "evaluate_every=4"], nodes, **script)


def test_a_run_goes_on_without_who_fails_and_pays_for_the_sum_that_was_lost(folder):
    done = ran(folder, GRADIENT, failing=[("differentiate", "d", 2)])
    asked = {
        at: [name for stage, name, n in done.grid.asked if (stage, n) == ("differentiate", at)] for at in range(1, 5)
    }
    assert {at: "".join(names) for at, names in asked.items()} == {1: "abcd", 2: "abcd", 3: "abc", 4: "abc"}
    assert [len(done.charges(name)) for name in NAMES] == [4, 4, 4, 1]
    assert len(done.result["failures"]) == 1


def test_with_too_few_a_run_stops_with_a_line(folder):
    with pytest.raises(RunError, match="a sum needs 3 institutions; exchange 3 has 2"):
        ran(folder, GRADIENT, failing=[("differentiate", "c", 2), ("differentiate", "d", 2)])


def test_sums_that_one_has_left_are_not_made_for_others(folder):
    with pytest.raises(RunError, match="one left before they were read"):
        ran(folder, SUMS, failing=[("summarise", "d", 1)])


def test_who_is_not_there_at_the_start_is_not_in_the_sum(folder):
    done = ran(
        folder, [*SUMS, "wait=0.1"], there=lambda grid: [node for node in grid.contexts if grid.name_of(node) != "d"]
    )
    assert done.grid.who("summarise") == ["a", "b", "c"]
    assert done.result["bytes"]["up"] > 0


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["dropouts=2"], "a sum needs three institutions"),
        (["colluders=2"], "a sum needs three institutions"),
        (["dropouts=-1"], "privacy.dropouts"),
        (["noise=secret"], "are for noise=shared"),
    ],
)
def test_a_mistake_is_one_line(folder, options, line):
    with pytest.raises(ConfigError, match=line):
        ran(folder, [*(o for o in GRADIENT if o.partition("=")[0] != options[0].partition("=")[0]), *options])


def test_who_has_failed_and_gone_is_asked_again_when_it_is_back(folder):
    """d fails in exchange 2, is gone when the server looks before exchange 3, and is there again before exchange 4."""

    def there(grid):
        failed = ("differentiate", "d", 2) in grid.asked
        gone = failed and ("differentiate", "a", 3) not in grid.asked
        return [node for node in grid.contexts if not (gone and grid.name_of(node) == "d")]

    done = ran(folder, GRADIENT, failing=[("differentiate", "d", 2)], there=there)
    assert [at.exchange for at in done.grid.asked if at[:2] == ("differentiate", "d")] == [1, 2, 4]
    assert [len(done.charges(name)) for name in "ad"] == [4, 2]
