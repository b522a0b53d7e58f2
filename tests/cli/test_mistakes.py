"""The command line: one clear line with exit code 2 for every mistake."""

import pytest
import torch

SMALL = ["model.width=4", "rounds=1", "encoder-epochs=1"]


SEVERAL = {
    ("lr=-1", "rounds=abc", "sseed=3"): ("lr must be positive", "rounds must be a whole number", "option 'sseed'"),
    ("strategy=cwtt", "task=digit", "lr=-1"): ("unknown strategy 'cwtt'", "unknown task 'digit'"),
    ("strategy=fedavg", "mu=3", "fraction=2", "record-mb=-1"): (
        "fraction is a share",
        "record-mb",
        "mu is an option",
    ),
    ("encoder=file", "masked=true"): ("encoder-file=PATH go together", "masked=true is for"),
    ("ks=2", "lr=0.1|0.2", "nodes=0"): ("ks is a statistic", "has one value of an option", "nodes must be at least 1"),
    ("strategy=scaffold", "replay=vqvae2", "optimizer=adam", "batch-size=1"): (
        "replay is for serial and parallel methods",
        "batch norm needs batches",
        "set training.optimizer=sgd",
    ),
    ("strategy=fedreplay", "fraction=0.5", "encoder=random", "augment=flip"): (
        "fraction is for methods",
        "training.augment needs encoder=institution",
    ),
}


@pytest.mark.parametrize("words", SEVERAL)
def test_several_mistakes_are_a_line_each(flwr_replay, words):
    code, out, err = flwr_replay("run", *words)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (code, out, len(errors)) == (2, "", len(SEVERAL[words]))
    assert all(any(needed in line for line in errors) for needed in SEVERAL[words])


@pytest.mark.parametrize("words", [["encoder=file", "encoder-file="], ["masked=true", "nodes=2"]])
def test_options_that_do_not_go_together_are_one_mistake(flwr_replay, words):
    assert flwr_replay("run", "strategy=fedavg" if "nodes=2" in words else "seed=1", *words)[2].count("error: ") == 1


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
        (["rounds=two"], ["rounds must be a whole number", "'two'"]),
        (["record=true"], ["record must be none, up, all; got 'true'"]),
        (["stratgy=cwt"], ["did you mean strategy?;"]),
        (["--strategy", "cwt"], ["options of a run have no hyphens in front: strategy=…"]),
        (["--against", "cwt"], ["No such option '--against'; it is one of flwr-replay compare"]),
        (
            ["strategy=fedavg", "dp=latents"],
            ["can have dp=classifier or update, with replay=vqvae2 dp=generator, with replay=pixelcnn dp=prior, with"],
        ),
        (["strategy=local", "dp=generator"], ["strategy=local can have dp=classifier; got dp=generator"]),
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
        (["task.data-dir=nowhere"], ["'task.data-dir=nowhere' is for tasks that read files; got task=digits"]),
        (["task=digits", "task.classes=5"], ["0..4"]),
        (["batch-size=1"], ["batch norm", "at least two", "1"]),
        (["encoder=file"], ["encoder-file"]),
        (["encoder=file", "encoder-file=none.safetensors"], ["none.safetensors"]),
        (["encoder-institution=institution-9"], ["institution-9", "did you mean institution-"]),
        (
            ["encoder=random", "encoder-institution=institution-2"],
            ["for strategy.encoder=institution; got strategy.encoder=random"],
        ),
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
        ["compare", "fedavg,cwt", "seeds=0-" + "9" * 40],
        ["compare", "fedavg,cwt", "seeds=4-2"],
        ["compare", "fedavg,cwt", "seeds=0-2,2"],
        ["compare", "fedavg,cwt", "seeds=-3"],
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


@pytest.mark.parametrize(
    "words", [["--foo"], ["run", "--foo"], ["foo"], ["compare"], ["compare", "cwt", "--jobs", "a"]]
)
def test_a_mistake_in_the_command_itself_is_one_line_too(flwr_replay, words):
    code, out, err = flwr_replay(*words)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("error: ")
