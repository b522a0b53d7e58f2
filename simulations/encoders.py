"""Networks from scratch, fixed features, and a pretrained encoder that stays or is tuned, in the main methods.

CIFAR-10: a sample, 8 institutions of 500 images: equal mixes, 80 % of one class each, sorted by KS, or 30 % of a class
drawn at random as in `study proxyfl`. PneumoniaMNIST: 2 institutions of 380, 80 % of one class each. X-rays: three
sites as they are, at 224 pixels.

Settings were chosen by validation images of the institutions' own mixes: on seeds 0 to 2 of CIFAR-10 with lite0 frozen,
on 0 and 1 with Gabor, on 0 and 1 of the 80 % partition from scratch (rates 0.01, 0.03 and 0.1; not ProxyFL), on seed 0
of it with the tuned network. They serve all data, and are reported on seeds 10 to 14. The learning rate is 0.01, which
every method preferred to 0.1 but FedAvg on equal mixes, and FedAvg and Local with the tuned network. FedStats has
nearest class means here; its two constants were chosen by all validation images, with lite0 and Gabor, on seeds 0 to 2.
`local` and `own head, pooled` are what an institution has alone, without noise. Batch norm that trains has no
per-example gradients, so the tuned network is not in ProxyFL.
"""

from flwr_replay.studies.study import Compared

__all__ = ["COMPARISONS"]

PUBLIC = ["task.mean=[0.4914,0.4822,0.4465]", "task.std=[0.2470,0.2435,0.2616]"]  # of CIFAR-10; lite0 has its own
CIFAR10 = ["task=medmnist", "channels=3", "task.size=32", "classes=10", "nodes=8", "partition.size=500"]
PNEUMONIA = ["task=medmnist", "classes=2", "nodes=2", "partition.size=380", "partition=majority", "p=0.8"]
XRAYS = ["task=folder", "channels=1", "task.size=224", "classes=3", "class_names=[covid,normal,pneumonia]", "nodes=3"]
# File, options, and how many examples the smallest institution has.
DATA = {
    "equal": ("cifar10-8k.npz", [*CIFAR10, "partition=iid"], 500),
    "majority": ("cifar10-8k.npz", [*CIFAR10, "partition=majority", "p=0.8"], 500),
    "ks": ("cifar10-8k.npz", [*CIFAR10, "partition=ks", "ks=0.9"], 500),
    "third": ("cifar10-8k.npz", [*CIFAR10, "partition=majority", "p=0.3", "majors=random", "rest=uniform"], 500),
    "pneumonia": ("pneumoniamnist.npz", PNEUMONIA, 380),
    "xrays": ("covid-cxr", [*XRAYS, "partition=natural"], 30),
}
# Network, and FedReplay's cut.
ENCODERS = {
    "scratch": (["model=cnn", "width=16", "norm=group"], "conv1"),
    "gabor": (["model=gabor", "model.train=head"], "energies"),
    "frozen": (["model=lite0", "model.train=head"], "features"),
    "tuned": (["model=lite0", "model.train=from:blocks6"], "blocks5"),
}
PAIR = "proxyfl:listen=pool:alpha=0:beta=0:private_lr=0.01:private_epochs=1:private_batch_size=32:lr=1"
ROUNDS = {8: (30, 24), 1: (15, 12)}  # of ProxyFL by epsilon, and the round after which its rate is a tenth


def network_of(data: str, encoder: str, file: str) -> tuple[list[str], str]:
    """Return a network's options on one data set, and FedReplay's cut."""
    network, cut = ENCODERS[encoder]
    if network[0] == "model=lite0":
        return [*network, "model.size=224" if data == "xrays" else "model.size=96"], cut
    return [*network, *(PUBLIC if file == "cifar10-8k.npz" else [])], cut


def comparison(data: str, encoder: str) -> Compared:
    """Return the methods on one data set with one network."""
    file, dealt, smallest = DATA[data]
    network, cut = network_of(data, encoder, file)
    tuned = encoder == "tuned"
    high = ":lr=0.1" if tuned else ""
    methods = ["central", f"local{high}", f"fedavg{high}", "cwt", f"fedreplay := fedreplay:cut={cut}"]
    if not tuned:
        pair = f"{PAIR}:batch_size={smallest}"
        methods += [
            f"ProxyFL, ε {budget} := {pair}:topology=complete:target_epsilon={budget}:rounds={rounds}:lr_step={step}"
            for budget, (rounds, step) in ROUNDS.items()
        ]
        if encoder != "scratch":
            noisy = "fedstats:head=means:dp=statistics:target_epsilon"
            methods += [
                "FedStats := fedstats:head=means",
                *(f"FedStats, ε {budget} := {noisy}={budget}" for budget in ROUNDS),
            ]
        methods.append(f"own head, pooled := {pair}:topology=none:dp=none:rounds=30:lr_step=24")
    return Compared(
        name=f"{data}-{encoder}",
        about=f"{data}: {encoder}.",
        methods=methods,
        options=[
            *dealt,
            *network,
            f"rounds={5 if tuned else 20}",
            "evaluate_every=30",
            "delta=1e-5",
            "seeds=10,11,12,13,14",
        ],
        against="central",
        metric="accuracy" if file == "cifar10-8k.npz" else "balanced-accuracy",
        data=file,
        group=data,
    )


COMPARISONS = [comparison(data, encoder) for data in DATA for encoder in ENCODERS]
