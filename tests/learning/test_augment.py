"""Random changes of training images: what they may do, who may use them, and that batches of one's own are used."""

import math
from types import SimpleNamespace

import pytest
import torch
from flwr.app import Context, RecordDict
from harness import SHARDS, broken, node_configs, run, write_shards
from safetensors import safe_open

from flwr_replay.config.compose import compose, compose_own, overrides_of, to_yaml
from flwr_replay.config.sections import CHANGES
from flwr_replay.errors import ConfigError
from flwr_replay.institution.budget import DPTraining
from flwr_replay.institution.client import InstitutionClient
from flwr_replay.institution.learner import Learner
from flwr_replay.institution.node import institution_of
from flwr_replay.learning.augment import DRAWS, augmented
from flwr_replay.privacy.accounting import SampledGaussian
from flwr_replay.privacy.dpsgd import clipped_sums
from flwr_replay.privacy.secret import Stream

TASK = [*SHARDS, "classes=3", "model=mlp", "model.width=4", "batch_size=16", "rounds=1"]


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def kinds_of(changed, image, turns):
    """Which of an image's quarter turns and their flips each result is; fails if it is none."""
    forms = [image.rot90(turn, (1, 2)) for turn in range(turns)]
    forms += [form.flip(2) for form in forms]
    return [next(i for i, form in enumerate(forms) if torch.equal(form, image)) for image in changed]


def blank_labels(x):
    """Labels that nothing changes."""
    return torch.zeros(len(x), dtype=torch.int64)


def images_of(x, changes, seed=0):
    return augmented(x, blank_labels(x), changes, rng(seed))[0]


def test_half_of_the_images_are_flipped():
    image = torch.rand(3, 4, 4, generator=rng())
    kinds = kinds_of(images_of(image.expand(400, 3, 4, 4), ["flip"]), image, 1)
    assert 160 < kinds.count(1) < 240


def test_with_quarter_turns_all_eight_forms_come_equally_often():
    image = torch.rand(1, 4, 4, generator=rng())
    kinds = kinds_of(images_of(image.expand(800, 1, 4, 4), ["flip", "rot90"]), image, 4)
    assert all(60 < kinds.count(kind) < 140 for kind in range(8))


@pytest.mark.parametrize("changes", [[change] for change in CHANGES] + [[*CHANGES]])
def test_each_change_does_something_within_the_range_the_same_for_the_same_draws(changes):
    x = torch.rand(30, 3, 20, 20, generator=rng())
    y = torch.arange(30)
    changed, labels = augmented(x, y, changes, rng(1))
    again, _ = augmented(x, y, changes, rng(1))
    other, _ = augmented(x, y, changes, rng(2))
    assert torch.equal(changed, again)
    assert not torch.equal(changed, other)
    assert not torch.equal(changed, x)
    assert torch.equal(labels, y)
    assert changed.shape == x.shape
    assert changed.dtype == x.dtype
    assert -1e-6 <= float(changed.min()) <= float(changed.max()) <= 1 + 1e-6


def test_none_changes_nothing_and_draws_nothing():
    x, draws = torch.rand(20, 1, 5, 5, generator=rng()), rng(1)
    state = draws.get_state()
    images, labels = augmented(x, blank_labels(x), [], draws)
    assert images is x
    assert torch.equal(labels, blank_labels(x))
    assert torch.equal(draws.get_state(), state)


def test_a_shift_is_by_whole_pixels_up_to_a_tenth_and_black_comes_in():
    x = torch.arange(1.0, 401).view(1, 1, 20, 20).expand(300, 1, 20, 20) / 400
    offsets_seen = set()
    for image in images_of(x, ["shift"]):
        offsets = [
            (down, right)
            for down in range(-3, 4)
            for right in range(-3, 4)
            if torch.allclose(image[0], shifted(x[0, 0], down, right), atol=1e-5)
        ]
        assert len(offsets) == 1
        offsets_seen.update(offsets)
    assert offsets_seen == {(down, right) for down in range(-2, 3) for right in range(-2, 3)}


def shifted(image, down, right):
    moved = torch.zeros_like(image)
    height, width = image.shape
    moved[max(down, 0) : height + min(down, 0), max(right, 0) : width + min(right, 0)] = image[
        max(-down, 0) : height - max(down, 0), max(-right, 0) : width - max(right, 0)
    ]
    return moved


def test_a_rotation_is_by_at_most_fifteen_degrees_to_either_side():
    x = torch.zeros(200, 1, 41, 41)
    x[:, :, 20, 21:] = 1  # a hand that points to the right
    rows, columns = torch.meshgrid(torch.arange(41.0) - 20, torch.arange(41.0) - 20, indexing="ij")
    angles = []
    for image in images_of(x, ["rotate"]):
        weight = image[0] / image.sum()
        angles.append(math.degrees(math.atan2((weight * rows).sum(), (weight * columns).sum())))
    assert -15.5 < min(angles) < -13
    assert 13 < max(angles) < 15.5


def test_a_crop_shows_a_part_of_the_stated_size():
    ramp = torch.linspace(0, 1, 40)
    x = torch.stack([ramp[:, None].expand(40, 40), ramp.expand(40, 40)]).expand(200, 2, 40, 40)
    spans = images_of(x, ["crop"])
    high = (spans[:, 0, -1, 0] - spans[:, 0, 0, 0]).clamp(min=0)
    wide = (spans[:, 1, 0, -1] - spans[:, 1, 0, 0]).clamp(min=0)
    area = high * wide
    assert 0.5 < float(area.min()) < 0.68
    assert 0.93 < float(area.max()) <= 1.001
    assert 1.1 < float((high / wide).max()) < 1.45
    assert 1.1 < float((wide / high).max()) < 1.45


@pytest.mark.parametrize("changes", [[change] for change in CHANGES] + [[*CHANGES]])
def test_masks_move_with_their_images(changes):
    y = (torch.nn.functional.interpolate(torch.rand(40, 1, 4, 4, generator=rng()), 32)[:, 0] > 0.6).to(torch.uint8)
    images, masks = augmented(y[:, None].float(), y, changes, rng(3))
    assert masks.dtype == torch.uint8
    assert masks.shape == y.shape
    assert set(masks.unique().tolist()) == {0, 1}
    assert not torch.equal(masks, y)
    wrong = ((images[:, 0] > 0.5) != masks.bool()).float().mean()
    still = ((images[:, 0] > 0.5) != y.bool()).float().mean()
    assert wrong < 0.03 < still


@pytest.mark.parametrize("changes", [[change] for change in CHANGES] + [[*CHANGES]])
def test_what_happens_to_an_image_depends_on_no_other(changes):
    x = torch.rand(9, 3, 16, 16, generator=rng())
    others = x.clone()
    others[4] = 0
    alone, two = images_of(x, changes, 5), images_of(others, changes, 5)
    same = [torch.equal(a, b) for a, b in zip(alone, two, strict=True)]
    assert same == [n != 4 for n in range(9)]


@pytest.mark.parametrize("changes", [["flip"], [*CHANGES]])
def test_an_example_is_one_clipped_gradient_however_it_is_changed(changes):
    torch.manual_seed(0)  # of some weights the changed example has no gradient
    clip, model = 0.1, torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 4))
    x, y = torch.rand(9, 3, 16, 16, generator=rng()), torch.arange(9) % 4
    others = x.clone()
    others[4] = torch.rand(3, 16, 16, generator=rng(8)) * 50

    def losses(x_B, y_B):
        return torch.nn.functional.cross_entropy(model(x_B), y_B, reduction="none")

    def sums(images, rows):
        images, labels = augmented(images, y, changes, rng(5))  # the same draws for the examples that stay
        return clipped_sums(model, losses, (images[rows], labels[rows]), clip)[0]

    rest = [n for n in range(9) if n != 4]
    for given in (x, others):
        with_it, without = sums(given, list(range(9))), sums(given, rest)
        change = torch.cat([(a - b).flatten() for a, b in zip(with_it, without, strict=True)])
        assert 0 < float(change.norm()) <= clip * (1 + 1e-4)


def test_under_dp_the_draws_are_of_the_secret_stream_and_an_empty_batch_stays_one():
    cost = SampledGaussian(0.5, 1.0, 4)
    trainings = [DPTraining(1.0, cost, Stream(bytes([key]) * 32)) for key in (1, 1, 2)]
    x, client = torch.rand(20, 1, 8, 8, generator=rng()), SimpleNamespace(training=SimpleNamespace(changes=CHANGES))
    first, two, other = (InstitutionClient.augmentation(client, dp)(x, blank_labels(x))[0] for dp in trainings)
    assert torch.equal(first, two)
    assert not torch.equal(first, other)
    plain = Stream(bytes([1]) * 32)
    plain.uniform(20 * (1 + 1 + DRAWS))  # not 32 bits of it, which could be tried out
    assert torch.equal(trainings[0].stream.uniform(3), plain.uniform(3))
    assert images_of(x[:0], CHANGES).shape == x[:0].shape


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path, {"a": 40, "b": 33})
    return tmp_path


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["fedavg", "cwt", "local", "avgpush", "feder"])
def test_every_method_with_own_batches_trains_on_changed_images_and_own_batch_sizes(folder, strategy, monkeypatch):
    seen, step = [], Learner.step

    def watched(learner, x_B, y_B, penalty=None):
        assert learner.augment is not None
        seen.append(len(y_B))
        step(learner, x_B, y_B, penalty)

    monkeypatch.setattr(Learner, "step", watched)
    nodes = node_configs(folder, folder / "state", "ab")
    nodes[1]["batch-size"] = "11"
    buffer = ["buffer=0"] if strategy == "feder" else []
    options = ["training.augment=flip", "training.batch_sizes=[8]", f"strategy={strategy}", *buffer]
    ran = run(folder, [*TASK, *options], nodes)
    assert not ran.result["failures"]
    assert sorted(seen) == [8] * 5 + [11] * 3


METHODS = {
    "fedavg": (),
    "fedavg dp=classifier": ("epsilon=50", "privacy.noise=seeded"),
    "fedavgm": (),
    "fedprox": (),
    "fedsgd": (),
    "fedavgshare": (),
    "scaffold": (),
    "moon": (),
    "ditto": (),
    "fedbn": ("model=cnn",),
    "cwt": (),
    "local": (),
    "avgpush": (),
    "fml": ("dp=none",),
    "proxyfl dp=none": (),
    "proxyfl dp=proxy": ("epsilon=50", "privacy.noise=seeded"),
    "splitnn": ("cut=hidden1",),
    "fedreplay": ("cut=hidden1",),
    "fedreplay dp=encoder": ("cut=hidden1", "epsilon=50", "privacy.noise=seeded"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", METHODS)
def test_every_methods_runs_differ_by_augment_and_can_be_repeated_and_resumed_to_the_bit(folder, method):
    strategy, *more = method.split()
    results = []
    for name, augment in (("one", "flip,rotate,shift,crop"), ("two", "flip,rotate,shift,crop"), ("plain", "none")):
        job = [*TASK, "rounds=2", f"strategy={strategy}", *more, *METHODS[method], f"training.augment={augment}"]
        nodes = node_configs(folder, folder / name, "ab")
        ran = broken(run, folder, job, nodes, stop_after=1) if name == "two" else run(folder, job, nodes, name=name)
        assert not ran.result["failures"]
        results.append(trained_bits(ran, folder / name))
    assert results[0]
    assert results[0] == results[1]
    assert results[0] != results[2]


def trained_bits(ran, state):
    """What a run has learned, at the server and at the institutions."""
    files = [*(ran.folder / "models").glob("*.safetensors"), *state.glob("*/runs/*/*00000*.safetensors")]
    bits = {}
    for file in files:
        with safe_open(file, "np") as arrays:
            bits[file.name, file.parents[2].name if "runs" in file.parts[-3:] else ""] = {
                key: arrays.get_tensor(key).tobytes()
                for key in arrays.keys()  # noqa: SIM118 - no mapping
            }
    return bits


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["training.augment=flips"], "did you mean flip"),
        (["training.augment=flip,turn"], "training.augment must be one of none, flip, rot90, rotate, shift, crop"),
        (["training.augment=flip,flip"], "names every change once"),
        (["training.augment=flip,none"], "none stands alone"),
        (["strategy=proxyfl", "dp=none", "training.batch_sizes=[8]"], "batch_sizes=.* is for methods whose"),
        (["strategy=local", "dp=classifier", "training.batch_sizes=[8]"], "not for training under DP"),
        (["strategy=fedavg", "training.batch_sizes=[8,0]"], "must lie in 1 to 1,000,000; got 0"),
        (["strategy=fedavg", "task=diabetes", "training.augment=flip"], "changes images"),
        (["strategy=fedavg", "task=histopathology", "training.augment=flip"], "changes images"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        compose_own(options, options)


def test_without_an_encoder_that_trains_on_images_fedreplay_refuses_changes_of_images(folder):
    job = [*TASK, "strategy=fedreplay", "cut=hidden1", "encoder=random", "training.augment=flip"]
    with pytest.raises(ConfigError, match="needs encoder=institution; got random: set augment=none"):
        run(folder, job, node_configs(folder, folder / "state", "ab"))


@pytest.mark.parametrize("spelled", ["flip,rot90", "'flip,rot90'", "flip+rot90"])
def test_words_have_commas_between_and_older_spellings_stay(spelled, tmp_path):
    config = compose(["strategy=fedavg", "task=isbi2012", f"training.augment={spelled}"])
    assert config.training.changes == ("flip", "rot90")
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert compose(overrides_of(path)) == config


def institution(sizes, **node):
    overrides = {"overrides": f"strategy=fedavg training.batch_sizes={sizes}"}
    return institution_of(Context(1, 1, node, RecordDict(), overrides))[0]


def test_an_institution_says_its_own_batch_size(tmp_path):
    owned = {"name": "a", "data": str(tmp_path), "state": str(tmp_path)}
    with pytest.raises(ConfigError, match="a SuperNode names its own"):
        institution("[8,16]", **owned)
    for wrong in ("0", "many", "1000001", "\u0663"):
        with pytest.raises(ConfigError, match="batch-size in --node-config must be a whole number"):
            institution("[8,16]", **owned, **{"batch-size": wrong})
    assert institution("[8,16]", **owned, **{"batch-size": 5}).batch_size == 5
    assert institution("[]", **owned, **{"batch-size": 5}).batch_size == 0  # the run says it


def test_in_a_simulation_batch_sizes_are_dealt_in_turn():
    nodes = [{"partition-id": k, "num-partitions": 3} for k in range(3)]
    assert [institution("[8,32]", **node).batch_size for node in nodes] == [8, 32, 8]
