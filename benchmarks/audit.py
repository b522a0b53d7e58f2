"""Figures of docs/audit-epsilon.md: audits of honest runs, of sabotaged ones, and of ProxyFL with beta > 0.

    python benchmarks/audit.py runs --data ../shared/data/mnist --epsilon 8 --sabotage none --seeds 20
    python benchmarks/audit.py proxyfl --beta 0.5 --seeds 5

`runs`: FedAvg, MLP, MNIST, two institutions, 500 canaries that are gradients, by the command's own functions. Sabotages
replace one function of DP-SGD: the noise is a tenth of what is charged, every row joins every step, or nothing is
clipped.

`proxyfl`: data made for the purpose, by the library's own mutual learning and DP-SGD, with full batches. m canaries are
images of one white pixel each, a pixel of their own, all of class 1. To every canary belong k carriers: faint images of
its pixel, half of them of either class, so that they say nothing by themselves. The private model learns without noise
from a canary that is in. From then on it answers 1 to all of its carriers, a little more often than 0. With beta > 0
each of them pulls the proxy that way, and each pull is clipped by itself: one example has moved the gradients of k
others. Only the released proxy is looked at: the weight of a canary's pixel for class 1, minus that for class 0.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import OrderedDict
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from flwr_replay.institution.budget import DPTraining
from flwr_replay.institution.mutual import Learning, MutualLearner
from flwr_replay.learning.tasks import Classification
from flwr_replay.models.staged import StagedModel
from flwr_replay.privacy.accounting import SampledGaussian, epsilon, noise_for
from flwr_replay.privacy.bounds import auc, guessed, lower_bounds
from flwr_replay.privacy.dpsgd import noisy_step
from flwr_replay.privacy.secret import Stream
from flwr_replay.report.progress import Display
from flwr_replay.runs.audit import SHARES, audit
from flwr_replay.runs.options import resolve
from flwr_replay.runs.simulate import Simulation

DELTA = 1e-5
STEPS = 20
RESISTANCE = 0.4  # k times the square of a carrier's pixel: how much they keep the private model back


def main() -> None:
    """Audit one setting with several seeds, and print a line for each and one for all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["runs", "proxyfl"])
    parser.add_argument("--data", default="../shared/data/mnist")
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--sabotage", choices=["none", *SABOTAGES], default="none")
    parser.add_argument("--kind", default="gradients")
    parser.add_argument("--options", default="", help="more options of the runs, separated by spaces")
    parser.add_argument("--beta", type=float, default=0.5)
    parser.add_argument("--carriers", type=int, default=2000, help="k, of each canary")
    parser.add_argument("--canaries", type=int, default=0, help="0: 500 of runs, 100 of proxyfl")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for seed in range(args.seeds):
        one = of_run(args, seed) if args.what == "runs" else of_proxyfl(args, seed)
        found.append(one)
        steinke, mahloujifar, area, claim = one
        print(f"seed {seed}: Steinke {steinke:.2f}, Mahloujifar {mahloujifar:.2f}, AUC {area:.3f}, claim {claim:.2f}")
    steinkes, mahloujifars, areas, claims = np.array(found).T
    refuted = int((np.maximum(steinkes, mahloujifars) > claims).sum())
    print(
        f"{len(found)} audits: Steinke {steinkes.mean():.2f} (most {steinkes.max():.2f}), Mahloujifar "
        f"{mahloujifars.mean():.2f} (most {mahloujifars.max():.2f}), AUC {areas.mean():.3f}, claim "
        f"{claims.mean():.2f}; refuted {refuted}"
    )


def of_run(args: argparse.Namespace, seed: int) -> tuple[float, float, float, float]:
    """Audit a run, perhaps a sabotaged one; return both bounds, the AUC and the claim."""
    words = ["strategy=fedavg", "task=mnist", f"task.data-dir={args.data}", "partition=iid", "nodes=2", "model=mlp"]
    words += ["split=test", "batch-size=64", "rounds=5", f"seed={seed}", "evaluate-every=5", *args.options.split()]
    words += ["dp=classifier", f"target-epsilon={args.epsilon:g}"] if args.epsilon else []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {"FLWR_REPLAY_HOME": folder}))
        if args.sabotage != "none":
            stack.enter_context(patch(*SABOTAGES[args.sabotage]))
        overrides, config = resolve(words, folder, "")
        report, _ = audit(Simulation.of(config), overrides, "", args.canaries or 500, args.kind, Display())
    bounds = [one["epsilon"] for one in report["bounds"].values()]
    return *bounds, report["auc"], report["claim"]["epsilon"] or float("inf")


def of_proxyfl(args: argparse.Namespace, seed: int) -> tuple[float, float, float, float]:
    """Train a private model and a proxy on canaries and carriers; audit the proxy that is released."""
    m, k, rng = args.canaries or 100, args.carriers, np.random.default_rng(seed)
    was_in = rng.random(m) < 0.5
    pixels, faint = torch.eye(m), (RESISTANCE / k) ** 0.5
    x = torch.cat([pixels[torch.from_numpy(was_in)], faint * pixels.repeat_interleave(k, 0)])
    y = torch.cat([torch.ones(int(was_in.sum())), torch.arange(m * k) % 2]).long()
    examples = m + m * k  # a canary that is out has a row, too; all rows join every step
    sigma = noise_for(args.epsilon, DELTA, [(1.0, STEPS)])
    cost = SampledGaussian(1.0, sigma, STEPS)
    phi, theta = (StagedModel(OrderedDict(head=nn.Linear(m, 2, bias=False))) for _ in range(2))
    for weights in (*phi.parameters(), *theta.parameters()):
        nn.init.zeros_(weights)
    halves = Learning(phi, sgd(phi, 4.0 * examples)), Learning(theta, sgd(theta, 0.01))
    request = SimpleNamespace(listen="loss", alpha=0.5, beta=args.beta)
    dp = DPTraining(faint, cost, Stream(rng.bytes(32)))
    learner = MutualLearner(*halves, Classification(2), request, examples, dp)
    for _ in range(STEPS):
        learner.step(x, y)
    head = next(theta.parameters()).detach().double().numpy()
    scores = head[1] - head[0]
    tried = [guessed(scores, was_in, guesses) for guesses in sorted({max(2, round(share * m)) for share in SHARES})]
    bounds = [bound for bound, _ in lower_bounds(tried, DELTA).values()]
    return *bounds, auc(scores, was_in), epsilon([cost], DELTA)


def sgd(model: nn.Module, lr: float) -> torch.optim.SGD:
    """Return plain SGD."""
    return torch.optim.SGD(model.parameters(), lr=lr)


def quieter(*args, sigma, **rest):
    """Take a step of DP-SGD with a tenth of the noise."""
    return noisy_step(*args, sigma=sigma / 10, **rest)


def everyone(examples, cost, stream):
    """Let all rows join every step."""
    return (torch.arange(examples) for _ in range(cost.steps))


def unclipped(clip, examples, dtype, norms_B):
    """Leave every gradient as it is."""
    return torch.ones(examples, dtype=dtype), norms_B.isfinite()


SABOTAGES = {
    "noise": ("flwr_replay.institution.budget.noisy_step", quieter),
    "sampling": ("flwr_replay.institution.budget.poisson_batches", everyone),
    "clipping": ("flwr_replay.privacy.dpsgd._scales", unclipped),
}

if __name__ == "__main__":
    main()
