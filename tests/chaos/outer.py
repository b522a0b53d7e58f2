"""Kill what runs beside or around a run, at a random moment, for every strategy: plain, with replay, under DP.

`python tests/chaos/outer.py --seed 0`: on one real deployment its SuperLink, a run's ServerApp, a SuperNode, or a
ClientApp at work; on `--engine ray` an actor, Ray's driver, or the command. Every run is resumed by its command, and
compared with an undisturbed run in one process. `--engine`, `--only` (jobs) and `--kinds` choose.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos_outer import APART, STRIKES, OnDeployment, OnRay, verdict_on
from chaos_runs import jobs, undisturbed_run
from deployed import CLINICS, deployed

from flwr_replay.files.lines import read_lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=STRIKES, default="deployed")
    parser.add_argument("--apart", choices=APART, default="", help="on a deployment of its own: jobs of this word")
    parser.add_argument("--only", nargs="*", default=[], metavar="JOB", help="names of jobs, whole; default: all")
    parser.add_argument("--but", nargs="*", default=[], metavar="JOB", help="names of jobs to leave out")
    parser.add_argument(
        "--kinds", nargs="*", default=[], help=f"strike each run, one after another; default: {STRIKES}"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further job after so many")
    asked = parser.parse_args()
    rng, began = Random(asked.seed), time.monotonic()
    every = jobs()
    chosen = sorted(every, key=lambda name: (" " in name, rng.random()))  # plain ones first
    chosen = [name for name in chosen if name in (asked.only or every) and name not in asked.but]
    done, by_kind, findings = 0, Counter(), []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flwr-replay-outer-")))
        if asked.engine == "ray":
            engine = OnRay(folder)
        else:
            clinics, study = APART.get(asked.apart, (CLINICS, ()))
            real = deployed(folder / "real", refusing=False, taking_part=clinics, study=study)
            engine = OnDeployment(stack.enter_context(real), asked.apart)
        refused = [name for name in chosen if engine.refuses(name)]
        chosen = [name for name in chosen if name not in refused]
        print_timed(f"ready after {time.monotonic() - began:.0f} s; {len(chosen)} jobs; none here: {refused}")
        while chosen and time.monotonic() < began + 60 * asked.minutes:
            name, struck, start = chosen.pop(0), "never", time.monotonic()
            kinds = asked.kinds or STRIKES[asked.engine][done % len(STRIKES[asked.engine])]
            done += 1
            try:
                once, _ = undisturbed_run(folder / f"once-{done}", engine.undisturbed(every[name]))
                run = engine.strikes(every[name], kinds, rng, len(read_lines(once.run / "ledger.jsonl")))
                struck = ", ".join(run.moments)
                by_kind.update(moment.partition(" ")[0] for moment in run.moments if "too late" not in moment)
                verdict = verdict_on(engine, once, run)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                verdict = f"FINDING: {error}"
                findings.append(name)
            print_timed(f"{name}: struck by {struck}: {verdict} ({time.monotonic() - start:.0f} s)")
    print_timed(f"{done} jobs", dict(by_kind), f"{len(findings)} findings: {findings}", f"not run: {chosen}")


def print_timed(*words):
    print(f"{time.strftime('%H:%M:%S')} ", *words, flush=True)


if __name__ == "__main__":
    main()
