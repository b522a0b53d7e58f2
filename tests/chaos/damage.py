"""Damage each kind of file of broken-off runs in each way: `python tests/chaos/damage.py --seed 0`."""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos_damage import SECRET, WAYS, Broken
from chaos_runs import jobs

KEPT = ("strategy.optimizer_state=keep",)
JOBS = {
    "cwt": (),
    "fedavg dp=classifier": KEPT,
    "fedavg dp=classifier, secret noise": (*KEPT, SECRET),
    "fedreplay": (),
    "proxyfl dp=proxy": (),
    "proxyfl dp=proxy, secret noise": (SECRET,),
    "cwt replay=vqvae2": (),
    "feder": (),
    "splitnn": (),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="jobs whose names hold this text")
    asked = parser.parse_args()

    rng, ends, findings, known = Random(asked.seed), Counter(), [], jobs()
    with tempfile.TemporaryDirectory(prefix="flwr-replay-damage-") as folder:
        for number, (name, more) in enumerate(JOBS.items()):
            share = rng.uniform(0.6, 0.95)
            if asked.only not in name:
                continue
            options = [*known[name.partition(",")[0]], *more]
            broken = Broken(Path(folder) / str(number), options, share)
            for kind, paths in broken.kinds().items():
                for way in WAYS:
                    path = rng.choice(paths)
                    try:
                        reported = broken.resumed(path, way)
                        ends["reported" if reported else "the same"] += 1
                    except AssertionError as error:
                        reported = f"FINDING: {error}"
                        findings.append(f"{name}: {path} {way}: {error}")
                    print(f"{name}: {kind} {way}: {reported or 'the same'}", flush=True)
            print(f"{name}: {dict(ends)}, {len(findings)} findings", flush=True)
    print(dict(ends), *findings, sep="\n")


if __name__ == "__main__":
    main()
