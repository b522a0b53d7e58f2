"""The command line: what it prints and writes, and how runs go on."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flwr_replay.config.catalogue import choices
from flwr_replay.files.atomic import alone
from flwr_replay.memory import forget
from flwr_replay.report.run_files import read_result

SMALL = ["model.width=4", "rounds=1", "encoder-epochs=1"]


def test_nan_loss_stops_the_run_and_keeps_the_last_good_checkpoint(flwr_replay, tmp_path):
    words = ["strategy=fedavg", "model=mlp", "rounds=3", "training.lr=1e30", "run-name=nan", "model.width=8"]
    code, _, err = flwr_replay("run", *words)
    assert code == 2
    assert "the loss must stay finite" in err
    for file in (tmp_path / "runs" / "nan" / "checkpoints").glob("*"):
        from safetensors.numpy import load_file

        assert all(np.isfinite(array).all() for array in load_file(file).values())


def test_run_writes_its_directory(flwr_replay, tmp_path):
    code, out, _ = flwr_replay("run", "--json", *SMALL)
    assert code == 0
    result = json.loads(out)
    (folder,) = (tmp_path / "runs").iterdir()
    assert read_result(folder) == result
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "ledger.jsonl", "checkpoints", "models"):
        assert (folder / name).exists()
    assert result["final"]["global"]["accuracy"] > 0.1
    assert set(result["final"]["institutions"]) == {f"institution-{k}" for k in (1, 2, 3, 4)}
    pooled = result["bytes-by-kind"]["up"]
    assert pooled["raw-bytes-they-stand-for"] > 0
    assert result["privacy"] == dict.fromkeys(result["final"]["institutions"])


def test_a_resumed_run_keeps_its_options(flwr_replay, tmp_path):
    assert flwr_replay("run", *SMALL, "run-name=first")[0] == 0
    code, _, err = flwr_replay("run", "--resume", "runs/first", "lr=0.5")
    assert code == 2
    assert "a resumed run keeps its options, except rounds" in err
    code, out, _ = flwr_replay("run", "--resume", "runs/first", "rounds=2", "--json")
    assert code == 0
    assert json.loads(out)["rounds"] == 2


def test_a_run_is_not_made_shorter(flwr_replay, tmp_path):
    options = ["strategy=cwt", "nodes=2", "model.width=4", "rounds=1", "run-name=first"]
    assert flwr_replay("run", *options)[0] == 0
    assert flwr_replay("run", "--resume", "runs/first", "rounds=3")[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    for rounds in ("rounds=2", "rounds=1"):
        code, out, err = flwr_replay("run", "--resume", "runs/first", rounds)
        assert (code, out) == (2, "")
        folder = tmp_path / "runs" / "first"
        assert err.splitlines()[-1] == (
            f"error: a run is not made shorter; {folder} has done 3 rounds, now {rounds}: give rounds=3 or more, or "
            "leave rounds out"
        )
    assert {path: path.read_bytes() for path in before} == before
    assert json.loads(flwr_replay("run", "--resume", "runs/first", "rounds=3", "--json")[1])["rounds"] == 3
    assert json.loads(flwr_replay("run", "--resume", "runs/first", "--json")[1])["rounds"] == 3


def test_last_is_what_was_worked_on_last(flwr_replay, tmp_path):
    code, _, err = flwr_replay("predict", "last", "images")
    assert (code, err.splitlines()[-1]) == (
        2,
        "error: last is the newest in runs/, and there is none here: give the directory of a run",
    )
    for name in ("b", "a"):
        assert flwr_replay("run", "strategy=fedavg", "nodes=2", "model.width=4", "rounds=1", f"run-name={name}")[0] == 0
    assert flwr_replay("report", "last")[1] == f"{tmp_path / 'runs' / 'a' / 'report.html'}\n"
    assert flwr_replay("runs", "show", "last")[1].endswith(f"{tmp_path / 'runs' / 'a'}\n")
    code, _, err = flwr_replay("predict", "last", "images")
    assert code == 2
    assert f"there is no {tmp_path / 'images'}: give a folder of images" in err
    assert flwr_replay("compare", "fedavg", "seeds=1", "nodes=2", "model.width=4", "rounds=1", "lr=0.1|0.2")[0] == 0
    page = flwr_replay("report", "last")[1].strip()  # a comparison is not one of its runs
    assert json.loads((Path(page).parent / "compare.json").read_text())["against"] == "fedavg:lr=0.1"
    for words in (["runs", "show", "last"], ["privacy", "attack", "last"]):
        assert re.search("error: last is a comparison, .* give one of its runs", flwr_replay(*words)[2])
    assert flwr_replay("run", "--resume", "runs/b", "rounds=2")[0] == 0
    assert flwr_replay("report", "runs/a")[0] == 0  # no work on it
    assert flwr_replay("report", "last")[1] == f"{tmp_path / 'runs' / 'b' / 'report.html'}\n"
    assert flwr_replay("compare", "fedavg", "seeds=1", "nodes=2", "model.width=4", "rounds=1", "lr=0.1|0.2")[0] == 0
    assert flwr_replay("report", "last")[1].strip() == page


def test_last_may_be_unfinished_and_then_says_how_to_go_on(flwr_replay, tmp_path):
    words = ["strategy=fedavg", "model=mlp", "rounds=3", "lr=1e30", "run-name=nan run", "model.width=8"]
    assert flwr_replay("run", *words)[0] == 2
    folder = tmp_path / "runs" / "nan run"
    says = f"error: {folder} has not finished: go on by `flwr-replay run --resume '{folder}'`, with a comparison "
    for words in (["predict", "last", "images"], ["report", "last"], ["privacy", "attack", "last"], ["export", "last"]):
        code, out, err = flwr_replay(*words)
        assert (code, out, err.count("\n"), err[: len(says)]) == (2, "", 1, says)
    assert flwr_replay("runs", "show", "last")[1].startswith(f"{folder}: not finished, ")


def test_a_run_is_resumed_from_anywhere_and_after_its_data_moved(flwr_replay, tmp_path, monkeypatch):
    x, y = np.arange(40 * 64, dtype=np.uint8).reshape(40, 8, 8), np.arange(40) % 2
    np.savez(tmp_path / "d.npz", train_images=x, train_labels=y, test_images=x, test_labels=y)
    task = ["task=medmnist", "task.data-dir=d.npz", "partition=iid", "nodes=2"]  # the file says size and channels
    assert flwr_replay("run", "strategy=fedavg", "model=mlp", *task, "rounds=1", "run-name=first")[0] == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert flwr_replay("run", "--resume", "../runs/first", "rounds=2")[0] == 0
    (tmp_path / "d.npz").rename(tmp_path / "elsewhere" / "d.npz")
    forget()
    assert flwr_replay("run", "--resume", "../runs/first", "rounds=3")[0] == 2
    assert flwr_replay("run", "--resume", "../runs/first", "rounds=3", "task.data-dir=d.npz")[0] == 0


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.yaml", b"", "damaged"),
        ("config.yaml", b"a: [", "damaged"),
        ("config.yaml", b"\xff\xfe", "damaged"),
        ("run-id", b"../../x", "must hold the run's id"),
        ("run-id", b"", "must hold the run's id"),
        ("result.json", b"", "damaged"),
        ("ledger.jsonl", b"{}\nGARBAGE\n{}\n", "line 1"),
        ("latents/institution-1/upload.json", b"{", "damaged"),
        ("latents/institution-1/labels.npy", None, "damaged"),
    ],
)
def test_a_damaged_run_directory_is_reported_in_one_line(flwr_replay, tmp_path, file, content, says):
    assert flwr_replay("run", *SMALL, "run-name=first")[0] == 0
    path = tmp_path / "runs" / "first" / file
    path.write_bytes(content) if content is not None else path.unlink()
    code, _, err = flwr_replay("run", "--resume", "runs/first", "rounds=2")
    assert code == 2, err
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert says in line


def test_a_ledger_whose_last_line_lacks_its_end_loses_nothing(flwr_replay, tmp_path):
    assert flwr_replay("run", *SMALL, "run-name=first")[0] == 0
    ledger = tmp_path / "runs" / "first" / "ledger.jsonl"
    before = ledger.read_text()
    ledger.write_text(before[:-1])
    code, out, _ = flwr_replay("run", "--resume", "runs/first", "rounds=2", "--json")
    assert code == 0
    assert ledger.read_text().startswith(before)
    counted = sum(json.loads(line)["bytes"] for line in ledger.read_text().splitlines())
    assert counted == sum(json.loads(out)["bytes"][way] for way in ("up", "down"))


def test_runs_of_one_name_share_no_state_at_the_institutions(flwr_replay):
    words = ["strategy=local", "model=mlp", "model.width=4", "rounds=5", "run-name=same", "--json"]
    results = [flwr_replay("run", *words, "--runs-dir", folder) for folder in ("one", "other")]
    assert [code for code, _, _ in results] == [0, 0]
    first, second = (json.loads(out) for _, out, _ in results)
    assert first["final"] == second["final"]
    assert second["failures"] == []


def test_two_processes_never_work_in_one_run(flwr_replay, tmp_path):
    assert flwr_replay("run", "strategy=local", "model=mlp", "rounds=1", "run-name=first")[0] == 0
    (tmp_path / "runs" / "first" / "result.json").unlink()
    with alone(tmp_path / "runs" / "first"):
        code, _, err = flwr_replay("run", "--resume", "runs/first")
    assert code == 2
    assert "error: only one process may work in" in err
    assert flwr_replay("run", "--resume", "runs/first")[0] == 0


def test_dry_run_as_json_has_the_same_bytes(flwr_replay):
    lines = json.loads(flwr_replay("run", "--dry-run", "--json", "strategy=cwt")[1])
    assert {line["stage"] for line in lines} == {"roll-call", "train", "evaluate"}
    weights = sum(line["bytes"] for line in lines if line["direction"] == "up" and line["kind"] == "model")
    assert f"{weights:,}" in flwr_replay("run", "--dry-run", "strategy=cwt")[1]


def test_dry_run_prints_the_ledger_on_80_columns_and_trains_nothing(flwr_replay, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = flwr_replay("run", "--dry-run", "strategy=cwt")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    for text in ("Forecast of the ledger", "arrays", "model", "protection", "none", "differentially private"):
        assert text in out
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_strategies_lists_what_travels(flwr_replay):
    code, out, _ = flwr_replay("strategies", "--json")
    assert code == 0
    described = json.loads(out)
    assert set(described) == set(choices("strategy"))
    assert all(idea and travels for idea, travels in described.values())
    code, out, _ = flwr_replay("strategies", "fedavg")
    assert code == 0
    assert "Deviations: A pass has" in out
    assert flwr_replay("strategies", "fedavgg")[0] == 2


def test_data_show_prints_and_plots(flwr_replay, tmp_path):
    code, out, _ = flwr_replay("data", "show", "task=digits", "partition=ks", "ks=0.6", "--out", "plots")
    assert code == 0
    assert "institution-1" in out
    assert list((tmp_path / "plots").glob("*.png"))
    before = sorted(tmp_path.rglob("*"))
    code, without, _ = flwr_replay("data", "show", "task=digits", "partition=ks", "ks=0.6")
    assert (code, without.splitlines()) == (0, out.splitlines()[:-1])
    assert sorted(tmp_path.rglob("*")) == before


def test_classes_that_starve_are_said_after_a_run_and_in_its_result(flwr_replay):
    words = [
        "run",
        "strategy=local",
        "model=mlp",
        "model.width=4",
        "rounds=1",
        "partition=majority",
        "p=0.7",
        "split=test",
    ]
    code, out, err = flwr_replay(*words, "partition.size=200", "run-name=first")
    assert code == 0, err
    assert "warning: classes starve at " in out
    assert len([line for line in out.splitlines() if ": largest 140 of class " in line]) == 4
    classes = json.loads(Path("runs/first/result.json").read_text())["skew"]["classes"]
    largest = classes["uniform-size"]
    assert f"set partition.rest=uniform (partition.size={largest} at most)" in " ".join(out.split())
    assert any(institution["starved"] for institution in classes["institutions"].values())
    code, out, err = flwr_replay(*words, f"partition.size={largest}", "rest=uniform")
    assert code == 0, err
    assert "institution-4: largest " in out
    assert "warning" not in out


@pytest.mark.parametrize(
    "words", ["options", "options lrr", "strategies", "strategies proxyfl", "runs list", "run lrr=1"]
)
def test_what_needs_no_training_does_not_import_pytorch(words, tmp_path):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "config.yaml").write_text("")
    code = "import sys, atexit; atexit.register(lambda: print({'torch', 'flwr'} & {*sys.modules}))"
    code += "; from flwr_replay.cli.main import main; main()"
    ran = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True, text=True, cwd=tmp_path)
    assert ran.stdout.splitlines()[-1] == "set()", ran.stderr
