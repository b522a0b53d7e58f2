"""SplitNN through real messages: CWT's bits, the unsplit model's gradients, plain loops for what is its own."""

import re
import shlex

import numpy as np
import pytest
import torch
from grid import Grid
from harness import SHARDS, Seen, fresh, node_configs, same, write_shards
from safetensors.numpy import load_file
from torch.nn.functional import cross_entropy

from flwr_replay.client_app import app
from flwr_replay.config.compose import compose, overrides_of
from flwr_replay.config.halves import load_strategy
from flwr_replay.engines.inline import InlineGrid
from flwr_replay.errors import DivergedError, FlwrReplayError, RunError
from flwr_replay.models import placed
from flwr_replay.models.zoo import backbone
from flwr_replay.report.progress import Display
from flwr_replay.rng import derived_seed
from flwr_replay.runs.execute import execute, settings_of
from flwr_replay.strategies.splitnn import group_sizes
from flwr_replay.wire.payload import REQUESTS
from flwr_replay.wire.records import array_record, arrays_in, opened
from flwr_replay.wire.weights import to_arrays

B, LR = 16, 0.05
SIZES = {"a": 70, "b": 33, "c": 5}  # 4, 2 and 1 batches
TASK = [*SHARDS, "classes=3", "model=cnn", "model.width=4"]
JOB = [*TASK, f"batch_size={B}", f"lr={LR}", "device=cpu", "rounds=2", "evaluate-every=2"]
UNLABELLED = "share-labels=false"
VISIT = ["enter", "next-batch", "leave"]  # of b
OUTSIDE = ("roll-call", "evaluate")  # of visits


def stages(grid, name=""):
    """Return what the institutions, or one of them, were asked for in their visits."""
    return [at.stage for at in grid.asked if at.stage not in OUTSIDE and name in ("", at.name)]


def nth_message(*calls):
    """Mean messages by their number among all of an institution's visits: (name, n)."""
    return lambda grid, at: (at.name, len(stages(grid, at.name))) in calls and at.stage not in OUTSIDE


def answered(grid, stage, name):
    """Return the arrays that an institution sent at a stage."""
    return [arrays_in(reply.content) for _, reply in grid.of(stage, name)]


def spoil_answers(call, spoil):
    """Let arrays of an answer be replaced."""

    def after(grid, asked, reply):
        if nth_message(call)(grid, grid.asked[-1]):
            reply.content["arrays"].update(spoil(arrays_in(reply.content)))

    return after


def asked_twice(grid, asked):
    if grid.asked[-1].stage not in OUTSIDE:
        InlineGrid.answer(grid, asked)


@pytest.fixture
def shards(tmp_path):
    torch.set_num_threads(1)
    return write_shards(tmp_path, SIZES)


@pytest.fixture
def start(tmp_path, shards):
    """Run; return the weights, the grid and the recorder."""

    def start(*options, strategy="splitnn", names="cab", **script):
        overrides = [f"strategy={strategy}", *JOB, *options]
        config = compose(overrides)
        grid = Grid(app, {"overrides": shlex.join(overrides)}, node_configs(tmp_path, tmp_path, names))
        vars(grid).update(script)
        run = load_strategy(strategy)[0](config.strategy, settings_of(config), Seen())
        return opened(run.start(grid, fresh(config), config.rounds).arrays), grid, run.recorder

    return start


def assert_weights_close(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_allclose(left[name], right[name], rtol=0, atol=1e-6, err_msg=name)


# --- exact relations --------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2, "labels")
@pytest.mark.parametrize("labels", ["share-labels=true", UNLABELLED])
@pytest.mark.parametrize(
    "options",
    [
        ["momentum=0"],
        ["weight-decay=0.1"],
        ["optimizer=adam", "lr=0.001"],
        ["norm=group", "lr-step=1"],
        ["model=resnet18", "model.width=8", "strategy.cut=layer2", "rounds=1", "evaluate-every=1"],
    ],
)
def test_splitnn_is_cwt_bit_for_bit(start, labels, options):
    """Norm statistics are among the weights: a second update of theirs would show."""
    cwt, _, of_cwt = start(*[option for option in options if "cut" not in option], strategy="cwt")
    weights, _, recorder = start(labels, *options)
    assert list(weights) == list(cwt)
    assert same(weights, cwt)
    assert recorder.last == of_cwt.last
    assert recorder.examples == of_cwt.examples


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cut", ["conv1", "conv2"])
def test_the_gradients_are_those_of_the_unsplit_model(start, shards, cut):
    weights, grid, _ = start(f"cut={cut}", "rounds=1", "evaluate-every=1", "momentum=0", names="c")  # one batch
    config = compose(JOB)
    model = placed(backbone(config.model, config.task)(derived_seed(0, "model")), "cpu")
    x, y = shards["c"]
    order = torch.randperm(5, generator=torch.Generator().manual_seed(derived_seed(0, "c", 1)))
    first = [name for name, _ in model.named_children()].index(cut) + 1
    a = model[:first](x[order])
    a.retain_grad()
    cross_entropy(model[first:](a), y[order]).backward()
    torch.optim.SGD(model.parameters(), lr=LR).step()

    [sent] = answered(grid, "enter", "c")
    assert np.array_equal(sent["activations"], a.detach().numpy())
    assert sent["labels"].tolist() == y[order].tolist()
    [(leave, _)] = grid.of("leave")
    assert np.array_equal(arrays_in(leave.content)["gradients"], a.grad.numpy())
    assert same(weights, to_arrays(model))


# --- messages ---------------------------------------------------------------------------------------------------------


def test_a_batch_is_one_message_each_way(start):
    _, grid, recorder = start()
    visits = {
        "a": ["enter", *["next-batch"] * 3, "leave"],
        "b": VISIT,
        "c": ["enter", "leave"],
    }
    assert stages(grid) == (visits["a"] + visits["b"] + visits["c"]) * 2
    assert recorder.examples == 2 * (4 * B + 2 * B + 5)
    for name, rows in {"a": B, "b": B, "c": 5}.items():
        assert {len(sent["activations"]) for sent in answered(grid, "enter", name)} == {rows}


def test_without_labels_a_batch_is_two_messages_and_no_payload_has_a_field_for_labels(start):
    _, grid, _ = start(UNLABELLED)
    assert stages(grid, "b") == ["enter-unlabelled", "head-loss", "next-batch-unlabelled", "head-loss", "leave"] * 2
    for stage in set(stages(grid)):
        assert not {"labels"} & (REQUESTS[stage].declared().keys() | REQUESTS[stage].answer.declared().keys())
    assert not any("labels" in arrays_in(reply.content) for at, _, reply in grid.log if at.stage not in OUTSIDE)


def test_only_the_institutions_part_visits(start):
    _, grid, _ = start(UNLABELLED, "cut=conv1")
    [half, *_] = answered(grid, "leave", "a")
    assert {name.split(".")[0] for name in half} == {"conv1", "head"}
    _, grid, _ = start("cut=conv2")
    [half, *_] = answered(grid, "leave", "a")
    assert {name.split(".")[0] for name in half} == {"conv1", "conv2"}


def test_group_sizes_add_up_to_the_visits_of_cwt():
    for n, b, m in [(70, 16, 1), (70, 16, 3), (70, 16, 9), (5, 16, 2), (1, 1, 1), (33, 16, 2)]:
        sizes = group_sizes(n, b, m)
        assert sum(sizes) == max(1, n // b) * min(b, n)
        assert all(size == m * min(b, n) for size in sizes[:-1])


# --- what must survive ------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1, "how")
@pytest.mark.parametrize("labels", ["share-labels=true", UNLABELLED])
@pytest.mark.parametrize("how", [{"before": asked_twice}, {"forgetful": True}], ids=["twice", "new process"])
def test_a_message_repeated_or_in_a_new_process_gives_the_same_bits(start, labels, how):
    weights, _, _ = start(labels)
    assert same(start(labels, **how)[0], weights)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [[], ["optimizer-state=keep"], [UNLABELLED, "optimizer-state=keep"]])
def test_a_run_that_breaks_off_amid_a_visit_goes_on_with_the_same_bits(tmp_path, shards, options):
    def run(name, *more, stopping=(), resume=False):
        overrides = ["strategy=splitnn", *JOB, *options, "nodes=3", f"runs_dir={tmp_path}", f"run_name={name}"]
        if resume:
            overrides = [*overrides_of(tmp_path / name / "config.yaml"), f"resume={tmp_path / name}"]
        grid = Grid(app, {"overrides": shlex.join(overrides)}, node_configs(tmp_path, tmp_path))
        grid.stopping = stopping
        result, folder = execute(grid, compose(overrides), Display())
        return load_file(folder / "models" / "global.safetensors"), result

    weights, result = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("broken", stopping=nth_message(("a", 9 if options[:1] != [UNLABELLED] else 16)))  # in its second visit
    resumed, ended = run("broken", resume=True)
    assert same(resumed, weights)
    assert ended["final"] == result["final"]
    assert ended["examples-seen"] == result["examples-seen"] == 2 * (4 * B + 2 * B + 5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("message", [1, 2, 3])
@pytest.mark.parametrize("options", [[], ["optimizer-state=keep"]])
def test_a_visit_that_breaks_off_leaves_both_parts_and_goes_to_the_next(start, shards, message, options):
    weights, grid, recorder = start(*options, failing=nth_message(("b", message)))
    assert [failure["institution"] for failure in recorder.failures] == ["b"]
    assert stages(grid, "b") == [*VISIT[:message], *VISIT]
    assert_weights_close(weights, twin(shards, ["a", None, *"cabc"], keep=bool(options)))


def test_a_cycle_of_failures_ends_the_run(start):
    with pytest.raises(RunError, match=r"no institution answered in exchange 4; .*made to fail"):
        start(failing=nth_message(("b", 1), ("c", 2), ("a", 7)))


def test_what_an_institution_must_go_on_with_may_not_vanish(start, tmp_path):
    def lose(arrays):
        for file in (tmp_path / "b").rglob("part-*"):
            file.unlink()
        return {}

    _, grid, recorder = start(after=spoil_answers(("b", 1), lose))
    [failure] = recorder.failures
    assert failure["institution"] == "b"
    assert "the part of the model that it kept" in failure["reason"]
    assert stages(grid, "b")[2:] == VISIT


@pytest.mark.parametrize(
    ("at", "spoil", "reported"),
    [
        (1, lambda sent: {"labels": sent["labels"] + 3}, "as many labels of"),
        (1, lambda sent: {"labels": sent["labels"][1:]}, "as many labels of"),
        (2, lambda sent: {"activations": sent["activations"][1:]}, "have shape (16, 4, 4, 4); got (15, 4, 4, 4)"),
        (3, lambda sent: {"conv1.norm.bias": np.zeros(5, np.float32)}, "in the form that it had"),
    ],
)
def test_an_upload_that_does_not_fit_ends_the_visit_alone(start, shards, at, spoil, reported):
    weights, _, recorder = start(after=spoil_answers(("b", at), lambda sent: array_record(spoil(sent))))
    [failure] = recorder.failures
    assert failure["institution"] == "b"
    assert reported in failure["reason"]
    assert_weights_close(weights, twin(shards, ["a", None, *"cabc"]))


@pytest.mark.parametrize("labels", ["share-labels=true", UNLABELLED])
def test_a_loss_that_is_not_finite_stops_the_run(start, labels):
    with pytest.raises(DivergedError, match="must be finite"):
        start(labels, "lr=1e30")


# --- what is SplitNN's own --------------------------------------------------------------------------------------------


def twin(shards, visits, keep=False, m=1, with_head=False):
    """Train with SGD spelled out: all outputs of a group first, then its gradients, back through the parts."""
    config = compose(JOB)
    model = backbone(config.model, config.task)(derived_seed(0, "model"))
    stages = list(model.children())
    parts = [torch.nn.Sequential(stages[0]), torch.nn.Sequential(*stages[1:])]
    if with_head:
        parts = [torch.nn.Sequential(stage) for stage in stages]
    velocity = {}

    def descend(part, gradients, who):
        with torch.no_grad():
            for theta, gradient in zip(part.parameters(), gradients, strict=True):
                at = who, id(theta)
                velocity[at] = 0.9 * velocity.get(at, 0.0) + gradient
                theta.sub_(LR * velocity[at])

    for number, name in enumerate(visits, start=1):
        if name is None:
            continue
        x, y = shards[name]
        institution, server = (name, "server") if keep else (number, number)
        owners = [institution, server, institution]
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(derived_seed(0, name, number)))
        batches = order[: max(1, len(y) // B) * B].split(B)
        for first in range(0, len(batches), m):
            group = batches[first : first + m]
            inputs = [[x[rows] for rows in group]]
            for part in parts[:-1]:
                outputs = [part(z) for z in inputs[-1]]
                inputs.append([z.detach().requires_grad_() for z in outputs])
            slopes = []
            for z, rows in zip(inputs[-1], group, strict=True):
                loss = cross_entropy(parts[-1](z), y[rows])
                slope, *gradients = torch.autograd.grad(loss, [z, *parts[-1].parameters()])
                descend(parts[-1], gradients, owners[len(parts) - 1])
                slopes.append(slope)
            for k in range(len(parts) - 2, -1, -1):
                slopes_found = []
                saved = {key: value.clone() for key, value in parts[k].state_dict().items()}
                for z, slope in zip(inputs[k], slopes, strict=True):
                    wanted = [*([z] if k else []), *parts[k].parameters()]
                    slopes_found.append(torch.autograd.grad(parts[k](z), wanted, slope))
                parts[k].load_state_dict(saved)  # this second pass moved the norm statistics again
                for gradients in slopes_found:
                    descend(parts[k], gradients[1:] if k else gradients, owners[k])
                slopes = [gradients[0] for gradients in slopes_found]
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize(("m", "keep"), [(1, False), (1, True), (3, False), (2, True)])
def test_micro_batches_and_the_optimizers_kept(start, shards, with_head, m, keep):
    options = [f"micro-batches={m}", f"optimizer-state={'keep' if keep else 'reset'}"]
    options += [f"share-labels={'false' if with_head else 'true'}"]
    weights, grid, _ = start(*options)
    assert_weights_close(weights, twin(shards, "abcabc", keep, m, with_head))
    uploads = stages(grid, "a").count("enter-unlabelled" if with_head else "enter")
    uploads += stages(grid, "a").count("next-batch-unlabelled" if with_head else "next-batch")
    assert uploads == 2 * -(-4 // m)


def test_more_than_one_micro_batch_is_not_cwt(start, shards):
    assert not same(start("micro-batches=2")[0], start()[0])
    assert same(start("micro-batches=2", names="c")[0], start(names="c")[0])  # one batch a visit: nothing to group


# --- before the run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        (["cut=conv9"], "cut must be one of conv1, conv2; got 'conv9'"),
        (["cut=conv2", UNLABELLED], "must leave a stage between them; got cut='conv2'"),
        (["micro-batches=0"], "strategy.micro-batches must be at least 1; got 0"),
        (["optimizer-state=kept"], "strategy.optimizer-state must be one of keep, reset"),
        (["batch_size=1"], "batch norm needs batches of at least two examples"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, reported):
    def checked():
        config = compose(["strategy=splitnn", *JOB, *options])
        load_strategy("splitnn")[0].check(config.strategy, settings_of(config))

    with pytest.raises(FlwrReplayError, match=reported):
        checked()


@pytest.mark.parametrize("labels", ["share-labels=true", UNLABELLED])
def test_a_policy_that_keeps_samples_at_home_refuses_at_the_roll_call(tmp_path, shards, labels):
    (tmp_path / "policy.yaml").write_text("kinds: [model, statistic]\n")
    overrides = ["strategy=splitnn", *JOB, labels]
    config = compose(overrides)
    nodes = node_configs(tmp_path, tmp_path)
    nodes[0]["policy"] = str(tmp_path / "policy.yaml")  # c's
    grid = Grid(app, {"overrides": shlex.join(overrides)}, nodes)
    run = load_strategy("splitnn")[0](config.strategy, settings_of(config), Seen())
    run.start(grid, fresh(config), 1)
    [failure] = run.recorder.failures
    assert (failure["institution"], failure["round"]) == ("c", 0)
    assert "activations is per-sample" in failure["reason"]
    assert not stages(grid, "c")


@pytest.mark.parametrize("labels", ["share-labels=true", UNLABELLED])
def test_that_uploads_will_be_larger_than_the_raw_data_is_told_before(start, labels):
    """Real messages are weighed."""
    _, grid, recorder = start(labels, "rounds=1", "evaluate-every=1")
    visits = [(name, stage) for name in SIZES for stage in set(stages(grid, name)) - {"leave"}]
    arrays = [array for name, stage in visits for sent in answered(grid, stage, name) for array in sent.values()]
    up, raw = sum(array.nbytes for array in arrays), sum(SIZES.values()) * (8 * 8 + 8)  # bytes of images and labels
    advice = recorder.notes["upload-advice"]
    told, times = re.match(r"uploads of each round will be (\S+) kB, (\S+) times the raw data ", advice).groups()
    assert float(told) * 1000 == pytest.approx(up, rel=0.01)
    assert float(times) == pytest.approx(up / raw, rel=0.05)
