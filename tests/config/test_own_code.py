"""Models and data of the user's own: named by import, and imported at an institution only if it allows."""

import shlex
import sys

import numpy as np
import pytest
import torch
from harness import SHARDS, command, node_configs, run, write_shards
from safetensors.numpy import load_file
from users_code import ALL, BROKEN, DATA, NETS

from flwr_replay.config.compose import compose, overrides_of, to_yaml
from flwr_replay.config.own_code import VARIABLE, VARIABLE_BEFORE
from flwr_replay.config.renamed import told
from flwr_replay.data.datasets import load
from flwr_replay.engines.inline import partitions
from flwr_replay.engines.simulate import run_inline
from flwr_replay.errors import ConfigError, DataError, RefusedError, RunError
from flwr_replay.institution.node import _institution
from flwr_replay.models import split
from flwr_replay.models.own import check_layers
from flwr_replay.models.zoo import backbone, build, bytes_of
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.report.progress import Display
from flwr_replay.rng import derived_seed
from flwr_replay.wire.weights import to_arrays

JOB = ["strategy=fedavg", "rounds=1", "device=cpu"]


@pytest.fixture
def import_marker(tmp_path, monkeypatch):
    """Return the file that importing the user's network makes; both modules can be imported from here."""
    marker = tmp_path / "imported"
    (tmp_path / "ownnets.py").write_text(NETS.format(marker=str(marker)), encoding="utf-8")
    (tmp_path / "owndata.py").write_text(DATA, encoding="utf-8")
    (tmp_path / "ownbroken.py").write_text(BROKEN, encoding="utf-8")
    (tmp_path / "ownfolder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(VARIABLE, ALL)
    yield marker
    for name in ("ownnets", "owndata", "ownbroken", "ownfolder"):
        sys.modules.pop(name, None)


def composed(*options):
    return compose([*JOB, *options])


def test_the_options_of_a_run_hold_the_names(import_marker, tmp_path):
    config = composed("model=ownnets:build", "task=owndata:arrays", "task.size=8", "classes=3")
    assert config.own_code == ("ownnets:build", "owndata:arrays")
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert compose(overrides_of(tmp_path / "config.yaml")) == config
    assert not import_marker.exists()  # composing imports nothing


def test_a_model_has_its_stages_and_weights_of_the_seed(import_marker):
    config = composed("model=ownnets:build")
    first, again, other = (build(config.model, config.task, seed) for seed in (1, 1, 2))
    assert first.stages == ("body", "head")
    assert torch.equal(first.head.weight, again.head.weight)
    assert not torch.equal(first.head.weight, other.head.weight)
    assert first.training


@pytest.mark.parametrize("name", ["build", "real"])
def test_the_bytes_of_a_model_are_those_of_its_weights(import_marker, name):
    config = composed(f"model=ownnets:{name}")
    weights = build(config.model, config.task, 0).state_dict().values()
    assert bytes_of(config.model, config.task) == sum(weight.numel() * weight.element_size() for weight in weights) > 0


def test_a_bare_first_layer_is_standardised_too(import_marker):
    plain, config = composed("model=ownnets:bare"), composed("model=ownnets:bare", "mean=[0.5]", "std=[0.25]")
    x = torch.rand(2, 1, 8, 8)
    output = build(config.model, config.task, 0)(x)
    assert torch.allclose(output, build(plain.model, plain.task, 0)((x - 0.5) / 0.25), atol=1e-5)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("model=ownnets:sub", "must return torch.nn.Sequential"),
        ("model=ownnets:module", "must return torch.nn.Sequential"),
        ("model=ownnets:narrow", r"outputs of shape \(2, 10\) for two images; got \(2, 11\)"),
        ("model=ownnets:fails", "no such size"),
        ("model=ownnets:other", "is called with channels=1, size=8, classes=10"),
        ("model=ownnets:constant", "must be a function; got int"),
        ("model=ownnets:buidl", "has no function buidl"),
        (
            "model=ownfolder:build",
            "ownfolder is a folder without __init__.py: start in it, or write ownfolder.FILE:build",
        ),
        ("model=nonesuch:build", "cannot be imported"),
        (
            "model=ownbroken:build",
            r"cannot be imported.*No module named 'nothing_of_this_name' \(ownbroken.py, line 2\)",
        ),
        ("model=ownnets:key", r"KeyError: 'resnet' \(ownnets.py, line \d+\)"),
        ("model=ownnets:exits", r"SystemExit: 3 \(ownnets.py, line \d+\)"),
        ("model=ownnets:deep", r"RecursionError: .* \(ownnets.py, line \d+\)"),
        ("model=ownnets:dictionary", r"outputs of shape \(2, 10\) for two images; got a dict"),
        ("model=ownnets:in_training", r"outputs of shape \(2, 10\) for two images; got a tuple"),
        ("model=ownnets:frozen", "depend on a parameter that trains"),
    ],
)
def test_a_wrong_model_is_one_line(import_marker, option, message):
    config = composed(option)
    with pytest.raises(ConfigError, match=message) as error:
        build(config.model, config.task, 0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("group", ["model", "task"])
def test_own_without_a_function_is_refused(group):
    with pytest.raises(ConfigError, match=f"{group}=own needs its function"):
        composed(f"{group}=own")


def test_under_dp_layers_of_the_users_own_are_refused(import_marker):
    fine, mixing = composed("model=ownnets:build"), composed("model=ownnets:mixing")
    check_layers(fine.model, build(fine.model, fine.task, 0))
    for config, stated in ((mixing, "centre is a Centred"), (composed("model=ownnets:batchwise"), "soft is a Softmax")):
        with pytest.raises(ConfigError, match=f"each example by itself; {stated}"):
            check_layers(config.model, build(config.model, config.task, 0))
    hooked = build(fine.model, fine.task, 0)
    hooked.body.register_forward_hook(lambda layer, x, y: y - y.mean(0))
    with pytest.raises(ConfigError, match="body is a Sequential, or has hooks"):
        check_layers(fine.model, hooked)
    with pytest.raises(ConfigError, match="each example by itself"):
        PrivacyPlan.of(composed("model=ownnets:mixing", "dp=classifier", "target-epsilon=8"))
    assert PrivacyPlan.of(composed("model=ownnets:build", "dp=classifier", "target-epsilon=8"))


def test_a_layer_that_stands_twice_stays_twice(import_marker):
    config = composed("model=ownnets:twice")
    assert build(config.model, config.task, 0).stages == ("flat", "one", "act", "two", "again", "head")


def test_a_layer_behind_a_cut_may_write_over_its_input(import_marker, tmp_path):
    words = [
        "task=digits",
        "model=ownnets:inplace",
        "strategy=splitnn",
        "cut=body",
        "nodes=2",
        f"runs_dir={tmp_path / 'runs'}",
    ]
    assert run_inline([*words, "rounds=1"], Display())[0]["final"]["global"]["accuracy"] > 0


@pytest.mark.parametrize("function", ["arrays", "torchs", "hugging"])
def test_data_are_arrays_a_torch_or_a_hugging_face_data_set(import_marker, function):
    task = composed(f"task=owndata:{function}", "task.size=8", "classes=3", "split=test").task
    data = load(task)
    assert data.train.x.dtype == np.uint8
    assert data.train.x.tobytes() == np.arange(6 * 64, dtype=np.uint8).tobytes()
    assert data.train.y.tolist() == [0, 1, 2, 0, 1, 2]
    assert (data.val is not None) == (function == "arrays")


def test_one_split_is_divided_and_channels_may_come_last(import_marker):
    assert len(load(composed("task=owndata:whole", "task.size=8", "classes=3").task).test) == 1
    data = load(composed("task=owndata:last", "task.size=8", "classes=3", "task.channels=3").task)
    assert data.train.x.shape[1:] == (3, 8, 8)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("names", 'must return {"train": …, "test": …}, perhaps with "val", or "all"; got training'),
        ("fails", "called with task.data-dir='here', failed: OSError: nothing in here (owndata.py, line "),
        ("lacking", "AttributeError: 'Lacking' object has no attribute 'images' (owndata.py, line "),
        ("leaves", "SystemExit: no data (owndata.py, line "),
        ("words", "images must be uint8 or floats"),
        ("unlabelled", "no images with labels"),
    ],
)
def test_wrong_data_are_one_line(import_marker, function, message):
    task = composed(f"task=owndata:{function}", "task.data-dir=here").task
    with pytest.raises((ConfigError, DataError)) as error:
        load(task)
    assert message in str(error.value)


def test_a_model_is_tried_in_training_and_its_norm_statistics_stay(import_marker):
    config = composed("model=ownnets:normed")
    assert not build(config.model, config.task, 0).norm.running_mean.any()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("strategy", ["fedsgd", "splitnn", "splitnn share-labels=false", "fedavg", "fedprox", "cwt"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_frozen_layers_stay_and_unused_parameters_do_no_harm(import_marker, tmp_path, strategy, optimizer):
    options = [f"strategy={strategy}", "model=ownnets:partly", "partition=iid", "nodes=2", "partition.size=40"]
    options = [*JOB, *" ".join(options).split(), f"training.optimizer={optimizer}"]
    config = compose(options)
    before = to_arrays(backbone(config.model, config.task)(derived_seed(0, "model")))
    after = load_file(run(tmp_path, options, partitions(2)).folder / "models" / "global.safetensors")
    assert before.keys() == after.keys()
    moved = [name for name in before if not np.array_equal(before[name], after[name])]
    assert moved == ["spare.weight", "spare.bias", "head.weight", "head.bias"]


def test_a_model_is_not_cut_between_layers_that_share_weights(import_marker):
    config = composed("model=ownnets:tied")
    model = build(config.model, config.task, 0)
    assert split(model, "flat")[1].stages == ("one", "two", "head")
    with pytest.raises(ConfigError, match="its parts share no weights; at cut='one' they do"):
        split(model, "one")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["fedavg", "splitnn"])  # SplitNN's server has the layer that fails
@pytest.mark.parametrize(("name", "message"), [("late", "KeyError: '/data/patient-7'"), ("leaving", "SystemExit: 4")])
def test_a_model_that_fails_in_training_is_one_line(import_marker, monkeypatch, capsys, strategy, name, message):
    monkeypatch.delenv("COLUMNS", raising=False)
    job = [f"strategy={strategy}", "task=digits", f"model=ownnets:{name}", "nodes=2", "partition=iid", "rounds=1"]
    assert command(monkeypatch, "run", *job, "partition.size=40") == 2
    written = capsys.readouterr().err
    assert "Traceback" not in written
    assert f"{message} (ownnets.py, line " in written.splitlines()[-1]


def test_what_a_users_code_raises_at_an_institution_does_not_leave(import_marker, tmp_path, caplog):
    write_shards(tmp_path, {"a": 20})
    (owned,) = node_configs(tmp_path, tmp_path / "state", "a")
    with pytest.raises(RunError, match="a: FlwrReplayError; the institution's own log says more"):
        run(tmp_path, [*JOB, *SHARDS, "classes=3", "model=ownnets:late"], [{**owned, "own-code": "ownnets:late"}])
    told = [line.getMessage() for line in caplog.records if "patient-7" in line.getMessage()]
    assert all("KeyError: '/data/patient-7' (ownnets.py, line " in line for line in told)
    assert told


def test_no_dp_on_data_that_nobody_has_checked(import_marker):
    with pytest.raises(ConfigError, match="mixes patients without noise"):
        PrivacyPlan.of(composed("task=owndata:arrays", "dp=classifier", "target-epsilon=8"))


def institution(tmp_path, choice, **node):
    write_shards(tmp_path, {"a": 9})
    (owned,) = node_configs(tmp_path, tmp_path / "state", "a")
    run = {"overrides": shlex.join([*JOB, *SHARDS, "classes=3", choice])}
    return _institution(tuple(run.items()), tuple(sorted({**owned, **node}.items())))


@pytest.mark.parametrize("allowed", ["", "ownnets:other", "ownnets", "build", "ownnets:builds"])
def test_an_institution_imports_nothing_that_it_has_not_allowed(import_marker, tmp_path, allowed, monkeypatch):
    monkeypatch.setenv(VARIABLE, "ownnets:build")  # a deployed node does not heed it
    with pytest.raises(RefusedError, match=r"ownnets:build, which has not been allowed here.*own-code"):
        institution(tmp_path, "model=ownnets:build", **{"own-code": allowed})
    assert not import_marker.exists()


def test_nothing_is_imported_that_was_not_allowed_in_this_process(import_marker, monkeypatch):
    config = composed("model=ownnets:build", "task=owndata:arrays", "task.size=8", "classes=3")
    monkeypatch.setenv(VARIABLE, "ownnets:bare")
    with pytest.raises(RefusedError, match="has not been allowed here"):
        build(config.model, config.task, 0)
    with pytest.raises(RefusedError, match="has not been allowed here"):
        load(config.task)
    assert not import_marker.exists()


def test_a_later_choice_wins_over_own_code(import_marker):
    assert composed("model=ownnets:build", "model=mlp").model.name == "mlp"
    assert composed("task=owndata:arrays", "task=digits").task.name == "digits"


@pytest.mark.parametrize("key", ["own-code", "own-parts"])
def test_an_institution_takes_what_it_allows_by_name(import_marker, tmp_path, caplog, key):
    told.cache_clear()
    _, config = institution(tmp_path, "model=ownnets:build", **{key: "ownnets:bare ownnets:build"})
    assert build(config.model, config.task, 0).stages == ("body", "head")
    assert ("own-parts is called own-code now; the old name ends" in caplog.text) == (key == "own-parts")


def test_an_old_key_beside_the_new_one_is_refused(import_marker, tmp_path):
    with pytest.raises(ConfigError, match="unknown key 'own-parts'"):
        institution(tmp_path, "model=ownnets:build", **{"own-code": "ownnets:build", "own-parts": "ownnets:bare"})


@pytest.mark.parametrize("variable", [VARIABLE, VARIABLE_BEFORE])
def test_a_simulated_node_imports_what_its_own_process_allows(import_marker, monkeypatch, variable):
    run = (("overrides", shlex.join([*JOB, "model=ownnets:build", "nodes=2", f"seed={len(variable)}"])),)
    node = (("num-partitions", "2"), ("partition-id", "0"))
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(RefusedError, match=VARIABLE):
        _institution(run, node)
    assert not import_marker.exists()
    monkeypatch.setenv(variable, "ownnets:build")
    assert _institution(run, node)[0].name == "institution-1"
