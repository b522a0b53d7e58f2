"""Montgomery and Shenzhen: labels in the names, a site for each set; and a run from such a folder to a result."""

import shutil

import pytest
from clinical import draw, levels, read, refused, truncate

from flwr_replay.convert import convert
from flwr_replay.engines.simulate import run_inline
from flwr_replay.errors import ConfigError
from flwr_replay.report.progress import Display
from flwr_replay.runs.options import resolve

SIZE = ("task.size=8",)
MONTGOMERY, SHENZHEN = "MontgomerySet", "ChinaSet_AllFiles"


@pytest.fixture
def folder(tmp_path):
    """Ten images of Montgomery and twenty of Shenzhen; the first half of either is normal. The level is the number."""
    for name, prefix, count in ((MONTGOMERY, "MCUCXR", 10), (SHENZHEN, "CHNCXR", 20)):
        (tmp_path / name / "ClinicalReadings").mkdir(parents=True)
        for n in range(1, count + 1):
            stem = f"{prefix}_{n:04d}_{int(n > count // 2)}"
            draw(tmp_path / name / "CXR_png" / f"{stem}.png", n + (100 if name == SHENZHEN else 0))
            (tmp_path / name / "ClinicalReadings" / f"{stem}.txt").write_text("Patient's Sex: F\n")
    (tmp_path / SHENZHEN / "CXR_png" / "Thumbs.db").write_bytes(b"as in the download")
    return tmp_path


def test_labels_and_sites_come_from_the_names(folder):
    data = read("tuberculosis", folder, *SIZE)
    assert sorted(levels(data.train) + levels(data.test)) == [*range(1, 11), *range(101, 121)]
    for split in (data.train, data.test):
        assert split.y.tolist() == [int(n > 110 or 5 < n < 100) for n in levels(split)]
        assert split.sites.tolist() == ["shenzhen" if n > 100 else "montgomery" for n in levels(split)]
    assert sorted(zip(data.test.sites.tolist(), data.test.y.tolist(), strict=True)) == [
        *(("montgomery", label) for label in (0, 1)),
        *(("shenzhen", label) for label in (0, 0, 1, 1)),
    ]


def test_balanced_tests_have_as_many_of_both_classes_and_all_others_train(folder):
    for n in range(12, 19):  # Shenzhen: 14 normal, 6 with tuberculosis after these are renamed
        old = folder / SHENZHEN / "CXR_png" / f"CHNCXR_{n:04d}_1.png"
        for inner, end in (("CXR_png", "png"), ("ClinicalReadings", "txt")):
            path = folder / SHENZHEN / inner / f"{old.stem}.{end}"
            path.rename(path.with_name(f"CHNCXR_{n:04d}_0.{end}"))
    data = read("tuberculosis", folder, *SIZE, "task.balanced=true")
    assert sorted(levels(data.train) + levels(data.test)) == [*range(1, 11), *range(101, 121)]
    assert sorted(zip(data.test.sites.tolist(), data.test.y.tolist(), strict=True)) == [
        *(("montgomery", label) for label in (0, 1)),
        *(("shenzhen", label) for label in (0, 0, 1, 1)),
    ]
    assert len(data.train.y[data.train.sites == "shenzhen"]) == 16
    with pytest.raises(ConfigError, match=r"leave task\.test-size out"):
        read("tuberculosis", folder, *SIZE, "task.balanced=true", "task.test_size=4")


def test_a_class_of_one_cannot_be_tested_in_balance(folder):
    for inner in ("CXR_png", "ClinicalReadings"):
        for path in sorted((folder / MONTGOMERY / inner).glob("*_1.*"))[1:]:
            path.unlink()
    words = ("two subjects of every class at montgomery",)
    refused("tuberculosis", folder, *words, overrides=(*SIZE, "task.balanced=true"))


def test_one_of_the_sets_is_enough_and_reads_alike(folder):
    whole = read("tuberculosis", folder, *SIZE)
    shutil.rmtree(folder / MONTGOMERY)
    alone = read("tuberculosis", folder, *SIZE)
    assert levels(alone.test) == [n for n in levels(whole.test) if n > 100]
    shutil.rmtree(folder / SHENZHEN / "CXR_png")
    shutil.rmtree(folder / SHENZHEN / "ClinicalReadings")
    refused("tuberculosis", folder, "MontgomerySet/CXR_png", "ChinaSet_AllFiles/CXR_png", folder, overrides=SIZE)


def test_what_is_wrong_is_named(folder):
    image = folder / MONTGOMERY / "CXR_png" / "MCUCXR_0003_0.png"
    whole = truncate(image)
    refused("tuberculosis", folder, image, "cannot be read", overrides=SIZE)
    image.unlink()
    refused("tuberculosis", folder, image, "does not exist", overrides=SIZE)
    image.write_bytes(whole)
    for name in ("MCUCXR_0003_2.png", "MCUCXR_0003.png", "CHNCXR_0003_0.png"):
        odd = image.with_name(name)
        odd.write_bytes(whole)
        refused("tuberculosis", folder, odd, "the last its label", overrides=SIZE)
        odd.unlink()


def test_a_run_from_the_folder_to_a_result(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    convert("tuberculosis", folder)
    options = [
        "strategy=fedavg",
        "task=tuberculosis",
        f"task.data-dir='{folder}'",
        "task.size=16",
        "model.width=4",
        "split=test",
    ]
    overrides, config = resolve([*options, "rounds=1", "batch-size=4"], str(tmp_path / "runs"), "")
    assert (config.nodes, config.partition.name) == (2, "natural")
    result, _ = run_inline(overrides, Display())
    assert set(result["final"]["institutions"]) == {"montgomery", "shenzhen"}
    assert result["examples-seen"] == 24
    assert all("auc" in scores for scores in result["final"]["institutions"].values())  # each tests on both classes
