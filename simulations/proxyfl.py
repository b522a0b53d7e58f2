"""ProxyFL and its family with differential privacy: Kalra et al.'s Fig. 3, 5-7 and 11-13, and a sound form of it.

Sources: Kalra et al. 2023, sections 4.1 and 4.2, appendix B, whose accuracies are curves only: no number stands beside
ours.

The partition is the paper's: 8 institutions with 1,000 of MNIST's 60,000 images, 80 % of them of one class drawn at
random, the rest uniform over the other classes; tests on all 10,000.

`main` and `mlp` have the paper's settings (`preset=paper`), the ablations 50 rounds of them. Their epsilon is not
proven, since proxies learn from private models. Comparisons `sound-...` have a proven epsilon (`preset=sound`). Their
settings were chosen on seeds 0 to 2, by training images that no institution has; they are reported on seeds 10 to 14.
`no teacher` has the same passes and listens to no proxy. `Regular without noise` is what an institution can do alone.
Accuracy is that of the private models. Comparisons named `-proxies` show the proxies of the same runs.
"""

from collections.abc import Sequence
from functools import partial

from flwr_replay.studies.study import Compared

__all__ = ["COMPARISONS"]

SKEW = ["partition=majority", "majors=random", "rest=uniform"]
MNIST = ["task=mnist", *SKEW, "p=0.8", "partition.size=1000", "nodes=8"]
PAPER = [*MNIST, "preset=paper", "evaluate_every=30", "seeds=5"]
SHORT = [*MNIST, "preset=paper", "rounds=50", "evaluate_every=10", "seeds=5"]
SOUND = [*MNIST, "preset=sound", "batch_size=1000", "evaluate_every=50", "seeds=10,11,12,13,14"]
CIFAR10 = ["task.mean=[0.4914,0.4822,0.4465]", "task.std=[0.2470,0.2435,0.2616]"]  # public; as in preset=sound
OTHER_DATA = {
    "cifar10": (
        "cifar10-8k.npz",
        ["task=medmnist", "channels=3", "task.size=32", "classes=10", "nodes=8", "p=0.3", *CIFAR10],
        500,
    ),
    "pneumonia": ("pneumoniamnist.npz", ["task=medmnist", "classes=2", "nodes=2", "p=0.8", "majors=distinct"], 380),
}
UNMIXED = "evaluate_before_mixing=true"
MLP = "private_models=[mlp]"
MIXED = "private_models=[mlp,lenet5_unpadded,cnn1,cnn2]"
PAIRS = [f"ProxyFL := proxyfl:{MLP}", f"FML := fml:{MLP}"]
LENET = ["ProxyFL with LeNet-5 := proxyfl", "FML with LeNet-5 := fml"]
ALONE = "alpha=0 := proxyfl"
OTHERS = ["AvgPush := avgpush", "FedAvg := fedavg", "Regular := local", "Joint := central"]
NOISELESS = "Regular without noise := local:dp=none"
BY_ITSELF = [f"{ALONE}:{MLP}:alpha=0", NOISELESS]
BUDGETS = {1: ":rounds=50:lr_step=40:private_epochs=2", 2: ":rounds=50:lr_step=40:private_epochs=2", 4: "", 8: ""}
REGULAR = ":target_epsilon=0:model=mlp:optimizer=adam:lr=0.001:weight_decay=0.0001:batch_size=250:rounds=300:lr_step=0"
TEACHERS = [
    "no teacher := proxyfl:listen=loss",
    "distilled := proxyfl:listen=loss:alpha=0.5",
    f"{NOISELESS}{REGULAR}",
]
UNSHARED = "dp=none:target_epsilon=0"
OWN_HEADS = [f"own Gabor head := local:{UNSHARED}", f"own Gabor head, pooled := proxyfl:{UNSHARED}:topology=none"]
comparison = partial(Compared.led, data="mnist-full")


def ablation(
    about: str,
    name: str,
    options: Sequence[str] = (),
    methods: Sequence[str] = (*PAIRS, *OTHERS),
    alone: Sequence[str] = BY_ITSELF,
) -> Compared:
    """Return a comparison of 50 rounds in which all models are MLPs; the comparisons of a figure share a picture."""
    group = f"{name.partition('-')[0]}, {about.partition(':')[0]}"
    return comparison(name, about, [*methods, *alone], [*SHORT, *options], group=group)


def sound(budget: int) -> Compared:
    """Return a comparison with a proven epsilon on MNIST."""
    methods = [f"ProxyFL := proxyfl:target_epsilon={budget}{BUDGETS[budget]}", *TEACHERS, *OWN_HEADS]
    about = f"A proven epsilon of {budget}."
    return comparison(f"sound-{budget}", about, methods, SOUND, group="sound, private models by epsilon")


def sound_on(name: str) -> Compared:
    """Return a comparison with the same settings on data on which they were not chosen."""
    data, task, size = OTHER_DATA[name]
    options = [*SKEW, *task, f"partition.size={size}", "preset=sound", f"batch_size={size}", *SOUND[-2:]]
    methods = [
        "ProxyFL := proxyfl",
        *(method.replace("batch_size=250", f"batch_size={size // 4}") for method in TEACHERS),
        *OWN_HEADS,
    ]
    return comparison(f"sound-{name}", "The same settings on other data; epsilon 8.", methods, options, data=data)


def mutual(weight: float) -> Compared:
    """Return a comparison with alpha and beta at a weight; the paper's is 0.5."""
    own = "" if weight == 0.5 else f":alpha={weight}:beta={weight}"
    methods = [f"{method}{own}" for method in PAIRS]
    return ablation("Fig. 13: alpha and beta.", f"dml-{weight}", methods=methods)


COMPARISONS = [
    *map(sound, BUDGETS),
    *map(sound_on, OTHER_DATA),
    comparison(
        "mlp",
        "Fig. 11: private models and proxies are MLPs.",
        [*PAIRS, *OTHERS, f"{ALONE}:{MLP}:alpha=0", NOISELESS],
        PAPER,
    ),
    comparison("mlp-proxies", "The proxies of these runs.", PAIRS, PAPER, metric="proxy-accuracy"),
    comparison(
        "main",
        "Fig. 3: private models are LeNet-5, all others MLPs.",
        [*LENET, *OTHERS, f"{ALONE}:alpha=0", f"{NOISELESS}:model=lenet5_unpadded"],
        PAPER,
    ),
    comparison("main-proxies", "The proxies of these runs.", LENET, PAPER, metric="proxy-accuracy"),
    ablation("Fig. 5: skew, none (IID).", "skew-0.1", ["p=0.1"]),
    ablation("Fig. 5: skew, half of the examples of one class.", "skew-0.5", ["p=0.5"]),
    ablation("Fig. 5: skew, as in all other comparisons.", "skew-0.8"),
    ablation(
        "Fig. 6: two institutions each have MLP, LeNet-5, CNN1 and CNN2.",
        "mixed",
        methods=[f"ProxyFL := proxyfl:{MIXED}", f"FML := fml:{MIXED}"],
        alone=[f"{ALONE}:{MIXED}:alpha=0"],
    ),
    ablation("Fig. 7: with differential privacy.", "privacy-on"),
    ablation("Fig. 7: no clipping, no noise.", "privacy-off", ["dp=none"], alone=BY_ITSELF[:1]),
    comparison(
        "unmixed",
        "Fig. 7: tested before averaging, as in the authors' code.",
        ["FedAvg := fedavg", "AvgPush := avgpush"],
        [*SHORT, UNMIXED],
        metric="before-mixing-accuracy",
    ),
    comparison(
        "unmixed-proxies",
        "Fig. 7: the proxies before averaging.",
        PAIRS,
        [*SHORT, UNMIXED],
        metric="before-mixing-proxy-accuracy",
    ),
    ablation("Fig. 12: batch size.", "batch-100", ["batch_size=100"], PAIRS),
    ablation("Fig. 12: batch size, as in all other comparisons.", "batch-250", methods=PAIRS),
    ablation("Fig. 12: batch size.", "batch-500", ["batch_size=500"], PAIRS),
    *(mutual(weight) for weight in (0.1, 0.3, 0.5, 0.7, 0.9)),
]
