"""Qu et al.'s figures and tables on Retina, from your own copy of the images: `study retina --data DIR`.

Source: Qu et al. 2022, sections 4.1, 4.2 and 4.4.2: Fig. 5 (left), Tables 1 and 3. docs/data.md says what DIR holds.

`preset=paper` has the paper's network, sizes and training; what the paper does not say is marked in
`conf/preset/paper/retina.yaml`. The paper does not mention optimizers' states, so every method that has one is run
with both kinds: fresh at every visit, and kept (", kept"). FedAVG+Replay is described in the paper, and not among the
methods that it compares.
"""

from typing import Any

from flwr_replay.studies.methods import named, with_kept
from flwr_replay.studies.study import Compared, Printed

__all__ = ["COMPARISONS", "FIGURE_5"]

PAPER = ["task=retina", "preset=paper", "seeds=4"]  # section 4.2: the mean of four runs
SPLITS = {  # Fig. 2; four institutions
    "split-1": ["partition=iid"],
    "split-2": ["partition=ks", "partition.ks=0.3"],  # "mild": the text has no number, 0.3 is ours
    # Table 1: a model that came from Inst1 calls nearly all eyes healthy. So its accuracies are the healthy shares.
    "split-3": ["partition=shares", 'partition.shares=["0.96 0.04", "0.83 0.17", "0.23 0.77", "0.09 0.91"]'],
}
SERIAL_AND_PARALLEL = [  # FedProx's mu of 0.001 and FedAVG+Share's 5 % are the defaults
    "fedavg",
    "fedavgm",
    "fedprox",
    "fedavgshare",
    "cwt",
    "splitnn",
    "cwt+replay := cwt:replay=vqvae2",
    "fedavg+replay := fedavg:replay=vqvae2",
]
FIGURE_5 = ["central", *with_kept(SERIAL_AND_PARALLEL), "fedreplay"]
CUTS = {"conv1": "fedreplay", **{cut: f"fedreplay:cut={cut}" for cut in ("layer2", "layer3")}}
TABLE_3 = [f"fedreplay, {cut} := {method}" for cut, method in CUTS.items()]

SOURCE = "Qu et al. 2022, Table "
PRINTED_1 = (  # by institution whose data these are of; in a row after the visit to Inst1, Inst2, …
    ("0.956", "0.910", "0.699", "0.517"),
    ("0.834", "0.877", "0.690", "0.600"),
    ("0.234", "0.537", "0.930", "0.910"),
    ("0.094", "0.418", "0.957", "0.977"),
)
FORGETTING = {
    f"institution-{data} after institution-{visit}": share
    for data, row in enumerate(PRINTED_1, 1)
    for visit, share in enumerate(row, 1)
}
ACCURACY = {  # Table 3, first row
    "fedavg": "0.7065 ± 0.0083",
    "fedreplay, conv1": "0.7720 ± 0.0013",
    "fedreplay, layer2": "0.7648 ± 0.0063",
    "fedreplay, layer3": "0.7500 ± 0.0098",
}
PSNR = {  # Table 3, second row, over 50 images
    "fedavg": "11.82 ± 1.86",
    "fedreplay, conv1": "11.64 ± 0.98",
    "fedreplay, layer2": "10.48 ± 1.23",
    "fedreplay, layer3": "9.22 ± 1.28",
}

# Everything above at a size that a laptop runs in minutes.
SMALL = ["preset=quick", "training.batch_size=8", "task.size=32", "task.balanced=true"]
SMALL += ["task.train_size=64", "task.val_size=0", "task.test_size=32"]  # patients, half of them diseased
SMALL += ["generator.epochs=1", "generator.width=8", "generator.batch_size=8"]
QUICK = [*SMALL, "model=resnet18", "model.width=4", "model.stem=small"]
QUICK_WEIGHTS = [*SMALL, "model=mlp"]  # the attack differentiates a training step, which takes minutes for a ResNet


def comparison(
    name: str, about: str, methods: list[str], options: list[str], quick: list[str] = QUICK, **more: Any
) -> Compared:
    """Return a comparison on Retina."""
    return Compared.led(name, about, methods, [*PAPER, *options], data=".", quick=quick, **more)


def attacked(name: str, about: str, methods: list[str], options: list[str], quick: list[str], of: str) -> Compared:
    """Return a comparison on Split 3, attacked on recorded messages by who has another institution's images."""
    # 224 pixels in the paper; one run, whose images give the standard deviation.
    recorded = [*SPLITS["split-3"], "task.size=224", "seeds=1", "record=all", "record_mb=50000", *options]
    labels = [named(method)[0] for method in methods]
    paper = Printed(source=f"{SOURCE}3: PSNR in dB, by {of}", values={label: PSNR[label] for label in labels}, of=of)
    return comparison(name, about, methods, recorded, quick, attack="institution-2", paper=paper)


COMPARISONS = [
    *(
        comparison(name, f"Fig. 5, {name.replace('-', ' ')}.", FIGURE_5, how, group="Figure 5, Retina")
        for name, how in SPLITS.items()
    ),
    comparison(
        "table-1",
        "Table 1: what CWT forgets from visit to visit, on Split 3.",
        ["cwt"],
        [*SPLITS["split-3"], "seeds=1", "forgetting=true"],
        paper=Printed(
            source=f"{SOURCE}1: accuracy on whose data, after whose visit", values=FORGETTING, of="forgetting"
        ),
    ),
    comparison(
        "table-3",
        "Table 3, first row: accuracy by cut, on Split 3.",
        ["fedavg", *TABLE_3],
        SPLITS["split-3"],
        paper=Printed(source=f"{SOURCE}3", values=ACCURACY),
    ),
    attacked(
        "table-3-latents", "Table 3, second row: what latents show, by cut.", TABLE_3, [], QUICK, "latent matching"
    ),
    attacked(
        "table-3-weights",
        # The paper does not say how many images lie behind an update. A search looks for at most 128.
        "Table 3, second row, FedAVG: what the weights after one step on eight images show.",
        ["fedavg"],
        ["partition.size=8", "training.batch_size=8", "rounds=1"],
        QUICK_WEIGHTS,
        "gradient matching",
    ),
]
