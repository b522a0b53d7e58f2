"""flwr-replay runs and watch."""

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flwr_replay import run
from flwr_replay.api import Run, plot
from flwr_replay.cli.main import app
from flwr_replay.engines.simulate import run_inline
from flwr_replay.errors import ConfigError, DivergedError, RunError
from flwr_replay.files.atomic import alone
from flwr_replay.report.progress import Display
from flwr_replay.report.run_files import read_result
from flwr_replay.runs.listing import clean, listed, spare, watch

TINY = {"task": "digits", "nodes": 2, "rounds": 2, "model.width": 4}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("runs")
        patch.setenv("FLWR_REPLAY_HOME", str(place / "home"))
        for name in ("fedavg", "cwt"):
            run(TINY, strategy=name, run_name=name, runs_dir=place / "runs", record="all")
        yield place / "runs"


def output_of(capsys, *words):
    app(list(map(str, words)), standalone_mode=False)
    return capsys.readouterr().out


def test_runs_are_listed_and_shown(runs, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")  # else the terminal's, and without one no limit
    listed = output_of(capsys, "runs", "list", "--runs-dir", runs)
    assert [line for line in listed.splitlines() if not line.startswith(" ")] == ["fedavg", "cwt"]
    assert listed.count("accuracy 0.") == 2
    assert "Nothing here is differentially private" in output_of(capsys, "runs", "show", runs / "cwt")
    table = output_of(capsys, "runs", "compare", runs / "cwt", runs / "fedavg")
    assert "fedavg" in table
    assert table.endswith("metrics: different; final global weights: different\n")
    same = output_of(capsys, "runs", "compare", runs / "cwt", runs / "cwt")
    assert same.endswith("metrics: identical; final global weights: identical\n")
    assert all(max(map(len, listing.splitlines())) <= 80 for listing in (table, listed))
    with pytest.raises(RunError, match="it has none"):
        output_of(capsys, "runs", "list", "--runs-dir", tmp_path)


def test_runs_of_different_tasks_are_said_to_be_so(runs, capsys, tmp_path):
    run({"task": "diabetes", "nodes": 2, "rounds": 1}, strategy="cwt", run_name="numbers", runs_dir=tmp_path)
    *table, last = output_of(capsys, "runs", "compare", runs / "cwt", tmp_path / "numbers").splitlines()
    assert last == "different tasks (digits, diabetes): these metrics cannot be compared"
    assert any("mae" in line for line in table)


def test_an_unfinished_run_is_listed_but_neither_compared_nor_cleaned(runs, capsys, tmp_path):
    shutil.copytree(runs / "cwt", tmp_path / "cwt")
    (tmp_path / "cwt" / "result.json").unlink()
    assert "not finished, last written 0:00:0" in output_of(capsys, "runs", "list", "--runs-dir", tmp_path)
    assert "not finished" in output_of(capsys, "runs", "show", tmp_path / "cwt")
    with pytest.raises(RunError, match="cwt has not finished: go on by `flwr-replay run --resume "):
        output_of(capsys, "runs", "compare", runs / "fedavg", tmp_path / "cwt")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunError, match="only finished runs are cleaned"):
        output_of(capsys, "runs", "clean", "--yes", tmp_path / "cwt")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_result_hides_no_other_run(runs, capsys, tmp_path):
    for name in ("fedavg", "cwt"):
        shutil.copytree(runs / name, tmp_path / name)
    (tmp_path / "fedavg" / "result.json").write_text("{")
    listed = " ".join(output_of(capsys, "runs", "list", "--runs-dir", tmp_path).split())
    assert "damaged: " in listed
    assert "accuracy 0." in listed


def test_a_run_is_listed_while_its_files_are_replaced(runs, tmp_path, monkeypatch):
    shutil.copytree(runs / "cwt", tmp_path / "cwt")
    rglob, passing = Path.rglob, tmp_path / "cwt" / ".result.json.1.tmp"

    def walked(self, what):
        passing.touch()
        yield passing
        passing.unlink()
        yield passing
        yield from rglob(self, what)

    monkeypatch.setattr(Path, "rglob", walked)
    assert listed(tmp_path / "cwt").state == "finished"


def test_why_a_run_ended_is_listed_until_it_goes_on(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    with pytest.raises(DivergedError):
        run(TINY | {"lr": 1e30, "rounds": 3}, strategy="fedavg", run_name="nan", runs_dir=tmp_path / "runs")
    listed = " ".join(output_of(capsys, "runs", "list", "--runs-dir", tmp_path / "runs").split())
    assert "ago: failed: institution-1: the loss must stay finite" in listed
    ended = []

    class Interrupted(Display):
        def begin(self, progress):
            ended.append((tmp_path / "runs" / "cut" / "ended.txt").exists())

        def exchange(self, exchange, *progress):
            if len(ended) == 1:
                raise KeyboardInterrupt

    job = ["strategy=fedavg", "task=digits", "nodes=2", "rounds=2", "model.width=4"]
    with pytest.raises(KeyboardInterrupt):
        run_inline([*job, f"runs_dir='{tmp_path / 'runs'}'", "run_name=cut"], Interrupted())
    assert (tmp_path / "runs" / "cut" / "ended.txt").read_text() == "interrupted\n"
    run_inline([*job, f"resume='{tmp_path / 'runs' / 'cut'}'"], Interrupted())
    assert ended == [False, False]


def test_runs_are_drawn_in_one_picture(runs, capsys, tmp_path):
    out = tmp_path / "both.svg"
    assert (
        output_of(capsys, "runs", "plot", runs / "cwt", runs / "fedavg", "--metric", "loss", "--out", out) == f"{out}\n"
    )
    figure = plot([Run(runs / name, read_result(runs / name)) for name in ("cwt", "fedavg")])
    drawn = {line.get_label(): line.get_ydata()[-1] for line in figure.axes[0].lines}
    assert drawn == {n: read_result(runs / n)["final"]["global"]["validation-accuracy"] for n in ("cwt", "fedavg")}
    assert output_of(capsys, "runs", "plot", runs / "cwt", "--out", tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert out.read_bytes().count(b"<!-- fedavg: ") == 1
    for options, fault in ((["--metric", "acuracy"], "metric must be one of"), (["--out", "a.doc"], "--out must end")):
        with pytest.raises(ConfigError, match=fault):
            output_of(capsys, "runs", "plot", runs / "cwt", *options)


def test_cleaning_keeps_what_a_result_needs(runs, capsys, tmp_path):
    folder = shutil.copytree(runs / "cwt", tmp_path / "cwt")
    assert "checkpoints" in output_of(capsys, "runs", "clean", "--yes", folder)
    assert not (folder / "messages").exists()
    assert (folder / "models" / "global.safetensors").exists()
    assert "cwt on digits" in output_of(capsys, "runs", "show", folder)
    assert spare([folder]) == []
    shutil.copytree(runs / "cwt", tmp_path / "compare-x" / "cwt-seed0")
    asked = subprocess.run(
        [
            sys.executable,
            "-c",
            "from flwr_replay.cli.main import main; main()",
            "runs",
            "clean",
            tmp_path / "compare-x",
        ],
        input="n\n",
        capture_output=True,
        text=True,
    )
    assert asked.returncode == 1
    assert asked.stderr.splitlines()[-1] == "nothing was changed"
    assert "cwt-seed0/checkpoints" in asked.stdout
    assert "replay" not in asked.stdout.replace(str(tmp_path), "")
    assert spare([tmp_path / "compare-x"])
    assert "cwt-seed0" in output_of(capsys, "runs", "clean", "--yes", tmp_path / "compare-x")
    assert not spare([tmp_path / "compare-x"])


def test_what_another_process_has_cleaned_meanwhile_is_no_error(runs, tmp_path, monkeypatch):
    folder = shutil.copytree(runs / "cwt", tmp_path / "cwt")
    spared = spare([folder])
    shutil.rmtree(spared[0][0])
    monkeypatch.setattr("flwr_replay.runs.listing.spare", lambda folders: spared)
    clean([folder])
    assert not any(place.exists() for place, _ in spared)


def test_a_live_run_is_followed_to_its_end(runs, tmp_path):
    folder = shutil.copytree(runs / "cwt", tmp_path / "cwt")
    result = (folder / "result.json").read_bytes()
    timings = (folder / "timings.jsonl").read_text().splitlines(keepends=True)
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints")
    (folder / "timings.jsonl").write_text(timings[0])

    def go_on():
        time.sleep(0.2)
        (folder / "timings.jsonl").write_text("".join(timings))
        (folder / "result.json").write_bytes(result)

    worker = threading.Thread(target=go_on)
    worker.start()
    lines = list(map(str, watch(folder)))
    worker.join()
    assert len(lines) == len(timings)
    assert lines[0].startswith("exchange 1  not evaluated")
    assert "accuracy 0." in lines[-1]


def test_watching_ends_with_the_process_of_the_run(runs, tmp_path, monkeypatch):
    folder = shutil.copytree(runs / "cwt", tmp_path / "cwt")
    (folder / "result.json").unlink()
    monkeypatch.setattr("flwr_replay.runs.listing.QUIET", 0.0)
    with alone(folder):
        waits = watch(folder)
        for _ in range(4):
            next(waits)
    with pytest.raises(RunError, match=r"nobody works on .*cwt any more: go on by the same command with --resume"):
        next(waits)


def test_cleaning_leaves_a_link_and_what_lies_behind_it(runs, tmp_path):
    folder = shutil.copytree(runs / "cwt", tmp_path / "cwt")
    (folder / "checkpoints").rename(tmp_path / "elsewhere")
    (folder / "checkpoints").symlink_to(tmp_path / "elsewhere")
    clean([folder])
    assert list((tmp_path / "elsewhere").iterdir())
    assert not (folder / "messages").exists()
