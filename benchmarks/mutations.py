"""Faults put into the package by hand, each of which a test must notice.

    python benchmarks/mutations.py                      # all; hours on a busy machine
    python benchmarks/mutations.py --only wire/ rng.py  # those whose file's name holds one of these texts

Works in a git worktree of HEAD with an environment of its own, both thrown away. Ends with 1 if a fault survives, if a
text of the list does not occur exactly once in its file, or if a room has no fault: a folder of flwr_replay, clients,
simulations, strategies. CI checks the list alone. The tests must pass without any fault first.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".txt")  # file | text | its replacement | tests, by spaces
FIELDS = 4


def listed(only: list[str]) -> list[list[str]]:
    """Return the faults whose file's name holds one of the texts; raise ValueError if the list is not as above."""
    lines = [line for line in LIST.read_text(encoding="utf-8").splitlines() if line]
    inner = sorted(file.parent.relative_to(ROOT).as_posix() for file in ROOT.glob("flwr_replay/*/__init__.py"))
    for room in (*inner, "clients", "simulations", "strategies"):
        if not any(line.startswith(f"{room}/") for line in lines):
            raise ValueError(f"every room has a fault by hand; {room} has none: add one to {LIST.name}")
    faults = [fault for fault in (line.split(" | ") for line in lines) if any(text in fault[0] for text in only)]
    for fault in faults:
        if len(fault) != FIELDS or (ROOT / fault[0]).read_text(encoding="utf-8").count(fault[1]) != 1:
            raise ValueError(f"a text occurs once in its file; {' | '.join(fault)}: correct {LIST.name}")
    return faults


def tested(tree: Path, files: list[str]) -> int:
    """Return pytest's exit code for some test files: 0 if they pass, 1 if one fails."""
    words = [tree / ".venv/bin/python", "-m", "pytest", "-n", "0", "-q", "-x", *files]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(words, cwd=tree, env=environment | {"FLWR_REPLAY_MOMENTS": "all"}, capture_output=True)
    return ran.returncode


def main() -> int:
    """Print a line for each fault; return 1 if one survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="faults whose file's name holds one of these texts")
    faults = listed(parser.parse_args().only)
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", tree, "HEAD"], cwd=ROOT, check=True, capture_output=True)
        try:
            subprocess.run(["uv", "sync", "-q", "--group", "dev", "--all-extras"], cwd=tree, check=True)
            if code := tested(tree, sorted({file for *_, tests in faults for file in tests.split()})):
                print(f"the tests end with {code} without any fault")
                return 1
            for name, text, replacement, tests in faults:
                whole = (tree / name).read_text(encoding="utf-8")
                (tree / name).write_text(whole.replace(text, replacement), encoding="utf-8")
                killed = tested(tree, tests.split()) == 1
                (tree / name).write_text(whole, encoding="utf-8")
                survived += not killed
                print("killed  " if killed else "SURVIVED", f"{name}: {text}  ->  {replacement}", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    print(f"{len(faults)} faults, {survived} survived")
    return min(survived, 1)


if __name__ == "__main__":
    sys.exit(main())
