"""`flwr-replay data manifest`: whose image a file is, from a table as hospitals' spreadsheets write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from folders import draw, read_off
from harness import command

from flwr_replay.data.folder import folder_rows, read_folder

NAMES = ["ill/0001.png", "ill/0002.png", "well/0003.png"]
ROWS = "file,id\n0001.png,007\n0002.png,007\n0003.png,8\n"


def run_data_manifest(
    folder: Path, patch: pytest.MonkeyPatch, text: str | bytes, *more: str, names: list[str] = NAMES
) -> int:
    """Draw images, write the table, and run the command."""
    for n, name in enumerate(names):
        draw(folder / "scans" / name, n)
    (folder / "p.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    words = ["--patients", str(folder / "p.csv"), "--id", "id", *more]
    return command(patch, "data", "manifest", str(folder / "scans"), *words)


@pytest.mark.parametrize(
    "text",
    [
        ROWS,
        b"\xef\xbb\xbf" + ROWS.encode(),  # a byte order mark
        ROWS.replace("\n", "\r\n").replace(",", ";"),  # as spreadsheets write where 0,5 is a half
        ROWS.replace(",", " , ").replace("0001.png", '" 0001.png "'),
        ROWS.replace(".png", ".PNG"),
        ROWS.replace(".png", ""),
        ROWS.replace("00", "C:\\scans\\00", 1),
        ROWS.replace("0001", "/mnt/old scans/0001").replace("0002", "ill/0002"),
        ROWS.replace("file,id", "sex,file,id").replace("\n0", "\nf,0"),
        ROWS + "0003.png,8\n",  # a row for each finding
    ],
)
def test_the_folder_is_read_with_its_patients(tmp_path: Path, monkeypatch, capsys, text: str | bytes) -> None:
    assert run_data_manifest(tmp_path, monkeypatch, text) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'scans' / 'manifest.csv'}\n"
    rows = folder_rows(tmp_path / "scans")
    listed = [(row.file.relative_to(tmp_path / "scans").as_posix(), row.label, row.patient) for row in rows]
    assert listed == [(NAMES[0], "ill", "007"), (NAMES[1], "ill", "007"), (NAMES[2], "well", "8")]
    raws = read_folder(read_off(tmp_path / "scans"))
    patients = [set() if (of := raws[split].patients) is None else set(of) for split in ("train", "test")]
    assert [len(among) for among in patients] == [1, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ROWS.replace("0003.png,8\n", ""), "every image must have a row in {table}; 1 wrong:\n  well/0003.png"),
        (ROWS + "4.png,9\n", "every row of {table} must name an image in {folder}; 1 wrong:\n  line 5: 4.png"),
        (ROWS.replace("0001", "1"), "every row of {table} must name an image in {folder}; 1 wrong:\n  line 2: 1.png"),
        (ROWS.replace("0001", "well/0001"), "must name an image in {folder}; 1 wrong:\n  line 2: well/0001.png"),
        (ROWS + "0001.png,9\n", "an image must have one patient; 1 wrong:\n  ill/0001.png: 007, 9"),
        (ROWS.replace(",007", ",7", 1), "patients must differ by more than spelling; 1 wrong:\n  line 3: 007 and 7"),
        (ROWS.replace(",8", ",8.0") + "0003.png,8\n", "more than spelling; 1 wrong:\n  line 5: 8 and 8.0"),
        (ROWS.replace(",8", ", "), "every row of {table} must have a whole value for 'id'; 1 wrong:\n  line 4:\n"),
        (ROWS.replace(",8", ",1.23457E+11"), "a whole value for 'id'; 1 wrong:\n  line 4: 1.23457E+11"),
        (ROWS.replace(",8", ",#REF!"), "a whole value for 'id'; 1 wrong:\n  line 4: #REF!"),
        (
            ROWS.replace("id", "ID"),
            "{table} must have a column 'id', between commas or semicolons: known: ID, file; --file and --id say",
        ),
        (ROWS.encode("utf-16"), "{table} must be a CSV file in UTF-8"),
    ],
)
def test_what_does_not_fit_is_a_line_and_nothing_is_written(tmp_path, monkeypatch, capsys, text, message) -> None:
    assert run_data_manifest(tmp_path, monkeypatch, text) == 2
    assert message.format(table=tmp_path / "p.csv", folder=tmp_path / "scans") in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path / "scans")) == ["ill", "well"]


def test_all_that_does_not_fit_is_said_at_once(tmp_path, monkeypatch, capsys) -> None:
    text = ROWS.replace("0003.png,8", "4.png,8") + "0001.png,9\n"
    assert run_data_manifest(tmp_path, monkeypatch, text) == 2
    out, err = capsys.readouterr()
    assert (out, [line for line in err.splitlines() if not line.startswith(" ")][-1]) == (
        "",
        "nothing was written: mend this, name other columns by --file and --id, or leave images out by --skip-bad",
    )
    assert len(err.splitlines()) == 7
    assert run_data_manifest(tmp_path, monkeypatch, text, "--skip-bad") == 0
    assert [row.patient for row in folder_rows(tmp_path / "scans")] == ["007"]
    left_out = (tmp_path / "scans" / "left-out.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in left_out] == ["image", "ill/0001.png", "well/0003.png"]
    (tmp_path / "scans" / "manifest.csv").unlink()
    assert (
        run_data_manifest(tmp_path, monkeypatch, ROWS.replace(",007", ",7", 1), "--skip-bad") == 2
    )  # who is who is not known


def test_the_folder_decides_between_files_of_one_name(tmp_path, monkeypatch, capsys) -> None:
    names = ["ill/1.png", "well/1.png", "well/a\u0308.PNG"]
    text = "file,id\nILL\\1.png,1\nscans/well/1.png,2\n\u00e4.png,2\n"
    assert run_data_manifest(tmp_path, monkeypatch, text.replace("ILL\\", ""), names=names) == 2
    assert (
        "must name the folder, too, where several have the file; 1 wrong:\n  line 2: 1.png" in capsys.readouterr().err
    )
    assert run_data_manifest(tmp_path, monkeypatch, text, names=names) == 0
    assert [row.patient for row in folder_rows(tmp_path / "scans")] == ["1", "2", "2"]


def test_names_that_a_table_cannot_hold_and_a_manifest_that_is_there(tmp_path, monkeypatch, capsys) -> None:
    draw(tmp_path / "scans" / " odd" / "4.png")
    draw(latin := tmp_path / "scans" / "ill" / os.fsdecode(b"\xe4.png"))
    assert run_data_manifest(tmp_path, monkeypatch, ROWS + "4.png,9\n") == 2
    rule = "names must be UTF-8, without spaces at their ends"
    assert f"{rule}; 2 wrong:\n  odd/4.png\n  ill/\\udce4.png\n" in capsys.readouterr().err
    latin.unlink()
    (tmp_path / "scans" / " odd").rename(tmp_path / "scans" / "odd")
    assert (
        run_data_manifest(tmp_path, monkeypatch, (ROWS + "4.png,9\n").replace("file", "image"), "--file", "image") == 0
    )
    written = (tmp_path / "scans" / "manifest.csv").read_bytes()
    assert run_data_manifest(tmp_path, monkeypatch, ROWS) == 2
    assert "manifest.csv is there already" in capsys.readouterr().err
    assert (tmp_path / "scans" / "manifest.csv").read_bytes() == written
