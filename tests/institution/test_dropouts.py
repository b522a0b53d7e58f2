"""Sums from which institutions are missing: what the server may ask for, and how a run goes on."""

import logging
from contextlib import suppress

import numpy as np
import pytest
from harness import node_configs, run, write_shards
from hostile_server import HostileServer, metrics, refusal, weights
from sealed_runs import SMALL, pinned_keys

from flwr_replay.errors import ConfigError, RunError
from flwr_replay.institution.budget import PrivacyBudget
from flwr_replay.memory import forget
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
    pinned_keys(tmp_path, NAMES)
    return tmp_path


def server_of(folder, name, options):
    return HostileServer(folder, *options, name=name, **{"seal-peers": str(folder / f"peers-{NAMES}.txt")})


def ask_cohort(server, cohort, exchange=1, kind=Differentiate, **other):
    spare = len(cohort) - server.config.nodes + server.config.privacy.dropouts
    asked = {
        "run": "r",
        "exchange": exchange,
        "total": 160,
        "cohort": cohort,
        "spare": max(spare, 0) or None,
    } | other
    return server.send(kind(arrays=server.weights, **asked))


def check(answers):
    return sum(np.int64(answer[MASKED].view(np.int64)) for answer in answers)


# --- a hostile server -------------------------------------------------------------------------------------------------


def test_masks_cancel_in_the_cohort_and_nowhere_else(folder):
    servers = {name: server_of(folder, name, GRADIENT) for name in NAMES}
    abc = {name: weights(ask_cohort(servers[name], list("abc"))) for name in "abc"}
    assert not check(abc.values()).any()
    assert check([abc["a"], abc["b"]]).any()
    split = [
        weights(ask_cohort(servers[name], list(cohort), 2))
        for name, cohort in (("a", "abc"), ("b", "abc"), ("c", "bcd"))
    ]
    assert check(split).any()
    later = [weights(ask_cohort(servers[name], list("acd"), 3)) for name in "acd"]  # d was not asked before
    assert not check(later).any()


BAD = [["a"], ["a", "b"], ["b", "c", "d"], ["a", "a", "b", "c"], ["a", "b", "x"], [*"abc", ""], ["a ", "b", "c"]]
BAD += [
    [1, 2, 3],
    [b"a", b"b", b"c"],
    [0.5] * 3,
    [True] * 3,
    "abc",
    3,
    b"abc",
    ["a\nb"] * 9,
    [*"abcd", *map(str, range(10**4))],
]


@pytest.mark.parametrize("cohort", BAD, ids=lambda cohort: repr(cohort)[:20])
def test_a_cohort_is_of_enough_pinned_institutions(folder, cohort):
    server = server_of(folder, "a", GRADIENT)
    request = Differentiate(arrays=server.weights, run="r", exchange=1, total=160)
    content = request.encode()
    content["config"]["cohort"] = cohort
    reply = server.send_content(content)
    assert refusal(reply)
    assert len(refusal(reply)) < 500
    assert not weights(reply)
    assert server.charges("r") == []


def test_without_dropouts_a_sum_is_of_all(folder):
    options = [*GRADIENT, "dropouts=0"]
    assert "a sum is of 4 institutions" in refusal(ask_cohort(server_of(folder, "a", options), list("abc")))
    all_of = [weights(ask_cohort(server_of(folder, name, options), list("abcd"), 2)) for name in NAMES]
    assert not check(all_of).any()


def test_the_same_weights_in_two_cohorts_are_two_releases(folder):
    server = server_of(folder, "a", GRADIENT)
    first, second = ask_cohort(server, list("abc")), ask_cohort(server, list("abd"), 2)
    assert [charge["steps"] for charge in server.charges("r")] == [1, 1]
    assert metrics(first)["epsilon"] < metrics(second)["epsilon"]
    assert not (server.state / "runs" / "r" / "gradient-000001.safetensors").samefile(
        server.state / "runs" / "r" / "gradient-000002.safetensors"
    )


@pytest.mark.parametrize("kind", [Differentiate, Summarise])
def test_names_with_spaces_are_not_taken_for_two(tmp_path, kind):
    """The same noise in two sums would be in neither."""
    names = ["a", "b", "a b", "c", "d", "e", "f"]
    write_shards(tmp_path, dict.fromkeys(names, 40))
    peers = pinned_keys(tmp_path, names)["c"]
    options = [*(GRADIENT if kind is Differentiate else SUMS), "nodes=7", "dropouts=2"]
    server = HostileServer(tmp_path, *options, name="c", **peers)
    clip = {} if kind is Differentiate else {"clip": 10.0}
    reply = ask_cohort(server, ["a", "b", "c", "d", "e", "f"], 1, kind, total=280, **clip)
    assert weights(reply)
    two = ask_cohort(server, ["a b", "c", "d", "e", "f"], 2, kind, total=280, **clip)
    assert "of the same institutions" in refusal(two) if clip else len(server.charges("r")) == 2


def test_an_exchange_has_one_cohort(folder):
    server = server_of(folder, "a", GRADIENT)
    first, again = ask_cohort(server, list("abc")), ask_cohort(server, list("abc"))
    assert all(weights(first)[name].tobytes() == array.tobytes() for name, array in weights(again).items())
    assert "an exchange has one answer" in refusal(ask_cohort(server, list("abd")))


def test_sums_that_are_made_once_are_added_to_those_of_the_same_institutions(folder):
    """The same bytes in two sums, one without d: the difference would show d's, with its own share of noise alone."""
    server = server_of(folder, "a", SUMS)
    assert weights(ask_cohort(server, list("abcd"), 1, Summarise, clip=10.0))
    assert "of the same institutions" in refusal(ask_cohort(server, list("abc"), 2, Summarise, clip=10.0))
    assert weights(ask_cohort(server, list("abcd"), 3, Summarise, clip=10.0))


# --- an honest run ----------------------------------------------------------------------------------------------------


def ran(folder, options, **script):
    nodes = node_configs(folder, folder / "state", names=NAMES)
    nodes = [{**node, "seal-peers": str(folder / f"peers-{NAMES}.txt")} for node in nodes]
    return run(folder, ["rounds=4", "evaluate_every=4", *options], nodes, **script)


@pytest.mark.parametrize(("how", "of_d"), [("failing", 1), ("losing", 2)])
def test_a_run_goes_on_without_who_fails_or_is_late(folder, how, of_d):
    done = ran(folder, GRADIENT, **{how: [("differentiate", "d", 2)]})
    asked = {
        at: [name for stage, name, n in done.grid.asked if (stage, n) == ("differentiate", at)] for at in range(1, 5)
    }
    assert {at: "".join(names) for at, names in asked.items()} == {1: "abcd", 2: "abcd", 3: "abc", 4: "abc"}
    assert [len(done.charges(name)) for name in NAMES] == [4, 4, 4, of_d]
    assert len(done.result["failures"]) == 1
    stated = {name: of["epsilon"] for name, of in done.result["privacy"].items()}
    assert stated["a"] == stated["b"] == stated["c"] > stated["d"] > 0


def test_with_too_few_a_run_stops_with_a_line(folder):
    with pytest.raises(RunError, match="a sum needs 3 institutions; exchange 3 has 2"):
        ran(folder, GRADIENT, failing=[("differentiate", "c", 2), ("differentiate", "d", 2)])


def test_when_all_have_gone_the_run_stops_and_no_exchange_passes(folder):
    with pytest.raises(RunError, match="a sum needs 3 institutions; exchange 3 has 0"):
        ran(folder, GRADIENT, name="gone", there=lambda grid: [] if ("differentiate", "d", 2) in grid.asked else None)
    forget()
    done = ran(folder, GRADIENT, resume=str(folder / "runs" / "gone"))
    assert [len(done.charges(name)) for name in NAMES] == [4] * 4


def without_d(grid):
    return [node for node in grid.contexts if grid.name_of(node) != "d"]


@pytest.mark.parametrize("rounds", [1, 4])
def test_a_sum_that_is_made_once_and_lost_is_no_model(folder, rounds):
    """The run stops, also if that was its last exchange; when all are there again, it goes on with the same sums."""
    options = [*SUMS, f"rounds={rounds}", f"evaluate_every={rounds}", "wait=0.1"]
    line = "; c, d did not answer; .*: resume the run when all that were asked at first are there, and nobody else"
    with pytest.raises(RunError, match=line):
        ran(folder, options, name="lost", failing=[("summarise", "c", 1), ("summarise", "d", 1)])
    forget()
    with pytest.raises(RunError, match=r"; a, b did not answer; .* an exchange has one answer"):
        ran(folder, options, resume=str(folder / "runs" / "lost"), there=without_d)
    forget()
    done = ran(folder, options, resume=str(folder / "runs" / "lost"))
    assert [[charge["steps"] for charge in done.charges(name) if charge["steps"]] for name in NAMES] == [[1]] * 4
    assert {of["epsilon"] for of in done.result["privacy"].values()} == {done.result["privacy"]["a"]["epsilon"]}


def test_who_is_not_there_at_the_start_is_not_in_the_sum(folder, caplog):
    """It comes later and tests; nobody is said to have failed, and it has stated no epsilon."""
    caplog.set_level(logging.INFO, "flwr")

    def there(grid):
        return without_d(grid) if ("evaluate", "a", 1) not in grid.asked else None

    done = ran(folder, [*SUMS, "wait=0.1", "evaluate_every=1"], there=there)
    assert done.grid.who("summarise") == ["a", "b", "c"]
    assert "d" in done.grid.who("evaluate")
    assert "no sum can be read" not in caplog.text
    assert "waiting for who has gone" not in caplog.text  # it was waited for already
    assert [name for name, stated in done.result["privacy"].items() if stated] == ["a", "b", "c"]
    assert done.result["failures"] == []


@pytest.mark.parametrize("back", [True, False])
@pytest.mark.parametrize("at", [2, 3])
def test_a_run_that_broke_off_goes_on_with_other_institutions_than_before(folder, at, back):
    """They add to one sum in an exchange, so what others began before is lost; after that, they go on."""
    breaks = {"failing": [("differentiate", "d", 2)], "breaking": [("differentiate", "c", at)]}
    with suppress(KeyboardInterrupt):
        ran(folder, GRADIENT, name="broken", **breaks)
    forget()
    done = ran(
        folder, [*GRADIENT, "wait=0.1"], resume=str(folder / "runs" / "broken"), there=None if back else without_d
    )
    assert done.result["rounds"] == 4
    asked = [request.exchange for request in done.grid.asked if request[:2] == ("differentiate", "a")]
    assert asked == list(range(at, 5))
    spent = {name: sum(charge["steps"] for charge in done.charges(name)) for name in NAMES}
    assert spent == dict.fromkeys("abc", 4) | {"d": {2: 4, 3: 3}[at] if back else 1}
    refused = {
        failure["round"] for failure in done.result["failures"] if "an exchange has one answer" in failure["reason"]
    }
    assert refused == ({at} if (at, back) != (2, True) and (at, back) != (3, False) else set())


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


def test_who_has_failed_is_asked_again_as_another_node(folder):
    """d fails in exchange 2, and is started again before anybody has seen that it had gone."""

    def there(grid):
        if ("differentiate", "d", 2) in grid.asked and max(grid.contexts) < 99:
            [node] = [node for node in grid.contexts if grid.name_of(node) == "d"]
            grid.contexts[99] = grid.contexts.pop(node)

    done = ran(folder, GRADIENT, failing=[("differentiate", "d", 2)], there=there)
    assert [at.exchange for at in done.grid.asked if at[:2] == ("differentiate", "d")] == [1, 2, 3, 4]


def test_who_fails_at_a_test_adds_to_the_next_sum(folder):
    done = ran(folder, [*GRADIENT, "evaluate_every=1"], failing=[("evaluate", "d")])
    assert [len(done.charges(name)) for name in NAMES] == [4] * 4
    assert set(done.result["final"]["institutions"]) == {*"abc"}


def test_what_a_crash_has_used_up_ends_in_a_line(folder, monkeypatch):
    """d was charged for exchange 1, crashed, and was charged again: it cannot add to the last sum."""
    charge = PrivacyBudget.charge

    def charges(self, mechanism, cost, request):
        for _ in range(1 + ((self.institution.name, request.exchange) == ("d", 1))):
            charge(self, mechanism, cost, request)

    monkeypatch.setattr(PrivacyBudget, "charge", charges)
    done = ran(folder, [*GRADIENT, "privacy.target-epsilon=2"])
    [failure] = done.result["failures"]
    assert (failure["round"], failure["institution"]) == (4, "d")
    assert "the privacy budget is epsilon 2 at delta 0.001; 1 steps of gradient would make" in failure["reason"]
    assert max(of["epsilon"] for of in done.result["privacy"].values()) <= 2
