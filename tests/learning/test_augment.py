"""Random changes of training images: what they may do, who may use them, and that batches of one's own are used."""

import pytest
import torch
from flwr.app import Context, RecordDict
from harness import node_configs, run, write_shards

from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError
from flwr_replay.institution.learner import Learner
from flwr_replay.institution.node import institution_of
from flwr_replay.learning.augment import augmented

TASK = ["task=medmnist", "task.size=8", "classes=3", "model=mlp", "model.width=4", "batch_size=16", "rounds=1"]


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def kinds_of(changed, image, turns):
    """Which of an image's quarter turns and their flips each result is; fails if it is none."""
    forms = [image.rot90(turn, (1, 2)) for turn in range(turns)]
    forms += [form.flip(2) for form in forms]
    return [next(i for i, form in enumerate(forms) if torch.equal(form, one)) for one in changed]


def test_half_of_the_images_are_flipped():
    image = torch.rand(3, 4, 4, generator=rng())
    kinds = kinds_of(augmented(image.expand(400, 3, 4, 4), "flip", rng()), image, 1)
    assert 160 < kinds.count(1) < 240


def test_with_quarter_turns_all_eight_forms_come_equally_often():
    image = torch.rand(1, 4, 4, generator=rng())
    kinds = kinds_of(augmented(image.expand(800, 1, 4, 4), "flip+rot90", rng()), image, 4)
    assert all(60 < kinds.count(kind) < 140 for kind in range(8))


def test_the_same_draws_make_the_same_changes_and_none_changes_nothing():
    x = torch.rand(20, 1, 5, 5, generator=rng())
    assert torch.equal(augmented(x, "flip+rot90", rng(1)), augmented(x, "flip+rot90", rng(1)))
    assert torch.equal(augmented(x, "none", rng(1)), x)


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path, {"a": 40, "b": 33})
    return tmp_path


@pytest.mark.parametrize("strategy", ["fedavg", "cwt", "local", "avgpush", "feder"])
def test_every_method_that_says_so_trains_on_changed_images_and_own_batch_sizes(folder, strategy, monkeypatch):
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


def test_augmented_runs_differ_and_can_be_repeated(folder):
    models = []
    for name, augment in (("one", "flip"), ("two", "flip"), ("plain", "none")):
        job = [*TASK, "strategy=fedavg", f"training.augment={augment}"]
        ran = run(folder, job, node_configs(folder, folder / name, "ab"), name=name)
        models.append((ran.folder / "models" / "global.safetensors").read_bytes())
    assert models[0] == models[1] != models[2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["training.augment=flips"], "did you mean flip"),
        (
            ["strategy=splitnn", "training.augment=flip"],
            "augment=flip is for methods whose institutions train on batches",
        ),
        (["strategy=proxyfl", "training.batch_sizes=[8]"], "batch-sizes is for methods whose"),
        (["strategy=fedavg", "dp=classifier", "training.augment=flip"], "not for training under DP"),
        (["strategy=local", "dp=classifier", "training.batch_sizes=[8]"], "not for training under DP"),
        (["strategy=fedavg", "training.batch_sizes=[8,0]"], "must lie in 1 to 1,000,000; got 0"),
        (["strategy=fedavg", "task=diabetes", "training.augment=flip"], "changes images"),
        (["strategy=fedavg", "task=isbi2012", "training.augment=flip"], "changes images"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        compose(options)


def institution(sizes, **node):
    overrides = {"overrides": f"strategy=fedavg training.batch_sizes={sizes}"}
    return institution_of(Context(1, 1, node, RecordDict(), overrides))[0]


def test_an_institution_says_its_own_batch_size(tmp_path):
    owned = {"name": "a", "data": str(tmp_path), "state": str(tmp_path)}
    with pytest.raises(ConfigError, match="a SuperNode names its own"):
        institution("[8,16]", **owned)
    for wrong in ("0", "many", "1000001"):
        with pytest.raises(ConfigError, match="batch-size in --node-config must be a whole number"):
            institution("[8,16]", **owned, **{"batch-size": wrong})
    assert institution("[8,16]", **owned, **{"batch-size": 5}).batch_size == 5
    assert institution("[]", **owned, **{"batch-size": 5}).batch_size == 0  # the run says it


def test_in_a_simulation_batch_sizes_are_dealt_in_turn():
    nodes = [{"partition-id": k, "num-partitions": 3} for k in range(3)]
    assert [institution("[8,32]", **node).batch_size for node in nodes] == [8, 32, 8]
