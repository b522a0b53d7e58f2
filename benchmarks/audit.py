"""Figures of docs/audit-epsilon.md: audits of honest steps and of sabotaged ones, and of ProxyFL with beta > 0.

    python benchmarks/audit.py runs --epsilon 0.5 2 8 40 --sabotage none noise-0.5 clipping charges --seeds 40
    python benchmarks/audit.py proxyfl --beta 0.5 --seeds 5

`runs`: FedAvg, MLP, scikit-learn's digits, two institutions, 300 canaries that are gradients, by the command's own
functions. Sabotages replace one function of DP-SGD: the noise is a share of what is charged, clipping is to 4 C, half
of the steps are charged, every row joins every step, or batches are those of a shuffled epoch. Noise and masks are
secret, so no two audits are equal.

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
from collections import Counter, OrderedDict
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from scipy.stats import beta
from torch import nn

from flwr_replay.attacks.membership import auc
from flwr_replay.engines.simulate import Simulation
from flwr_replay.institution.budget import DPTraining
from flwr_replay.institution.mutual import Learning, MutualLearner
from flwr_replay.lab.audit import SHARES, audit
from flwr_replay.learning.tasks import Classification
from flwr_replay.models.staged import StagedModel
from flwr_replay.privacy.account import Account
from flwr_replay.privacy.accounting import SampledGaussian, epsilon, noise_for
from flwr_replay.privacy.bounds import guessed, lower_bound
from flwr_replay.privacy.dpsgd import noisy_step, scales
from flwr_replay.privacy.secret import Stream
from flwr_replay.report.progress import Display
from flwr_replay.runs.options import resolve

DELTA = 1e-5
STEPS = 20
RESISTANCE = 0.4  # k times the square of a carrier's pixel: how much they keep the private model back


def main() -> None:
    """Audit settings with several seeds, and print a line for each audit and one for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["runs", "proxyfl"])
    parser.add_argument("--epsilon", type=float, nargs="+", default=[2.0])
    parser.add_argument("--sabotage", choices=["none", *SABOTAGES], nargs="+", default=["none"])
    parser.add_argument("--kind", default="gradients")
    parser.add_argument("--options", default="", help="more options of the runs, separated by spaces")
    parser.add_argument("--beta", type=float, default=0.5)
    parser.add_argument("--carriers", type=int, default=2000, help="k, of each canary")
    parser.add_argument("--canaries", type=int, default=0, help="0: 300 of runs, 100 of proxyfl")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    refuted, audits = Counter[tuple[float, str]](), Counter[tuple[float, str]]()
    settings = [(target, sabotage) for target in args.epsilon for sabotage in args.sabotage]
    for seed in range(args.first, args.first + args.seeds):
        for target, sabotage in settings:
            if args.what == "runs":
                line, caught = of_run(args, target, sabotage, seed)
            else:
                line, caught = of_proxyfl(args, target, seed)
            refuted[target, sabotage] += caught
            audits[target, sabotage] += 1
            print(f"epsilon {target:g}, {sabotage}, seed {seed}: {line}{', REFUTED' if caught else ''}", flush=True)
    for setting in settings:
        k, n = refuted[setting], audits[setting]
        low, high = beta.ppf(0.025, k, n - k + 1) if k else 0.0, beta.ppf(0.975, k + 1, n - k) if k < n else 1.0
        print(f"epsilon {setting[0]:g}, {setting[1]}: {k} of {n} refuted, 95 % interval {low:.3f} to {high:.3f}")


def of_run(args: argparse.Namespace, target: float, sabotage: str, seed: int) -> tuple[str, bool]:
    """Audit a run, perhaps a sabotaged one; say what was found, and whether the claim is refuted."""
    words = ["strategy=fedavg", "task=digits", "partition=iid", "nodes=2", "model=mlp", "model.width=16", "rounds=2"]
    words += ["batch-size=64", f"seed={seed}", "evaluate-every=2", *args.options.split()]
    words += ["dp=classifier", f"target-epsilon={target:g}"] if target else []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {"FLWR_REPLAY_HOME": folder}))
        if sabotage != "none":
            stack.enter_context(patch(*SABOTAGES[sabotage]))
        overrides, config = resolve(words, folder, "")
        report, _ = audit(Simulation.of(config), overrides, "", args.canaries or 300, args.kind, Display())
    steps, bound, claim = report.get("steps"), report["bounds"]["steinke"], report["claim"]["epsilon"]
    line = f"claim {claim or float('inf'):.2f}, guesses {bound['epsilon']:.2f}, AUC {report['auc']:.3f}"
    if steps:
        line += f", detectable {steps['detectable']:.2f}, found {steps['found']}"
    return line, report["refuted"]


def of_proxyfl(args: argparse.Namespace, target: float, seed: int) -> tuple[str, bool]:
    """Train a private model and a proxy on canaries and carriers; audit the proxy that is released."""
    m, k, rng = args.canaries or 100, args.carriers, np.random.default_rng(seed)
    was_in = rng.random(m) < 0.5
    pixels, faint = torch.eye(m), (RESISTANCE / k) ** 0.5
    x = torch.cat([pixels[torch.from_numpy(was_in)], faint * pixels.repeat_interleave(k, 0)])
    y = torch.cat([torch.ones(int(was_in.sum())), torch.arange(m * k) % 2]).long()
    examples = m + m * k  # a canary that is out has a row, too; all rows join every step
    sigma = noise_for(target, DELTA, [(1.0, STEPS)])
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
    bound, _ = lower_bound(tried, DELTA)
    claim = epsilon([cost], DELTA)
    return f"claim {claim:.2f}, guesses {bound:.2f}, AUC {auc(scores[was_in], scores[~was_in]):.3f}", bound > claim


def sgd(model: nn.Module, lr: float) -> torch.optim.SGD:
    """Return plain SGD."""
    return torch.optim.SGD(model.parameters(), lr=lr)


def quieter(share: float):
    """Return a step of DP-SGD with a share of the noise."""
    return lambda *args, sigma, **rest: noisy_step(*args, sigma=sigma * share, **rest)


def looser(clip, *rest):
    """Clip to 4 C."""
    return scales(4 * clip, *rest)


def half(account, mechanism, cost, *noise):
    """Charge half of the steps."""
    CHARGE(account, mechanism, replace(cost, steps=cost.steps // 2), *noise)


def everyone(examples, cost, stream):
    """Let all rows join every step."""
    return (torch.arange(examples) for _ in range(cost.steps))


def shuffled(examples, cost, stream):
    """Return the batches of an epoch in random order, as SGD without DP takes them."""
    return iter(stream.uniform(examples).argsort()[: cost.steps * int(cost.rate * examples)].chunk(cost.steps))


CHARGE = Account.charge
SABOTAGES = {
    **{
        f"noise-{share}": ("flwr_replay.institution.budget.noisy_step", quieter(share)) for share in (0.5, 0.25, 0.1, 0)
    },
    "clipping": ("flwr_replay.privacy.dpsgd.scales", looser),
    "charges": ("flwr_replay.privacy.account.Account.charge", half),
    "sampling": ("flwr_replay.institution.budget.poisson_batches", everyone),
    "shuffling": ("flwr_replay.institution.budget.poisson_batches", shuffled),
}

if __name__ == "__main__":
    main()
