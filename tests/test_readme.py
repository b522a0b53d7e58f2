"""The README's commands do what it says; they run in a copy of the checkout's place, with a home of their own."""

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
ELSEWHERE = ("pip install uv", "uv run pytest")  # the set-up itself, and what runs this test


def commands():
    blocks = re.findall(r"```sh\n(.*?)```", README, re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    yield {
        **os.environ,
        "FLWR_HOME": str(home / "flwr"),
        "FLWR_REPLAY_HOME": str(home / "replay"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # this environment has all that the app needs
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    for process in Path("/proc").glob("[0-9]*"):  # `flwr run` leaves a SuperLink running; this one is the test's own
        try:
            if str(home) in (process / "cmdline").read_text():
                os.kill(int(process.name), signal.SIGTERM)
        except OSError:
            continue


def test_the_first_screen_has_the_two_commands():
    assert commands()[:3] == ["pip install uv", "uv run flwr-replay run", "uv run pytest"]


@pytest.mark.parametrize("command", [command for command in commands() if command not in ELSEWHERE])
def test_command(command, environment, tmp_path):
    words = shlex.split(command)
    if words[2] == "flwr-replay" and words[3] in ("run", "compare"):
        words += ["--runs-dir", str(tmp_path)]
    if words[2:5] == ["flwr-replay", "data", "show"]:
        words += ["--out", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if words[2] == "flwr":
        assert re.search(r"^accuracy 0\.\d+", done.stdout + done.stderr, re.M), done.stdout + done.stderr
        (folder,) = sorted((Path(environment["FLWR_REPLAY_HOME"]) / "runs").iterdir())[-1:]
        assert json.loads((folder / "result.json").read_text())["strategy"] == "fedreplay"
    if words[3] == "compare":
        assert "fedreplay" in done.stdout


def test_every_linked_file_is_there():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
