"""The cost of Flower's rounds in ProxyFL: this package's run against a plain loop of the same steps in one process.

    python benchmarks/proxyfl.py inline --data ../shared/data/mnist [--rounds 30] [--batch-size 250]
    python benchmarks/proxyfl.py ray --data ../shared/data/mnist

Kalra et al.'s settings on 8 x 900 digits, MLP and MLP: steps of both models, the proxy's by DP-SGD, and an evaluation
of both. Batches of 250 give three steps a round; 225 give four, as a loader of 900 in batches of 250 does.
The plain loop keeps all models and optimizers in memory. It samples, clips and adds noise with the same functions, and
passes the proxies on. It has no messages, ledgers, accounts on the disk, state of institutions, checkpoints or
progress. In process the two alternate round by round, and the median of the paired ratios counts. Ray's rounds are
compared with the same plain loop, which is one process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from engine import Pairing, shards

from flwr_replay.config.compose import compose
from flwr_replay.config.run import RunConfig
from flwr_replay.engines.simulate import Simulation, run_inline, run_ray
from flwr_replay.institution.budget import DPTraining
from flwr_replay.institution.mutual import Learning, MutualLearner
from flwr_replay.learning.tasks import make_task
from flwr_replay.learning.training import make_optimizer
from flwr_replay.models.zoo import backbone
from flwr_replay.movements.topology import mixing_matrix
from flwr_replay.privacy.accounting import SampledGaussian
from flwr_replay.privacy.secret import Stream
from flwr_replay.rng import derived_seed


def plain(config: RunConfig) -> Iterator[None]:
    """Run ProxyFL without Flower; each step of the iterator is a round."""
    owned, task, b = shards(config), make_task(config.task), config.training.batch_size
    fresh, stream = backbone(config.model, config.task), Stream(os.urandom(32))
    learners = []
    for train, _ in owned:
        halves = []
        for purpose in ("model", "proxy"):
            model = fresh(derived_seed(config.seed, purpose))
            halves.append(Learning(model, make_optimizer(model, config.training, config.training.lr)))
        cost = SampledGaussian.of_epochs(examples=len(train), batch=b, sigma=config.privacy.sigma, epochs=1)
        request = SimpleNamespace(alpha=config.strategy.alpha, beta=config.strategy.beta)
        visit = DPTraining(config.privacy.clip, cost, stream, config.rounds)
        learners.append(MutualLearner(*halves, task, request, b, visit))
    for exchange in range(config.rounds):
        for learner, (train, _) in zip(learners, owned, strict=True):
            learner.losses.clear()
            for x_B, y_B in learner.batches(train, torch.Generator()):
                learner.step(x_B, y_B)
        p = torch.from_numpy(mixing_matrix(config.strategy.topology, len(owned), exchange))
        with torch.no_grad():
            for parameters in zip(*(learner.proxy.model.parameters() for learner in learners), strict=True):
                mixed = torch.tensordot(p, torch.stack(parameters).double(), dims=1)
                for parameter, value in zip(parameters, mixed, strict=True):
                    parameter.copy_(value)
        if (exchange + 1) % config.evaluate_every == 0:
            for half in ("private", "proxy"):
                models = [getattr(learner, half).model for learner in learners]
                task.pool([task.evaluate(m, t.x, t.y) for m, (_, t) in zip(models, owned, strict=True)])
                for model in models:
                    model.train()
        yield


def main() -> None:
    """Measure and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["inline", "ray"])
    parser.add_argument("--data", required=True, help="folder with MNIST's idx files")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--evaluate-every", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=250, help="900 examples: 250 gives 3 steps a round, 225 four")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FLWR_REPLAY_HOME"] = folder
        data = Path(asked.data).absolute()
        overrides = ["strategy=proxyfl", "preset=paper", "task=mnist", f"task.data-dir={data}", "partition.size=900"]
        overrides += ["majors=distinct", "private_models=[mlp]", f"rounds={asked.rounds}", f"runs_dir={folder}"]
        overrides += [f"evaluate_every={asked.evaluate_every}", f"batch_size={asked.batch_size}"]
        config = compose(overrides)
        if asked.engine == "inline":
            pairing = Pairing(plain(config))
            run_inline(overrides, pairing)
            theirs, ours = pairing.theirs, pairing.ours
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        else:
            _, run = run_ray(Simulation.of(compose(overrides)), overrides)
            stamps = [json.loads(line)["seconds"] for line in (run / "timings.jsonl").read_text().splitlines()]
            ours, loop, theirs = [b - a for a, b in itertools.pairwise(stamps)], plain(config), []
            for _ in range(asked.rounds):
                begun = time.perf_counter()
                next(loop)
                theirs.append(time.perf_counter() - begun)
            ratio = statistics.median(ours) / statistics.median(theirs[1:])
    medians = statistics.median(theirs), statistics.median(ours)
    print(f"plain {medians[0]:.3f} s a round, {asked.engine} {medians[1]:.3f} s: x {ratio:.3f}")


if __name__ == "__main__":
    main()
