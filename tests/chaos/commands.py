"""Kill attacks, audits, comparisons, rehearsals and `watch` at random moments, and repeat them.

`python tests/chaos/commands.py --kills 5`: so often each. `--only` chooses.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos_commands import COMMANDS, struck_commands


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5, help="of each command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="commands whose names hold this text")
    asked = parser.parse_args()

    findings = []
    with tempfile.TemporaryDirectory(prefix="flwr-replay-commands-") as folder:
        for name in (name for name in COMMANDS if asked.only in name):
            place, began = Path(folder) / name, time.monotonic()
            place.mkdir()
            try:
                for struck in struck_commands(name, place, Random(asked.seed), asked.kills):
                    print(f"{name}: killed at {struck} ({time.monotonic() - began:.0f} s)", flush=True)
            except AssertionError as error:
                findings.append(f"{name}: {error}")
                print(f"FINDING: {findings[-1]}", flush=True)
    print(f"{len(findings)} findings", *findings, sep="\n")


if __name__ == "__main__":
    main()
