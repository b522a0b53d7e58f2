"""Image generators under DP: what is charged, what leaves, and what does not depend on an image."""

import shlex
import shutil
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from harness import SHARDS, Ran, broken, node_configs, run, write_shards
from torch.nn import functional as F

from flwr_replay.config.compose import compose, overrides_of
from flwr_replay.engines.simulate import Simulation
from flwr_replay.errors import BudgetError, ConfigError, FlwrReplayError, PrivacyError, TrainingError
from flwr_replay.forecast.forecast import forecast
from flwr_replay.generators.base import ImageForm
from flwr_replay.generators.style_layers import Discriminator
from flwr_replay.generators.stylegan2 import StyleGAN2
from flwr_replay.generators.synthesis import SynthesisPlan
from flwr_replay.institution.budget import DPTraining, PrivacyBudget
from flwr_replay.institution.node import institution_of
from flwr_replay.institution.owner import Institution
from flwr_replay.institution.synthesis import SynthesisStages
from flwr_replay.payloads.synthetic import DrawBuffer, TrainPiece
from flwr_replay.privacy.accounting import SampledGaussian, epsilon
from flwr_replay.privacy.dpsgd import clipped_sums
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.report.summary import summary
from flwr_replay.runs.execute import Job
from flwr_replay.state.store import StateStore
from flwr_replay.wire.records import config_in, metrics_in

SIZES = {"a": 40, "b": 33, "c": 20}
TASK = [*SHARDS, "classes=3", "model=cnn", "model.width=4", "model.norm=group", "device=cpu"]
PLAIN = [*TASK, "training.batch_size=16", "lr=0.05", "rounds=2", "generator.batch_size=16", "generator.classes=[all]"]
OFF = ["generator.deviation=false", "generator.r1_every=0", "generator.ada_images=0", "generator.privacy_loss=none"]
STYLE = ["generator=stylegan2", "generator.latents=4", "generator.width=4", "generator.max_width=4", *OFF]
STYLE += ["generator.steps=6", "generator.piece_steps=4"]
CODES = ["generator.width=4", "generator.codes=8", "generator.dim=4", "generator.epochs=2", "codebook=gradient"]
CODES += ["prior.width=4", "prior.layers=1", "prior.epochs=1", "prior.batch_size=16", "generator.piece_steps=3"]
FEDER = ["strategy=feder", "buffer=12", "mode=buffer-only"]
RUNS = {
    "feder, stylegan2": [*PLAIN, *STYLE, "strategy=feder", "buffer=12", "dp=generator"],
    "feder, codes": [*PLAIN, *CODES, "strategy=feder", "buffer=12", "dp=generator+prior"],
    "buffer-only, stylegan2": [*PLAIN, *STYLE, *FEDER, "dp=end-to-end"],
    "buffer-only, codes": [*PLAIN, *CODES, *FEDER, "dp=end-to-end"],
    "syncentral": [*PLAIN, *CODES, "strategy=syncentral", "buffer=12", "dp=end-to-end"],
    "fedavg": [*PLAIN, *STYLE, "strategy=fedavg", "replay=buffer", "replay.images=12", "dp=end-to-end"],
}

UNCOVERED = {name: {"evaluate"} for name in RUNS}
UNCOVERED |= {name: {"evaluate-own"} for name in RUNS if name.startswith("buffer-only")}
UNCOVERED |= {name: {"evaluate", "train-with-buffers"} for name in RUNS if name.startswith("feder")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("hospitals")
    write_shards(folder, SIZES)
    return folder


@pytest.fixture(scope="module")
def once(folder):
    """Return a run with these options, the same for all tests that ask for it."""
    return cache(lambda name: started(folder, *RUNS[name]))


def started(folder, *options, **more):
    return run(folder, options, node_configs(folder, folder / "state"), **more)


def charged(ran, name):
    """Return the steps charged at an institution, by mechanism."""
    steps = Counter()
    for charge in ran.charges(name):
        steps[charge["mechanism"]] += charge["steps"]
    return steps


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", RUNS)
def test_every_step_is_charged_and_every_answer_states_the_account(once, name):
    ran, plan = once(name), PrivacyPlan.of(compose(RUNS[name]))
    assert not ran.result["failures"]
    for institution, n in SIZES.items():
        assert charged(ran, institution) == {p.mechanism: p.cost(n, plan.config.sigma).steps for p in plan.passes}
        costs = [SampledGaussian(c["rate"], c["sigma"], c["steps"]) for c in ran.charges(institution)]
        stated = ran.result["privacy"][institution]["epsilon"]
        assert stated == epsilon(costs, 1 / n, plan.accountant) == plan.planned(n)[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", RUNS)
def test_only_what_the_claim_leaves_out_leaves_unprotected(once, name):
    ran = once(name)
    up = {
        (e["stage"], e["field"]): e["protection"]
        for e in ran.ledger
        if e["direction"] == "up" and e["kind"] != "notice"
    }
    for field in ("images", "labels"):
        assert up["draw-buffer", field].endswith("-DP")
    assert not {"loss", "margin", "diversity"} & {field for stage, field in up if stage == "train-piece"}
    kept, released = name.startswith("buffer-only"), set() if "dp=end-to-end" in RUNS[name] else {"train-with-buffers"}
    open_ = {stage for (stage, _), protection in up.items() if protection == "none"}
    assert open_ == {"evaluate-own" if kept else "evaluate"} | released
    assert ("train-own-with-buffers", "train-loss") not in up
    own = {(e["stage"], e["field"]) for e in ran.own_ledger("a") if e["protection"].endswith("-DP")}
    assert own == {key for key, protection in up.items() if protection.endswith("-DP")}


def test_the_summary_says_what_bounds_synthetic_images(once):
    def shown(name, **more):
        ran = once(name)
        return summary({**ran.result, "skew": {"ks": 0, "tv": 0, "dropped": 0}, **more}, ran.folder)

    assert "drawn by generators trained under DP" in shown("feder, codes")
    assert "Only what training the generator and prior at an institution reveals" in shown("feder, codes")
    assert "own model, which never leaves and is trained without noise, also depend" in shown("buffer-only, codes")
    assert "no epsilon bounds" in shown("feder, codes", privacy={"a": None})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["feder, codes", "buffer-only, stylegan2"])
def test_the_forecast_says_what_the_ledger_will_say(tmp_path, name):
    more = ["task=digits", "classes=10", "partition=iid", "partition.size=40", "model.width=4", "nodes=2"]
    nodes = [{"partition-id": k, "num-partitions": 2, "state": str(tmp_path / "state")} for k in range(2)]
    ran = run(tmp_path, [*RUNS[name], *more], nodes)
    expected, counted = Counter(), Counter()
    for line in forecast(Simulation.of(compose(overrides_of(ran.folder / "config.yaml")))):
        expected[line.institution, line.direction, line.stage, line.field] += line.bytes
    for e in ran.ledger:
        counted[e["institution"], e["direction"], e["stage"], e["field"]] += e["bytes"]
    assert counted == expected


@pytest.mark.sampled(2, of="slow replay")
def test_a_crash_after_an_answer_costs_nothing_and_every_message_may_meet_a_new_process(folder, once):
    usual = once("feder, codes")
    ran = broken(started, folder, *RUNS["feder, codes"], breaking=[("train-piece", "b")], forgetful=True)
    assert charged(ran, "b") == charged(usual, "b")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", RUNS)
def test_without_its_charged_steps_nothing_would_depend_on_an_image(tmp_path, monkeypatch, name):
    """Two data sets differ in an image and its label. Where no step is taken, the same bits leave."""
    monkeypatch.setattr(DPTraining, "step", lambda *_, **__: None)
    monkeypatch.setattr(PrivacyBudget, "check_steps", lambda _: None)
    by_run = []
    for changed in (0, 1):
        (place := tmp_path / str(changed)).mkdir()
        write_shards(place, SIZES)
        shard = dict(np.load(place / "a.npz"))
        shard["train_images"][0] += changed * 99
        shard["train_labels"][0] = (shard["train_labels"][0] + changed) % 3
        np.savez(place / "a.npz", **shard)
        log = started(place, *RUNS[name]).grid.log
        answers = [(asked, reply.content) for asked, _, reply in log if asked.stage not in UNCOVERED[name]]
        bits = [{key: a.numpy().tobytes() for key, a in content.get("arrays", {}).items()} for _, content in answers]
        by_run.append([(asked, metrics_in(content), b) for (asked, content), b in zip(answers, bits, strict=True)])
    assert len(by_run[0]) > 10
    assert by_run[0] == by_run[1]


# --- one institution ------------------------------------------------------------------------------------------------


def stages_of(folder, *options, name="feder, stylegan2", change=0, seed=0):
    """Return an institution with 40 images, and its stages; `change`: to its first image."""
    config = compose([*RUNS[name], f"seed={seed}", *options])
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 200, (40, 1, 8, 8), np.uint8), np.arange(40) % 3
    x[0] += change
    institution = Institution.from_arrays("a", (x, y))
    institution.state_root, institution.classes = folder, "all"
    state = StateStore(institution)
    budget = PrivacyBudget(PrivacyPlan.of(config), institution, state, config.seed)
    return SynthesisStages(institution, state, SynthesisPlan.of(config), budget)


def trained(stages, run="r"):
    while stages.train_piece(TrainPiece(run=run)).steps_left:
        pass
    return stages.draw_buffer(DrawBuffer(run=run, buffer=12, buffer_refresh="never"))


def test_what_begins_and_draws_does_not_depend_on_an_image(tmp_path):
    first, second = (stages_of(tmp_path / str(change), change=change) for change in (0, 9))
    assert first.identity == second.identity
    begun = [stages.trained_so_far("r")[0].state() for stages in (first, second)]
    assert all(np.array_equal(begun[0][key], begun[1][key]) for key in begun[0])
    assert not np.array_equal(trained(first).images, trained(stages_of(tmp_path / "0", seed=1), "s").images)


def test_a_generator_belongs_to_the_run_that_was_charged_for_it(tmp_path):
    stages = stages_of(tmp_path)
    first = trained(stages)
    charges = stages.budget.account("s").mechanisms
    assert charges == ()
    with pytest.raises(TrainingError, match="train it first"):
        stages.draw_buffer(DrawBuffer(run="s", buffer=12, buffer_refresh="never"))
    second = trained(stages, "s")
    assert not np.array_equal(first.images, second.images)  # other noise
    assert stages.budget.account("s").epsilon() == stages.budget.account("r").epsilon()
    assert np.array_equal(first.images, trained(stages).images)  # drawn again: nothing new
    shutil.copy(stages.file("s"), stages.file("r"))
    for ask in (trained, lambda stages: stages.draw_buffer(DrawBuffer(run="r", buffer=12, buffer_refresh="never"))):
        with pytest.raises(PrivacyError, match=r"is its run's alone; .* is of s, not r"):
            ask(stages)


def test_an_older_copy_of_the_state_is_noticed_before_an_image_leaves(tmp_path):
    stages = stages_of(tmp_path)
    stated = trained(stages).epsilon
    account = stages.state.of_run("r") / "privacy.jsonl"
    account.write_text("".join(account.read_text().splitlines(keepends=True)[:1]))
    for told in (stated, 0.0):  # also by a server that tells nothing
        with pytest.raises(PrivacyError, match="6 steps of generator were made in run 'r', and its account has 4"):
            stages.draw_buffer(DrawBuffer(run="r", buffer=12, buffer_refresh="never", stated=told))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spent", [1, 6])
def test_a_training_ends_where_the_budget_ends(tmp_path, spent):
    cost = stages_of(tmp_path).budget.plan.cost("generator", 40, 1)
    limit = epsilon([replace(cost, steps=6)], 1 / 40, "prv")
    stages = stages_of(tmp_path, f"privacy.epsilon={limit}")
    stages.budget.begin_steps("generator", range(spent), TrainPiece(run="r"))  # as by a crash
    if spent == 6:
        with pytest.raises(BudgetError, match="steps of generator would make"):
            stages.train_piece(TrainPiece(run="r"))
        return
    buffer = trained(stages)
    assert stages.trained_so_far("r")[1].steps == 4  # of 6: the second piece would be one step too many
    assert buffer.epsilon <= limit


def test_what_a_crash_has_repeated_is_charged_twice(tmp_path, monkeypatch):
    stages, train = stages_of(tmp_path), StyleGAN2.train

    def killed(self, images, labels, steps, *dp):
        if steps.stop == 6:
            monkeypatch.setattr(StyleGAN2, "train", train)
            raise KeyboardInterrupt
        return train(self, images, labels, steps, *dp)

    monkeypatch.setattr(StyleGAN2, "train", killed)
    with pytest.raises(KeyboardInterrupt):
        trained(stages)
    stated = trained(stages).epsilon
    assert [cost.steps for cost in stages.budget.account("r").spent] == [4, 2, 2, 0]
    assert stated == epsilon(stages.budget.account("r").spent, 1 / 40, "prv")


def test_under_dp_an_institution_without_its_declared_classes_says_nothing_of_that(tmp_path):
    stages = stages_of(tmp_path)
    stages.institution.train.y.zero_()
    assert {*trained(stages).labels.tolist()} == {0, 1, 2}
    stages.institution.classes = "2"
    assert {*trained(stages, "s").labels.tolist()} == {2}


def test_images_out_of_range_are_clipped_and_not_told(tmp_path):
    stages = stages_of(tmp_path)
    data = stages.institution.train
    object.__setattr__(data, "x", data.x.float() / 100 - 0.5)
    assert (stages.images().x.min(), stages.images().x.max()) == (0, 1)
    trained(stages)


# --- StyleGAN2 --------------------------------------------------------------------------------------------------------


def test_no_example_changes_anothers_gradient_at_the_discriminator():
    torch.manual_seed(0)
    net = Discriminator(3, 1, 8, 4, 8, residual=True, deviation=False).double()
    x, y = torch.rand(5, 1, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 1, 2, 0])

    def losses(x, y):
        return F.softplus(-net(x, y))

    sums, _ = clipped_sums(net, losses, (x, y), clip=0.1)
    expected = [torch.zeros_like(p) for p in net.parameters()]
    for i in range(5):
        gradients = torch.autograd.grad(losses(x[i : i + 1], y[i : i + 1]).sum(), [*net.parameters()])
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for total, gradient in zip(expected, gradients, strict=True):
            total += gradient * min(1.0, 0.1 / float(norm))
    for clipped, total in zip(sums, expected, strict=True):
        torch.testing.assert_close(clipped, total, rtol=1e-4, atol=1e-8)


class Watched:
    """In place of charged steps: takes every image, keeps what each step is given, and takes none."""

    def __init__(self):
        self.batches = []

    def rows(self, examples):
        return (torch.arange(n) for n in (examples, 0, examples))

    def step(self, model, optimizer, losses, batch, batch_size, num_replayed=0):
        self.batches.append((batch, batch_size, num_replayed))
        assert len(losses(*batch)) == len(batch[0])


def test_fakes_are_public_and_have_declared_labels():
    config = compose(RUNS["feder, stylegan2"]).generator
    images, labels = torch.randint(0, 256, (10, 1, 8, 8), dtype=torch.uint8), torch.zeros(10, dtype=torch.int64)

    def fakes(images, labels):
        gan, watched = StyleGAN2(config, ImageForm(1, 8, 3), 0, torch.device("cpu")), Watched()
        figures = gan.train(images, labels, range(3), watched, torch.tensor([1, 2]))
        assert figures == {"loss": 0.0}
        assert [len(batch[0]) for batch, *_ in watched.batches] == [16 + len(images), 16, 16 + len(images)]
        assert {(b, public) for _, b, public in watched.batches} == {(16, 16)}
        assert all({*batch[1][:16].tolist()} <= {1, 2} for batch, *_ in watched.batches)
        assert all((batch[2][:16] == -1).all() and (batch[2][16:] == 1).all() for batch, *_ in watched.batches)
        return [batch[0][:16] for batch, *_ in watched.batches]

    all_images, some = fakes(images, labels), fakes(images[:7], labels[:7])
    assert all(torch.equal(a, b) for a, b in zip(all_images, some, strict=True))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("feder, stylegan2", ["generator.deviation=true"], "set generator.deviation=false generator.r1-every=0"),
        ("feder, stylegan2", ["generator.r1_every=16"], "got .* r1-every=16"),
        ("feder, stylegan2", ["generator.ada_images=5"], "got .* ada-images=5"),
        ("feder, stylegan2", ["generator.privacy_loss=nearest"], "got .* privacy-loss=nearest"),
        ("feder, stylegan2", ["generator.classes=[]"], r"set generator\.classes=\[all\]"),
        ("feder, stylegan2", ["generator.checkpoint=/x"], r"generator\.checkpoint has no epsilon"),
        ("feder, stylegan2", ["dp=generator+prior"], "drawn by generator; got dp=generator.prior"),
        ("feder, codes", ["dp=generator"], "drawn by generator and prior; got dp=generator:"),
        ("feder, codes", ["codebook=ema"], "choose generator.codebook=gradient"),
        ("feder, codes", ["dp=end-to-end"], "lets classifiers leave that it cannot train so: choose mode=buffer-only"),
        ("fedavg", ["dp=classifier"], r"have no epsilon|has no epsilon"),
        ("feder, codes", ["generator.classes=['0 3']", "dp=none"], "numbers below 3 with spaces between; got '0 3'"),
        ("feder, codes", ["generator.classes=['']", "dp=none"], "numbers below 3"),
        ("buffer-only, codes", ["forgetting=true"], "leave forgetting out"),
    ],
)
def test_what_has_no_epsilon_is_refused_in_one_line(name, options, says):
    with pytest.raises(ConfigError, match=says) as refusal:
        Job.of(compose([*RUNS[name], *options]))
    assert "\n" not in str(refusal.value)


def test_an_institution_that_asks_for_a_guarantee_refuses_tests_of_a_model_without(folder, tmp_path):
    (tmp_path / "policy.yaml").write_text("{max-epsilon: 50, max-delta: 0.1}")
    nodes = [{**node, "policy": str(tmp_path / "policy.yaml")} for node in node_configs(folder, tmp_path, "ab")]
    with pytest.raises(FlwrReplayError, match=r"policy asks for epsilon <= 50; Evaluation\.\w+ has no differential"):
        run(folder, [*RUNS["buffer-only, stylegan2"], "sigma=4", "epsilon=20"], nodes)
    ran = run(folder, [*RUNS["syncentral"], "sigma=4", "epsilon=20"], nodes, ran=Ran)
    assert not ran.result["failures"]
    assert 0 < ran.result["privacy"]["a"]["epsilon"] <= 20


@pytest.mark.parametrize("own", ["", "0 2"])
def test_a_node_declares_its_own_classes(tmp_path, own):
    def of(*asked):
        overrides = shlex.join(["strategy=feder", *TASK, *asked])
        node = {"name": "a", "data": str(tmp_path), "state": str(tmp_path), **({"classes": own} if own else {})}
        return institution_of(Context(1, 1, node, RecordDict(), {"overrides": overrides}))[0].classes

    assert of() == own  # whatever a server leaves out
    assert of("generator.classes=[all]") == (own or "all")
    if own:
        assert of("generator.classes=['0','1']") == own
    else:
        with pytest.raises(ConfigError, match="a SuperNode names its own"):
            of("generator.classes=['0','1']")


def test_a_server_cannot_have_an_institution_draw_what_was_trained_without_noise(folder, tmp_path):
    """A run trained without DP, then the same run's buffer asked for under dp=generator."""
    plain = [option for option in RUNS["feder, stylegan2"] if not option.startswith("dp=")]
    nodes = node_configs(folder, tmp_path / "state", "ab")
    ran = run(folder, plain, nodes)

    def same_run(grid, message):
        if "run" in config_in(message.content):
            message.content["config"]["run"] = ran.run

    with pytest.raises(FlwrReplayError) as refusal:
        run(folder, RUNS["feder, stylegan2"], nodes, before=same_run)
    assert "began under other options" in str(refusal.value) or "privacy.dp was" in str(refusal.value)
