"""Kill every strategy's runs at random moments, as often as wanted: `python tests/chaos/long.py --kills 1000`."""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos_runs import STEPS, Place, check, clear, jobs, killed, whole


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="jobs whose names hold this text")
    asked = parser.parse_args()

    rng, died, lost, undisturbed, number = Random(asked.seed), Counter(), [], {}, 0
    chosen = {name: options for name, options in jobs().items() if asked.only in name}
    with tempfile.TemporaryDirectory(prefix="flwr-replay-chaos-") as folder:
        while died.total() < asked.kills:
            for name, options in chosen.items():
                number += 1
                if name not in undisturbed:
                    undisturbed[name] = whole(Path(folder) / f"whole-{number}", options)
                once, ended = undisturbed[name]
                place, of = Place(Path(folder) / f"killed-{number}", options), []
                try:
                    of.extend(killed(place, rng, once.shared[STEPS], ended.seconds, 9))
                    check(once, place, len(of))
                except AssertionError as error:
                    lost.append(f"{name}: {error}")
                died.update(of)
                clear(place)
                print(f"{name}: {len(of)} kills, {died.total()} in all, {len(lost)} findings", flush=True)
                if died.total() >= asked.kills:
                    break
    print(dict(died), *lost, sep="\n")


if __name__ == "__main__":
    main()
