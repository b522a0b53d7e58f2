"""The cost of Flower's rounds: this package's runs compared with plain PyTorch loops that take the same steps.

    python benchmarks/engine.py inline --data ../shared/data/mnist
    python benchmarks/engine.py flower --data ../shared/data/mnist
    python benchmarks/engine.py ray --data ../shared/data/mnist

FedAvg on 8 institutions x 1,000 MNIST images, MLP(200, 200), batch 32, one local epoch and one evaluation a round. The
plain loop trains the same model on the same tensors with the same shuffles, averages, evaluates and computes loss and
accuracy, without messages, ledger, checkpoints or progress. A round's time runs from the end of the previous round, so
start-up is left out. The plain loop takes one batch after another, and steps by `torch.optim.SGD` as it comes. This
package takes several of the same batches at a time, and leaves out the hooks of PyTorch's profiler, which offsets a
part of the cost of messages.

In process the two alternate round by round, and the median of the paired ratios counts, so that other work on the
machine affects both; it is printed for the wall clock and for the processor's time. `flower` runs Flower's own FedAvg
and a plain ClientApp on the same grid: the cost of Flower's messages alone, without ledger, policy or checkpoints.
`ray` is compared with as many plain processes as there are actors, run by run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch.optim import SGD

from flwr_replay.config.compose import compose
from flwr_replay.config.run import RunConfig
from flwr_replay.config.sections import TrainingConfig
from flwr_replay.data.dealt import dealt, loaded
from flwr_replay.engines.inline import InlineGrid
from flwr_replay.engines.simulate import Simulation, run_inline, run_ray
from flwr_replay.institution.owner import Shard
from flwr_replay.learning.tasks import make_task
from flwr_replay.learning.training import iterations, make_optimizer, torch_rng
from flwr_replay.models.layers import as_input
from flwr_replay.models.zoo import backbone
from flwr_replay.movements.parallel import weighted_mean
from flwr_replay.payloads.common import Evaluation
from flwr_replay.report.progress import Display
from flwr_replay.rng import derived_seed
from flwr_replay.wire.records import StateDict
from flwr_replay.wire.weights import load_arrays, to_arrays

Steps = Callable[[torch.nn.Module, TrainingConfig, float], torch.optim.Optimizer]


class Pairing(Display):
    """A display that times each round of a run, and after it one round of the plain loop: wall clock and processor."""

    def __init__(self, plain: Iterator[None]) -> None:
        self.plain = plain
        self.ours: list[float] = []
        self.theirs: list[float] = []
        self.own_cpu: list[float] = []  # of all threads
        self.their_cpu: list[float] = []

    def begin(self, progress: object) -> None:
        """Start the clocks."""
        self.start, self.start_cpu = time.perf_counter(), time.process_time()

    def exchange(self, exchange: int, metrics: object, total_bytes: int, seconds: float) -> None:
        """Stop the clocks, run a plain round, start them."""
        middle, middle_cpu = time.perf_counter(), time.process_time()
        next(self.plain)
        end, end_cpu = time.perf_counter(), time.process_time()
        if exchange > 1:  # the first round includes start-up
            self.ours.append(middle - self.start)
            self.theirs.append(end - middle)
            self.own_cpu.append(middle_cpu - self.start_cpu)
            self.their_cpu.append(end_cpu - middle_cpu)
        self.begin(None)


def shards(config: RunConfig) -> list[tuple[Shard, Shard]]:
    """Return each institution's training and test examples, as its ClientApp holds them."""
    dealing, device = dealt(config.task, config.partition, config.nodes, config.seed), torch.device("cpu")
    owned = [dealing.examples(loaded(config.task), k) for k in range(config.nodes)]
    return [(Shard.of(own.train, device), Shard.of(own.test, device)) for own in owned]


def one_by_one(
    x: torch.Tensor, y: torch.Tensor, batch_size: int, shuffle: torch.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batches of an epoch one by one: the same batches as `flwr_replay.learning.training.batches`."""
    order = torch.randperm(len(y), generator=shuffle)
    for i in range(iterations(len(y), batch_size)):
        rows = order[i * batch_size : (i + 1) * batch_size]
        yield as_input(x[rows]), y[rows]


def plain_steps(model: torch.nn.Module, training: TrainingConfig, lr: float) -> torch.optim.Optimizer:
    """Return PyTorch's SGD as it comes."""
    return SGD(model.parameters(), lr, training.momentum, weight_decay=training.weight_decay)


def visit(
    model: torch.nn.Module,
    train: Shard,
    arrays: StateDict,
    config: RunConfig,
    epochs: int,
    *seed: object,
    steps: Steps = plain_steps,
) -> tuple[StateDict, float]:
    """Train one institution's epochs with plain PyTorch; return weights and training loss."""
    load_arrays(model, arrays)
    model.train()
    optimizer = steps(model, config.training, config.training.lr)
    task = make_task(config.task)
    shuffle, losses = torch_rng(config.seed, *seed), []
    for _ in range(epochs):
        for x_B, y_B in one_by_one(train.x, train.y, config.training.batch_size, shuffle):
            optimizer.zero_grad()
            loss = task.loss(model(x_B), y_B)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return to_arrays(model), float(torch.stack(losses).mean())


def evaluate(model: torch.nn.Module, test: Shard, arrays: StateDict, config: RunConfig) -> Evaluation:
    """Compute loss and confusion matrix of one institution."""
    load_arrays(model, arrays)
    evaluation: Evaluation = make_task(config.task).evaluate(model, test.x, test.y)
    return evaluation


def sequential(
    config: RunConfig, owned: list[tuple[Shard, Shard]], only: slice = slice(None), steps: Steps = plain_steps
) -> Iterator[None]:
    """Run the plain loop, one institution after another; each step of the iterator is a round. `only` some stages."""
    model = backbone(config.model, config.task)(derived_seed(config.seed, "model"))[only]
    arrays = to_arrays(model)
    for exchange in range(1, config.rounds + 1):
        answers = [
            visit(
                model,
                train,
                arrays,
                config,
                config.strategy.local_epochs,
                f"institution-{k + 1}",
                exchange,
                steps=steps,
            )
            for k, (train, _) in enumerate(owned)
        ]
        arrays = weighted_mean([trained for trained, _ in answers], [len(train) for train, _ in owned])
        if exchange % config.evaluate_every == 0:
            make_task(config.task).pool([evaluate(model, test, arrays, config) for _, test in owned])
        yield


def inline(config: RunConfig, overrides: list[str], steps: Steps) -> Pairing:
    """Time rounds of the plain loop and of the in-process engine, everything included."""
    pairing = Pairing(sequential(config, shards(config), steps=steps))
    run_inline(overrides, pairing)
    return pairing


def flower(config: RunConfig, owned: list[tuple[Shard, Shard]], only: slice = slice(None)) -> Pairing:
    """Time rounds of the plain loop and of Flower's FedAvg on the in-process grid. `only` some stages."""
    pairing = Pairing(sequential(config, owned, only))
    model, client = backbone(config.model, config.task)(derived_seed(config.seed, "model"))[only], ClientApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        k = int(context.node_config["partition-id"])
        arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
        exchange = message.content["config"]["server-round"]
        trained, loss = visit(model, owned[k][0], arrays, config, 1, f"institution-{k + 1}", exchange)
        record = ArrayRecord({name: Array(array) for name, array in trained.items()})
        metrics = MetricRecord({"num-examples": len(owned[k][0]), "train-loss": loss})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    @client.evaluate()
    def evaluate_on(message: Message, context: Context) -> Message:
        test = owned[int(context.node_config["partition-id"])][1]
        arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
        evaluation = evaluate(model, test, arrays, config)
        metrics = MetricRecord({"num-examples": len(test), "loss": evaluation.loss, "confusion": evaluation.confusion})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    def after(exchange: int, arrays: ArrayRecord) -> None:
        if exchange:
            pairing.exchange(exchange, {}, 0, 0.0)

    strategy = FedAvg(evaluate_metrics_aggr_fn=lambda replies, key: MetricRecord({"answers": len(replies)}))
    pairing.begin(None)
    grid = InlineGrid.simulated(client, {}, config.nodes)
    strategy.start(grid, ArrayRecord(model.state_dict()), config.rounds, evaluate_fn=after)
    return pairing


def worker(overrides: list[str], jobs: multiprocessing.Queue[Any], answers: multiprocessing.Queue[Any]) -> None:
    """Serve visits and evaluations in a worker process."""
    config = compose(overrides)
    torch.set_num_threads(config.threads)
    owned, model = shards(config), backbone(config.model, config.task)(0)
    while (job := jobs.get()) is not None:
        what, k, arrays, exchange = job
        if what == "train":
            epochs = config.strategy.local_epochs
            answers.put((k, visit(model, owned[k][0], arrays, config, epochs, f"institution-{k + 1}", exchange)))
        else:
            answers.put((k, evaluate(model, owned[k][1], arrays, config)))


def parallel(config: RunConfig, overrides: list[str], actors: int) -> list[float]:
    """Return seconds per round of the plain loop in several processes."""
    context = multiprocessing.get_context("spawn")
    jobs, answers = context.Queue(), context.Queue()
    pool = [context.Process(target=worker, args=(overrides, jobs, answers)) for _ in range(actors)]
    for process in pool:
        process.start()
    arrays = to_arrays(backbone(config.model, config.task)(derived_seed(config.seed, "model")))
    sizes, times = [len(train) for train, _ in shards(config)], []
    for exchange in range(1, config.rounds + 1):
        start = time.perf_counter()
        for k in range(config.nodes):
            jobs.put(("train", k, arrays, exchange))
        trained = dict(answers.get() for _ in range(config.nodes))
        arrays = weighted_mean([trained[k][0] for k in range(config.nodes)], sizes)
        if exchange % config.evaluate_every == 0:
            for k in range(config.nodes):
                jobs.put(("evaluate", k, arrays, exchange))
            make_task(config.task).pool([answers.get()[1] for _ in range(config.nodes)])
        times.append(time.perf_counter() - start)
    for _ in pool:
        jobs.put(None)
    for process in pool:
        process.join()
    return times[1:]


def ray(overrides: list[str]) -> list[float]:
    """Return seconds per round of a Ray simulation, from its run directory."""
    _, folder = run_ray(Simulation.of(compose(overrides)), overrides)
    stamps = [json.loads(line)["seconds"] for line in (folder / "timings.jsonl").read_text().splitlines()]
    return [after - before for before, after in itertools.pairwise(stamps)]


def main() -> None:
    """Measure and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["inline", "flower", "ray"])
    parser.add_argument("--data", required=True, help="folder with MNIST's idx files")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--local-epochs", type=int, default=1)
    parser.add_argument("--evaluate-every", type=int, default=1)
    parser.add_argument("--own-steps", action="store_true", help="inline: our optimizer in the plain loop, too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs:
        overrides = ["strategy=fedavg", "task=mnist", "partition=iid", "model=mlp", "model.width=200", "nodes=8"]
        overrides += [f"task.data_dir={Path(given.data).resolve()}", "threads=1", f"rounds={given.rounds}"]
        overrides += [f"runs_dir={runs}", f"strategy.local_epochs={given.local_epochs}"]
        overrides += [f"evaluate_every={given.evaluate_every}"]
        config = compose(overrides)
        torch.set_num_threads(config.threads)
        plain, ours, plain_cpu, our_cpu = list[float](), list[float](), list[float](), list[float]()
        for _ in range(given.repeats):
            if given.engine != "ray":
                steps = make_optimizer if given.own_steps else plain_steps
                pairs = inline(config, overrides, steps) if given.engine == "inline" else flower(config, shards(config))
                plain, ours = plain + pairs.theirs, ours + pairs.ours
                plain_cpu, our_cpu = plain_cpu + pairs.their_cpu, our_cpu + pairs.own_cpu
            else:
                plain += parallel(config, overrides, os.cpu_count() or 1)
                ours += ray(overrides)
    for what, theirs, own in (("wall clock", plain, ours), ("processor", plain_cpu, our_cpu)):
        if own:
            report(what, given.engine, theirs, own)


def report(what: str, engine: str, plain: Sequence[float], ours: Sequence[float]) -> None:
    """Print medians and their ratio; where rounds are paired, the median of ratios and its 95 % interval by ranks."""
    a, b = statistics.median(plain), statistics.median(ours)
    print(f"{what}: plain loop {a:.4f} s a round, {engine} {b:.4f} (medians of {len(plain)} and {len(ours)})")
    if engine == "ray":
        print(f"overhead {100 * (b / a - 1):+.1f} % (of medians)")
        return
    ratios = sorted(own / theirs for own, theirs in zip(ours, plain, strict=True))
    away = 0.98 * len(ratios) ** 0.5
    ends = [ratios[max(0, int(len(ratios) / 2 - away))], ratios[min(len(ratios) - 1, int(len(ratios) / 2 + away))]]
    low, middle, high = (f"{100 * (ratio - 1):+.1f}" for ratio in (ends[0], statistics.median(ratios), ends[1]))
    print(f"overhead {middle} % [{low}, {high}] (median of paired ratios)")


if __name__ == "__main__":
    main()
