"""`flwr-replay data check`: all that is wrong with a folder, at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from folders import draw, draw_folders, manifest, read_off
from harness import command

from flwr_replay.convert.checked import LEAKS, checked
from flwr_replay.data import load
from flwr_replay.errors import DataError


def test_all_bad_files_are_named_at_once(tmp_path: Path, monkeypatch, capsys) -> None:
    draw_folders(tmp_path, "healthy", "ill")
    (tmp_path / "healthy" / "a.png").write_bytes(b"no image")
    (tmp_path / "ill" / "b.png").write_bytes((tmp_path / "ill" / "0.png").read_bytes()[:40])
    draw(tmp_path / "ill" / "same.png", 0)  # healthy/0.png under another label
    draw(tmp_path / "ill" / "big.png", 77, (9, 12), "RGB")
    assert command(monkeypatch, "data", "check", str(tmp_path)) == 1
    output = capsys.readouterr().out
    assert "12 images: healthy 5, ill 7" in output
    assert "height x width: 8 x 8 (9), 12 x 9 (1: ill/big.png)" in output
    assert "mode: L (9), RGB (1: ill/big.png)" in output
    assert "there more than once: 1 (healthy/0.png = ill/same.png)" in output
    assert LEAKS in output
    wrong = [line for line in output.splitlines() if line.startswith(("cannot be read", "the same image"))]
    assert [f"{name}.png" in line for name, line in zip(("a", "b"), wrong[:2], strict=True)] == [True, True]
    assert wrong[2:] == ["the same image with other labels, splits or patients: healthy/0.png = ill/same.png"]
    assert "--skip-bad writes a manifest.csv without these 2 files, and lists them" in output
    assert not (tmp_path / "manifest.csv").exists()
    (tmp_path / "ill" / "same.png").unlink()
    (tmp_path / "ill" / "big.png").unlink()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("no image")
    assert command(monkeypatch, "data", "check", str(tmp_path)) == 1  # as if the folder were none
    output = capsys.readouterr().out
    assert (output.count("notes/ has files but no image"), output.count("\ncannot be read: ")) == (1, 2)


def test_images_beside_the_folders_of_classes_are_named(tmp_path: Path) -> None:
    draw_folders(tmp_path, "train/a", "train/b", "test/a", "test/b")
    loose = [tmp_path / "stray.png", tmp_path / "test" / "1.png", tmp_path / "test" / "2.png"]
    for number, file in enumerate(loose):
        draw(file, 100 + number)
    folder = checked(tmp_path)
    assert [line for line in folder.lines if "in no class" in line] == [f"in no class's folder: {f}" for f in loose]
    assert not folder.sound


def test_unreadable_files_are_left_out_and_listed(tmp_path: Path, monkeypatch, capsys) -> None:
    draw_folders(tmp_path, "healthy", "ill")
    words = "data", "check", str(tmp_path), "--skip-bad"
    assert command(monkeypatch, *words) == 0
    assert not (tmp_path / "manifest.csv").exists()  # nothing to leave out
    (tmp_path / "healthy" / "a.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"a\.png .* cannot be read: .*; `flwr-replay data check` lists all such files"):
        load(read_off(tmp_path))
    capsys.readouterr()
    assert command(monkeypatch, *words) == 0
    output = capsys.readouterr().out
    assert output.startswith("8 images: healthy 4, ill 4\nleft out: ")
    data = load(read_off(tmp_path))
    assert len(data.train) + len(data.test) + (len(data.val) if data.val else 0) == 8
    written = (tmp_path / "manifest.csv").read_text()
    (tmp_path / "manifest.csv").write_text(written.replace("\n", ",7\n").replace("label,7", "label,age"))
    (tmp_path / "ill" / "0.png").write_bytes(b"")
    assert command(monkeypatch, *words) == 2
    assert "left-out.csv has other columns than" in capsys.readouterr().err
    (tmp_path / "manifest.csv").write_text(written)
    assert command(monkeypatch, *words) == 0
    assert command(monkeypatch, *words) == 0
    rows = (tmp_path / "left-out.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["image", "healthy/a.png", "ill/0.png"]  # the list goes on
    assert (tmp_path / "manifest.csv").read_text() == written.replace("ill/0.png,ill\n", "")
    for file in (tmp_path / "healthy").iterdir():
        file.write_bytes(b"")
    for file in (tmp_path / "ill").iterdir():
        file.write_bytes(b"")
    assert command(monkeypatch, *words) == 1  # nothing would be left
    assert (tmp_path / "manifest.csv").read_text() != "image,label\n"


def test_what_a_run_refuses_or_leaks_is_wrong(tmp_path: Path) -> None:
    for n in range(3):
        draw(tmp_path / f"{n}.png", 0)
    manifest(tmp_path, "image,label,patient", ["0.png,Normal,p1", "1.png,normal,p2"])
    sound, lines, _ = checked(tmp_path)
    assert f"not in the manifest: 1 ({tmp_path / '2.png'})" in lines
    assert not sound
    assert "labels must differ by more than spelling; got 'normal'" in lines[-2]
    manifest(tmp_path, "image,label,patient", ["0.png,Normal,p1", "1.png,Normal,p2"])
    assert checked(tmp_path).lines[-1].startswith("the same image with other labels, splits or patients: ")


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_patient_in_two_splits_is_wrong(tmp_path: Path, split: str) -> None:
    for n in range(3):
        draw(tmp_path / f"{n}.png", n)
    rows = ["0.png,0,p1,train", f"1.png,1,p1,{split}", "2.png,1,,test"]
    manifest(tmp_path, "image,label,patient,split", rows)
    sound, lines, _ = checked(tmp_path)
    assert sound == (split == "train")
    assert "1 patients; 1 images without one" in lines
    assert LEAKS not in lines  # most images have a patient
    assert lines[-1] == ("nothing is wrong" if sound else "in several splits: patient p1")


def test_a_folder_whose_images_mostly_have_no_patient_warns(tmp_path: Path) -> None:
    for n in range(3):
        draw(tmp_path / f"{n}.png", n)
    manifest(tmp_path, "image,label,patient", ["0.png,0,p1", "1.png,1,", "2.png,1,"])
    sound, lines, _ = checked(tmp_path)
    assert sound
    assert lines[-3:] == ["1 patients; 2 images without one", LEAKS, "nothing is wrong"]


def test_all_that_a_manifest_lacks_is_said_at_once(tmp_path: Path, monkeypatch, capsys) -> None:
    for n in range(6):
        draw(tmp_path / f"{n}.png", n)
    (tmp_path / "5.png").write_bytes(b"no image")
    rows = ["0.png,ill,p,x", "0.png,Ill,p,train", "2.png,,p,train", ",ill,p,test", "4.png,nan,p,y", "5.png,0,p,x"]
    manifest(tmp_path, "image,label,Site_ID,split", rows)
    assert command(monkeypatch, "data", "check", str(tmp_path)) == 1
    output = capsys.readouterr().out
    for fault in (
        "column 'Site_ID' of",
        "every row must have a value for 'image'; 1 of 6",
        "every row must have a value for 'label'; 1 of 6",
        "a file must be listed once",
        "got 'x' in",
        "got 'y' in",
        "\ncannot be read: ",
        "every example must have a label; 1 of 4",
        "labels must differ by more than spelling",
        "labels must be all numbers or all names",
    ):
        assert output.count(fault) == 1, fault
    manifest(tmp_path, "file,class,PatientID", ["0.png,a,p"])
    assert command(monkeypatch, "data", "check", str(tmp_path)) == 2
    errors = capsys.readouterr().err.splitlines()
    assert ["'image'" in errors[0], "'label'" in errors[1], "'PatientID'" in errors[2], len(errors)] == [True] * 3 + [3]
    manifest(tmp_path, "image,label,split", [f"{n}.png,0,{n}" for n in range(30)])
    assert command(monkeypatch, "data", "check", str(tmp_path)) == 1
    assert capsys.readouterr().out.count("split must be one of") == 30
    with pytest.raises(
        DataError, match=r"got '0' in .* line 2 .the first of 30.; also: `flwr-replay data check` tells each"
    ):
        load(read_off(tmp_path))
