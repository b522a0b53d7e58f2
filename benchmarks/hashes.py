"""Small runs of every strategy, each as three hashes: of its models, its metrics and its ledger.

    python benchmarks/hashes.py > before.txt   # then change the code
    python benchmarks/hashes.py before.txt     # ends with 1 if a line differs

The runs are those that faults strike in tests/chaos: every strategy plain, with each kind of replay, masked, sealed,
and under each kind of DP with seeded noise. Models are the run's, and what institutions keep beside masked answers.
`--only fedavg` chooses by name. Bits are those of one CPU, thread and version of PyTorch: compare on one machine.
"""

import argparse
import json
import os
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from chaos_runs import Place, jobs, undisturbed_run

from flwr_replay.files.tensors import digest, read_tensors
from flwr_replay.report.run_files import METRICS
from flwr_replay.wire.ledger import ledger_lines


def hashes(place: Place) -> str:
    """Return the first 16 digits of the hashes of a run's models, metrics and ledger."""
    run = place.run
    own = (path for state in place.states().values() for path in state.glob("runs/*/*.safetensors"))
    files = [*sorted(run.glob("models/*")), *sorted(run.glob("best/*"))]
    files += sorted(path for path in own if not path.name.startswith("masked"))  # masks are drawn anew
    texts = {
        "models": "".join(digest(read_tensors(path)) for path in files),
        "metrics": (run / METRICS).read_text(),
        "ledger": json.dumps([*ledger_lines(run)], sort_keys=True),
    }
    return "  ".join(f"{name} {sha256(text.encode()).hexdigest()[:16]}" for name, text in texts.items())


def main() -> int:
    """Print a line for each run; return how many differ from those of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", type=Path, help="what an earlier call printed")
    parser.add_argument("--only", default="", help="runs whose names hold this text")
    args = parser.parse_args()
    before = args.before.read_text().splitlines() if args.before else None
    differing = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, options) in enumerate(jobs().items()):
            if args.only in name:
                place, _ = undisturbed_run(Path(folder) / str(number), options)
                line = f"{name:40}  {hashes(place)}"
                differs = before is not None and line not in before
                differing += differs
                print(line, "  differs" if differs else "", sep="", flush=True)
                place.clear()
    if before is not None:
        print(f"{differing} runs differ")
    return min(differing, 1)


if __name__ == "__main__":
    sys.exit(main())
