"""Runs and comparisons from Python give what the command line gives."""

import json

import pytest

import flwr_replay
from flwr_replay import compare, load_model, run
from flwr_replay.cli.main import app
from flwr_replay.errors import ConfigError, RunError

TINY = {"task": "digits", "partition.size": 60, "nodes": 2, "rounds": 2, "model.width": 4}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def test_a_run_has_what_the_command_line_prints(capsys):
    ran = run(TINY, strategy="cwt", run_name="mine", class_names=list("abcdefghij"))
    words = [f"{key}={value}" for key, value in TINY.items()]
    words += ["strategy=cwt", "run-name=typed", "class-names=[a,b,c,d,e,f,g,h,i,j]"]
    app(["run", *words, "--json"], standalone_mode=False)
    typed = json.loads(capsys.readouterr().out)
    assert ran.result["final"] == typed["final"]
    assert str(ran).startswith("cwt on digits: accuracy ")
    last = ran.metrics[(ran.metrics["round"] == 2) & (ran.metrics["institution"] == "")]
    assert dict(zip(last["metric"], last["value"], strict=True)) == ran.result["final"]["global"]
    assert ran.report().exists()
    assert ran.plot().axes[0].lines[0].get_label() == "all institutions"
    assert ran.model().classes == tuple("abcdefghij")
    assert load_model(ran.folder).classes == ran.model().classes
    more = run(resume=ran.folder, rounds=3)
    assert (more.folder, more.result["rounds"]) == (ran.folder, 3)


def test_a_comparison_has_a_table_and_its_runs(capsys):
    compared = compare(["fedavg", "cwt"], TINY, seeds=2)
    both = compare("fedavg", TINY, seeds=1, lr="0.1|0.3")
    assert list(both.table.index) == ["fedavg:lr=0.1", "fedavg:lr=0.3"]
    assert list(compared.table.index) == ["fedavg", "cwt"]
    assert compared.table.loc["fedavg", "difference"] == pytest.approx(
        compared.table.loc["fedavg", "mean"] - compared.table.loc["cwt", "mean"]
    )
    assert compared.runs["cwt", 1].result["seed"] == 1
    assert "minus cwt" in str(compared)
    assert (compared.folder / "report.html").exists()
    tuned = compare("cwt", TINY, seeds=1, batch_size="32..33", tune=2)
    capsys.readouterr()
    words = [
        *(f"{key}={value}" for key, value in TINY.items()),
        "seeds=1",
        "batch-size=32..33",
        "--tune",
        "2",
        "--json",
    ]
    app(["compare", "cwt", *words], standalone_mode=False)
    printed, error_output = capsys.readouterr()
    assert json.loads(printed) == json.loads(tuned.shown("json"))
    assert error_output.count("1 finished, 0 to resume, 0 to start") == 4  # the tries, the page of them, the comparison
    assert "of 2 tries each (different ones: cwt 1) the best" in tuned.report["rates"]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"strategy": "fedav"}, ConfigError, "did you mean fedavg"),
        ({"nonsense": 1}, ConfigError, "unknown option 'nonsense'"),
        ({"rounds": 0}, ConfigError, "rounds must be at least 1"),
        ({"workers": 0}, ConfigError, "workers must be at least 1"),
        ({"engine": "dask"}, ConfigError, "must be inline or ray"),
        ({"resume": "nowhere"}, RunError, "config.yaml"),
    ],
)
def test_mistakes_raise_our_errors_and_leave_nothing(given, error, message, tmp_path):
    with pytest.raises(error, match=message):
        run(**{"task": "digits", **given} if "resume" not in given else given)
    assert not (tmp_path / "runs").exists()


def test_where_ray_has_no_wheel_its_engine_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr("flwr_replay.api.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Ray is not installed"):
        run(task="digits", engine="ray")


def test_mistaken_arguments_of_python_raise_our_errors_too(tmp_path):
    with pytest.raises(ConfigError, match="options must be a mapping"):
        run(["rounds=3"])
    with pytest.raises(ConfigError, match="at least one method"):
        compare([])
    with pytest.raises(ConfigError, match="did you mean fedavg"):
        compare("fedav,cwt", task="digits", runs_dir=tmp_path)
    with pytest.raises(ConfigError, match="lr=auto chooses by validation examples"):
        compare("cwt", TINY, lr="auto", split="test")
    with pytest.raises(ConfigError, match="--tune must be at least 1; got 0"):
        compare("cwt", TINY, lr="1e-3..1e-1", tune=0)
    with pytest.raises(ConfigError, match=r"a range is low..high, two numbers; got lr=1e-3..abc: write"):
        compare("cwt", TINY, lr="1e-3..abc", tune=1)


def test_only_what_is_offered_is_there():
    assert set(flwr_replay.__all__) == set(flwr_replay.OFFERED)
    assert [name for name in dir(flwr_replay) if name[0] != "_"] == flwr_replay.__all__  # as a shell completes it
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = flwr_replay.nothing
    with pytest.raises(ConfigError, match=r"metric must be one of .*accuracy"):
        run(TINY, strategy="fedavg").plot("acuracy")


def test_a_picture_of_runs_judged_by_different_examples_says_whose_each_line_is():
    runs = [run(TINY, strategy="fedavg", split=split) for split in ("validation", "test")]
    axes = flwr_replay.api.plot(runs).axes[0]
    assert axes.get_ylabel() == "accuracy"
    assert [line.get_label().rpartition(" ")[2] for line in axes.lines] == ["(validation-accuracy)", "(accuracy)"]
