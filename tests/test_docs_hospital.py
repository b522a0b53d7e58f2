"""The commands of docs/hospital.md, in order; the scripts that need servers run in tests/integration instead."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import command
from PIL import Image

from flwr_replay.data.folder import folder_rows
from flwr_replay.deploy.rehearsal import _names, deal

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "hospital.md").read_text(encoding="utf-8")
SET_UP = ("pip install uv", "uv sync", ". .venv/bin/activate")
PROCESSES = ("superlink.sh", "register.sh", "start.sh", "run.sh", "flwr-replay doctor", "kill $(jobs -p)")
SMALLER = ("rounds=1", "task.size=32", "device=cpu", "threads=1")
CLASSES = ("COVID-19", "Normal", "Pneumonia")


def commands():
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.S)
    return [line for block in blocks for line in block.splitlines() if line not in SET_UP]


def images(folder):
    """Write 36 grey images of 36 patients, and their manifest."""
    folder.mkdir()
    rng, rows = np.random.default_rng(0), ["image,patient,label"]
    for n in range(36):
        Image.fromarray(rng.integers(0, 255, (32, 32), dtype=np.uint8)).save(folder / f"{n}.png")
        rows.append(f"{n}.png,P{n},{CLASSES[n % 3]}")
    (folder / "manifest.csv").write_text("\n".join(rows))


def test_the_page_is_short():
    assert len(PAGE.split()) <= 1000
    assert len(commands()) + len(SET_UP) <= 19


@pytest.mark.parametrize(
    ("begins", "smaller_yet", "on_the_officers_page"),
    [
        ("strategy=fedreplay", "encoder-epochs=1", "may try to reconstruct"),
        ("preset=private", "model=gabor", "(8, 1e-05)-DP in the sum of 3"),
    ],
)
def test_its_commands_in_order(begins, smaller_yet, on_the_officers_page, tmp_path, monkeypatch, capsys):
    images(tmp_path / "xrays")
    values = {"PWD": str(tmp_path)}
    (method,) = re.findall(rf'method="({begins}.*)"', PAGE)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # make-key.sh's
    for line in commands():
        place, line = re.fullmatch(r"\(cd (\S+); (.*)\)", line).groups() if line.startswith("(") else (".", line)
        monkeypatch.chdir(tmp_path / place)
        key, equals, value = line.partition("=")
        if equals and key.isidentifier():
            values[key] = value.strip('"').replace("$PWD", str(tmp_path)).replace("$HOME", str(tmp_path))
            values["method"] = method
        elif any(word in line for word in PROCESSES):
            for script in re.findall(r"deployment/\S+\.sh", line):
                assert os.access(tmp_path / script.replace("$k", "1"), os.X_OK), script
        elif line.startswith("flwr-replay rehearse"):
            rows = folder_rows(tmp_path / "xrays")
            (tmp_path / "rehearsal").mkdir()
            deal(rows, _names(rows, 0), tmp_path / "rehearsal" / "data")
        elif line.startswith("flwr-replay"):
            words = shlex.split(re.sub(r"\$(\w+)", lambda match: values[match[1]], line))[1:]
            if words[0] == "predict":  # the run's place is that of the one in this process
                words[1] = str(next((tmp_path / "runs").iterdir()))
            smaller = (*SMALLER, smaller_yet) if "--study" not in words and words[0] in ("run", "deploy") else ()
            theirs = {option.partition("=")[0] for option in smaller}
            words = [word for word in words if word.partition("=")[0] not in theirs]
            assert command(monkeypatch, *words, *smaller) == 0, capsys.readouterr().err
        else:
            subprocess.run(["bash", "-c", line], check=True, cwd=tmp_path)
    assert len((tmp_path / "deployment" / "predictions.csv").read_text().splitlines()) == 37
    assert on_the_officers_page in (tmp_path / "deployment" / "clinic-1" / "officer" / "officer.html").read_text()
    assert sorted(file.name for file in (tmp_path / "deployment" / "coordinator" / "keys").iterdir()) == [
        f"clinic-{k}.pub" for k in (1, 2, 3)
    ]
