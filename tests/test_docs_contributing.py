"""CONTRIBUTING's example, installed in a copy of the checkout, keeps the contract that every strategy keeps."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from harness import forked

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = dict(re.findall(r"^```\w+ (\S+)\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("flwr_replay", "strategies", "clients", "simulations", "conf"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in BLOCKS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def python(checkout, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(checkout), "FLWR_REPLAY_HOME": str(checkout / "home")}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_five_files_are_shown():
    places = ("conf/strategy/{}.yaml", "strategies/{}.py", "clients/{}.py", "conf/run/{}.toml")
    assert set(BLOCKS) == {place.format("mine") for place in (*places, "tests/strategies/test_{}.py")}


def test_the_example_runs(checkout):
    """In a fork, which has all imported but the package itself."""
    loose = (checkout / "strategies" / "mine.py").read_text().replace("frozen=True, kw_only=True", "")
    (checkout / "strategies" / "loose.py").write_text(loose)
    script = """
import sys, pytest
from flwr_replay.config.halves import load_strategy
from flwr_replay.errors import ConfigError
from flwr_replay.check import check_strategy
from flwr_replay.cli.main import strategies
check_strategy("mine", ["partition.size=70"])
strategies()
with pytest.raises(ConfigError, match="strategies/loose.py: .*write @dataclass.frozen=True, kw_only=True"):
    load_strategy("loose")
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/strategies/test_mine.py"]))
"""

    def run():
        os.environ["FLWR_REPLAY_HOME"] = str(checkout / "home")
        os.chdir(checkout)
        sys.path.insert(0, str(checkout))
        for name in [name for name in sys.modules if name.partition(".")[0] == "flwr_replay"]:
            del sys.modules[name]
        with open(checkout / "said", "w") as log, redirect_stdout(log):
            exec(script, {})

    os.waitpid(forked(run), 0)
    output = (checkout / "said").read_text()
    assert "mine all institutions train the same model at once; the server averages every weight" in " ".join(
        output.split()
    )
    assert "4 passed" in output


def test_its_halves_are_well_formed(checkout):
    halves = [str(checkout / folder / "mine.py") for folder in ("strategies", "clients")]
    for check in (["check"], ["format", "--check"]):
        python(checkout, "-m", "ruff", *check, "--config", str(ROOT / "pyproject.toml"), *halves)
