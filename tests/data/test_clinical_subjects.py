"""The division by subject: fixed, by stratum, of the sizes asked for, and never one subject in two splits."""

from pathlib import Path

import numpy as np
import pytest
from clinical import boneage, loaded
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_replay.cli.main import app
from flwr_replay.config.catalogue import choices
from flwr_replay.config.compose import compose
from flwr_replay.config.sections import TaskConfig
from flwr_replay.convert import convert
from flwr_replay.data import load
from flwr_replay.data.subjects import divide
from flwr_replay.errors import ConfigError, DataError
from flwr_replay.rng import derived_seed

CLINICAL = ("retina", "boneage", "brats", "isic", "tuberculosis")
ROWS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), min_size=1, max_size=120)


def task(**options):
    return TaskConfig(name="made", kind="regression", format="made", channels=1, size=1, **options)


def divided(subjects, strata, **options):
    return divide(subjects, strata, task(**options), Path("table.csv"))


@settings(max_examples=60)
@given(ROWS)
def test_splits_cover_all_rows_and_share_no_subject(rows):
    subjects, strata = [f"s{subject}" for subject, _ in rows], [stratum for _, stratum in rows]
    splits = divided(subjects, strata)
    assert sorted(np.concatenate(list(splits.values()))) == list(range(len(rows)))
    owners = [{subjects[n] for n in rows} for rows in splits.values()]
    assert sum(map(len, owners)) == len(set(subjects))


def test_a_fifth_of_every_stratum_by_the_hash_alone():
    subjects = [f"{site}{n}" for site, count in (("a", 40), ("b", 10)) for n in range(count)]
    splits = divided(subjects, [name[0] for name in subjects])
    for site, count in (("a", 40), ("b", 10)):
        ranked = sorted((derived_seed(0, "made", f"{site}{n}"), f"{site}{n}") for n in range(count))
        tested = {subjects[n] for n in splits["test"] if subjects[n][0] == site}
        assert tested == {name for _, name in ranked[: count // 5]}
    assert len(splits["val"]) == 0


def test_an_institution_alone_gets_what_a_simulation_of_all_gives_it():
    rng = np.random.default_rng(0)
    subjects = [f"{site}{n}" for site, count in (("a", 33), ("b", 7)) for n in range(count) for _ in range(2)]
    subjects = [subjects[n] for n in rng.permutation(len(subjects))]
    whole = divided(subjects, [name[0] for name in subjects])
    for site in "ab":
        own = [name for name in subjects if name[0] == site]
        alone = divided(own, [site] * len(own))
        for split in ("train", "test"):
            assert [own[n] for n in alone[split]] == [subjects[n] for n in whole[split] if subjects[n][0] == site]


def test_sizes_count_subjects_in_the_same_proportion_everywhere():
    subjects = [f"{site}{n}" for site, count in (("a", 80), ("b", 20)) for n in range(count) for _ in range(3)]
    splits = divided(subjects, [name[0] for name in subjects], train_size=50, val_size=10, test_size=20)
    for split, size in (("train", 50), ("val", 10), ("test", 20)):
        owners = {subjects[n] for n in splits[split]}
        assert len(owners) == size
        assert len(splits[split]) == 3 * size
        assert sum(name[0] == "b" for name in owners) == size // 5


def test_balanced_splits_hold_both_classes_equally_and_leave_the_rest_out():
    strata = [0] * 70 + [1] * 30
    subjects = [str(n) for n in range(100)]
    splits = divided(subjects, strata, train_size=30, val_size=10, test_size=20, balanced=True)
    for split, size in (("train", 30), ("val", 10), ("test", 20)):
        assert np.bincount(np.asarray(strata)[splits[split]]).tolist() == [size // 2, size // 2]
    rest = divided(subjects, strata, balanced=True)
    assert sum(map(len, rest.values())) == 60
    with pytest.raises(
        DataError, match=r"train on 61, validate on 0 .* got 60 in 2 classes of equal size in table.csv"
    ):
        divided(subjects, strata, train_size=61, balanced=True)


def test_more_than_there_is_is_refused_with_both_numbers():
    with pytest.raises(DataError, match=r"train on 7, validate on 2 and test on 2 subjects; got 10 in table.csv"):
        divided(list("abcdefghij"), [0] * 10, train_size=7, val_size=2, test_size=2)
    with pytest.raises(DataError, match=r"train on 1, validate on 0 and test on 1 subjects; got 1"):
        divided(["a"], [0], test_size=1)
    with pytest.raises(DataError, match="got 0"):
        divided([], [])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [name for name in choices("task") if name != "own"])  # it needs a function
def test_every_task_composes_with_the_presets_that_know_it(name):
    assert compose([f"task={name}", "preset=quick"]).task.name == name
    if name in (*CLINICAL, "mnist", "fashion_mnist", "cifar10", "histopathology", "folder"):
        assert compose([f"task={name}", "preset=paper"]).task.name == name
    else:
        with pytest.raises(
            ConfigError,
            match="preset=paper has values for task=boneage, brats, cifar10, fashion_mnist, folder, histopathology, "
            "isic, mnist, retina, tuberculosis",
        ):
            compose([f"task={name}", "preset=paper"])


def test_the_papers_numbers():
    retina, boneage, brats = (compose([f"task={name}", "preset=paper"]) for name in CLINICAL[:3])
    assert (retina.task.train_size, retina.task.val_size, retina.task.test_size) == (6000, 3000, 3000)
    assert retina.task.balanced
    assert (boneage.task.train_size, boneage.task.val_size, boneage.task.test_size) == (4575, 1000, 0)
    for config in (retina, boneage):
        assert (config.model.name, config.training.optimizer, config.training.lr) == ("resnet34", "sgd", 0.001)
        assert (config.training.lr_step, config.training.batch_size, config.task.size) == (35, 32, 256)
    assert (brats.task.train_size, brats.task.test_size, brats.task.size) == (165, 45, 224)
    assert (brats.model.name, brats.model.width, brats.partition.name) == ("unet", 32, "natural")
    assert (brats.training.optimizer, brats.training.lr, brats.training.batch_size) == ("adam", 0.0001, 32)
    assert brats.rounds == 35


def test_sizes_are_options_of_these_tasks_only():
    with pytest.raises(ConfigError, match="unknown option 'train-size'"):
        compose(["task=mnist", "train-size=10"])
    with pytest.raises(ConfigError, match=r"unknown option 'task\.balanced'"):
        compose(["task=boneage", "task.balanced=true"])
    with pytest.raises(ConfigError, match=r"task\.val-size must not be negative; got -1"):
        compose(["task=isic", "val-size=-1"])


@pytest.mark.parametrize("name", CLINICAL)
def test_no_folder_and_no_manifest(name, tmp_path):
    with pytest.raises(ConfigError, match=r"set task\.data-dir"):
        load(compose([f"task={name}"]).task)
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match=f"does not exist: run flwr-replay data convert {name} {folder}$"):
            loaded(name, folder)
    with pytest.raises(DataError, match="nowhere is none"):
        convert(name, tmp_path / "nowhere")
    with pytest.raises(DataError, match=str(tmp_path)):
        convert(name, tmp_path)
    with pytest.raises(ConfigError, match="got 2"):
        loaded(name, tmp_path, "task.channels=2")


@pytest.fixture
def hands(tmp_path):
    return boneage(tmp_path, 10, 2)


def test_a_manifest_that_is_there_stays(hands):
    manifest = hands / "manifest.csv"
    written = manifest.read_text()
    with pytest.raises(DataError, match=r"manifest.csv is there already: remove it"):
        convert("boneage", hands)
    assert manifest.read_text() == written
    with pytest.raises(ConfigError, match="NAME must be one of retina, boneage"):
        convert("mnist", hands)


def test_the_command_writes_what_the_task_reads(hands, capsys):
    (hands / "manifest.csv").unlink()
    app(["data", "convert", "boneage", str(hands)], standalone_mode=False)
    assert capsys.readouterr().out.strip() == str(hands / "manifest.csv")
    assert (
        (hands / "manifest.csv").read_text().startswith("image,label,patient,split\nboneage-training-dataset/1000.png,")
    )
    assert len(loaded("boneage", hands, "task.size=8").test) == 2


def test_labels_and_subjects_that_somebody_spoilt(hands):
    """As spreadsheets leave them: no label, a word, no patient, one patient in both splits."""
    manifest = hands / "manifest.csv"
    whole = manifest.read_text()
    first = whole.splitlines()[1]
    image, label, patient, _ = first.split(",")
    for spoilt, message in (
        (f"{image},nan,{patient},train", "every example must have a label"),
        (f"{image},six years,{patient},train", "labels must be numbers"),
        (f"{image},inf,{patient},train", "be finite numbers"),
        (f"{image},{label},1010,train", "all examples of a patient must be in one split"),
        (f"gone.png,{label},{patient},train", "gone.png .* does not exist"),
        (f"{image},{label},{patient},holdout", "split must be one of"),
    ):
        manifest.write_text(whole.replace(first, spoilt))
        with pytest.raises(DataError, match=message):
            loaded("boneage", hands, "task.size=8")
    manifest.write_text(whole.replace(first, f"{image},{label},,train"))
    assert len(loaded("boneage", hands, "task.size=8").train) == 10
