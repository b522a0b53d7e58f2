"""The README's commands do what it says; they run in a copy of the checkout's place, with a home of their own."""

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from flwr.common.config import flatten_dict, parse_config_args
from harness import checkout
from safetensors.numpy import load_file

from flwr_replay.cli.main import main
from flwr_replay.config.compose import compose, from_run_config, overrides_of
from flwr_replay.engines import simulate as simulations
from flwr_replay.engines.simulate import run_inline, simulate
from flwr_replay.files.atomic import read_json
from flwr_replay.report.progress import Display

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
ELSEWHERE = ("pip install uv", "uv run --group dev pytest")  # the set-up itself, and what runs this test
SMALLER = {"compare": ["rounds=1", "partition.size=60"]}  # of fewer examples
FEWER = {"seeds=5": "seeds=2"}
OWN = {
    "UV_NO_SYNC": "1",  # this environment has all that the app needs
    "UV_PROJECT_ENVIRONMENT": sys.prefix,  # of the copy, too
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
}


def commands():
    blocks = re.findall(r"```sh\n(.*?)```", README, re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#") and line not in ELSEWHERE]


OURS = [command for command in commands() if command.startswith("uv run flwr-replay")]
STEPS = OURS[:3]  # a first run, and what its model makes of images
FIRST, *VARIANTS = [command for command in commands() if command.startswith("uv run flwr run")]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    yield {**os.environ, **OWN, "FLWR_HOME": str(home / "flwr"), "FLWR_REPLAY_HOME": str(home / "replay")}
    for process in Path("/proc").glob("[0-9]*"):  # `flwr run` leaves a SuperLink running; this one is the test's own
        try:
            if str(home) in (process / "cmdline").read_text():
                os.kill(int(process.name), signal.SIGTERM)
        except OSError:
            continue


def test_the_first_screen_has_the_two_commands():
    blocks = re.findall(r"```sh\n(.*?)```", README, re.S)
    lines = [line.split("  #")[0].strip() for line in blocks[0].splitlines()]
    assert lines == ["pip install uv", "uv run flwr-replay run", *OURS[1:4], "uv run --group dev pytest"]
    assert {*OURS, FIRST, *VARIANTS} == {*commands()}  # a test for each


def test_the_first_runs_model_names_digits_that_it_has_not_seen(environment, tmp_path, monkeypatch, capsys):
    """The first steps in order, as they are written: the first through uv, as a newcomer types it."""
    done = output_of(f"{STEPS[0]} --runs-dir {tmp_path / 'runs'}", environment)
    assert re.search(r"^fedreplay on digits: accuracy 0\.\d+", done, re.M), done
    monkeypatch.chdir(tmp_path)
    for command in STEPS[1:]:
        monkeypatch.setattr(sys, "argv", shlex.split(command)[2:])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        assert end.value.code == 0, captured.err
    rows = list(csv.DictReader(captured.out.splitlines()))
    assert len(rows) == 20
    right = [row["image"].partition("/")[0] == row["predicted"] for row in rows]  # the folder is the label
    assert sum(right) >= 15  # the run's accuracy on all 359 is 0.97


@pytest.mark.parametrize("command", OURS[len(STEPS) :])
def test_command(command, tmp_path, monkeypatch, capsys):
    """In this process: the entry point itself is the first command's, and Ray that of `flwr run .`."""
    words, on_ray = [FEWER.get(word, word) for word in shlex.split(command)[2:]], []

    def not_on_ray(simulation, overrides):
        on_ray.append(overrides)
        return simulate(simulation, overrides, Display())

    monkeypatch.setattr(simulations, "run_ray", not_on_ray)
    if words[1] in ("run", "compare"):
        words += [*SMALLER.get(words[1], []), "--runs-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        main()
    captured = capsys.readouterr()
    assert end.value.code == 0, captured.err
    assert len(on_ray) == ("ray" in words)
    if words[1] == "compare":
        assert "fedreplay" in captured.out


def test_flower_runs_the_first_commands_job(environment, tmp_path, monkeypatch):
    done = output_of(FIRST, environment, checkout(tmp_path / "checkout"))
    assert re.search(r"^\w+ on \w+: accuracy 0\.\d+", done, re.M), done
    (folder,) = (Path(environment["FLWR_REPLAY_HOME"]) / "runs").iterdir()
    assert json.loads((folder / "result.json").read_text())["strategy"] == "fedreplay"
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    same_bits_in_process(folder, tmp_path, "nodes=2")


def output_of(command, environment, folder=ROOT):
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def same_bits_in_process(folder, place, *options):
    """Run what Flower's Ray simulation has run in this process, at equal torch threads; compare what they leave."""
    overrides = [*overrides_of(folder / "config.yaml"), *options, f"runs_dir='{place}'", "run_name=inline"]
    result, own = run_inline(overrides, Display())
    assert result["final"] == read_json(folder / "result.json")["final"]
    weights, others = (load_file(at / "models" / "global.safetensors") for at in (own, folder))
    assert {name: array.tobytes() for name, array in weights.items()} == {
        name: array.tobytes() for name, array in others.items()
    }


@pytest.mark.parametrize("command", VARIANTS)
def test_flowers_parser_makes_the_same_job_of_it(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    given = parse_config_args(words[words.index("--run-config") + 1 :])
    unset = flatten_dict(tomllib.loads(Path("pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"])
    assert given.keys() <= unset.keys()  # `flwr run` refuses other keys
    assert from_run_config({**unset, **given}) == compose(["strategy=fedreplay"])


def test_every_linked_file_is_there():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
