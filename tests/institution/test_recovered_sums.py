"""Sums that are read though institutions have failed: what a server and those who help it can make of it."""

import itertools
import logging
import re
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
from harness import json_lines, node_configs, run, write_shards
from hostile_server import HostileServer, refusal, weights
from safetensors.numpy import load_file
from sealed_runs import SMALL, pinned_keys

from flwr_replay.ciphers import masking
from flwr_replay.ciphers.recovery import SECRET, strip
from flwr_replay.config.compose import compose
from flwr_replay.config.sections import TrainingConfig
from flwr_replay.engines.simulate import Simulation, run_inline
from flwr_replay.errors import RunError
from flwr_replay.forecast.forecast import forecast
from flwr_replay.memory import forget
from flwr_replay.payloads.common import Train, Unmask
from flwr_replay.payloads.fedsgd import Differentiate
from flwr_replay.payloads.fedstats import Summarise
from flwr_replay.payloads.mutual import TrainMutually
from flwr_replay.report.progress import Display
from flwr_replay.strategies.fml import FMLConfig
from flwr_replay.wire.masked import MASKED, add
from flwr_replay.wire.records import config_in

NAMES, K, D = "abcdefg", 7, 2
SHARED = [*SMALL, "masked=true", f"nodes={K}", "noise=shared", "delta=0.001", "colluders=0", f"dropouts={D}"]
GRADIENT = [*SHARED, "strategy=fedsgd", "dp=gradient", "privacy.sigma=2"]
SUMS = [*SHARED, "strategy=fedstats", "dp=statistics", "privacy.sigma=2"]
UPDATE = [*SHARED, "strategy=fedavg", "dp=update", "privacy.sigma=2"]
PROXY = [*UPDATE, "strategy=fml"]
DRAWS = [*SUMS, "strategy=fedavg", "replay=statistics", "model.train=head", "dropouts=0"]
KEPT = {Differentiate: "gradient", Summarise: "class-sums", Train: "update", TrainMutually: "update"}
PAIR = FMLConfig().instructions(TrainingConfig(), 0.05) | {"private_seed": 1, "lr": 0.05}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    write_shards(folder, dict.fromkeys(NAMES, 40))
    pinned_keys(folder, NAMES)
    return folder


class Servers:
    """A server that asks all institutions what it likes, in a run of its own."""

    runs = itertools.count()

    def __init__(self, folder, options=GRADIENT):
        self.run, self.cohort = f"run-{next(self.runs)}", {}
        kinds = {str(SUMS): Summarise, str(UPDATE): Train, str(PROXY): TrainMutually}
        self.kind = kinds.get(str(options), Differentiate)
        own = {"seal-peers": str(folder / f"peers-{NAMES}.txt")}
        self.at = {name: HostileServer(folder, *options, name=name, **own) for name in NAMES}

    def train(self, cohort=NAMES, exchange=1, of=NAMES, **other):
        """Ask some of those that the request names; return arrays and points by name."""
        self.cohort[exchange] = sorted(cohort)
        asked = {"total": 40 * K, "cohort": self.cohort[exchange], "spare": len(cohort) - K + D or None} | other
        asked |= {Summarise: {"clip": 10.0}, Train: {"lr": 0.05}, TrainMutually: PAIR}.get(self.kind, {})
        replies = {}
        for name in of:
            request = self.kind(arrays=self.at[name].weights, run=self.run, exchange=exchange, **asked)
            replies[name] = self.at[name].send(request)
            assert not refusal(replies[name])
        return {name: (weights(reply), config_in(reply.content).get("points")) for name, reply in replies.items()}

    def tell(self, name, survivors, exchange=1, **other):
        asked = {"run": self.run, "exchange": exchange, "survivors": list(survivors)} | other
        return self.at[name].send(Unmask(**asked))

    def shares(self, by, survivors, exchange=1):
        replies = {name: self.tell(name, survivors, exchange) for name in by}
        assert not any(map(refusal, replies.values()))
        return {name: config_in(reply.content)["shares"] for name, reply in replies.items()}

    def read(self, answers, shares, exchange=1):
        """Return the check, which is 0 if the sum can be read, and the sum."""
        total = {}
        for arrays, _ in answers.values():
            add(arrays, to=total)
        strip(total, self.cohort[exchange], {name: points for name, (_, points) in answers.items()}, shares)
        numbers = {name.removesuffix(f".{MASKED}"): array.view(np.int64) for name, array in total.items()}
        return numbers.pop(MASKED), numbers

    def sent(self, names, exchange=1):
        """Return the sum of what institutions have put under masks, from their own state directories."""
        total, file = {}, f"{KEPT[self.kind]}-{exchange:06d}.safetensors"
        for name in names:
            kept = load_file(self.at[name].state / "runs" / self.run / file)
            add({key: array for key, array in kept.items() if array.dtype == np.int64}, to=total)
        return total


# --- a hostile server -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [GRADIENT, SUMS, UPDATE, PROXY], ids=["gradient", "statistics", "update", "proxy"])
@pytest.mark.parametrize(("answer", "tell"), [("abcdefg", "abcdefg"), ("abcde", "abcde"), ("bcdefg", "bcefg")])
def test_the_sum_is_of_what_the_survivors_really_sent(folder, options, answer, tell):
    server = Servers(folder, options)
    answers = server.train(of=answer)
    check, total = server.read(answers, server.shares(tell, answer))
    assert not check.any()
    sent = server.sent(answer)
    assert total.keys() >= sent.keys()
    for name, array in total.items():
        assert (array == sent.get(name, 0)).all()


def test_before_keys_are_told_no_sum_can_be_read_nor_with_too_few_or_those_of_another_exchange(folder):
    server = Servers(folder)
    first, two = server.train(), server.train(exchange=2)
    told = server.shares("abcde", NAMES)
    few = {name: shares for name, shares in told.items() if name != "e"}
    for shares in (few | {"e": bytes(len(told["e"]))}, few | {"f": told["e"]}, few | {"e": told["d"]}):
        check, _ = server.read(first, shares)
        assert check.all()
    check, _ = server.read(two, told, 2)
    assert check.all()
    check, _ = server.read(first, told)
    assert not check.any()


def test_keys_are_told_for_one_set_of_survivors_for_good(folder, monkeypatch):
    server = Servers(folder)
    server.train()
    told = server.shares("a", "abcde")
    for survivors in ("abcdef", NAMES, "abcdg"):
        assert "keys are told for one sum; those of exchange 1" in refusal(server.tell("a", survivors))
        forget()  # a new process
    assert server.shares("a", "abcde") == told
    with monkeypatch.context() as patch:  # it crashes before its answer leaves
        patch.setattr(masking, "joined", lambda shares: 1 / 0)
        assert refusal(server.tell("b", "abcde"))
    forget()
    assert "keys are told for one sum" in refusal(server.tell("b", NAMES))
    assert server.shares("b", "abcde")
    server.train(exchange=2)
    assert server.shares("a", "abcdg", exchange=2)  # of another sum
    assert server.shares("a", "abcde") == told


def test_sums_that_are_made_once_are_read_once_in_whatever_exchange(folder):
    """The difference of two sums of the same bytes would show those of f and g, with their shares of noise alone."""
    server = Servers(folder, SUMS)
    first, three = server.train(), server.train(exchange=3)
    check, _ = server.read({name: first[name] for name in "abcde"}, server.shares("abcde", "abcde"))
    assert not check.any()
    assert "keys are told for one sum; those of exchange 3" in refusal(server.tell("a", NAMES, exchange=3))
    shares = server.shares("abcde", "abcde", exchange=3)
    check, again = server.read({name: three[name] for name in "abcde"}, shares, 3)
    assert not check.any()
    assert (again["head.fc.bias"] == server.sent("abcde")["head.fc.bias"]).all()


BAD = ["abcd", "bcdef", "edcba", "abcdex", "aabcde", "", [*"abcde", ""], [*"abcdefg", *map(str, range(999))]]


@pytest.mark.parametrize("survivors", BAD, ids=lambda survivors: "".join(survivors)[:12])
def test_survivors_are_enough_of_those_who_were_asked(folder, survivors):
    server = Servers(folder)
    server.train()
    line = refusal(server.tell("a", survivors))
    assert "keys are told for a sum of 5 institutions or more" in line or "arrived incomplete" in line
    assert len(line) < 500
    assert server.shares("a", "abcde")  # nothing was noted


def test_who_has_not_answered_tells_nothing(folder):
    server, line = Servers(folder), "keys are told for a sum of 5 institutions or more"
    assert line in refusal(server.tell("a", NAMES))
    server.train(of="b")
    assert line in refusal(server.tell("a", NAMES))
    assert line in refusal(server.tell("b", NAMES, run="another"))
    assert line in refusal(server.tell("b", NAMES, exchange=2))
    server.train("abcde", exchange=2, of="b")  # a sum from which nobody may be missing has no such keys
    assert line in refusal(server.tell("b", "abcde", exchange=2))
    for exchange in range(3, 6):
        server.train(exchange=exchange, of="b")
    assert line in refusal(server.tell("b", NAMES))  # of long ago
    forget()
    plain = HostileServer(folder, *[option for option in GRADIENT if "dropouts" not in option], "dropouts=0", name="c")
    assert "needs pinned keys" in refusal(plain.send(Unmask(run="r", exchange=1, survivors=[*NAMES])))


@pytest.mark.parametrize("spare", [0, 1, 3, 2**40])
def test_how_many_may_fail_follows_from_the_runs_options(folder, spare):
    server = Servers(folder).at["a"]
    asked = {"run": f"spare-{spare}", "exchange": 1, "total": 40 * K, "cohort": [*NAMES], "spare": spare or None}
    assert "of whom may fail yet: refused" in refusal(server.send(Differentiate(arrays=server.weights, **asked)))
    assert server.charges(asked["run"]) == []


def test_answers_that_come_again_have_the_same_masks_and_points(folder):
    server = Servers(folder)
    (arrays, points), (again, same) = server.train(of="a")["a"], server.train(of="a")["a"]
    assert points == same
    assert all(arrays[name].tobytes() == again[name].tobytes() for name in arrays)
    assert len(points) == K * (D + 1) * SECRET


# --- an honest run ----------------------------------------------------------------------------------------------------


def ran(folder, options, **script):
    nodes = node_configs(folder, folder / "state", names=NAMES)
    nodes = [{**node, "seal-peers": str(folder / f"peers-{NAMES}.txt")} for node in nodes]
    return run(folder, ["rounds=3", "evaluate_every=3", *options], nodes, **script)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("forgetful", [False, True])
@pytest.mark.parametrize(
    ("failing", "without"),
    [
        ([("differentiate", "d", 2)], "d"),
        ([("unmask", "d", 2)], "d"),
        ([("differentiate", "d", 2), ("unmask", "e", 2)], "d, e"),
        ([("differentiate", "d", 2), ("differentiate", "e", 2)], "d, e"),
    ],
)
def test_a_killed_institution_costs_no_sum(folder, caplog, failing, without, forgetful):
    caplog.set_level(logging.INFO, "flwr")
    done = ran(folder, GRADIENT, failing=failing, forgetful=forgetful)
    assert f"the sum of exchange 2 is read though {without} did not answer; the next sums are without" in caplog.text
    assert "no sum can be read" not in caplog.text
    assert [len(done.grid.of("differentiate", name)) for name in "ab"] == [3, 3]
    at_3 = [at.name for at in done.grid.asked if at[::2] == ("differentiate", 3)]
    assert "".join(at_3) == "".join(name for name in NAMES if name not in without)
    assert len(done.grid.of("unmask", "a")) == 2 + (len(without) == 1)  # with five of seven nobody may fail


@pytest.mark.parametrize("failing", ["train-mutually", "unmask"])
def test_without_one_institution_proxies_are_summed_and_its_private_model_stays(folder, caplog, failing):
    caplog.set_level(logging.INFO, "flwr")
    done = ran(folder, [*PROXY, "private-epochs=1"], failing=[(failing, "d", 2)])
    assert "the sum of exchange 2 is read though d did not answer; the next sums are without" in caplog.text
    kept = {name: sorted((folder / "state" / name / "runs" / done.run).glob("pair-*")) for name in "cd"}
    assert [len(files) for files in kept.values()] == [3, 1 + (failing == "unmask")]
    assert len(done.result["final"]["institutions"]) == K  # d tests the model that it has
    assert (done.folder / "models" / "global.safetensors").exists()


def test_a_model_is_that_of_the_survivors(folder):
    """The same institutions with almost no noise: who fails before the only sum adds nothing to the model."""
    options = [option for option in GRADIENT if "sigma" not in option] + ["privacy.sigma=0.02", "rounds=1"]
    lost = ran(folder, options, failing=[("differentiate", "g", 1)])
    kept = ran(folder, options, failing=[("unmask", "g", 1)])
    away = ran(folder, [*options, "wait=0.1"], there=lambda grid: [n for n in grid.contexts if grid.name_of(n) != "g"])
    model_lost, two, three = (load_file(of.folder / "models" / "global.safetensors") for of in (lost, kept, away))
    near = max(abs(model_lost[name] - three[name]).max() for name in model_lost)
    assert near < 0.3 * max(abs(model_lost[name] - two[name]).max() for name in model_lost)


@pytest.mark.parametrize("at", ["abcdef", "g"])
def test_with_more_failures_a_sum_is_lost_and_the_run_goes_on(folder, caplog, at):
    caplog.set_level(logging.INFO, "flwr")
    failing = [("unmask", name, 2) for name in "efg"] if at == "g" else [("differentiate", name, 2) for name in "efg"]
    with pytest.raises(RunError, match="a sum needs 5 institutions; exchange 3 has 4"):
        ran(folder, GRADIENT, failing=failing)
    assert "no sum can be read in exchange 2, which e, f, g did not answer" in caplog.text


def spoil_word(stage, of, change):
    """Return a script by which an institution's word is another."""

    def after(grid, message, reply):
        asked = config_in(message.content)
        if asked["stage"] == stage and grid.name_of(message.metadata.dst_node_id) in of:
            for key in {"points", "shares"} & {*reply.content.get("config", {})}:
                reply.content["config"][key] = change(reply.content["config"][key])
        return reply

    return after


def flipped(told):
    return bytes(byte ^ 1 for byte in told)


@pytest.mark.parametrize(
    ("stage", "liars", "failing"), [("differentiate", "b", ""), ("unmask", "b", "de"), ("unmask", "bc", "")]
)
def test_wrong_points_and_shares_that_none_make_up_for_are_a_line_not_a_model(folder, stage, liars, failing):
    failures = [("differentiate", name, 1) for name in failing]
    with pytest.raises(RunError, match="with dropouts one that has told wrong shares of keys spoils a sum, too"):
        ran(folder, GRADIENT, after=spoil_word(stage, liars, flipped), failing=failures)


@pytest.mark.parametrize("failing", ["", "d"])
def test_who_tells_wrong_shares_is_named_and_costs_no_sum(folder, caplog, failing):
    caplog.set_level(logging.INFO, "flwr")
    failures = [("differentiate", name, 1) for name in failing]
    done = ran(folder, [*GRADIENT, "rounds=1"], after=spoil_word("unmask", "b", flipped), failing=failures)
    assert re.findall(r"(\w+) has told wrong shares", caplog.text) == ["b"]
    assert (done.folder / "models" / "global.safetensors").exists()


@pytest.mark.parametrize(("stage", "line"), [("differentiate", "points of"), ("unmask", "shares of")])
def test_too_few_bytes_are_one_institutions_failure(folder, stage, line):
    done = ran(folder, GRADIENT, after=spoil_word(stage, "b", lambda told: told[:-1]))
    assert {(failure["institution"], line in failure["reason"]) for failure in done.result["failures"]} == {("b", True)}
    assert done.result["rounds"] == 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [GRADIENT, SUMS], ids=["gradient", "statistics"])
@pytest.mark.parametrize("asked", [1, 4, 7])
def test_a_run_that_broke_off_while_keys_were_told_reads_the_same_sum(folder, options, asked):
    stage = {"breaking": [("unmask", NAMES[asked - 1], 1)]}
    name = f"broken-{asked}-{options is SUMS}"
    with suppress(KeyboardInterrupt):
        ran(folder, options, name=name, **stage)
        raise AssertionError("the run must break off")
    forget()
    done = ran(folder, options, resume=str(folder / "runs" / name))
    assert not done.result["failures"]
    times = 1 if options is SUMS else 3
    assert [sum(charge["steps"] for charge in done.charges(name)) for name in NAMES] == [times] * K


@pytest.mark.parametrize(
    "options", [GRADIENT, SUMS, UPDATE, PROXY, DRAWS], ids=["gradient", "statistics", "update", "proxy", "draws"]
)
def test_the_forecast_is_the_ledger(tmp_path, options):
    job = [*options[len(SMALL) :], "task=digits", "partition.size=40", "model=mlp", "model.width=6", "device=cpu"]
    job += ["rounds=2", "evaluate_every=2", f"runs_dir={tmp_path}"]
    result, done = run_inline(job, Display())
    seen, asks = Counter(), {str(GRADIENT): 2, str(UPDATE): 2, str(PROXY): 2, str(SUMS): 1}.get(str(options), 0)
    for line in json_lines(done / "ledger.jsonl"):
        seen[line["institution"], line["direction"], line["stage"], line["field"], line["kind"]] += line["bytes"]
    stated = Counter()
    for line in forecast(Simulation.of(compose(job))):
        stated[line.institution, line.direction, line.stage, line.field, line.kind] += line.bytes
    assert seen == stated
    assert not result["failures"]
    assert seen["institution-1", "up", "unmask", "shares", "notice"] == asks * (K * SECRET + 6)
