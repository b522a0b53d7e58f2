"""FedReplay through real messages against Algorithm 2 in plain PyTorch, and the store of its latents."""

import shlex
import tracemalloc
from collections import OrderedDict

import numpy as np
import pytest
import torch
from flwr.app import Error, Message
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors.numpy import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy

from flwr_replay.check import Quiet
from flwr_replay.client_app import app, backbone
from flwr_replay.compose import compose, overrides_of
from flwr_replay.engine import InlineGrid
from flwr_replay.errors import ConfigError, RunError, WireError
from flwr_replay.latents import LatentStore, pack, shifted, unpack
from flwr_replay.movements.base import Settings
from flwr_replay.movements.recorder import Recorder
from flwr_replay.payloads.fedreplay import Latents
from flwr_replay.rng import derived_seed
from flwr_replay.server_app import execute
from flwr_replay.strategies.fedreplay import FedReplay
from flwr_replay.tasks import make_task
from flwr_replay.training import to_arrays
from flwr_replay.wire import array_record, arrays_in, config_in, opened

B, LR = 16, 0.05
SIZES = {"a": 40, "b": 64, "c": 21}
JOB = ["strategy=fedreplay", "task=medmnist", "task.size=8", "classes=3", "model=cnn", "model.width=4", "rounds=2"]
JOB += ["encoder-epochs=4", "patience=2", f"batch_size={B}", f"lr={LR}", "device=cpu", "evaluate-every=2"]
QUICK = ["encoder=random", "rounds=1"]


class Grid(InlineGrid):
    """Keeps what was asked and answered; fails or breaks off where told, by (name, stage, n-th time)."""

    failing = breaking = ()

    def _answer(self, message):
        self.log = getattr(self, "log", [])
        name = self.contexts[message.metadata.dst_node_id].node_config["name"]
        stage = config_in(message.content)["stage"]
        at = name, stage, len(self.of(stage, name)) + 1
        if at in self.breaking:
            raise KeyboardInterrupt
        reply = Message(Error(2, "made to fail"), reply_to=message) if at in self.failing else super()._answer(message)
        self.log.append((name, stage, message.content, reply))
        return reply

    def of(self, stage, name=""):
        """Return requests and replies of one stage."""
        return [(asked, reply) for who, what, asked, reply in self.log if what == stage and name in ("", who)]

    def who(self, stage):
        return [who for who, what, _, _ in self.log if what == stage]


@pytest.fixture
def shards(tmp_path):
    rng = np.random.default_rng(0)
    data = {}
    for name, n in SIZES.items():
        x, y = rng.integers(0, 256, (n + 9, 8, 8), np.uint8), rng.integers(0, 3, n + 9)
        parts = {"train_images": x[:n], "train_labels": y[:n], "test_images": x[n:], "test_labels": y[n:]}
        np.savez(tmp_path / f"{name}.npz", **parts)
        data[name] = torch.from_numpy(x[:n, None]) / 255, torch.from_numpy(y[:n])
    return data


@pytest.fixture
def nodes(tmp_path, shards):
    torch.set_num_threads(1)
    return {name: {"name": name, "data": str(tmp_path / f"{name}.npz"), "state": str(tmp_path)} for name in "cab"}


class Seen(Recorder):
    """Counts the examples used."""

    examples = 0

    def saw(self, examples):
        self.examples += examples


@pytest.fixture
def start(nodes):
    """Run; return the weights, the grid, the folder of latents and the recorder."""
    kept = []  # a recorder's folder goes with it

    def start(*options, names="cab", wait_for=3, evaluate_fn=None, **watched):
        overrides = [*JOB, *options]
        config = compose(overrides)
        grid = Grid(app, {"overrides": shlex.join(overrides)}, [nodes[name] for name in names])
        vars(grid).update(watched)
        strategy = FedReplay(
            config.strategy,
            Settings(
                training=config.training,
                nodes=wait_for,
                evaluate_every=config.evaluate_every,
                task=make_task(config.task),
                model=backbone(config.model, config.task),
            ),
            Seen(),
        )
        kept.append(strategy)
        fresh = array_record(to_arrays(network(*options)))
        result = strategy.start(grid, fresh, config.rounds, evaluate_fn=evaluate_fn and evaluate_fn(grid))
        return opened(result.arrays), grid, strategy.store.folder, strategy.recorder

    return start


@pytest.fixture
def run(tmp_path, nodes):
    """Run with a run directory; return the weights, the grid, the directory and the result."""

    def start(name, *options, resume=False, breaking=()):
        overrides = [*JOB, *options, "nodes=3", f"runs_dir={tmp_path}", f"run_name={name}"]
        if resume:
            overrides = [*overrides_of(tmp_path / name / "config.yaml"), f"resume={tmp_path / name}"]
        grid = Grid(app, {"overrides": shlex.join(overrides)}, list(nodes.values()))
        grid.breaking = breaking
        result, folder = execute(grid, compose(overrides), Quiet())
        return load_file(folder / "models" / "global.safetensors"), grid, folder / "latents", result

    return start


# --- Algorithm 2, slowly ----------------------------------------------------------------------------------------------


def network(*options, purpose="model"):
    config = compose([*JOB, *options])
    return backbone(config.model, config.task)(derived_seed(0, purpose))


def cut_after(model, cut):
    stages = list(model.named_children())
    first = [name for name, _ in stages].index(cut) + 1
    return nn.Sequential(OrderedDict(stages[:first])), nn.Sequential(OrderedDict(stages[first:]))


def descend(model, x, y, order, optimizer, lr=LR):
    size = min(B, len(y))
    optimizer.param_groups[0]["lr"] = lr
    for i in range(max(1, len(y) // B)):
        rows = order[i * size : (i + 1) * size]
        optimizer.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()


def shuffled(n, *purpose):
    return torch.randperm(n, generator=torch.Generator().manual_seed(derived_seed(0, *purpose)))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def stage_1(x, y, name, cut, epochs=4, patience=2, fall=1.0):
    """Train the whole backbone at one institution; the best epoch on the tenth that is held out counts."""
    model = network()
    order = shuffled(len(y), name, "held out")
    held, kept = order[: len(y) // 10], order[len(y) // 10 :]
    optimizer, losses, states = sgd(model), [], []
    while len(losses) < epochs and (not losses or len(losses) - 1 - int(np.argmin(losses)) < patience):
        order = shuffled(len(kept), name, "encoder", len(losses))
        descend(model.train(), x[kept], y[kept], order, optimizer, LR * fall ** len(losses))
        losses.append(cross_entropy(model.eval()(x[held]), y[held]).item())
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    model.load_state_dict(states[int(np.argmin(losses))])
    return cut_after(model, cut)[0], len(losses)


def stage_2(encoder, shards):
    """Encode every institution's images, by name."""
    with torch.no_grad():
        return {name: (encoder.eval()(x), y) for name, (x, y) in sorted(shards.items())}


def stage_3(unions, *options, cut="conv1", fall=1.0):
    """Train a fresh primary, one epoch on the union of each round."""
    _, primary = cut_after(network(*options, purpose="primary"), cut)
    optimizer = sgd(primary)
    for server_round, union in enumerate(unions, start=1):
        e, y = (torch.cat(column) for column in zip(*union.values(), strict=True))
        descend(primary, e, y, shuffled(len(y), "primary", server_round), optimizer, LR * fall ** (server_round - 1))
    return primary


def agree(weights, *modules):
    expected = {name: value for module in modules for name, value in module.state_dict().items()}
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value.numpy(), rtol=0, atol=1e-6, err_msg=name)


def same(one, other):
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


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
    agree(weights, encoder, stage_3([union, union], fall=fall))
    stages = [stage for _, stage, _, _ in grid.log]
    assert stages == ["roll-call"] * 3 + ["encode"] + ["extract"] * 3 + ["evaluate"] * 3
    in_encoder = epochs * (58 // B) * B
    assert recorder.examples == in_encoder + 2 * (sum(SIZES.values()) // B) * B


def test_the_primary_starts_from_fresh_weights_not_from_the_encoders_tail(start):
    weights, grid, _, _ = start("lr=1e-12", "momentum=0", "rounds=1")
    [(asked, _)] = grid.of("encode")
    fresh, tail = to_arrays(network(purpose="primary")), arrays_in(asked).state_dict()
    for name in ("conv2.conv.weight", "head.fc.weight"):
        np.testing.assert_allclose(weights[name], fresh[name], rtol=0, atol=1e-6)
        assert not np.allclose(weights[name], tail[name], rtol=0, atol=1e-2)


def test_the_encoder_stays_as_it_came_norm_layers_included(start):
    weights, grid, _, _ = start("rounds=3", "chunk-mb=0.01")
    [(_, reply)] = grid.of("encode")
    encoder = arrays_in(reply.content).state_dict()
    assert {"conv1.conv.weight", "conv1.norm.running_mean", "conv1.norm.num_batches_tracked"} <= encoder.keys()
    assert not any(name.startswith(("conv2", "head")) for name in encoder)
    assert len(grid.of("extract")) > 3
    assert all(same(arrays_in(asked).state_dict(), encoder) for asked, _ in grid.of("extract"))
    assert same({name: weights[name] for name in encoder}, encoder)
    assert any(encoder["conv1.norm.running_mean"] != 0)


# --- stage 1 ----------------------------------------------------------------------------------------------------------


def test_the_largest_trains_the_encoder_and_the_next_largest_stands_in(start, shards):
    assert start("rounds=1")[1].who("encode") == ["b"]
    weights, grid, _, recorder = start(failing=[("b", "encode", 1)])
    assert grid.who("encode") == ["b", "a"]
    assert sorted(grid.who("extract")) == ["a", "b", "c"]  # it could not train, but it can encode
    encoder, _ = stage_1(*shards["a"], "a", "conv1")
    union = stage_2(encoder, shards)
    agree(weights, encoder, stage_3([union, union]))
    assert [failure["institution"] for failure in recorder.failures] == ["b"]


def test_a_named_institution_trains_the_encoder_or_nobody(start):
    assert start("rounds=1", "encoder-institution=c")[1].who("encode") == ["c"]
    with pytest.raises(RunError, match=r"no institution could train the encoder; c: .*made to fail"):
        start("encoder-institution=c", failing=[("c", "encode", 1)])
    with pytest.raises(ConfigError, match="must be one of largest, b, a, c; got 'd'"):
        start("encoder-institution=d")


def test_a_random_encoder_is_the_fresh_backbones(start, shards):
    weights, grid, _, _ = start(*QUICK)
    assert not grid.of("encode")
    encoder, _ = cut_after(network(), "conv1")
    agree(weights, encoder, stage_3([stage_2(encoder, shards)]))


def test_an_encoder_from_a_file_is_taken_as_it_is(start, shards, tmp_path):
    model = network(purpose="somewhere else")
    save_file(to_arrays(model), tmp_path / "given.safetensors")
    option = f"encoder-file={tmp_path}/given.safetensors"
    weights, grid, _, _ = start("encoder=file", option, "rounds=1")
    assert not grid.of("encode")
    encoder, _ = cut_after(model, "conv1")
    agree(weights, encoder, stage_3([stage_2(encoder, shards)]))
    save_file({"conv1.conv.weight": np.zeros((4, 1, 3, 3), np.float32)}, tmp_path / "given.safetensors")
    with pytest.raises(ConfigError, match=r"'conv1.norm.weight' with shape .* lacks it"):
        start("encoder=file", option)
    save_file(to_arrays(network("model.width=8")), tmp_path / "given.safetensors")
    with pytest.raises(ConfigError, match=r"'conv1.conv.weight' with shape \(4, .* has \(8, "):
        start("encoder=file", option)
    (tmp_path / "given.safetensors").write_bytes(b"no")
    with pytest.raises(ConfigError, match=r"must be a \.safetensors file"):
        start("encoder=file", option)


@pytest.mark.parametrize("cut", ["conv1", "layer1", "layer2", "layer3", "layer4"])
def test_the_backbone_is_cut_at_any_stage(start, shards, cut):
    options = ["model=resnet18", "stem=small", "model.width=4"]
    weights, _, _, _ = start(*options, *QUICK, f"cut={cut}")
    encoder, _ = cut_after(network(*options), cut)
    agree(weights, encoder, stage_3([stage_2(encoder, shards)], *options, cut=cut))
    assert list(encoder.state_dict())[-1].startswith(cut)


# --- stage 2 ----------------------------------------------------------------------------------------------------------


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


@settings(max_examples=40, deadline=None)
@given(
    latents=array_shapes(min_dims=1, max_dims=4, max_side=5).flatmap(
        lambda shape: arrays("float32", shape, elements=st.floats(-1e5, 1e5, width=32))
    )
)
def test_rounding_has_bounds(latents):
    assert unpack(*pack(torch.from_numpy(latents), "float32")).tobytes() == latents.tobytes()
    halves = unpack(*pack(torch.from_numpy(latents), "float16"))
    bound = np.maximum(np.abs(latents) * 2.0**-11, 2.0**-25)
    inside = np.abs(latents) <= 65504
    assert (np.abs(halves - latents)[inside] <= bound[inside]).all()
    assert (np.abs(halves[~inside]) == 65504).all()
    codes, scales = pack(torch.from_numpy(latents), "int8")
    assert codes.dtype == np.int8
    peaks = np.abs(latents).reshape(len(latents), -1).max(1)
    errors = np.abs(unpack(codes, scales) - latents).reshape(len(latents), -1).max(1)
    assert (errors <= peaks / 254 * (1 + 1e-4) + 1e-30).all()


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
    agree(weights, encoder, stage_3([seen]))


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
    agree(weights, encoder, stage_3([dict(sorted(seen.items()))]))
    assert recorder.examples == (3 * sum(SIZES.values()) // B) * B


def test_a_shift_moves_every_image_by_its_own_offset():
    images = torch.arange(1.0, 3 * 2 * 16 + 1).reshape(3, 2, 4, 4)
    draws = torch.tensor([[1, 1], [0, 2], [2, 1]])
    moved = shifted(images, 1, draws)
    assert torch.equal(moved[0], images[0])
    assert torch.equal(moved[1, :, 1:, :3], images[1, :, :3, 1:])
    assert not moved[1, :, 0].any()
    assert not moved[1, :, :, 3].any()
    assert torch.equal(moved[2, :, :3], images[2, :, 1:])


# --- who comes late, who comes back -----------------------------------------------------------------------------------


def test_who_joins_late_uploads_then_and_counts_from_then_on(start, nodes, shards):
    def joins_after_2(grid):
        here, grid.contexts = grid.contexts, {node: grid.contexts[node] for node in list(grid.contexts)[:2]}

        def joins(server_round, arrays):
            grid.contexts = here if server_round == 2 else grid.contexts

        return joins

    options = ["encoder=random", "rounds=3", "evaluate-every=1"]
    weights, grid, _, _ = start(*options, names="acb", wait_for=2, evaluate_fn=joins_after_2)
    assert grid.who("extract") == ["a", "c", "b"]
    encoder, _ = cut_after(network(), "conv1")
    union = stage_2(encoder, shards)
    without = {name: union[name] for name in "ac"}
    agree(weights, encoder, stage_3([without, without, union]))
    assert grid.who("evaluate") == [*"ac", *"ac", *"abc"]


def test_who_fails_to_upload_is_asked_again_in_the_next_round(start, shards):
    weights, grid, _, recorder = start("encoder=random", "rounds=3", "evaluate-every=3", failing=[("b", "extract", 1)])
    assert grid.who("extract").count("b") == 2
    encoder, _ = cut_after(network(), "conv1")
    union = stage_2(encoder, shards)
    without = {name: union[name] for name in "ac"}
    agree(weights, encoder, stage_3([without, union, union]))
    assert [(failure["round"], failure["institution"]) for failure in recorder.failures] == [(1, "b")]


def test_a_run_without_any_upload_ends(start):
    with pytest.raises(RunError, match=r"no institution has uploaded its latents; .*made to fail"):
        start(*QUICK, failing=[(name, "extract", 1) for name in SIZES])


# --- resumption -------------------------------------------------------------------------------------------------------


def test_a_run_that_broke_off_goes_on_with_the_same_bits(run):
    options = ["chunk-mb=0.01", "rounds=3", "evaluate-every=1"]
    whole, _, folder, result = run("whole", *options)
    for k, (where, asked_again) in enumerate(
        [
            (("a", "extract", 1), [6]),  # the encoder is there, no upload
            (("b", "extract", 2), [3]),  # amid the uploads: the first chunk of each is there
            (("c", "evaluate", 2), [0]),  # all is there
        ]
    ):
        with pytest.raises(KeyboardInterrupt):
            run(f"broken-{k}", *options, breaking=[where])
        weights, grid, resumed, other = run(f"broken-{k}", resume=True)
        assert same(weights, whole)
        assert result["final"] == other["final"]
        assert result["examples-seen"] == other["examples-seen"]
        assert [*grid.who("encode"), len(grid.of("extract"))] == asked_again
        for name in SIZES:
            assert stored(resumed, name).tobytes() == stored(folder, name).tobytes()


# --- the store --------------------------------------------------------------------------------------------------------


def chunk(latents, first, total, scales=None):
    labels = np.arange(first, first + len(latents), dtype=np.int64)
    numbers = {"num_examples": total, "first": first, "total": total, "raw_bytes": 1}
    return Latents(latents=latents, labels=labels, scales=scales, **numbers)


def test_batches_come_from_the_disk_and_memory_stays_bounded(tmp_path):
    rows, values, width = 512, 4096, 64
    union_bytes = 3 * rows * values * 4
    tracemalloc.start()
    store = LatentStore(tmp_path)
    for k, name in enumerate("abc"):
        for first in range(0, rows, width):
            latents = np.full((width, values), first + rows * k, np.float32)
            store.add(name, chunk(latents, first, rows))
    assert tracemalloc.get_traced_memory()[1] < union_bytes / 8
    del latents
    tracemalloc.reset_peak()
    opened_maps = []
    store._open = lambda name: opened_maps.append(LatentStore._open(store, name)) or opened_maps[-1]
    found = 0
    for e_B, y_B in store.batches(32, torch.Generator().manual_seed(0)):
        assert (e_B[:, 0].long() % rows == y_B // width * width).all()
        assert (e_B == e_B[:, :1]).all()
        found += len(y_B)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == 3 * rows
    assert peak < union_bytes / 8
    assert len(opened_maps) == 3
    assert all(isinstance(array, np.memmap) for maps in opened_maps for array in maps.values())


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    step=st.integers(1, 9),
    b=st.integers(1, 30),
    dtype=st.sampled_from(["float32", "float16", "int8"]),
)
def test_batches_are_those_of_the_union_in_memory(tmp_path_factory, sizes, step, b, dtype):
    folder, rng, parts = tmp_path_factory.mktemp("store"), np.random.default_rng(sum(sizes)), []
    for k, n in reversed(list(enumerate(sizes))):
        values = rng.normal(size=(n, 2, 3)).astype(np.float32)
        codes, scales = pack(torch.from_numpy(values), dtype)
        for first in range(0, n, step):
            cut = slice(first, first + step)
            store = LatentStore(folder)  # as after a restart
            assert store.next_row(f"i{k}") == first
            store.add(f"i{k}", chunk(codes[cut], first, n, None if scales is None else scales[cut]))
        parts.insert(0, (unpack(codes, scales), np.arange(n)))
    LatentStore(folder).add("incomplete", chunk(codes[:1], 0, 2, None if scales is None else scales[:1]))
    e, y = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1)).numpy()
    found = list(LatentStore(folder).batches(b, torch.Generator().manual_seed(1)))
    assert len(found) == max(1, len(y) // b)
    size = min(b, len(y))
    for i, (e_B, y_B) in enumerate(found):
        rows = order[i * size : (i + 1) * size]
        assert e_B.numpy().tobytes() == e[rows].tobytes()
        assert y_B.tolist() == y[rows].tolist()


def test_a_chunk_that_does_not_go_on_where_the_last_ended_is_refused(tmp_path):
    store, rows = LatentStore(tmp_path), np.zeros((2, 3), np.float32)
    store.add("a", chunk(rows, 0, 6))
    for wrong in (
        chunk(rows, 0, 6),  # again
        chunk(rows, 4, 6),  # a gap
        chunk(rows, 2, 5),  # another total
        chunk(np.zeros((5, 3), np.float32), 2, 6),  # too many
        chunk(rows[:0], 2, 6),  # none: the upload would never end
    ):
        with pytest.raises(WireError, match="rows"):
            store.add("a", wrong)
        assert store.next_row("a") == 2
        assert store.complete == []
    store.add("a", chunk(rows, 2, 6))
    store.add("a", chunk(rows, 4, 6))
    assert store.complete == ["a"]
