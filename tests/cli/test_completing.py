"""What a shell completes, as it asks: by an environment variable, in a process of its own."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(sys.executable).parent / "flwr-replay"
ASKED = {
    ("bash", "run str"): "strategy=",
    ("bash", "run strategy ="): "cwt",
    ("bash", "run strategy = fedre"): "fedreplay",
    ("fish", "run strategy=fedre"): "strategy=fedreplay",
    ("bash", "run rounds=3 masked"): "masked=true",
    ("fish", "run training.opt"): "training.optimizer=adam",
    ("fish", "run spl"): "split=validation",
    ("bash", "run rou"): "rounds=10",
    ("fish", "compare fedavg,cw"): "fedavg,cwt",
    ("bash", "study ske"): "skew",
    ("bash", "strategies fedb"): "fedbn",
    ("bash", "options partition.ma"): "partition.majors",
    ("bash", "runs show ru"): "runs/mine",
    ("bash", "predict la"): "last",
}


def completed(shell, words, folder):
    words = ["flwr-replay", *words.split()]
    asked = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    asked |= {"_TYPER_COMPLETE_ARGS": " ".join(words), "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    asked |= {"_FLWR_REPLAY_COMPLETE": f"complete_{shell}"}
    done = subprocess.run(
        [PROGRAM], env=os.environ | asked, cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
    return done.stdout.split()


@pytest.mark.parametrize(("shell", "words"), ASKED)
def test_a_shell_completes(shell, words, tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").touch()
    assert ASKED[shell, words] in completed(shell, words, tmp_path)


def test_it_takes_a_moment_and_no_pytorch(tmp_path):
    completed("bash", "run str", tmp_path)  # compiled by now
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    completed("bash", "run lr", tmp_path)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began < 1.2  # s of a core: 0.5; with PyTorch 3
    script = "import sys\nfrom flwr_replay.cli.completing import of_options\n"
    script += "of_options(type('C', (), {'params': {}}), 'lr')\nprint('torch' in sys.modules, 'flwr' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
