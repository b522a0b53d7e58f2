"""Differential privacy in whole runs: charges that outlive a crash, noise that is secret, budgets, claims."""

import re
import shlex
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from flwr.app import Message
from harness import node_configs, same, write_shards
from replay_runs import FEW, JOB, B, broken, run, simulated

from flwr_replay.client_app import app
from flwr_replay.config.compose import compose, overrides_of
from flwr_replay.config.halves import load_strategy
from flwr_replay.engines.inline import InlineGrid
from flwr_replay.engines.simulate import Simulation
from flwr_replay.errors import ConfigError
from flwr_replay.forecast.forecast import forecast
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.generators.sampler import CodeSampler
from flwr_replay.institution.budget import DPTraining, PrivacyBudget
from flwr_replay.learning.tasks import make_task
from flwr_replay.models.zoo import backbone
from flwr_replay.payloads.common import Evaluate, RollCall
from flwr_replay.payloads.replay import EncodeImages
from flwr_replay.privacy.accounting import SampledGaussian, epsilon, rounded_up
from flwr_replay.privacy.dpsgd import clipped_sums
from flwr_replay.privacy.secret import noise_stream
from flwr_replay.rng import derived_seed
from flwr_replay.runs.execute import settings_of
from flwr_replay.wire.records import config_in
from flwr_replay.wire.weights import to_arrays

SIZES = {"a": 48, "b": 40, "c": 24}
SMALL = ["strategy=cwt", *FEW, "model.norm=group"]
GENERATOR = [*SMALL, "replay=vqvae2", "codebook=gradient", "dp=generator"]
END_TO_END = [*SMALL, "replay=pixelcnn", "codebook=gradient", "dp=end-to-end", "count-sigma=2"]
MASKED = [*END_TO_END, "prior=maskgit", "prior.width=8", "prior.layers=1"]
CLASSIFIER = [*SMALL, "dp=classifier"]
SEEDED = "noise=seeded"


@pytest.fixture(scope="module")
def run_once(folder):
    """Return a run with these options, the same for all tests that ask for it."""
    return cache(lambda *options, copy=1: run(folder, *options))


def epsilon_of_charges(charges, n):
    costs = [SampledGaussian(charge["rate"], charge["sigma"], charge["steps"]) for charge in charges]
    [accountant] = {charge["accountant"] for charge in charges}
    return epsilon(costs, 1 / n, accountant)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("options", "at", "repeated"),
    [
        (GENERATOR, ("train-generator", "b"), ["generator"]),
        (END_TO_END, ("train-prior", "b"), ["generator", "prior", "label counts"]),
        (MASKED, ("train-prior", "b"), ["generator", "prior", "label counts"]),
        (END_TO_END, ("train", "b"), ["classifier"]),
    ],
    ids=["generator", "prior", "maskgit", "classifier"],
)
def test_a_crash_repeats_the_charges_of_a_classifier_and_none_of_a_generators_visit(
    folder, run_once, options, at, repeated
):
    """What a visit's training has found is kept: it leaves once more as it is, and its charge has no steps."""
    whole, resumed = run_once(*options), broken(folder, *options, breaking=[at])
    for name, n in SIZES.items():
        usual, charged = ([charge["mechanism"] for charge in ran.charges(name)] for ran in (whole, resumed))
        assert sorted(charged) == sorted([*usual, *(repeated if name == "b" else [])])
        reported, before = (ran.result["privacy"][name]["epsilon"] for ran in (resumed, whole))
        assert reported == pytest.approx(epsilon_of_charges(resumed.charges(name), n))
        assert (reported > before) if name == "b" and at[0] == "train" else (reported == before)


@pytest.mark.sampled(1, "noise")
@pytest.mark.parametrize("options", [GENERATOR, END_TO_END], ids=["generator", "end to end"])
@pytest.mark.parametrize("noise", ["secret", "seeded"])
def test_one_seed_gives_other_weights_with_secret_noise_only(run_once, options, noise):
    options = options if noise == "secret" else [*options, SEEDED]
    first, other = run_once(*options), run_once(*options, copy=2)
    assert same(first.visit("generator", 0), other.visit("generator", 0)) == (noise == "seeded")
    if "dp=end-to-end" in options or noise == "seeded":  # black replays of two generators teach a classifier the same
        assert same(first.weights, other.weights) == (noise == "seeded")


def noise_of_one_step(folder, noise, sigma=2.0, n=B):
    """Return what a step's gradient is beside its sum of clipped ones, and the stream that the run's seed gives."""
    shards = write_shards(folder, {"a": n})
    model_of = ["model=mlp", "model.width=16", "momentum=0"]
    options = ["strategy=cwt", "rounds=1", *model_of, "dp=classifier", f"sigma={sigma}", f"noise={noise}"]
    ran = run(folder, *options, nodes=node_configs(folder, folder / "state", names="a"))
    config = compose([*JOB, *options])
    model, task = backbone(config.model, config.task)(derived_seed(0, "model")), make_task(config.task)
    sums, _ = clipped_sums(model, lambda x, y: task.losses(model(x), y), shards["a"], 1.0)
    named = zip(model.named_parameters(), sums, strict=True)
    noises = [
        ((value - torch.tensor(ran.weights[key])) / 0.05 * B - summed).flatten() for (key, value), summed in named
    ]
    known = noise_stream("seeded", folder, 0, "a", "classifier", 1)
    known.uniform(n)  # the masks: with b = |D| everybody is in
    foreseen = [known.normal(value.shape).flatten() * sigma for value in model.parameters()]
    return torch.cat(noises).detach().double(), torch.cat(foreseen)


def test_the_seed_gives_seeded_noise_away_and_says_nothing_of_secret_noise(tmp_path):
    noise, foreseen = noise_of_one_step(tmp_path, "seeded")
    assert float(noise.std()) == pytest.approx(2.0, rel=0.1)
    assert float((noise - foreseen).abs().max()) < 1e-3
    noise, foreseen = noise_of_one_step(tmp_path, "secret")
    assert float(noise.std()) == pytest.approx(2.0, rel=0.1)
    assert float((noise - foreseen).std()) == pytest.approx(2.0 * 2**0.5, rel=0.1)
    assert abs(float(torch.corrcoef(torch.stack([noise, foreseen]))[0, 1])) < 5 / len(noise) ** 0.5


def test_a_budget_stops_an_institution_before_it_is_exceeded(folder):
    limit, of = 1.1, ["sigma=2", "delta=0.01", "epsilon=1.1", "rounds=3"]
    ran = run(folder, *CLASSIFIER, *of)
    charges = {name: ran.charges(name) for name in SIZES}
    assert {name: len(own) for name, own in charges.items()} == {"a": 3, "b": 3, "c": 2}
    for name, own in charges.items():
        costs = [SampledGaussian(charge["rate"], charge["sigma"], charge["steps"]) for charge in own]
        assert ran.result["privacy"][name]["epsilon"] == epsilon(costs, 0.01, "prv") <= limit
        assert (epsilon([*costs, costs[0]], 0.01, "prv") > limit) == (name == "c") or len(own) == 3
    [failure] = ran.result["failures"]
    assert (failure["institution"], failure["round"]) == ("c", 9)
    assert failure["reason"].startswith("the privacy budget is epsilon 1.1 at delta 0.01; 1 steps of classifier would")


def test_a_budget_that_the_generator_would_exceed_leaves_an_institution_out_of_replay(folder):
    ran = run(folder, *GENERATOR, "sigma=2", "delta=0.01", "epsilon=0.6", "replay.missing=say")
    assert [bool(ran.result["privacy"][name]) for name in SIZES] == [True, True, False]
    assert not (ran.state("c") / "privacy.jsonl").exists()
    assert len(ran.codes(1)) == SIZES["a"] + SIZES["b"]
    assert {failure["institution"] for failure in ran.result["failures"]} == {"c"}
    assert "steps of generator would make 0.63" in ran.result["failures"][0]["reason"]


def protections(entries, *, but=("instruction", "notice")):
    """Return stage and field to what protects them, numbers left out."""
    up = [entry for entry in entries if entry.get("direction", "up") == "up" and entry["kind"] not in but]
    return {(entry["stage"], entry["field"], without_numbers(entry["protection"])) for entry in up}


def without_numbers(protection):
    return re.sub(r"\(.*\)-DP", "(ε, δ)-DP", protection)


def both_ledgers(ran):
    """Return what the server's ledger and the institutions' own say alike."""
    reported, own = protections(ran.ledger), protections([entry for name in SIZES for entry in ran.own_ledger(name)])
    assert reported == own
    return reported


def test_only_the_generators_weights_are_called_protected(run_once):
    ran = run_once(*GENERATOR)
    reported = both_ledgers(ran)
    protected = {(stage, field) for stage, field, protection in reported if protection == "(ε, δ)-DP"}
    assert protected == {("train-generator", "arrays")}
    open_ = {(stage, field) for stage, field, protection in reported if protection == "none"}
    assert open_ >= {("encode-images", "codes"), ("encode-images", "labels"), ("train", "arrays")}
    public = {(stage, field) for stage, field, protection in reported if protection == "declared public"}
    counted = {
        (stage, field) for stage, field, _ in reported if field in ("num-examples", "examples-seen", "num-steps")
    }
    assert public >= counted - {("evaluate", "num-examples")}
    stated = {entry["protection"] for entry in ran.ledger if (entry["stage"], entry["field"]) in protected}
    up = {protection for protection in stated if protection != "none"}
    expected = {epsilon_of_charges(ran.charges(name), n): 1 / n for name, n in SIZES.items()}
    assert up == {f"({rounded_up(spent)}, {rounded_up(delta, 2)})-DP" for spent, delta in expected.items()}


def test_end_to_end_nothing_of_training_examples_leaves_unprotected(run_once):
    reported = both_ledgers(run_once(*END_TO_END))
    assert {stage for stage, _, protection in reported if protection == "none"} == {"evaluate"}
    protected = {(stage, field) for stage, field, protection in reported if protection == "(ε, δ)-DP"}
    weights = {(stage, "arrays") for stage in ("train-generator", "train-prior", "train")}
    assert protected == {*weights, ("train-prior", "label-counts")}
    assert not {"losses", "perplexity", "train-loss"} & {field for _, field, _ in reported}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [
        [*CLASSIFIER, "replay=vqvae2"],
        [*CLASSIFIER, "replay=pixelcnn"],
        [*SMALL, "replay=pixelcnn", "dp=prior", "count-sigma=2"],
    ],
    ids=["codes beside", "codes drawn", "prior"],
)
def test_nothing_is_called_protected_that_unprotected_functions_of_the_same_patients_taught(folder, options):
    with pytest.raises(ConfigError, match="choose"):
        run(folder, *options)


@pytest.mark.sampled(2, of="slow replay")
def test_noisy_counts_of_a_small_institution_are_taken_for_what_they_are(folder):
    ran = run(folder, *END_TO_END, "classes=10", "count-sigma=10", SEEDED)
    assert not ran.result["failures"]


@pytest.mark.parametrize("options", [GENERATOR, END_TO_END], ids=["generator", "end to end"])
def test_noise_from_the_seed_is_called_no_protection(run_once, options):
    reported = both_ledgers(ran := run_once(*options, SEEDED))
    assert ("train-generator", "arrays", "not protected: its noise comes from the run's seed") in reported
    assert not any("-DP" in protection for _, _, protection in reported)
    assert {ran.result["privacy"][name]["epsilon"] for name in SIZES} == {None}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [[*GENERATOR, SEEDED], END_TO_END], ids=["seeded", "end to end"])
def test_the_forecast_says_what_the_ledger_will_say(tmp_path, options):
    ran = simulated(tmp_path, *options, "task=digits", "partition=iid", "partition.size=40", "model.width=4")
    expected, counted = Counter(), Counter()
    for line in forecast(Simulation.of(compose(overrides_of(ran.folder / "config.yaml")))):
        expected[key(vars(line))] += line.bytes
    for entry in ran.ledger:
        counted[key(entry)] += entry["bytes"]
    assert counted == expected


def key(line):
    return (
        *(line[name] for name in ("institution", "direction", "stage", "field", "kind")),
        without_numbers(line["protection"]),
    )


# --- an institution that asks for a guarantee -------------------------------------------------------------------------


def said_at_the_roll_call(tmp_path, *options):
    """Return what an institution with a policy of max-epsilon 8 and without its data says."""
    overrides = [*JOB, *options]
    config = compose(overrides)
    stages = load_strategy(config.strategy.name)[0](config.strategy, settings_of(config)).all_stages()
    (tmp_path / "policy.yaml").write_text("{max-epsilon: 8, max-delta: 0.1}")
    node = {"name": "a", "data": str(tmp_path / "nothing.npz"), "state": str(tmp_path)}
    node["policy"] = str(tmp_path / "policy.yaml")
    grid = InlineGrid(app, {"overrides": shlex.join(overrides)}, [node])
    request = RollCall(strategy="cwt", run="r", stages=stages)
    [reply] = grid.send_and_receive([Message(request.encode(), 2, "query")])
    return config_in(reply.content)["failure"]


@pytest.mark.parametrize("budget", ["epsilon=8", "epsilon=0.5"])
def test_a_policy_accepts_a_run_that_is_private_from_end_to_end(tmp_path, budget):
    assert said_at_the_roll_call(tmp_path, *END_TO_END, budget).startswith("FlwrReplayError")  # it went on to its data


@pytest.mark.parametrize(
    "options",
    [
        SMALL,
        [*GENERATOR, "epsilon=8"],
        [*END_TO_END, "dp=generator+prior+classifier", "epsilon=8"],
        END_TO_END,
        [*END_TO_END, "epsilon=9"],
        [*END_TO_END, "epsilon=8", SEEDED],
    ],
    ids=["nothing", "generator", "three mechanisms", "no budget", "too large a budget", "seeded"],
)
def test_a_policy_refuses_less_before_any_data_are_read(tmp_path, options):
    assert said_at_the_roll_call(tmp_path, *options).startswith("policy asks for epsilon <= 8; ")


def test_an_institution_with_a_policy_takes_part_to_the_end(folder):
    (folder / "policy.yaml").write_text("{max-epsilon: 8, max-delta: 0.1}")
    [node] = node_configs(folder, folder / "state", names="c")
    nodes = [{**node, "policy": str(folder / "policy.yaml")}]
    ran = run(folder, *END_TO_END, "target-epsilon=8", "rounds=2", nodes=nodes)
    assert not ran.result["failures"]
    assert 7.9 < ran.result["privacy"]["c"]["epsilon"] <= 8


@pytest.mark.parametrize(("split", "answered"), [("test", True), ("train", False)])
def test_end_to_end_metrics_on_training_examples_are_refused(folder, split, answered):
    shown = ask(folder, Evaluate(arrays=weights(), run="r", split=split), *END_TO_END)
    assert ("loss" in shown.get("metrics", {})) == answered
    assert ("training examples" in str(shown.get("config", {}).get("failure", ""))) != answered


def test_codes_leave_only_where_codes_are_what_travels(folder):
    generator = to_arrays(ReplayPlan.of(compose([*JOB, *END_TO_END])).fresh_generator())
    shown = ask(folder, EncodeImages(arrays=generator, run="r", replayed=0), *END_TO_END)
    assert "arrays" not in shown
    assert shown["config"]["error"] == "PrivacyError"
    assert "Codes.codes would: refused" in shown["config"]["failure"]


def weights():
    config = compose([*JOB, *SMALL])
    return to_arrays(backbone(config.model, config.task)(0))


def ask(folder, request, *options):
    """Return what an institution answers to one request."""
    config = {"overrides": shlex.join([*JOB, *options])}
    grid = InlineGrid(app, config, node_configs(folder, folder / "asked", names="a"))
    message = Message(request.encode(), 2, request.message_type, group_id="0")
    return grid.send_and_receive([message])[0].content


def test_what_is_replayed_does_not_depend_on_the_private_batches(folder, monkeypatch):
    """It is neither clipped nor noised, so one example more or less in a batch must not change it."""
    take, rows_taken = CodeSampler.take, []

    def watched(self, rows):
        rows_taken[-1].append(rows.tolist())
        return take(self, rows)

    monkeypatch.setattr(CodeSampler, "take", watched)
    for sizes in ((0, 3), (5, 3)):
        rows_taken.append([])

        def rows(self, examples, sizes=sizes):
            return (torch.arange(size) for size in sizes[: self.epoch_cost.steps])

        monkeypatch.setattr(DPTraining, "rows", rows)
        monkeypatch.setattr(PrivacyBudget, "check_steps", lambda _: None)  # one of three steps is left out
        run(folder, *GENERATOR, "replay.ratio=6", "sigma=2", "delta=0.01")
    drawn = [[rows for rows in of_run if len(rows) == 6 * B] for of_run in rows_taken]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) >= 4


@pytest.mark.sampled(2, of="slow replay")
def test_end_to_end_a_label_above_the_classes_is_not_told(tmp_path, caplog):
    """The server chooses task.classes, and could ask by it whether anybody has a rare class."""
    left = []
    for label in (2, 7):
        folder = tmp_path / str(label)
        folder.mkdir()
        write_shards(folder, SIZES)
        with np.load(folder / "b.npz") as stored:
            arrays = dict(stored)
        arrays["train_labels"][0] = label
        np.savez(folder / "b.npz", **arrays)
        for options in ([*END_TO_END, SEEDED], SMALL):
            left.append(run(folder, *options))
    dp, plain, dp_above, plain_above = left
    assert not plain.result["failures"]
    assert [failure["institution"] for failure in plain_above.result["failures"]] == ["b"]
    assert dp_above.ledger == dp.ledger
    assert not dp_above.result["failures"]
    assert same(dp_above.weights, dp.weights)
    [message] = {line for line in caplog.messages if "are taken for it" in line}
    assert message.startswith("1 labels are above 2, the last of task.classes=3")
