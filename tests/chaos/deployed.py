"""Kill processes of a real deployment on the loopback, and print what happened: `python tests/chaos/deployed.py`.

superlink      SIGKILL in the middle of a run; started again with its database, the run goes on
fresh          the same, and the database is lost: keys are registered again
supernode      SIGKILL, and a loop that starts it again
pieces         the same between the messages of a generator's training, which goes on where it was
quick          SIGKILL of a SuperNode without a key, which comes back at once
together       two runs under DP at once
left           SIGKILL of a ServerApp while it sends; further runs; the ClientApps that are left are killed
growth         what a round and a run leave on the disk: database, logs, ledgers
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import subprocess

from chaos_outer import PROCESSES, OnDeployment, processes_with
from deployed import CLINICS, COORDINATOR, REFUSES, TASK, deployed, until

from flwr_replay.deploy.coordinator import examine_coordinator
from flwr_replay.deploy.rehearsal import supernode
from flwr_replay.engines.superlink import flwr_run, superlink
from flwr_replay.files.atomic import in_use
from flwr_replay.files.lines import read_lines
from flwr_replay.report.progress import shown_bytes
from flwr_replay.report.run_files import read_run_id

CWT = ("strategy=cwt", "rounds=1", "evaluate_every=100", "lr=0.05")
WIDE = ("strategy=fedavg", "rounds=2", "evaluate_every=2", "nodes=2", "model.width=1500", "timeout=60")
LONG = ("strategy=fedavg", "rounds=6", "evaluate_every=100", "lr=0.05", "nodes=2")
PIECES = (*CWT, "replay=vqvae2", "generator.epochs=3", "generator.batch-size=48", "generator.piece-seconds=0.001")
NOISY = (
    "strategy=fedavg",
    "rounds=2",
    "evaluate_every=100",
    "model.norm=group",
    "dp=classifier",
    "epsilon=50",
    "noise=seeded",
)
MINUTES = 600  # seconds to wait at most


def print_timed(*words):
    print(f"{time.strftime('%H:%M:%S')} ", *words, flush=True)


def weights(deployment, name):
    return (deployment.runs / name / "models" / "global.safetensors").read_bytes()


def online(deployment):
    return "ok  SuperNodes" in examine_coordinator(deployment.coordinator)[1]


def killed(deployment, name, options, exchange=1):
    """Kill the SuperLink after an exchange of a run; say what the doctor then says."""
    run = deployment.runs / name
    with deployment.begun(name, *options) as streamed:
        until(lambda: list(run.glob(f"checkpoints/{exchange:06d}.*")), MINUTES, deployment.logs)
        began = time.monotonic()
        deployment.kill(COORDINATOR)
        ended = until(lambda: not deployment.of_a_run() and not in_use(run), 90, deployment.logs)
        print_timed(f"SuperLink killed; its processes ended after {ended:.1f} s")
        output = streamed.communicate(timeout=MINUTES)[0]
        print_timed(
            f"flwr run ended after {time.monotonic() - began:.0f} s with code {streamed.returncode}:", output[-500:]
        )
    print_timed(examine_coordinator(deployment.coordinator)[1])


def goes_on(deployment, name):
    """Resume a run by its one command."""
    began = time.monotonic()
    command = ["./run.sh", str(deployment.runs / name / "resume.toml")]
    done = subprocess.run(
        command, cwd=deployment.coordinator, env=deployment.environment, capture_output=True, text=True, check=False
    )
    if not (deployment.runs / name / "result.json").exists():
        print_timed(done.stdout[-3000:], done.stderr[-2000:], deployment.logs())
        raise SystemExit("it did not go on")
    print_timed(f"resumed and ended after {time.monotonic() - began:.0f} s")


def of_superlink(deployment):
    deployment.run("whole", *CWT)
    killed(deployment, "killed", CWT)
    deployment.start(COORDINATOR)
    print_timed("all SuperNodes are online after", until(lambda: online(deployment), MINUTES, deployment.logs))
    print_timed(examine_coordinator(deployment.coordinator)[1])
    goes_on(deployment, "killed")
    print_timed("same bits as undisturbed:", weights(deployment, "killed") == weights(deployment, "whole"))


def of_fresh(deployment):
    deployment.run("whole-2", *CWT)
    killed(deployment, "fresh", CWT)
    for file in deployment.coordinator.glob("state/superlink.db*"):
        file.unlink()
    deployment.start(COORDINATOR)
    time.sleep(45)
    print_timed("SuperNodes that ended:", {name: node.poll() for name, node in deployment.started.items()})
    print_timed(deployment.logs()[-4000:])
    for file in deployment.coordinator.glob("state/*.registered"):
        file.unlink()
    subprocess.run([deployment.coordinator / "register.sh"], env=deployment.environment, check=True)
    for clinic in (*CLINICS, REFUSES):
        if deployment.started[clinic].poll() is not None:
            deployment.start(clinic)
    print_timed("all SuperNodes are online after", until(lambda: online(deployment), MINUTES, deployment.logs))
    goes_on(deployment, "fresh")
    print_timed("same bits as undisturbed:", weights(deployment, "fresh") == weights(deployment, "whole-2"))


def of_supernode(deployment):
    run = deployment.runs / "node"
    with deployment.begun("node", *LONG) as streamed:
        until(lambda: list(run.glob("checkpoints/000001.*")), MINUTES, deployment.logs)
        deployment.kill(CLINICS[1])
        print_timed("SuperNode killed, and started again and again")
        deployment.start(CLINICS[1], again=True)
        streamed.communicate()
    print_timed("refused:", (deployment.logs_of / f"{CLINICS[1]}.log").read_text().count("[code: 2004]"), "times")
    answered(run)


def of_pieces(deployment):
    """Each of three steps is a message."""
    deployment.run("at-once", *PIECES[:-1])
    ledger = deployment.runs / "pieces" / "ledger.jsonl"

    def answered_by(clinic):
        rows = read_lines(ledger) if ledger.exists() else []
        wanted = ("up", "train-generator", "steps", clinic)
        return [
            row for row in rows if tuple(row[key] for key in ("direction", "stage", "field", "institution")) == wanted
        ]

    with deployment.begun("pieces", *PIECES) as streamed:
        until(lambda: answered_by(CLINICS[0]), MINUTES, deployment.logs)
        deployment.kill(CLINICS[0])
        print_timed("SuperNode killed after the first of its pieces, and started again and again")
        deployment.start(CLINICS[0], again=True)
        streamed.communicate()
    print_timed({clinic: f"{len(answered_by(clinic))} pieces" for clinic in CLINICS})
    answered(deployment.runs / "pieces")
    print_timed("same bits as undisturbed:", weights(deployment, "pieces") == weights(deployment, "at-once"))


def of_quick(folder):
    (folder / "flower").mkdir()
    options = [*TASK, *LONG, f"runs_dir='{folder / 'runs'}'", "run_name=quick", "wait=300"]
    with ExitStack() as stack:
        link = stack.enter_context(superlink(folder / "flower", simulation=False))
        owned = {name: {"name": name, "data": str(folder / "data" / name), "state": str(folder)} for name in CLINICS}
        stack.enter_context(supernode(link, CLINICS[0], owned[CLINICS[0]]))
        first = supernode(link, CLINICS[1], owned[CLINICS[1]])
        first.__enter__()
        killed = False
        for line in flwr_run(link, options):
            print_timed(line.rstrip())
            if not killed and "round 1/" in line:
                first.__exit__(None, None, None)
                print_timed("SuperNode killed, and another is started")
                stack.enter_context(supernode(link, CLINICS[1], owned[CLINICS[1]]))
                killed = True
    answered(folder / "runs" / "quick")


def answered(run):
    """Say in which exchanges each institution has answered, and what failed."""
    rows = [row for row in read_lines(run / "ledger.jsonl") if row["direction"] == "up" and row["stage"] == "train"]
    for name in CLINICS:
        print_timed(name, "trained in", sorted({row["round"] for row in rows if row["institution"] == name}))
    for row in (*read_lines(run / "failures.jsonl"), *read_lines(run / "timings.jsonl")):
        print_timed(row)


def of_together(deployment):
    deployment.run("alone", *NOISY)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: deployment.run(name, *NOISY), ("one", "two")))
    for name in ("one", "two"):
        run = read_run_id(deployment.runs / name)
        charges = {c: len(read_lines(deployment.state(c) / "runs" / run / "privacy.jsonl")) for c in CLINICS}
        print_timed(name, "as alone:", weights(deployment, name) == weights(deployment, "alone"), "charges:", charges)
        for clinic in CLINICS:
            own = Counter((row["stage"], row["field"]) for row in deployment.own_ledger(clinic) if row["run"] == run)
            seen = [row for row in deployment.server_ledger(name) if row["direction"] == "up"]
            assert own == Counter((row["stage"], row["field"]) for row in seen if row["institution"] == clinic)


def of_left(deployment):
    """The next run ends those that are left, and has all answers; not so if they are killed before."""
    engine = OnDeployment(deployment)
    print_timed("ClientApps left:", left_by(engine, "sends"))
    later(deployment, "next")
    print_timed("and now:", waiting_client_apps(engine))
    for process in left_by(engine, "sends-again"):
        process.kill()
    print_timed("those left are killed")
    time.sleep(100)  # Flower notices after a minute
    later(deployment, "killed")
    engine.start_again(CLINICS)
    later(deployment, "started-again")


def waiting_client_apps(engine):
    return [process for process in processes_with(PROCESSES["clientapp"], engine.of(CLINICS)) if engine.waits(process)]


def left_by(engine, name):
    """Kill ServerApps that have begun to send weights until a ClientApp is left; return those left."""
    for number in range(9):
        with engine.deployment.begun(f"{name}-{number}", *WIDE) as streamed:
            answered = set()
            while streamed.poll() is None and len(answered) <= len(CLINICS):  # the roll call's, and one more
                answered |= {process.pid for process in processes_with(PROCESSES["clientapp"], engine.of(CLINICS))}
                time.sleep(0.02)
            for process in processes_with(PROCESSES["serverapp"], engine.of([COORDINATOR])):
                process.kill()
            streamed.communicate()
        time.sleep(20)
        if process := waiting_client_apps(engine):
            return process
    raise SystemExit("no ClientApp is left")


def later(deployment, name):
    """Say how a further run goes."""
    began = time.monotonic()
    output = deployment.output_of(name, *WIDE).strip().splitlines()[-2:]
    failures = read_lines(deployment.runs / name / "failures.jsonl")
    lacked = [failure for failure in failures if failure["institution"] != REFUSES]
    print_timed(f"{name}: {time.monotonic() - began:.0f} s; lacked: {lacked};", *output)


def of_growth(deployment):
    for number, rounds in enumerate((2, 60)):
        deployment.run(f"growth-{number}", *LONG, f"rounds={rounds}")
        places = [*deployment.coordinator.glob("state/superlink.db*"), *deployment.logs_of.glob("*.log")]
        places += [deployment.state(CLINICS[0]) / "ledger.jsonl"]
        print_timed(rounds, "rounds:", {place.name: shown_bytes(place.stat().st_size) for place in places})
        homes = [deployment.place / name / "state" / ".flower" for name in (COORDINATOR, CLINICS[0])]
        for home in homes:
            files = [file for file in home.rglob("*") if file.is_file()]
            print_timed(
                home.parents[1].name,
                "flower home:",
                len(files),
                shown_bytes(sum(file.stat().st_size for file in files)),
            )


SCENES = {
    "superlink": of_superlink,
    "growth": of_growth,
    "together": of_together,
    "supernode": of_supernode,
    "pieces": of_pieces,
    "fresh": of_fresh,
    "left": of_left,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenes", nargs="*", default=[*SCENES, "quick"])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flwr-replay-chaos-") as folder, deployed(Path(folder)) as deployment:
        until(lambda: online(deployment), MINUTES, deployment.logs)
        for name in asked.scenes:
            print_timed(f"--- {name}")
            of_quick(Path(folder)) if name == "quick" else SCENES[name](deployment)


if __name__ == "__main__":
    main()
