"""Label skew on small public data, for the methods of the first release.

Source: Qu et al. 2022, section 4.2 (accuracy of each method as the label skew grows).
"""

from flwr_replay.studies.study import Compared

__all__ = ["COMPARISONS"]

MNIST = ["task=mnist", "model=resnet18", "stem=small", "width=16", "partition=ks", "rounds=5", "seeds=5"]
PNEUMONIA = ["task=medmnist", "partition=ks", "ks=0.6", "drop=true", "rounds=20", "seeds=5"]
METHODS = ["central", "fedreplay", "fedreplay:cut=layer2", "fedavg", "cwt", "local"]
KEEP = ["fedavg:optimizer-state=keep", "cwt:optimizer-state=keep"]
LONGER = ["fedavg:rounds=10", "cwt:rounds=10", "fedreplay"]


def mnist(name: str, about: str, methods: list[str], ks: float) -> Compared:
    """Return a comparison on MNIST with labels so skewed."""
    return Compared(name=f"mnist-{name}", about=about, methods=methods, options=[*MNIST, f"ks={ks}"], data="mnist")


COMPARISONS = [
    Compared(
        name="digits",
        about="The default task.",
        methods=[*KEEP, "fedavg", "cwt", "local", "central", "fedreplay"],
        options=["seeds=5"],
    ),
    mnist("sorted", "The largest skew of four equal institutions.", METHODS, 0.93),
    mnist("momentum", "Institutions keep their momentum between visits.", [*KEEP, "fedavg", "cwt", "fedreplay"], 0.93),
    mnist("longer", "Twice the rounds for weight averaging and weight passing.", LONGER, 0.93),
    mnist("severe", "Severe skew.", METHODS, 0.9),
    mnist("mild", "Mild skew.", METHODS, 0.66),
    Compared(
        name="pneumonia",
        about="Chest X-rays, two classes, examples of the larger one left out.",
        methods=["central", "fedreplay", "fedreplay:encoder=random", "fedavg", "cwt", "local"],
        options=PNEUMONIA,
        metric="balanced-accuracy",
        data="pneumoniamnist.npz",
    ),
]
