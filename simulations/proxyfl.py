"""ProxyFL and its family with differential privacy: Kalra et al.'s Fig. 3, 5-7 and 11-13 in shape, on 8 x 900 digits.

Sources: Kalra et al. 2023, sections 4.1 and 4.2, appendix B.

`main` and `mlp` have the paper's settings (`preset=paper`) but for 900 examples each and distinct major classes: three
steps a round with a sampling rate of 0.28. Their epsilon is no proof where a proxy learns from a private model. `sound`
has beta=0 and a proven epsilon (`preset=sound`): full batches, SGD, the complete graph, and private models that learn
from the proxies in passes of their own. The ablations have 50 rounds. Accuracy is the private models', each on a share
of the test examples; parts named `-proxies` show the same runs' proxies.
"""

from __future__ import annotations

from collections.abc import Sequence

from flwr_replay.study import Part

__all__ = ["PARTS"]

MNIST = ["task=mnist", "partition=majority", "p=0.8", "majors=distinct", "partition.size=900", "nodes=8"]
PAPER = [*MNIST, "preset=paper", "evaluate_every=10"]
SOUND = [*MNIST, "preset=sound", "batch_size=900", "evaluate_every=10", "seeds=5"]
MLP = "private_models=[mlp]"
PAIRS = [f"ProxyFL := proxyfl:{MLP}", f"FML := fml:{MLP}"]
OTHERS = [
    "AvgPush := avgpush:dp=classifier",
    "FedAvg := fedavg:dp=classifier:optimizer_state=keep",
    "Regular := local:dp=classifier",
    "Joint := central:dp=classifier",
]
BUDGETS = {8: "", 4: "", 2: ":lr=0.3:rounds=70:lr_step=50", 1: ":lr=0.3:rounds=50:lr_step=40"}


def part(name: str, about: str, methods: Sequence[str], options: Sequence[str], metric: str = "") -> Part:
    """Return a part whose first method is what the others are compared with."""
    first = methods[0].split(" := ")[0]
    return Part(name=name, about=about, methods=methods, options=options, against=first, metric=metric, data="mnist")


def ablation(name: str, about: str, options: Sequence[str], methods: Sequence[str] = (*PAIRS, *OTHERS)) -> Part:
    """Return a part of 50 rounds with all models an MLP."""
    return part(name, about, methods, [*PAPER, "rounds=50", "seeds=3", *options])


LENET = ["ProxyFL := proxyfl", "FML := fml"]
BUDGETED = [f"epsilon {epsilon} := proxyfl:target_epsilon={epsilon}{rest}" for epsilon, rest in BUDGETS.items()]
PARTS = [
    part("mlp", "Fig. 11: private models and proxies are MLPs.", [*PAIRS, *OTHERS], [*PAPER, "seeds=5"]),
    part("mlp-proxies", "The proxies of these runs.", PAIRS, [*PAPER, "seeds=5"], "proxy-accuracy"),
    part("main", "Fig. 3: private models are LeNet-5, proxies MLPs; the others as above.", LENET, [*PAPER, "seeds=5"]),
    part("main-proxies", "The proxies of these runs.", LENET, [*PAPER, "seeds=5"], "proxy-accuracy"),
    part("sound", "A proven epsilon, and what it buys.", [*BUDGETED, "alpha 0 := proxyfl:alpha=0"], SOUND),
    part("sound-proxies", "The proxies of these runs.", BUDGETED, SOUND, "proxy-accuracy"),
    ablation("skew-iid", "Fig. 5: without skew.", ["p=0.1"]),
    ablation("skew-half", "Fig. 5: half of the examples of one class.", ["p=0.5"]),
    ablation("skew-most", "Fig. 5: as everywhere else.", []),
    ablation(
        "without-dp", "Fig. 7: no clipping, no noise.", ["dp=none"], [*PAIRS, *(m.split(":dp")[0] for m in OTHERS)]
    ),
    ablation(
        "mixed",
        "Fig. 6: two institutions each have MLP, LeNet-5, CNN1 and CNN2.",
        [],
        [
            "ProxyFL := proxyfl:private_models=[mlp,lenet5,cnn1,cnn2]",
            "FML := fml:private_models=[mlp,lenet5,cnn1,cnn2]",
        ],
    ),
    *(ablation(f"batch-{size}", "Fig. 12: batch size.", [f"batch_size={size}"], PAIRS[:1]) for size in (50, 100, 450)),
    *(
        ablation(
            f"dml-{weight}", "Fig. 13: alpha and beta.", [], [f"ProxyFL := proxyfl:{MLP}:alpha={weight}:beta={weight}"]
        )
        for weight in (0.1, 0.3, 0.7, 0.9)
    ),
]
