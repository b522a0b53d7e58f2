"""fraction=: who trains in a round, what it costs in epsilon, and which methods refuse it."""

from collections import Counter

import numpy as np
import pytest
from harness import SHARDS, Ran, command, json_lines, node_configs, run, write_shards

from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError
from flwr_replay.finished.export import card
from flwr_replay.finished.trained import load_model
from flwr_replay.movements.hops import Cycles, Reopening, Turn
from flwr_replay.movements.participation import number_chosen, participants
from flwr_replay.payloads.common import Trained
from flwr_replay.privacy.accounting import SampledGaussian, epsilon
from flwr_replay.report.run_page import write_run_page
from flwr_replay.report.summary import summary
from flwr_replay.report.texts import notes
from flwr_replay.server.settings import Settings
from flwr_replay.strategies.fedavg import FedAvg
from flwr_replay.strategies.splitnn import SplitNN
from flwr_replay.wire.records import opened

SIZES = {name: 40 + 8 * k for k, name in enumerate("abcde")}
JOB = [*SHARDS, "classes=3", "model=mlp", "model.width=4", "batch_size=8", "device=cpu"]
NAMES = [f"institution-{k:02d}" for k in range(20)]


@pytest.fixture
def hospitals(tmp_path):
    write_shards(tmp_path, SIZES)
    return tmp_path


def ran(folder, *options, name="", **more) -> Ran:
    nodes = node_configs(folder, folder / "state", "".join(SIZES))
    return run(folder, [*JOB, "nodes=5", *options], nodes, name, **more)


# --- the draw ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "fraction", "count"), [(1000, 0.1, 100), (100, 0.29, 29), (3, 0.1, 1), (5, 0.999, 5)])
def test_the_number_is_the_nearest_and_at_least_one(n, fraction, count):
    assert number_chosen(n, fraction) == len(participants([f"{k:04d}" for k in range(n)], fraction, 0, 1)) == count


def test_a_draw_follows_from_seed_and_round_and_everyone_has_the_same_chance():
    drawn = [participants(NAMES, 0.25, 7, at) for at in range(1, 401)]
    assert drawn == [participants(NAMES, 0.25, 7, at) for at in range(1, 401)]
    assert all(names == sorted(names) and len({*names}) == 5 for names in drawn)
    assert drawn != [participants(NAMES, 0.25, 8, at) for at in range(1, 401)]
    times = Counter(name for names in drawn for name in names)
    assert all(60 <= times[name] <= 140 for name in NAMES)  # 100 expected, standard deviation 8.7
    pairs = Counter((a, b) for names in drawn for a in names for b in names if a < b)
    assert len(pairs) == 190  # nobody always trains with the same others


def test_who_leaves_changes_at_most_one_place():
    for gone in NAMES:
        before, after = ({*participants(some, 0.25, 0, 3)} for some in (NAMES, [n for n in NAMES if n != gone]))
        assert len(after) == 5
        assert before - after <= {gone}


def test_all_are_drawn_in_the_order_given_if_the_fraction_is_one():
    assert participants(["b", "a"], 1.0, 0, 1) == ["b", "a"]


# --- parallel methods -------------------------------------------------------------------------------------------------


def test_only_those_drawn_train_and_their_weights_alone_are_averaged(hospitals):
    completed = ran(hospitals, "strategy=fedavg", "fraction=0.4", "rounds=3")
    expected = [participants([*"abcde"], 0.4, 0, at) for at in (1, 2, 3)]
    for at, names in enumerate(expected, 1):
        assert [
            request.name for request in completed.grid.asked if request.stage == "train" and request.exchange == at
        ] == names
        assert [
            request.name for request in completed.grid.asked if request.stage == "evaluate" and request.exchange == at
        ] == [*"abcde"]
        answers = [
            Trained.decode(r.content) for a, _, r in completed.grid.log if (a.stage, a.exchange) == ("train", at)
        ]
        n = np.array([answer.num_examples for answer in answers], np.float64)
        sent = next(m for a, m, _ in completed.grid.log if a.stage == "evaluate" and a.exchange == at)
        for key, array in opened(sent.content["arrays"]).items():
            mean = sum(
                k * opened(answer.arrays)[key].astype(np.float64)
                for k, answer in zip(n / n.sum(), answers, strict=True)
            )
            np.testing.assert_allclose(array, mean, rtol=1e-6, atol=1e-7)
    assert len({tuple(names) for names in expected}) > 1


def test_a_round_whose_institutions_all_fail_keeps_the_weights_and_the_run_goes_on(hospitals):
    (failing,) = participants([*"abcde"], 0.2, 0, 2)
    completed = ran(hospitals, "strategy=fedavg", "fraction=0.2", "rounds=3", failing=[("train", failing, 2)])
    weights = {
        at.exchange: opened(asked.content["arrays"]) for at, asked, _ in completed.grid.log if at.stage == "evaluate"
    }
    assert all(np.array_equal(weights[1][key], weights[2][key]) for key in weights[1])
    assert not all(np.array_equal(weights[2][key], weights[3][key]) for key in weights[2])
    assert [failure["institution"] for failure in completed.result["failures"]] == [failing]


def test_a_run_ends_once_every_institution_has_failed(hospitals):
    asked = set()

    def failing(grid, at):
        asked.update([at.name] * (at.stage == "train"))
        return at.stage == "train"

    with pytest.raises(Exception, match="no institution answered in exchange"):
        ran(hospitals, "strategy=fedavg", "fraction=0.4", "rounds=99", failing=failing)
    assert len(asked) == 5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["fedavg", "cwt"])
def test_a_resumed_run_draws_the_same(hospitals, strategy):
    options = (f"strategy={strategy}", "fraction=0.4", "rounds=4", "optimizer-state=keep")
    whole = ran(hospitals, *options, name="whole")
    with pytest.raises(KeyboardInterrupt):
        ran(hospitals, *options, name="broken", stop_after=3)
    resumed = ran(hospitals, *options, resume=str(hospitals / "runs" / "broken"))
    trained = [(at.name, at.exchange) for at in whole.grid.asked if at.stage == "train"]
    assert [(at.name, at.exchange) for at in resumed.grid.asked if at.stage == "train"] == [
        visit for visit in trained if visit[1] > 3
    ]
    files = [folder / "models" / "global.safetensors" for folder in (whole.folder, resumed.folder)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_another_fraction_is_another_run(hospitals):
    with pytest.raises(KeyboardInterrupt):
        ran(hospitals, "strategy=fedavg", "fraction=0.4", "rounds=2", name="broken", stop_after=1)
    with pytest.raises(Exception, match=r"fraction was 0\.4, now 0\.8"):
        ran(hospitals, "strategy=fedavg", "fraction=0.8", "rounds=2", resume=str(hospitals / "runs" / "broken"))


# --- serial -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["fixed", "shuffled"])
def test_a_cycle_visits_a_fraction_once_each(hospitals, order):
    completed = ran(hospitals, "strategy=cwt", f"order={order}", "fraction=0.6", "rounds=3")
    visits = completed.grid.who("train")
    for cycle in range(3):
        assert sorted(visits[3 * cycle : 3 * cycle + 3]) == participants([*"abcde"], 0.6, 0, cycle)
    assert completed.result["rounds"] == 3
    assert [line["round"] for line in completed.ledger if (line["stage"], line["field"]) == ("train", "lr")] == [
        *range(1, 10)
    ]


# --- relay ------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("strategy", "stage"), [("local", "train-own"), ("avgpush", "push"), ("proxyfl", "train-proxy")]
)
def test_those_drawn_train_and_all_that_have_trained_test(hospitals, strategy, stage):
    completed = ran(hospitals, f"strategy={strategy}", "fraction=0.4", "rounds=4")
    drawn = [participants([*"abcde"], 0.4, 0, at) for at in range(1, 5)]
    trained: set[str] = set()
    assert drawn[0] != drawn[1]
    for at, names in enumerate(drawn, 1):
        trained |= {*names}
        asked = [request for request in completed.grid.asked if request.exchange == at]
        assert [request.name for request in asked if request.stage == stage] == names
        assert {request.name for request in asked if request.stage.startswith("evaluate")} == trained
        assert {request.name for request in asked if request.stage == "deliver"} == (
            {*names} if strategy != "local" else set()
        )


def test_gossip_among_those_drawn_conserves_the_sum_of_all_models(hospitals):
    completed = ran(hospitals, "strategy=avgpush", "topology=random", "fraction=0.6", "rounds=4")
    shares = [
        (at.exchange, at.name, asked.content["config"]["kept"], asked.content["config"]["shares"])
        for at, asked, _ in completed.grid.log
        if at.stage == "deliver"
    ]
    for number in range(1, 5):
        of_round = [(kept, list(sent)) for exchange, _, kept, sent in shares if exchange == number]
        assert len(of_round) == 3
        assert sum(kept + sum(sent) for kept, sent in of_round) == pytest.approx(3)


def test_models_hop_among_those_drawn_and_wait_elsewhere():
    hops = Cycles(seed=3)
    rounds = [("a", "b"), ("c", "d"), ("a", "b", "c"), ("d",), ("a", "b", "c", "d")]
    for number, present in enumerate(rounds, 1):
        before = dict(hops.at)
        hops.begin_round(number, present)
        turns = list(Reopening(hops.start))
        assert sorted(turn.institution for turn in turns) == sorted(present)
        assert {name: model for name, model in hops.at.items() if name not in present} == {
            name: model for name, model in before.items() if name not in present
        }
        assert sorted(hops.at.values()) == sorted({*before.values(), *(name for name in present if name not in before)})
        for turn in turns:
            hops.pass_on(turn.institution, trained=True)


def test_a_model_that_could_not_begin_begins_when_its_institution_is_asked_next():
    hops = Cycles(seed=0)
    hops.begin_round(1, ["a", "b"])
    for turn in Reopening(hops.start):
        hops.pass_on(turn.institution, trained=turn.institution == "a")
    assert dict(hops.names()) == {"a": "a"}
    hops.begin_round(2, ["a", "b"])
    assert [*Reopening(hops.start)] == [Turn("a", "a", ""), Turn("b", "b", "")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["local", "fml", "fedavg"])
def test_who_never_trained_is_said(hospitals, strategy):
    completed = ran(hospitals, f"strategy={strategy}", "fraction=0.4", "rounds=2")
    never = sorted({*"abcde"} - {name for at in (1, 2) for name in participants([*"abcde"], 0.4, 0, at)})
    assert never
    assert completed.result["untrained"] == never
    assert completed.result["nodes"] == 5
    page = write_run_page(completed.folder).read_text()
    sentence = f"{len(never)} of 5 institutions never trained, or no answer of theirs arrived: {', '.join(never)}"
    for text in (summary(completed.result, completed.folder), page):
        assert sentence in text
        assert "All institutions took part" not in text
        assert (f"o metric is of {', '.join(never)}" in text) == (strategy != "fedavg")
    assert all(f">{SIZES[name]}</td>" in page for name in never)
    cell = {"label": strategy, "seed": 0, "options": [], "result": completed.result}
    report = {"seeds": [0], "options": [], "strategies": {}, "cells": [cell], "higher-is-better": True}
    assert f"{strategy} seed 0: {sentence}" in notes(report)


def test_the_best_round_is_among_those_that_most_institutions_tested(hospitals):
    completed = ran(hospitals, "strategy=local", "fraction=0.2", "rounds=4", "lr=0.5")
    rows = json_lines(completed.folder / "metrics.jsonl")
    at = {row["round"]: [] for row in rows}
    for row in rows:
        if row["metric"] == "accuracy":
            at[row["round"]].append((row["institution"], row["value"]))
    most = max(len(rows) for rows in at.values())
    whole = {number: dict(rows)[""] for number, rows in at.items() if len(rows) == most}
    assert max(whole.values()) < max(dict(rows)[""] for rows in at.values())  # one institution alone was better
    assert completed.result["best"]["accuracy"] == max(whole.values())
    assert completed.result["best"]["round"] in whole


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("strategy", "fraction"), [("avgpush", 0.2), ("avgpush", 0.4), ("local", 0.2)])
def test_a_draw_of_one_leaves_nobody_to_exchange_with(hospitals, strategy, fraction):
    completed = ran(hospitals, f"strategy={strategy}", f"fraction={fraction}", "rounds=2")
    sentence = "fraction=0.2 draws one of 5 institutions for a round: no model goes to another"
    assert (sentence in summary(completed.result, completed.folder)) == (strategy == "avgpush" and fraction == 0.2)


@pytest.mark.sampled(2, of="slow runs")
def test_a_queues_model_that_its_institution_never_trained_has_a_card(hospitals):
    job = ["strategy=feder", "generator.epochs=1", "order=queue", "fraction=0.6", "rounds=4"]
    completed = ran(hospitals, *job, failing=[("train-with-buffers", "e")])
    assert "e" not in completed.result["final"]["institutions"]
    text = card(completed.folder, load_model(completed.folder, "e"), "e")
    assert "On the test examples of e: no test." in text
    assert "at 3 of 5 institutions" in text


def test_what_is_for_all_institutions_in_every_round_refuses_a_fraction(hospitals):
    (hospitals / "p.json").write_text("[[0.5, 0.5], [0.5, 0.5]]")
    for options, why in (
        (["strategy=avgpush", f"topology-file={hospitals / 'p.json'}", "topology=file", "nodes=2"], "a file of mixing"),
        (["strategy=feder", "order=queue", "durations=[1,2,1,1,1]", "generator.epochs=1"], "durations are for all"),
    ):
        with pytest.raises(ConfigError, match=f"{why}.* got fraction=0.5"):
            ran(hospitals, *options, "fraction=0.5")


# --- privacy ----------------------------------------------------------------------------------------------------------


def test_a_proxy_is_charged_for_the_rounds_in_which_it_was_drawn(hospitals):
    completed = ran(hospitals, "strategy=proxyfl", "fraction=0.4", "rounds=4", "dp=proxy", "beta=0")
    times = Counter(completed.grid.who("train-proxy"))
    assert sum(times.values()) == 8
    assert len({*times.values()}) > 1
    for name, n in SIZES.items():
        stated = completed.result["privacy"].get(name)
        if times[name]:
            cost = SampledGaussian.of_epochs(examples=n, batch=8, sigma=0.7, epochs=times[name])
            assert stated["epsilon"] == pytest.approx(epsilon([cost], 1 / n, "prv"))
            assert len(completed.charges(name)) == times[name]
        else:
            assert stated is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["fedavg", "cwt"])
def test_an_institution_is_charged_for_the_rounds_in_which_it_trained(hospitals, strategy):
    completed = ran(hospitals, f"strategy={strategy}", "fraction=0.4", "rounds=4", "dp=classifier")
    times = Counter(completed.grid.who("train"))
    assert sum(times.values()) == 8
    assert len({*times.values()} | {times[name] for name in SIZES}) > 1
    for name, n in SIZES.items():
        stated = completed.result["privacy"][name]
        if not times[name]:
            assert stated is None
            assert not (completed.state(name) / "privacy.jsonl").exists()
            continue
        assert len(completed.charges(name)) == times[name]
        cost = SampledGaussian.of_epochs(examples=n, batch=8, sigma=0.7, epochs=times[name])
        assert stated["epsilon"] == pytest.approx(epsilon([cost], 1 / n, "prv"))


def test_a_resumed_run_ends_without_an_institution_that_stated_its_epsilon_before_any_checkpoint(hospitals):
    job = ["strategy=fedavg", "rounds=2", "dp=classifier"]
    with pytest.raises(KeyboardInterrupt):
        ran(hospitals, *job, name="broken", breaking=[("evaluate", "a", 1)])
    completed = ran(hospitals, *job, resume=str(hospitals / "runs" / "broken"), failing=lambda grid, at: at.name == "b")
    assert completed.result["privacy"]["b"]["epsilon"] > 0  # what was released stays released
    assert sorted(completed.result["noise"]) == ["a", "c", "d", "e"]  # nobody knows how many examples "b" has


def test_result_and_forecast_have_the_same_steps(hospitals):
    completed = ran(hospitals, "strategy=fedavg", "fraction=0.4", "rounds=4", "dp=classifier")
    for name, n in SIZES.items():
        if times := completed.grid.who("train").count(name):
            (noise,) = completed.result["noise"][name]
            assert noise["steps"] == times * (n // 8)


def test_a_forecast_states_each_institutions_own_epsilon(hospitals, monkeypatch, capsys):
    job = ["strategy=fedavg", "task=digits", "partition=iid", "partition.size=64", "model=mlp", "nodes=5", "rounds=4"]
    assert command(monkeypatch, "run", *job, "dp=classifier", "fraction=0.4", "--dry-run") == 0
    output = " ".join(capsys.readouterr().out.split())
    names = [f"institution-{k}" for k in range(1, 6)]
    times = Counter(name for at in range(1, 5) for name in participants(names, 0.4, 0, at))
    assert len({times[name] for name in names}) > 1
    for name in names:
        assert (
            f"(32 of 64), up to {2 * times[name]} steps" in output.partition(f"{name}: epsilon")[2].partition("inst")[0]
        )


def test_a_forecast_states_no_epsilon_of_who_is_never_drawn(hospitals, monkeypatch, capsys):
    job = ["strategy=local", "task=digits", "partition=iid", "partition.size=64", "model=mlp", "nodes=5", "rounds=1"]
    assert command(monkeypatch, "run", *job, "dp=classifier", "fraction=0.4", "--dry-run") == 0
    output, names = capsys.readouterr().out, [f"institution-{k}" for k in range(1, 6)]
    drawn = participants(names, 0.4, 0, 1)
    for name in names:
        assert (f"{name}: trains in no round, so it has no epsilon" in output) == (name not in drawn)
        assert (f"{name}: epsilon" in output) == (name in drawn)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["fedreplay", "central", "splitnn", "syncentral"])
def test_methods_in_which_all_must_take_part_refuse(strategy, monkeypatch, capsys, tmp_path):
    job = [f"strategy={strategy}", "task=digits", "nodes=3", "fraction=0.5", "--runs-dir", str(tmp_path / "runs")]
    assert command(monkeypatch, "run", *job) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(
        "error: fraction is for methods that can train in a round with some of the institutions; got"
    )
    told = "(no takes_fraction in its Traits): leave it out, or choose strategy=avgpush, cwt, ditto, fedavg, fedavgm,"
    assert f"got strategy={strategy} {told}" in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("value", ["0", "1.01", "-0.5", "nan", "half"])
def test_a_fraction_lies_above_0_and_up_to_1(value):
    with pytest.raises(ConfigError, match="fraction"):
        compose(["strategy=fedavg", f"fraction={value}"])


def test_an_app_of_ones_own_is_refused_likewise():
    with pytest.raises(ConfigError, match=r"fraction is a share in \(0, 1\]; got 2"):
        Settings(fraction=2)
    with pytest.raises(ConfigError, match="fraction is for methods"):
        SplitNN(settings=Settings(fraction=0.5))
    assert FedAvg(settings=Settings(fraction=0.5)).traits().takes_fraction
