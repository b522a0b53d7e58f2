"""The README's commands do what it says; they run in a copy of the checkout's place, with a home of their own."""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from flwr_replay.config.compose import compose, overrides_of
from flwr_replay.files.atomic import read_json
from flwr_replay.report.progress import Display
from flwr_replay.runs.simulate import run_inline
from flwr_replay.runs.superlink import superlink

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
ELSEWHERE = ("pip install uv", "uv run pytest")  # the set-up itself, and what runs this test
FLOWER = "uv run flwr run"
SMALLER = {"compare": ["rounds=1", "partition.size=60"]}  # all its cells, of fewer examples
OWN = {
    "UV_NO_SYNC": "1",  # this environment has all that the app needs
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
}


def commands():
    blocks = re.findall(r"```sh\n(.*?)```", README, re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#") and line not in ELSEWHERE]


FIRST, *VARIANTS = [command for command in commands() if command.startswith(FLOWER)]


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
    assert lines[:3] == ["pip install uv", "uv run flwr-replay run", "uv run pytest"]


@pytest.mark.parametrize("command", [command for command in commands() if command not in VARIANTS])
def test_command(command, environment, tmp_path, monkeypatch):
    words = shlex.split(command)
    if words[2] == "flwr-replay" and words[3] in ("run", "compare"):
        words += [*SMALLER.get(words[3], []), "--runs-dir", str(tmp_path)]
    if words[2:5] == ["flwr-replay", "data", "show"]:
        words += ["--out", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if words[2] == "flwr":
        assert re.search(r"^accuracy 0\.\d+", done.stdout + done.stderr, re.M), done.stdout + done.stderr
        (folder,) = (Path(environment["FLWR_REPLAY_HOME"]) / "runs").iterdir()
        assert json.loads((folder / "result.json").read_text())["strategy"] == "fedreplay"
        monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
        same_bits_in_process(folder, tmp_path, "nodes=2")
    if "ray" in words:
        (folder,) = tmp_path.glob("*-ray-*")
        same_bits_in_process(folder, tmp_path)
    if words[3] == "compare":
        assert "fedreplay" in done.stdout


def same_bits_in_process(folder, place, *options):
    """Run what Flower's Ray simulation has run in this process, at equal torch threads; compare what they leave."""
    overrides = [*overrides_of(folder / "config.yaml"), *options, f"runs_dir='{place}'", "run_name=inline"]
    result, own = run_inline(overrides, Display())
    assert result["final"] == read_json(folder / "result.json")["final"]
    weights, others = (load_file(at / "models" / "global.safetensors") for at in (own, folder))
    assert {name: array.tobytes() for name, array in weights.items()} == {
        name: array.tobytes() for name, array in others.items()
    }


@pytest.fixture(scope="module")
def link(tmp_path_factory):
    """A SuperLink that no institution has joined: a run waits there, and its directory tells what it is."""
    home = tmp_path_factory.mktemp("link")
    (home / "flwr").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (*OWN.items(), ("FLWR_REPLAY_HOME", str(home / "replay"))):
            patch.setenv(name, value)
        with superlink(home / "flwr", simulation=False) as link:
            yield link, home / "replay" / "runs"


@pytest.mark.parametrize("command", VARIANTS)
def test_flower_starts_the_same_job(command, link):
    there, runs = link
    before = {*runs.glob("*/config.yaml")}
    words = shlex.split(command)
    said = subprocess.Popen(words, cwd=ROOT, env=there.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        for _ in range(600):
            if found := {*runs.glob("*/config.yaml")} - before:
                break
            assert said.poll() is None, said.stdout.read().decode()
            time.sleep(0.1)
        (config,) = found
    finally:
        said.kill()
        said.wait()
    assert compose(overrides_of(config)).strategy.name == "fedreplay"


def test_every_linked_file_is_there():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
