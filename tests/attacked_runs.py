"""Recorded runs on digits, and the command that attacks them."""

import shutil

import pytest
from harness import command

from flwr_replay.files.atomic import read_json
from flwr_replay.wire.recording import FOLDER

DIGITS = ["task=digits", "nodes=2", "partition=iid", "device=cpu", "record=all"]


class Recorded:
    """Run directories by name, as `recorded / name`; each is run, with its options, when a test first asks for it."""

    def __init__(self, folder, runs):
        self.folder, self.runs = folder, runs

    def __truediv__(self, name):
        if name in self.runs and not (self.folder / name).exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("FLWR_REPLAY_HOME", str(self.folder / "home"))
                once = [] if any(option.startswith("rounds=") for option in self.runs[name]) else ["rounds=1"]
                words = [*DIGITS, *once, *self.runs[name], f"run_name={name}", "--runs-dir", str(self.folder)]
                assert command(patch, "run", *words) == 0, name
        return self.folder / name


def attacked(monkeypatch, capsys, run, *options, whom="institution-1"):
    """Attack one without time for more than the fewest steps; return exit code, results and error."""
    words = ("privacy", "attack", str(run), "--minutes", "0.001", "--institution", whom, *options)
    code = command(monkeypatch, *words)
    file = run / "attacks" / "attacks.json"
    results = read_json(file)["attacks"] if file.exists() else []
    return code, {(result["field"], result["attack"]): result for result in results}, capsys.readouterr().err


def without_digests(run, folder):
    """Copy a run as older versions left it: without digests of the data, and not attacked yet."""
    copy = shutil.copytree(run, folder / run.name, ignore=shutil.ignore_patterns("attacks"))
    for file in (copy / FOLDER).glob("*.sha256"):
        file.unlink()
    return copy
