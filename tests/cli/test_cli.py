"""The command line: what it prints, and one clear line with exit code 2 for every mistake."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from flwr_replay.config.catalogue import choices
from flwr_replay.files.atomic import alone
from flwr_replay.memory import forget
from flwr_replay.report.run_files import read_result

SMALL = ["model.width=4", "rounds=1", "encoder-epochs=1"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["strategy=fedreplai"], ["unknown strategy 'fedreplai'", "did you mean fedreplay"]),
        (["task=digit"], ["unknown task 'digit'", "digits"]),
        (["partition=kss"], ["unknown partition 'kss'", "ks"]),
        (["model=resnet19"], ["unknown model 'resnet19'", "resnet18"]),
        (["rouns=3"], ["unknown option 'rouns'", "rounds"]),
        (["rounds"], ["key=value", "'rounds'"]),
        (["rounds=0"], ["rounds must be at least 1", "0"]),
        (["nodes=0"], ["nodes must be at least 1", "0", "leave it out"]),
        (["rounds=two"], ["rounds must be of type int", "'two'"]),
        (["cut=layer7"], ["cut must be one of", "layer7", "conv1"]),
        (["cut=conv3"], ["did you mean conv"]),
        (["latent-dtype=float8"], ["float8", "float16"]),
        (["training.lr=-1"], ["training.lr must be positive", "-1"]),
        (["lr=inf"], ["training.lr must be positive and finite", "inf"]),
        (["strategy=fedavg", "cut=conv1"], ["cut is an option of strategy=fedreplay, splitnn; got strategy=fedavg"]),
        (["wait=-1"], ["wait must not be negative", "-1"]),
        (["partition=ks", "ks=0.99"], ["0.99"]),
        (["partition=majority", "nodes=12"], ["12"]),
        (["partition=natural"], ["site"]),
        (["task=mnist", "task.data-dir=nowhere"], ["nowhere"]),
        (["task=medmnist", "task.data-dir=broken.npz"], ["broken.npz"]),
        (["task=digits", "task.size=9"], ["9"]),
        (["task=digits", "task.classes=5"], ["0..4"]),
        (["batch-size=1"], ["batch norm", "at least two", "1"]),
        (["encoder=file"], ["encoder-file"]),
        (["encoder=file", "encoder-file=none.safetensors"], ["none.safetensors"]),
        (["encoder-institution=institution-9"], ["institution-9", "did you mean institution-"]),
        (["encoder=random", "encoder-institution=institution-2"], ["needs strategy.encoder=institution", "random"]),
        (["chunk-mb=0.0001"], ["strategy.chunk-mb", "0.0001"]),
        (["device=cuda:7"], ["cuda:7"]),
        (["nodes=2000"], ["every institution needs training examples of its own", "nodes=2000", "1315"]),
        (["device=hpu"], ["device must be auto, cpu or an available cuda[:N]", "'hpu'"]),
        (["device=meta"], ["device must be auto, cpu or an available cuda[:N]", "'meta'"]),
        (["strategy=fedavg", "model=mlp", "model.width=1000000"], ["model.width must be at most 4096", "1000000"]),
        (["seed=" + "9" * 5000], ["the value of seed must be a number", "'999"]),
        (["--runs-dir", "two\nlines"], ["runs-dir must be on one line, without control characters"]),
        (["--runs-dir", ""], ["--runs-dir must not be empty; got ''"]),
        (["--resume", ""], ["--resume must not be empty; got ''"]),
        (
            ["topology-file=deep.json", "topology=file", "strategy=avgpush"],
            ["deep.json must hold a matrix", "recursion"],
        ),
        (["--engine", "rey"], ["--engine", "rey"]),
        (["server-processes=0"], ["strategy.server-processes must be at least 1; got 0"]),
        (["server-processes=2"], ["server-processes=2", "batch norm", "model.norm=group"]),
        (["server-processes=2", "strategy=cwt"], ["server-processes"]),
        (["server-processes=9", "batch-size=8", "model.norm=group"], ["server-processes=9", "batches of 8"]),
        (["--resume", "nothing-here"], ["nothing-here"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line_and_exit_code_2(flwr_replay, tmp_path, words, says):
    (tmp_path / "broken.npz").write_bytes(b"PK not an archive")
    (tmp_path / "deep.json").write_text("[" * 100_000 + "]" * 100_000)
    code, out, err = flwr_replay("run", *words)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2, err
    assert len(errors) == 1, err
    for text in says:
        assert text in errors[0]
    assert "Traceback" not in errors[0]
    assert out == ""


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "fedavg,cwt", "--against", ""],
        ["compare", "fedavg,cwt", "--metric", ""],
        ["compare", "fedavg,cwt", "--runs-dir", ""],
        ["compare", "fedavg,cwt", "seeds=" + "9" * 5000],
        ["compare", "fedavg,cwt", "seeds=999999999999"],
        ["study", "skew", "--only", ","],
        ["study", "skew", "--data", ""],
        ["data", "show", "--out", ""],
        ["compare", "fedavg,cwt", "seeds=\u0663"],
        ["compare", "fedavg,cwt", "seeds=1_0"],
        ["compare", "fedavg,cwt", "--jobs", "\u0663"],
        ["data", "images", "here", "--count=\u0967\u0968"],
        ["run", "rounds=\u0663"],
        ["export", "last", "--out", "~nobody-of-this-name/model"],
        ["run", "task=folder", "task.data-dir=~nobody-of-this-name/data"],
        ["compare", "fedavg:lr=1:lr=2,cwt"],
        ["compare", "fedavg:lr=1:training.lr=2,cwt"],
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_an_empty_or_boundless_option_is_one_line_and_exit_code_2(flwr_replay, tmp_path, words):
    code, out, err = flwr_replay(*words)
    assert (code, out) == (2, "")
    assert len(err.splitlines()[-1]) < 300
    assert err.splitlines()[-1].startswith("error: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "raw", ["\x1b[2J", "\r", "\n", "\u202e", "\u2066", "\u2028", "\x9b", "\u200b", "\x07", "\udc80"]
)
def test_what_a_terminal_would_obey_is_written_out(flwr_replay, raw):
    for words in (
        ["report", f"a{raw}b"],
        ["run", f"task.data-dir=a{raw}b"],
        ["run", f"a{raw}b=1"],
        ["study", f"a{raw}b"],
    ):
        _, out, err = flwr_replay(*words)
        (line,) = [line for line in err.split("\n") if "error: " in line]
        assert (line + out).isprintable(), words


def test_an_error_line_is_short_and_keeps_its_end(flwr_replay):
    code, _, err = flwr_replay("report", "x" * 5000)
    assert code == 2
    assert len(err) < 1200
    code, _, err = flwr_replay("predict", "last", "/".join(["y" * 200] * 30))
    assert code == 2
    assert len(err) < 1200


@pytest.mark.parametrize(
    "words",
    [
        ["export", "last", "--out", ""],
        ["export", "", "--out", "model"],
        ["predict", "last", " "],
        ["deploy", "init", "--clinics", "a,b", "--out", " "],
        ["deploy", "init", "--clinics", ",", "--out", "dep"],
        ["deploy", "seal-key", "a", "--key="],
        ["new", "study", "mine", "--into", ""],
        ["rehearse", "\u3000", "--institutions", "3"],
        ["privacy", "attack", "last", "--field", ""],
        ["runs", "plot", "last", "--out", "\t"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_no_command_takes_an_empty_value(flwr_replay, tmp_path, words):
    code, out, err = flwr_replay(*words)
    assert (code, out) == (2, "")
    assert "must not be empty; got" in err
    assert list(tmp_path.iterdir()) == []


def test_a_memory_that_is_not_enough_is_reported_in_one_line(flwr_replay, monkeypatch):
    def huge(*given):
        return torch.empty(2**59)  # more than any machine has

    monkeypatch.setattr("flwr_replay.engines.simulate.Simulation.of", huge)
    code, _, err = flwr_replay("run", *SMALL)
    assert code == 2
    assert err.splitlines()[-1].startswith("error: this machine has too little memory (")


@pytest.mark.parametrize(
    "words",
    [
        ["cut=layer7"],
        ["task=mnist", "task.data-dir=nowhere"],
        ["partition=ks", "ks=0.99"],
        ["encoder-institution=institution-9"],
        ["chunk-mb=0.0001"],
        ["batch-size=1"],
    ],
)
def test_what_is_refused_leaves_no_run_directory(flwr_replay, tmp_path, words):
    assert flwr_replay("run", *words)[0] == 2
    assert not list((tmp_path / "runs").glob("*")) if (tmp_path / "runs").exists() else True


def test_runs_dir_that_cannot_be_written(flwr_replay, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = flwr_replay("run", "--runs-dir", "file/runs", *SMALL)
    assert code == 2
    assert "error: runs-dir must be a folder that can be written" in err


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


ABSENT = [
    ["runs", "list", "--runs-dir", "absent"],
    ["runs", "show", "absent"],
    ["runs", "compare", "absent"],
    ["runs", "plot", "absent"],
    ["runs", "clean", "absent"],
    ["watch", "absent"],
    ["report", "absent"],
    ["predict", "absent", "images"],
    ["export", "absent"],
    ["run", "--resume", "absent"],
]


@pytest.mark.parametrize("words", ABSENT, ids=" ".join)
def test_a_folder_that_is_not_there_is_one_line_that_says_what_to_do(flwr_replay, tmp_path, words):
    code, out, err = flwr_replay(*words)
    line = err.splitlines()[-1]
    assert (code, out) == (2, "")
    assert str(tmp_path / "absent") in line
    assert "there is no" in line or "does not exist" in line
    assert "flwr-replay run" in line  # `flwr-replay run` makes a run, `flwr-replay runs list` names them
    assert list(tmp_path.iterdir()) == []


def test_last_is_the_run_that_began_last(flwr_replay, tmp_path):
    code, _, err = flwr_replay("predict", "last", "images")
    assert (code, err.splitlines()[-1]) == (
        2,
        f"error: there is no folder {tmp_path / 'runs'}: `flwr-replay run` makes runs/ here, or give another by "
        "--runs-dir",
    )
    for name in ("b", "a"):
        assert flwr_replay("run", "strategy=fedavg", "nodes=2", "model.width=4", "rounds=1", f"run-name={name}")[0] == 0
    assert flwr_replay("report", "last")[1] == f"{tmp_path / 'runs' / 'a' / 'report.html'}\n"
    assert flwr_replay("runs", "show", "last")[1].endswith(f"{tmp_path / 'runs' / 'a'}\n")
    code, _, err = flwr_replay("predict", "last", "images")
    assert code == 2
    assert f"there is no {tmp_path / 'images'}: give a folder of images" in err


def test_a_run_is_resumed_from_anywhere_and_after_its_data_moved(flwr_replay, tmp_path, monkeypatch):
    x, y = np.arange(40 * 64, dtype=np.uint8).reshape(40, 8, 8), np.arange(40) % 2
    np.savez(tmp_path / "d.npz", train_images=x, train_labels=y, test_images=x, test_labels=y)
    task = ["task=medmnist", "task.data-dir=d.npz", "task.size=8", "partition=iid", "nodes=2"]
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


@pytest.mark.parametrize(
    "words", [["--foo"], ["run", "--foo"], ["foo"], ["compare"], ["compare", "cwt", "--jobs", "a"]]
)
def test_a_mistake_in_the_command_itself_is_one_line_too(flwr_replay, words):
    code, out, err = flwr_replay(*words)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("error: ")


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
    assert any(one["starved"] for one in classes["institutions"].values())
    code, out, err = flwr_replay(*words, f"partition.size={largest}", "rest=uniform")
    assert code == 0, err
    assert "institution-4: largest " in out
    assert "warning" not in out
