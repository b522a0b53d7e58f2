"""FedReplay through real messages against Algorithm 2 in plain PyTorch, and the store of its latents."""

import re
import shlex

import numpy as np
import pytest
import torch
from algorithm_2 import JOB, B, cut_after, network, stage_1, stage_2, stage_3
from grid import Grid, nth
from harness import Seen, fresh, node_configs, same, write_shards
from safetensors.numpy import load_file, save_file
from torch import nn

from flwr_replay.client_app import app
from flwr_replay.config.compose import compose, overrides_of
from flwr_replay.errors import ConfigError, RunError
from flwr_replay.learning.latents import unpack
from flwr_replay.learning.tasks import make_task
from flwr_replay.models.zoo import backbone
from flwr_replay.movements.base import Settings
from flwr_replay.report.progress import Display
from flwr_replay.runs.execute import execute
from flwr_replay.strategies.fedreplay import FedReplay
from flwr_replay.wire.records import arrays_in, opened
from flwr_replay.wire.weights import to_arrays

SIZES = {"a": 40, "b": 64, "c": 21}
QUICK = ["encoder=random", "rounds=1"]


@pytest.fixture
def shards(tmp_path):
    return write_shards(tmp_path, SIZES)


@pytest.fixture
def nodes(tmp_path, shards):
    torch.set_num_threads(1)
    return {node["name"]: node for node in node_configs(tmp_path, tmp_path)}


@pytest.fixture
def start(nodes):
    """Run; return the weights, the grid, the folder of latents and the recorder."""
    kept = []  # a recorder's folder goes with it

    def start(*options, names="cab", wait_for=3, evaluate_fn=None, **script):
        overrides = [*JOB, *options]
        config = compose(overrides)
        grid = Grid(app, {"overrides": shlex.join(overrides)}, [nodes[name] for name in names])
        vars(grid).update(script)
        strategy = FedReplay(
            config.strategy,
            Settings(
                roll_call=True,
                training=config.training,
                nodes=wait_for,
                evaluate_every=config.evaluate_every,
                task=make_task(config.task),
                model=backbone(config.model, config.task),
            ),
            Seen(),
        )
        kept.append(strategy)
        result = strategy.start(grid, fresh(config), config.rounds, evaluate_fn=evaluate_fn and evaluate_fn(grid))
        return opened(result.arrays), grid, strategy.uploads.store.folder, strategy.recorder

    return start


@pytest.fixture
def run(tmp_path, nodes):
    """Run with a run directory; return the weights, the grid, the directory and the result."""

    def start(name, *options, resume=False, stopping=()):
        overrides = [*JOB, *options, "nodes=3", f"runs_dir={tmp_path}", f"run_name={name}"]
        if resume:
            overrides = [*overrides_of(tmp_path / name / "config.yaml"), f"resume={tmp_path / name}", *options]
        grid = Grid(app, {"overrides": shlex.join(overrides)}, list(nodes.values()))
        grid.stopping = stopping
        result, folder = execute(grid, compose(overrides), Display())
        return load_file(folder / "models" / "global.safetensors"), grid, folder / "latents", result

    return start


# --- what must agree --------------------------------------------------------------------------------------------------


def assert_weights_close(weights, *modules):
    expected = {name: value for module in modules for name, value in module.state_dict().items()}
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value.numpy(), rtol=0, atol=1e-6, err_msg=name)


def stored(folder, name, what="latents"):
    return np.load(folder / name / f"{what}.npy", mmap_mode="r")


# --- the three stages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lr_step", "fall"), [(0, 1.0), (1, 0.1)])
def test_the_run_is_algorithm_2(start, shards, lr_step, fall):
    weights, grid, folder, recorder = start(f"lr-step={lr_step}")
    encoder, epochs = stage_1(*shards["b"], "b", "conv1", fall=fall)
    union = stage_2(encoder, shards)
    for name, (e, y) in union.items():
        np.testing.assert_allclose(stored(folder, name), e.numpy(), rtol=0, atol=1e-6)
        assert stored(folder, name, "labels").tolist() == y.tolist()
    assert_weights_close(weights, encoder, stage_3([union, union], fall=fall))
    stages = [at.stage for at in grid.asked]
    assert stages == ["roll-call"] * 3 + ["encode"] + ["extract"] * 3 + ["evaluate"] * 3
    in_encoder = epochs * (58 // B) * B
    assert recorder.examples == in_encoder + 2 * (sum(SIZES.values()) // B) * B


def test_the_primary_starts_from_fresh_weights_not_from_the_encoders_tail(start):
    weights, grid, _, _ = start("lr=1e-12", "momentum=0", "rounds=1")
    [(asked, _)] = grid.of("encode")
    fresh, tail = to_arrays(network(purpose="primary")), arrays_in(asked.content)
    for name in ("conv2.conv.weight", "head.fc.weight"):
        np.testing.assert_allclose(weights[name], fresh[name], rtol=0, atol=1e-6)
        assert not np.allclose(weights[name], tail[name], rtol=0, atol=1e-2)


def test_the_encoder_stays_as_it_came_norm_layers_included(start):
    weights, grid, _, _ = start("rounds=3", "chunk-mb=0.01")
    [(_, reply)] = grid.of("encode")
    encoder = arrays_in(reply.content)
    assert {"conv1.conv.weight", "conv1.norm.running_mean", "conv1.norm.num_batches_tracked"} <= encoder.keys()
    assert not any(name.startswith(("conv2", "head")) for name in encoder)
    assert len(grid.of("extract")) > 3
    assert all(same(arrays_in(asked.content), encoder) for asked, _ in grid.of("extract"))
    assert same({name: weights[name] for name in encoder}, encoder)
    assert any(encoder["conv1.norm.running_mean"] != 0)


# --- stage 1 ----------------------------------------------------------------------------------------------------------


def test_the_largest_trains_the_encoder_and_the_next_largest_stands_in(start, shards):
    assert start("rounds=1")[1].who("encode") == ["b"]
    weights, grid, _, recorder = start(failing=nth(("encode", "b", 1)))
    assert grid.who("encode") == ["b", "a"]
    assert sorted(grid.who("extract")) == ["a", "b", "c"]  # it could not train, but it can encode
    encoder, _ = stage_1(*shards["a"], "a", "conv1")
    union = stage_2(encoder, shards)
    assert_weights_close(weights, encoder, stage_3([union, union]))
    assert [failure["institution"] for failure in recorder.failures] == ["b"]


def test_a_named_institution_trains_the_encoder_or_nobody(start):
    assert start("rounds=1", "encoder-institution=c")[1].who("encode") == ["c"]
    with pytest.raises(RunError, match=r"no institution could train the encoder; c: .*made to fail"):
        start("encoder-institution=c", failing=nth(("encode", "c", 1)))
    with pytest.raises(ConfigError, match="must be one of largest, b, a, c; got 'd'"):
        start("encoder-institution=d")


def test_a_random_encoder_is_the_fresh_backbones(start, shards):
    weights, grid, _, _ = start(*QUICK)
    assert not grid.of("encode")
    encoder, _ = cut_after(network(), "conv1")
    assert_weights_close(weights, encoder, stage_3([stage_2(encoder, shards)]))


def test_an_encoder_from_a_file_is_taken_as_it_is(start, shards, tmp_path):
    model = network(purpose="somewhere else")
    save_file(to_arrays(model), tmp_path / "given.safetensors")
    option = f"encoder-file={tmp_path}/given.safetensors"
    weights, grid, _, _ = start("encoder=file", option, "rounds=1")
    assert not grid.of("encode")
    encoder, _ = cut_after(model, "conv1")
    assert_weights_close(weights, encoder, stage_3([stage_2(encoder, shards)]))
    save_file({"conv1.conv.weight": np.zeros((4, 1, 3, 3), np.float32)}, tmp_path / "given.safetensors")
    with pytest.raises(ConfigError, match=r"'conv1.norm.weight' with shape .* lacks it"):
        start("encoder=file", option)
    save_file(to_arrays(network("model.width=8")), tmp_path / "given.safetensors")
    with pytest.raises(ConfigError, match=r"'conv1.conv.weight' with shape \(4, .* has \(8, "):
        start("encoder=file", option)
    (tmp_path / "given.safetensors").write_bytes(b"no")
    with pytest.raises(ConfigError, match=r"must be a \.safetensors or \.pth file"):
        start("encoder=file", option)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cut", ["conv1", "layer1", "layer2", "layer3", "layer4"])
def test_the_backbone_is_cut_at_any_stage(start, shards, cut):
    options = ["model=resnet18", "stem=small", "model.width=4"]
    weights, _, _, _ = start(*options, *QUICK, f"cut={cut}")
    encoder, _ = cut_after(network(*options), cut)
    assert_weights_close(weights, encoder, stage_3([stage_2(encoder, shards)], *options, cut=cut))
    assert list(encoder.state_dict())[-1].startswith(cut)


# --- stage 2 ----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("cut", "size"), [("conv1", 0.005), ("layer2", 0.003)])  # 11 and 6 rows a message
def test_no_message_exceeds_chunk_mb_and_the_union_does_not_depend_on_it(start, cut, size):
    options = ["model=resnet18", "stem=small", "model.width=4", f"cut={cut}", *QUICK]
    whole, grid, folder, _ = start(*options)
    assert len(grid.of("extract")) == 3
    weights, grid, chunked, _ = start(*options, f"chunk-mb={size}")
    replies = [reply.content for _, reply in grid.of("extract")]
    assert len(replies) > 9
    assert max(sum(record.count_bytes() for record in reply.values()) for reply in replies) <= size * 1e6
    for name in SIZES:
        assert stored(chunked, name).tobytes() == stored(folder, name).tobytes()
        assert stored(chunked, name, "labels").tobytes() == stored(folder, name, "labels").tobytes()
    assert same(weights, whole)


def test_a_chunk_holds_at_least_one_example(start):
    with pytest.raises(RunError, match=r"chunk-mb must hold at least one example's latents"):
        start(*QUICK, "chunk-mb=0.0021")


@pytest.mark.parametrize(("dtype", "bytes_each"), [("float32", 4), ("float16", 2), ("int8", 1)])
def test_latents_travel_and_lie_in_the_dtype_asked_for(start, shards, dtype, bytes_each):
    weights, grid, folder, _ = start(*QUICK, f"latent-dtype={dtype}")
    encoder, _ = cut_after(network(), "conv1")
    union, seen = stage_2(encoder, shards), {}
    for name, (e, y) in union.items():
        codes = stored(folder, name)
        assert codes.dtype == dtype
        scales = stored(folder, name, "scales") if dtype == "int8" else None
        bound = {"float32": 1e-6, "float16": 2.0**-10 * float(e.abs().max())}.get(dtype)
        bound = scales.max() * 0.501 if bound is None else bound
        np.testing.assert_allclose(unpack(codes, scales), e.numpy(), rtol=0, atol=bound)
        seen[name] = torch.from_numpy(unpack(codes, scales)), y
        [(_, reply)] = grid.of("extract", name)
        sent = reply.content["arrays"]["latents"].data
        assert len(sent) == 128 + e.numel() * bytes_each
    assert_weights_close(weights, encoder, stage_3([seen]))


def test_the_first_view_is_the_image_itself_and_the_others_are_its_shifts(start, shards):
    weights, _, folder, recorder = start(*QUICK, "upload-views=3", "chunk-mb=0.01")
    encoder, _ = cut_after(network(), "conv1")
    seen = {}
    for name, (x, y) in shards.items():
        padded = nn.functional.pad(x, (1, 1, 1, 1))
        shifts = [padded[..., i : i + 8, j : j + 8] for i in range(3) for j in range(3)]
        with torch.no_grad():
            nine = torch.stack([encoder.eval()(shift) for shift in shifts])  # 4: the image itself
        views = torch.from_numpy(stored(folder, name).copy()).unflatten(0, (3, len(y)))
        torch.testing.assert_close(views[0], nine[4], rtol=0, atol=1e-6)
        which = (views[1:, None] - nine[None]).abs().flatten(3).amax(3).min(1)
        assert which.values.max() <= 1e-6
        assert len(which.indices.unique()) > 4  # drawn, not one shift for all
        assert stored(folder, name, "labels").tolist() == y.tolist() * 3
        seen[name] = views.flatten(0, 1), y.repeat(3)
    assert_weights_close(weights, encoder, stage_3([dict(sorted(seen.items()))]))
    assert recorder.examples == (3 * sum(SIZES.values()) // B) * B


# --- who comes late, who comes back -----------------------------------------------------------------------------------


def test_who_joins_late_uploads_then_and_counts_from_then_on(start, nodes, shards):
    def joins_after_2(grid):
        here, grid.contexts = grid.contexts, {node: grid.contexts[node] for node in list(grid.contexts)[:2]}

        def joins(exchange, arrays):
            grid.contexts = here if exchange == 2 else grid.contexts

        return joins

    options = ["encoder=random", "rounds=3", "evaluate-every=1"]
    weights, grid, _, _ = start(*options, names="acb", wait_for=2, evaluate_fn=joins_after_2)
    assert grid.who("extract") == ["a", "c", "b"]
    encoder, _ = cut_after(network(), "conv1")
    union = stage_2(encoder, shards)
    without = {name: union[name] for name in "ac"}
    assert_weights_close(weights, encoder, stage_3([without, without, union]))
    assert grid.who("evaluate") == [*"ac", *"ac", *"abc"]


def test_who_fails_to_upload_is_asked_again_in_the_next_round(start, shards):
    weights, grid, _, recorder = start(
        "encoder=random", "rounds=3", "evaluate-every=3", failing=nth(("extract", "b", 1))
    )
    assert grid.who("extract").count("b") == 2
    encoder, _ = cut_after(network(), "conv1")
    union = stage_2(encoder, shards)
    without = {name: union[name] for name in "ac"}
    assert_weights_close(weights, encoder, stage_3([without, union, union]))
    assert [(failure["round"], failure["institution"]) for failure in recorder.failures] == [(1, "b")]


def test_a_run_without_any_upload_ends(start):
    with pytest.raises(RunError, match=r"no institution has uploaded its latents; .*made to fail"):
        start(*QUICK, failing=nth(*(("extract", name, 1) for name in SIZES)))


# --- resumption -------------------------------------------------------------------------------------------------------


def test_a_run_that_broke_off_goes_on_with_the_same_bits(run):
    options = ["chunk-mb=0.01", "rounds=3", "evaluate-every=1"]
    whole, _, folder, result = run("whole", *options)
    for k, (where, asked_again) in enumerate(
        [
            (("extract", "a", 1), [6]),  # the encoder is there, no upload
            (("extract", "b", 2), [3]),  # amid the uploads: the first chunk of each is there
            (("evaluate", "c", 2), [0]),  # all is there
        ]
    ):
        with pytest.raises(KeyboardInterrupt):
            run(f"broken-{k}", *options, stopping=nth(where))
        weights, grid, resumed, other = run(f"broken-{k}", resume=True)
        assert same(weights, whole)
        assert result["final"] == other["final"]
        assert result["examples-seen"] == other["examples-seen"]
        assert [*grid.who("encode"), len(grid.of("extract"))] == asked_again
        for name in SIZES:
            assert stored(resumed, name).tobytes() == stored(folder, name).tobytes()


def test_several_processes_of_the_server_train_as_one_and_others_resume(run, forks):
    options = ["model.norm=group", "encoder=random", "rounds=3", "evaluate-every=1", "batch-size=15"]  # 8 and 7
    single, _, _, result = run("one", *options)
    with pytest.raises(KeyboardInterrupt):
        run("two", *options, "server-processes=2", stopping=nth(("evaluate", "c", 2)))
    two, _, _, other = run("two", "server-processes=3", resume=True)
    assert not same(single, two)  # the sums are others
    for name, value in single.items():
        np.testing.assert_allclose(two[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert other["final"]["global"]["loss"] == pytest.approx(result["final"]["global"]["loss"], rel=1e-5)
    assert other["examples-seen"] == result["examples-seen"] == 3 * (sum(SIZES.values()) // 15) * 15


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_that_uploads_will_be_larger_than_the_raw_data_is_told_before(dtype, run):
    _, _, _, result = run(dtype, *QUICK, f"latent_dtype={dtype}", "chunk_mb=64")
    up, advice = result["bytes-by-kind"]["up"], result["upload-advice"]
    told, times = re.match(r"uploads will be (\S+) kB, (\S+) times the raw data .*: cut=conv2 sends", advice).groups()
    assert float(told) * 1000 == pytest.approx(
        up["per-sample"], rel=0.15
    )  # the ledger counts the messages' frames, too
    assert float(times) == pytest.approx(float(told) * 1000 / up["raw-bytes-they-stand-for"], rel=0.05)
