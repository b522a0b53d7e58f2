"""Qu et al.'s comparison of methods on small public data, from IID to severe skew, on three kinds of task.

Sources: Qu et al. 2022, section 4.2, Figs. 2-5 (Retina and BoneAge: three partitions, four institutions), section 4.3,
Fig. 6 (BraTS: a U-Net), Table 3, first row (accuracy by cut), Table 1 (the forgetting matrix).

A visit on tables and PneumoniaMNIST has a few steps only. There every method keeps its momentum from visit to visit, as
Central, Local and FedReplay always do: two steps from rest would show missing momentum, not skew. FedAvgM has its
momentum at the server, and diverges with both. On MNIST a visit has 62 steps, and it makes no difference
(docs/results/baselines.md).

All methods of a comparison have the same hyperparameters. FedProx's mu is the best of `fedprox-mu`, on the mild split.
FedSGD takes one step a round, so it has 50 rounds and ten times the learning rate.
"""

from flwr_replay.studies.study import Compared

__all__ = ["COMPARISONS"]

SGD, REST = "fedsgd:rounds=50:lr=0.1", ["fedavgshare", "fedreplay"]
METHODS = ["central", "local", "cwt", "splitnn", "fedavg", "fedprox:mu=0.01", "fedavgm", SGD, *REST]
KEEP = ":optimizer-state=keep"
KEPT = ["central", "local", f"cwt{KEEP}", f"splitnn{KEEP}", f"fedavg{KEEP}", f"fedprox:mu=0.01{KEEP}", "fedavgm"]
KEPT += [SGD, f"fedavgshare{KEEP}", "fedreplay"]
MNIST = ["task=mnist", "model=lenet5", "rounds=10", "seeds=5"]
DIABETES = ["task=diabetes", "nodes=4", "rounds=20", "seeds=10"]
HEART = ["task=heart_disease", "rounds=20", "seeds=10"]
RESNET = ["task=mnist", "model=resnet18", "stem=small", "width=16", "partition=ks", "ks=0.93", "rounds=5", "seeds=5"]


PROGRESSION, PATIENTS = "Regression: the progression of the disease.", "Four hospitals, 920 patients."
# Methods, options, file and group.
OF = {
    "mnist": (METHODS, MNIST, "mnist", "MNIST, LeNet5, four institutions"),
    "diabetes": (KEPT, DIABETES, "", "Diabetes, MLP, four institutions"),
    "heart": (KEPT, HEART, "heart-disease", "Heart disease, MLP, four hospitals"),
}


def comparison(of: str, how: str, about: str, *partition: str) -> Compared:
    """Return a comparison of all methods on one data set, dealt in one way."""
    methods, options, data, group = OF[of]
    options = [*options, *partition]
    return Compared(name=f"{of}-{how}", about=about, methods=methods, options=options, data=data, group=group)


COMPARISONS = [
    Compared(
        name="fedprox-mu",
        about="FedProx's mu, chosen on the mild split as Qu et al. chose theirs.",
        methods=["fedprox:mu=0.001", "fedprox:mu=0.01", "fedprox:mu=0.1", "fedprox:mu=1", "fedavg"],
        options=[*MNIST, "partition=ks", "ks=0.4"],
        against="fedavg",
        data="mnist",
    ),
    comparison("mnist", "iid", "No skew.", "partition=iid"),
    comparison("mnist", "mild", "Mild skew.", "partition=ks", "ks=0.4"),
    comparison("mnist", "severe", "As skewed as four equal institutions can be.", "partition=ks", "ks=0.93"),
    comparison("diabetes", "iid", PROGRESSION, "partition=iid"),
    comparison("diabetes", "mild", PROGRESSION, "partition=ks", "ks=0.6"),
    comparison("diabetes", "severe", PROGRESSION, "partition=ks", "ks=0.95"),
    comparison("heart", "iid", PATIENTS, "partition=iid", "nodes=4"),
    comparison("heart", "natural", PATIENTS, "partition=natural", "nodes=4"),
    Compared(
        name="pneumonia",
        about="Chest X-rays, two classes, examples of the larger one left out.",
        methods=KEPT,
        options=["task=medmnist", "partition=ks", "ks=0.6", "drop=true", "rounds=10", "seeds=5"],
        metric="balanced-accuracy",
        data="pneumoniamnist.npz",
    ),
    Compared(
        name="isbi2012",
        about="Segmentation: institutions differ in the share of cells and in contrast.",
        methods=["central", "cwt", "fedavg", "fedavgshare", "fedreplay"],
        options=[
            "task=isbi2012",
            "partition=ks",
            "ks=0.8",
            "contrast=0.6",
            "rounds=6",
            "seeds=5",
            "fedreplay.encoder-epochs=6",
        ],
        data="isbi2012",
    ),
    Compared(
        name="cut",
        about="Table 3: accuracy by cut.",
        methods=["fedavg", "fedreplay:cut=layer2", "fedreplay:cut=layer3", "fedreplay"],
        options=RESNET,
        data="mnist",
    ),
    Compared(
        name="forgetting",
        about="Table 1: each run's `forgetting.png` is its matrix.",
        methods=["cwt", "fedavg", "fedreplay"],
        options=[*MNIST, "partition=ks", "ks=0.93", "rounds=5", "seeds=1", "forgetting=true"],
        data="mnist",
    ),
]
