"""Let faults strike every strategy's runs at random moments, as often as wanted.

`python tests/chaos/long.py --faults 1000 --seed 0`: SIGKILL, full disks, disks that become read-only.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos_faults import TAKEN
from chaos_runs import KINDS, Place, check, check_stated, jobs, secretly, struck, undisturbed_run


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="jobs whose names hold this text")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of faults, by commas; default: all")
    parser.add_argument("--secret", action="store_true", help="jobs under DP, with secret noise: what they state")
    asked = parser.parse_args()

    rng, kinds, findings, undisturbed, number = Random(asked.seed), Counter(), [], {}, 0
    chosen, compare = {name: options for name, options in jobs().items() if asked.only in name}, check
    if asked.secret:
        chosen = {name: secretly(options) for name, options in chosen.items() if secretly(options) != options}
        compare = check_stated
    with tempfile.TemporaryDirectory(prefix="flwr-replay-chaos-") as folder:
        while kinds.total() < asked.faults:
            for name, options in chosen.items():
                number += 1
                if name not in undisturbed:
                    undisturbed[name] = undisturbed_run(Path(folder) / f"whole-{number}", options)
                once, ended = undisturbed[name]
                place, of = Place(Path(folder) / f"struck-{number}", options), []
                try:
                    of.extend(struck(place, rng, ended, once.shared[TAKEN], 9, asked.kinds.split(",")))
                    compare(once, place, len(of))
                except AssertionError as error:
                    findings.append(f"{name}, after {of}: {error}")
                    print(findings[-1], flush=True)
                kinds.update(of)
                place.clear()
                print(f"{name}: {len(of)} faults, {kinds.total()} in all, {len(findings)} findings", flush=True)
                if kinds.total() >= asked.faults:
                    break
    print(dict(sorted(kinds.items())), f"{len(findings)} findings", sep="\n")


if __name__ == "__main__":
    main()
