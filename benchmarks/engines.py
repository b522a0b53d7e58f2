"""Engine by institutions by strategy: seconds a round, what is added to plain PyTorch, and memory.

    python benchmarks/engines.py --data ../shared/data/mnist-full [--fluke PYTHON] [--nodes 4 16 64] [--rounds 6]
        [--strategies fedavg cwt fedreplay proxyfl] [--engines inline workers ray] [--json engines.json]

500 MNIST images at each institution, MLP(200, 200), batch 32, one epoch and one evaluation a round; a cycle of CWT is a
round. Every run is the command line in a process of its own, with an empty state directory. A round is the median of
all but the first. Memory is what all processes of a run have for themselves (USS), sampled four times a second: their
largest sum. `plain` is a loop in one process that takes the same steps and tests the same images, without messages,
ledgers, policies or files. `two loops` is FedAvg's, dealt to two processes
that stay. `flower` is Flower's own FedAvg with a bare ClientApp that trains by the same loop, on Flower's own Ray
engine. `fluke` is fluke's FedAvg, in one process, by the Python of an environment that has it; it tests on the server,
all images at once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from engine import evaluate, parallel, sequential, shards, visit
from many import cycle
from plain_loops import fedreplay, proxyfl

from flwr_replay.config.compose import compose
from flwr_replay.config.run import RunConfig
from flwr_replay.models.zoo import backbone
from flwr_replay.processes import MARK, end, members
from flwr_replay.rng import derived_seed

JOB = "task=mnist partition=iid partition.size=500 model=mlp model.width=200 device=cpu threads=1 evaluate_every=1"
METHODS = {"fedavg": "", "cwt": "", "fedreplay": "encoder_epochs=2", "proxyfl": ""}
ENGINES = {"inline": [], "workers": ["--workers", "2"], "ray": ["--engine", "ray"]}
PLAIN = {"fedavg": sequential, "cwt": cycle, "fedreplay": fedreplay, "proxyfl": proxyfl}
PARALLEL = ("fedavg", "proxyfl")  # methods that ask several institutions at the same time
MB = 1e6


def plain(overrides: list[str]) -> list[float]:
    """Run the plain loop; return when its rounds ended."""
    config = compose(overrides)
    torch.set_num_threads(1)
    begun = time.perf_counter()
    return [time.perf_counter() - begun for _ in PLAIN[config.strategy.name](config, shards(config))]


def two_loops(overrides: list[str]) -> list[float]:
    """Run FedAvg's plain loop in two processes; return when its rounds ended, after the first."""
    return [0.0, *accumulate(parallel(compose(overrides), overrides, 2))]


def flower(overrides: list[str]) -> list[float]:
    """Run Flower's FedAvg on Flower's engine; return when its rounds ended."""
    from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    config, stamps, client, server = compose(overrides), list[float](), ClientApp(), ServerApp()
    held: dict[int, Any] = {}  # a worker's data and model

    def owned(config: RunConfig) -> Any:
        if not held:
            torch.set_num_threads(1)
            held[0] = shards(config), backbone(config.model, config.task)(derived_seed(config.seed, "model"))
        return held[0]

    @client.train()
    def train(message: Message, context: Context) -> Message:
        (of_all, model), k = owned(config), int(context.node_config["partition-id"])
        arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
        exchange = message.content["config"]["server-round"]
        trained, loss = visit(model, of_all[k][0], arrays, config, 1, f"institution-{k + 1}", exchange)
        record = ArrayRecord({name: Array(array) for name, array in trained.items()})
        metrics = MetricRecord({"num-examples": len(of_all[k][0]), "train-loss": loss})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    @client.evaluate()
    def test(message: Message, context: Context) -> Message:
        (of_all, model), k = owned(config), int(context.node_config["partition-id"])
        arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
        tested = evaluate(model, of_all[k][1], arrays, config)
        metrics = MetricRecord({"num-examples": len(of_all[k][1]), "loss": tested.loss})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        model = backbone(config.model, config.task)(derived_seed(config.seed, "model"))
        everybody = {"min_train_nodes": config.nodes, "min_evaluate_nodes": config.nodes}
        strategy = FedAvg(min_available_nodes=config.nodes, **everybody)

        def after(exchange: int, arrays: ArrayRecord) -> None:
            stamps.append(time.perf_counter())  # before the institutions test, the same place in every round

        strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=config.rounds, evaluate_fn=after)

    begun = time.perf_counter()
    run_simulation(server, client, config.nodes, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})
    return [stamp - begun for stamp in stamps[1:]]  # the first is before the first round


def watched(command: list[str], environment: dict[str, str]) -> tuple[str, float]:
    """Run a command; return what it printed, and the most memory that it and all its processes had, MB."""
    mark, most = f"benchmark-{time.time_ns()}", 0.0
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env={**environment, MARK: mark}, stdout=output, stderr=errors)
        while process.poll() is None:
            size = 0
            for process in members(mark):
                try:
                    size += process.memory_full_info().uss
                except psutil.Error:
                    continue
            most = max(most, size / MB)
            time.sleep(0.25)
        end(mark)
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: {errors.read()[-2000:]}")
        return output.read(), most


def ours(overrides: list[str], engine: str, folder: Path, environment: dict[str, str]) -> tuple[list[float], float]:
    """Run the command line; return when exchanges ended, and its memory."""
    words = [*overrides, "run_name=one", "--runs-dir", str(folder / "runs"), *ENGINES[engine]]
    _, most = watched([str(Path(sys.executable).with_name("flwr-replay")), "run", *words], environment)
    lines = (folder / "runs" / "one" / "timings.jsonl").read_text().splitlines()
    return [json.loads(line)["seconds"] for line in lines], most


def exported(overrides: list[str], file: Path) -> None:
    """Write the images that the institutions have, and all test images, for fluke."""
    owned_by = shards(compose(overrides))
    sides = {"": 0, "test_": 1}
    arrays = {
        f"{s}{a}": np.concatenate([getattr(p[i], a).numpy() for p in owned_by]) for s, i in sides.items() for a in "xy"
    }
    np.savez(file, **arrays)


def measured(engine: str, method: str, nodes: int, given: argparse.Namespace) -> dict[str, Any]:
    """Measure one row."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        overrides = [f"strategy={method}", f"nodes={nodes}", f"rounds={given.rounds}", *JOB.split()]
        overrides += [*METHODS[method].split(), f"task.data_dir={given.data.resolve()}"]
        environment = {**os.environ, "FLWR_REPLAY_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
        if engine in ENGINES:
            stamps, most = ours(overrides, engine, folder, environment)
        else:
            command = [sys.executable, __file__, "--data", str(given.data), "--child", engine, *overrides]
            if engine == "fluke":
                exported(overrides, folder / "data.npz")
                training = compose(overrides).training
                numbers = (nodes, given.rounds, 200, training.lr, training.momentum, training.batch_size)
                script = str(Path(__file__).with_name("fluke_fedavg.py"))
                command = [given.fluke, script, str(folder / "data.npz"), *map(str, numbers)]
            text, most = watched(command, environment)
            stamps = json.loads(text.splitlines()[-1])
    each = len(stamps) // given.rounds
    ends = stamps[each - 1 :: each]
    return {
        "engine": engine,
        "method": method,
        "nodes": nodes,
        "round": statistics.median(b - a for a, b in pairwise(ends)),
        "memory": most,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Write the rows as Markdown; what is added is to the plain loop with as many institutions."""
    loops = {(row["method"], row["nodes"]): row["round"] for row in rows if row["engine"] == "plain"}
    lines = [
        "| method | institutions | engine | s a round | beside the plain loop | memory, MB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        loop = loops.get((row["method"], row["nodes"]))
        ratio = f"× {row['round'] / loop:.2f}" if loop and row["engine"] != "plain" else ""
        cells = [row["method"], str(row["nodes"]), row["engine"], f"{row['round']:.3f}", ratio, f"{row['memory']:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="folder with MNIST's idx files")
    parser.add_argument("--fluke", default="", help="the Python of an environment with fluke-fl")
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--strategies", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)  # engine and the run's options
    given = parser.parse_args()
    if given.child:
        print(json.dumps({"plain": plain, "two loops": two_loops, "flower": flower}[given.child[0]](given.child[1:])))
        return
    rows: list[dict[str, Any]] = []
    for method in given.strategies:
        for nodes in given.nodes:
            engines = ["plain", *(engine for engine in given.engines if engine != "workers" or method in PARALLEL)]
            engines += ["two loops", "flower", *(["fluke"] if given.fluke else [])] if method == "fedavg" else []
            for engine in engines:
                rows.append(measured(engine, method, nodes, given))
                print(table(rows).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")
    print(", ".join(f"{name} {version(name)}" for name in ("flwr", "torch", "ray")))


if __name__ == "__main__":
    main()
