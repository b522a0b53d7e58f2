"""FedER and its modes, beside averaging, cycling and what nobody shares: Pennisi et al.'s Tables I and II in shape.

Source: Pennisi et al. 2023, sections IV-B and IV-C. Its numbers are of other images, so that none stands beside ours.

The generator is vqvae2 with its prior: at this size it passes the bar that StyleGAN2 misses (docs/feder.md). Every
institution trains one, for all methods and modes of a seed. The score is balanced accuracy, pooled over the
institutions' test shards; with FedER each tests the model that it has trained last.
"""

from functools import partial

from flwr_replay.studies.study import Compared

__all__ = ["COMPARISONS"]

# Eight times 1,000 are all of 8,000 training images. Tests come after the last round only, so none are used before.
MNIST = ["task=mnist", "partition.size=1000", "model=cnn", "rounds=10", "evaluate_every=10", "seeds=5", "split=test"]
SKEW = [*MNIST, "partition=ks", "ks=0.93", "nodes=4"]
PNEUMONIA = "pneumoniamnist.npz"
XRAYS = ["task=medmnist", "classes=2", "model=cnn", "rounds=20", "evaluate_every=20", "seeds=5"]
X_SKEW = [*XRAYS, "nodes=2", "partition=ks", "ks=0.6", "drop=true"]
FEDER = "standard := feder"
HOPS = "buffer 0 := feder:buffer=0"
MODES = [FEDER, HOPS, "buffer-only := feder:mode=buffer-only", "synthetic-only := feder:mode=synthetic-only"]
OTHERS = [
    "memory=all := feder:memory=all",
    "fedavg",
    "fedavg, buffers := fedavg:replay=buffer",
    "cwt",
    "local",
    "central",
]
WITH_A_GENERATOR = [FEDER, *MODES[2:], OTHERS[2], "syncentral := syncentral"]
LONGER = ["generator.epochs=18", "prior.epochs=36"]  # of vqvae2, on few images
BOTH = [*WITH_A_GENERATOR, *(x.replace(" :=", ", stylegan2 :=") + ":generator=stylegan2" for x in WITH_A_GENERATOR)]
# All are compared with FedER's standard mode.
comparison = partial(Compared.led, metric="balanced-accuracy", data="mnist")


def iid(nodes: int) -> Compared:
    """Return a comparison without skew."""
    options = [*MNIST, "partition=iid", f"nodes={nodes}"]
    return comparison(f"iid-{nodes}", "No skew.", [FEDER, HOPS, "central"], options, group="No skew, by institutions")


def shifted(nodes: int) -> list[str]:
    """Return the options of institutions whose X-rays differ in contrast."""
    return [*XRAYS, f"nodes={nodes}", "partition=iid", "partition.size=650", "contrast=0.6"]


def contrast(nodes: int) -> Compared:
    """Return a comparison in which institutions' X-rays differ in contrast, and classes do not."""
    return comparison(
        f"contrast-{nodes}",
        "Chest X-rays, no label skew; from institution to institution more contrast; 650 each.",
        [*MODES, *OTHERS, "syncentral"],
        [*shifted(nodes), *LONGER],
        data=PNEUMONIA,
    )


COMPARISONS = [
    comparison("skew", "Table I in shape: label skew, four institutions.", [*MODES, *OTHERS, "syncentral"], SKEW),
    comparison(
        "xrays",
        "Chest X-rays, label skew, two institutions.",
        [*MODES, *OTHERS, "syncentral"],
        X_SKEW,
        data=PNEUMONIA,
    ),
    *map(contrast, (2, 4)),
    comparison(
        "generators",
        "Chest X-rays, label skew, two institutions: buffers of both generators.",
        BOTH,
        X_SKEW,
        data=PNEUMONIA,
    ),
    comparison("generators-skew", "Label skew, four institutions: buffers of both generators.", BOTH, SKEW),
    *(
        comparison(
            f"generators-contrast-{nodes}",
            "Chest X-rays, no label skew, contrast: buffers of both generators.",
            [":".join([method, *LONGER]) if "stylegan2" not in method else method for method in BOTH],
            shifted(nodes),
            data=PNEUMONIA,
        )
        for nodes in (2, 4)
    ),
    comparison(
        "buffers",
        "Images in a buffer.",
        [FEDER, *(f"buffer {size} := feder:buffer={size}" for size in (0, 128, 2048))],
        SKEW,
    ),
    comparison(
        "epochs",
        "Rounds and epochs of equal products.",
        [
            FEDER,
            *(f"{r} rounds of {e} := feder:rounds={r}:local_epochs={e}" for r, e in ((5, 2), (2, 5))),
        ],
        SKEW,
    ),
    comparison(
        "agreement",
        "Table II in shape: every model at every institution, after the last round.",
        [f"{method}:agreement=true" for method in (FEDER, HOPS, OTHERS[0])],
        SKEW,
    ),
    *map(iid, (2, 4, 8)),
]
