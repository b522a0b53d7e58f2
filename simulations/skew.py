"""Label skew on small public data, for the methods of the first release.

Source: Qu et al. 2022, section 4.2 (accuracy of each method as the label skew grows).
"""

from __future__ import annotations

from flwr_replay.studies.study import Part

__all__ = ["PARTS"]

MNIST = ["task=mnist", "model=resnet18", "stem=small", "width=16", "partition=ks", "rounds=5", "seeds=5"]
PNEUMONIA = ["task=medmnist", "partition=ks", "ks=0.6", "drop=true", "rounds=20", "seeds=5"]
METHODS = ["central", "fedreplay", "fedreplay:cut=layer2", "fedavg", "cwt", "local"]
KEEP = ["fedavg:optimizer-state=keep", "cwt:optimizer-state=keep"]

PARTS = [
    Part(
        name="digits",
        about="The default task.",
        methods=[*KEEP, "fedavg", "cwt", "local", "central", "fedreplay"],
        options=["seeds=5"],
    ),
    Part(
        name="mnist-sorted",
        about="The largest skew of four equal institutions.",
        methods=METHODS,
        options=[*MNIST, "ks=0.93"],
        data="mnist",
    ),
    Part(
        name="mnist-momentum",
        about="Institutions keep their momentum between visits.",
        methods=[*KEEP, "fedavg", "cwt", "fedreplay"],
        options=[*MNIST, "ks=0.93"],
        data="mnist",
    ),
    Part(
        name="mnist-longer",
        about="Twice the rounds for weight averaging and weight passing.",
        methods=["fedavg:rounds=10", "cwt:rounds=10", "fedreplay"],
        options=[*MNIST, "ks=0.93"],
        data="mnist",
    ),
    Part(name="mnist-severe", about="Severe skew.", methods=METHODS, options=[*MNIST, "ks=0.9"], data="mnist"),
    Part(name="mnist-mild", about="Mild skew.", methods=METHODS, options=[*MNIST, "ks=0.66"], data="mnist"),
    Part(
        name="pneumonia",
        about="Chest X-rays, two classes, examples of the larger one left out.",
        methods=["central", "fedreplay", "fedreplay:encoder=random", "fedavg", "cwt", "local"],
        options=PNEUMONIA,
        metric="balanced-accuracy",
        data="pneumoniamnist.npz",
    ),
]
