"""Noise once for a sum, under masks, or at every institution: FedStats, and DP gradient descent of a head.

MNIST: `mnist-majority` has 8 institutions with 1,000 of the 60,000 images, 80 % of one class each. `mnist-ks` has 4
with 1,000 of the test file's first 8,000, sorted to KS 0.9, and tests on its last 2,000. The other data are those of
`study encoders`. Features are fixed. What tests few or unequal classes has accuracy and balanced accuracy.

`once`: the sum has its noise once, if nobody helps the server (`colluders=0`). `each`: every institution adds all of
its noise, so that the sum of K has √K times as much. PneumoniaMNIST has two institutions, and masks need three.

GD takes 30 steps, with momentum. Under noise its rate is bounded by `lr_by_noise`, else 0.5. Its constants were chosen
by validation images of the institutions' own mixes, on seeds 0 to 2 of both partitions of CIFAR-10, with Gabor and
lite0, and of MNIST, with Gabor: one rule for all data and every epsilon. It is reported on seeds 10 to 14. FedStats'
constants for discriminants, and the bound of head=auto, were chosen on seeds 0 to 2 of MNIST and of CIFAR-10's equal
mixes, by all images of the training files that no institution trains on; its others are those of `study encoders`.
`local` and `own head, pooled` are what an institution has alone, without noise. ProxyFL is that of `study encoders`;
its rounds at ε = 2 were chosen among 15 and 30 on seeds 0 to 2 of CIFAR-10's equal mixes, Gabor, by validation images.
FedReplay under local DP spends half of ε on latents and half on labels, and clips at 3: the best of six on sorted
MNIST, seeds 0 and 1, by validation images.
"""

from flwr_replay.simulations import encoders
from flwr_replay.studies.study import Compared

__all__ = ["COMPARISONS"]

EPSILONS, DELTA = (8, 2, 1), 1e-5
DESCENT = "fedsgd:rounds=30:training.momentum=0.9"
BOUNDED = "lr=5:lr_by_noise=0.000667:clip=1"  # as in preset=private
ONCE = "masked=true:noise=shared:colluders=0"
MNIST = ["task=mnist", "partition.size=1000"]
# File, options, how many examples the smallest institution has, and how many institutions there are.
DATA = {
    "mnist-majority": ("mnist-full", [*MNIST, "nodes=8", "partition=majority", "p=0.8"], 1000, 8),
    "mnist-ks": ("mnist", [*MNIST, "nodes=4", "partition=ks", "ks=0.9"], 1000, 4),
    "equal": (*encoders.DATA["equal"], 8),
    "majority": (*encoders.DATA["majority"], 8),
    "pneumonia": (*encoders.DATA["pneumonia"], 2),
    "xrays": (*encoders.DATA["xrays"], 3),
}
ROUNDS = {**encoders.ROUNDS, 2: encoders.ROUNDS[8]}


def noisy(institutions: int) -> list[str]:
    """Return both methods with noise, at every epsilon."""
    methods = []
    for epsilon in EPSILONS:
        for name, extra in (("each", ""), ("once", f":{ONCE}")):
            if name == "once" and institutions < 3:
                continue
            budget = f"target_epsilon={epsilon}{extra}"
            methods += [
                f"FedStats, ε {epsilon}, {name} := fedstats:dp=statistics:{budget}",
                f"GD, ε {epsilon}, {name} := {DESCENT}:{BOUNDED}:dp=gradient:{budget}",
            ]
    return methods


def comparison(data: str, encoder: str, metric: str = "accuracy") -> Compared:
    """Return the methods on one data set with one kind of features."""
    file, dealt, smallest, institutions = DATA[data]
    network, cut = encoders.network_of(data, encoder, file)
    local = f"fedreplay:cut={cut}:dp=latents:latent_clip=3"
    pair = f"{encoders.PAIR}:batch_size={smallest}"
    proxies = [(budget, f"{pair}:topology=complete:target_epsilon={budget}", *ROUNDS[budget]) for budget in EPSILONS]
    return Compared(
        name="-".join([data, "lite0" if encoder == "frozen" else encoder, *([metric] if metric != "accuracy" else [])]),
        about=f"{data}: {'lite0' if encoder == 'frozen' else encoder}.",
        methods=[
            "FedStats := fedstats",
            f"GD := {DESCENT}:lr=0.5",
            *noisy(institutions),
            f"FedReplay := fedreplay:cut={cut}",
            "local",
            *(f"FedReplay, ε {n}, local := {local}:latent_epsilon={n / 2:g}:label_epsilon={n / 2:g}" for n in EPSILONS),
            *(f"ProxyFL, ε {n}, each := {method}:rounds={t}:lr_step={step}" for n, method, t, step in proxies),
            f"own head, pooled := {pair}:topology=none:dp=none:rounds=30:lr_step=24",
        ],
        options=[*dealt, *network, "rounds=20", "evaluate_every=30", f"delta={DELTA:g}", "seeds=10,11,12,13,14"],
        against="FedReplay",
        metric=metric,
        data=file,
        group=data,
    )


COMPARISONS = [comparison(data, encoder) for encoder in ("gabor", "frozen") for data in DATA] + [
    comparison(data, encoder, "balanced-accuracy") for data in ("pneumonia", "xrays") for encoder in ("gabor", "frozen")
]
