"""ProxyFL and its family with differential privacy: Kalra et al.'s Fig. 3, 5-7 and 11-13 in shape, on 8 x 900 digits.

Sources: Kalra et al. 2023, sections 4.1 and 4.2, appendix B.

`main` and `mlp` have the paper's settings (`preset=paper`), except for 900 examples per institution and distinct major
classes: three steps a round with a sampling rate of 0.28. Their epsilon is not proven, since proxies learn from private
models. Parts `epsilon-...` have beta=0 and a proven epsilon (`preset=sound`): full batches, SGD, the complete graph,
and separate passes in which private models learn from proxies. They are compared with private models without a teacher
(`no teacher`), with and without the same passes on shifted images. The ablations have 50 rounds. Accuracy is that of
the private models, each on a share of the test examples. Parts named `-proxies` show the proxies of the same runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from flwr_replay.studies.study import Part

__all__ = ["PARTS"]

MNIST = ["task=mnist", "partition=majority", "p=0.8", "majors=distinct", "partition.size=900", "nodes=8"]
PAPER = [*MNIST, "preset=paper", "evaluate_every=10"]
PIXELS = ["task.mean=[]", "task.std=[]"]  # from 0 to 1, as in the paper; the preset standardises them
SOUND = [*MNIST, "preset=sound", *PIXELS, "batch_size=900", "evaluate_every=10", "seeds=5"]
MLP = "private_models=[mlp]"
MIXED = "private_models=[mlp,lenet5,cnn1,cnn2]"
PAIRS = [f"ProxyFL := proxyfl:{MLP}", f"FML := fml:{MLP}"]
LENET = ["ProxyFL with LeNet-5 := proxyfl", "FML with LeNet-5 := fml"]
OTHERS = ["AvgPush := avgpush", "FedAvg := fedavg", "Regular := local", "Joint := central"]
BUDGETS = {1: ":lr=0.3:rounds=50:lr_step=40", 2: ":lr=0.3:rounds=70:lr_step=50", 4: "", 8: ""}
ALONE = ["no teacher := proxyfl:alpha=0", "no teacher, one pass := proxyfl:alpha=0:private_epochs=0"]


def part(
    name: str, about: str, methods: Sequence[str], options: Sequence[str], metric: str = "", group: str = ""
) -> Part:
    """Return a part whose first method is the one that the others are compared with."""
    first = methods[0].split(" := ")[0]
    return Part(
        name=name,
        about=about,
        methods=methods,
        options=options,
        against=first,
        metric=metric,
        data="mnist",
        group=group,
    )


def ablation(about: str, name: str, options: Sequence[str] = (), methods: Sequence[str] = (*PAIRS, *OTHERS)) -> Part:
    """Return a part of 50 rounds in which all models are MLPs; the parts of a figure share a picture."""
    group = f"{name.partition('-')[0]}, {about.partition(':')[0]}"
    return part(name, about, methods, [*PAPER, "rounds=50", "seeds=3", *options], group=group)


def sound(budget: int, metric: str = "") -> Part:
    """Return a part with a proven epsilon; the part of epsilon 8 also has private models without a teacher."""
    name, other = f"epsilon-{budget}", ALONE if budget == max(BUDGETS) and not metric else []
    methods = [f"ProxyFL := proxyfl:target_epsilon={budget}{BUDGETS[budget]}", *other]
    if metric:
        return part(
            f"{name}-proxies", "The proxies of these runs.", methods, SOUND, metric, "Proxies, by their proven epsilon"
        )
    return part(
        name,
        "The accuracy at a proven epsilon.",
        methods,
        SOUND,
        group="Private models, by the proven epsilon of their proxies",
    )


def mutual(weight: float) -> Part:
    """Return a part with alpha and beta at a weight; the paper's is 0.5."""
    own = "" if weight == 0.5 else f":alpha={weight}:beta={weight}"
    return ablation("Fig. 13: alpha and beta.", f"dml-{weight}", methods=[f"{method}{own}" for method in PAIRS])


PARTS = [
    *(sound(budget) for budget in BUDGETS),
    *(sound(budget, "proxy-accuracy") for budget in BUDGETS),
    part("mlp", "Fig. 11: private models and proxies are MLPs.", [*PAIRS, *OTHERS], [*PAPER, "seeds=5"]),
    part("mlp-proxies", "The proxies of these runs.", PAIRS, [*PAPER, "seeds=5"], "proxy-accuracy"),
    part("main", "Fig. 3: private models are LeNet-5, all others MLPs.", [*LENET, *OTHERS], [*PAPER, "seeds=5"]),
    part("main-proxies", "The proxies of these runs.", LENET, [*PAPER, "seeds=5"], "proxy-accuracy"),
    ablation("Fig. 5: skew, none (IID).", "skew-0.1", ["p=0.1"]),
    ablation("Fig. 5: skew, half of the examples of one class.", "skew-0.5", ["p=0.5"]),
    ablation("Fig. 5: skew, as in all other parts.", "skew-0.8"),
    ablation(
        "Fig. 6: two institutions each have MLP, LeNet-5, CNN1 and CNN2.",
        "mixed",
        methods=[f"ProxyFL := proxyfl:{MIXED}", f"FML := fml:{MIXED}"],
    ),
    ablation("Fig. 7: with differential privacy.", "privacy-on"),
    ablation("Fig. 7: no clipping, no noise.", "privacy-off", ["dp=none"]),
    ablation("Fig. 12: batch size.", "batch-100", ["batch_size=100"], PAIRS),
    ablation("Fig. 12: batch size, as in all other parts.", "batch-250", methods=PAIRS),
    ablation("Fig. 12: batch size.", "batch-450", ["batch_size=450"], PAIRS),
    *(mutual(weight) for weight in (0.1, 0.3, 0.5, 0.7, 0.9)),
]
