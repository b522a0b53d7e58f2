"""Qu et al.'s figures and tables on BoneAge, from your own copy of the images: `study boneage --data DIR`.

Source: Qu et al. 2022, sections 4.1, 4.2 and 4.4.1: Fig. 5 (right) and Table 2. docs/data.md says what DIR holds. The
paper does not say how skewed Splits 2 and 3 are: KS 0.4 and 0.9 are ours, so that a difference may be the split's.

`preset=paper` has the paper's network, sizes and training. The error is in months; less is better. Table 2 has a row
that the paper's lacks: DP-SGD needs a codebook that is learned by gradients, and this alone may cost something. So
"no privacy" is there with both kinds of codebook. With DP the generator's weights alone are protected: codes, labels
and the classifier are not.
"""

from flwr_replay.simulations.retina import FIGURE_5
from flwr_replay.studies.study import Compared, Printed

__all__ = ["COMPARISONS"]

PAPER = ["task=boneage", "preset=paper", "seeds=4"]  # section 4.2: the mean of four runs
SPLITS = {  # Fig. 3; four institutions
    "split-1": ["partition=iid"],
    "split-2": ["partition=ks", "partition.ks=0.4"],
    "split-3": ["partition=ks", "partition.ks=0.9"],
}
# MAE in months: section 4.2 of the text, as Fig. 5 has no numbers. It prints none of Split 2.
TEXT = {
    "split-1": {
        "cwt": "6.88 ± 0.04",
        "splitnn": "6.80 ± 0.05",
        "fedavg": "7.26 ± 0.07",
        "fedavgm": "7.49 ± 0.032",
        "fedavgshare": "7.99 ± 0.14",
    },
    "split-3": {
        "cwt": "27.88 ± 2.82",
        "splitnn": "30.28 ± 1.47",
        "fedavg": "30.87 ± 0.07",
        "fedavgm": "21.81 ± 3.71",
        "fedavgshare": "15.63 ± 3.43",
    },
}
PRINTED_2 = {  # Table 2's columns
    "split-1": {"no privacy": "7.60 ± 0.03", "with privacy": "7.89 ± 0.05"},
    "split-2": {"no privacy": "7.55 ± 0.06", "with privacy": "8.39 ± 0.26"},
    "split-3": {"no privacy": "7.84 ± 0.09", "with privacy": "9.84 ± 0.02"},
}
TABLE_2 = [
    "no privacy := cwt:replay=vqvae2",  # the same runs as in Fig. 5
    "no privacy, gradient codebook := cwt:replay=vqvae2:codebook=gradient",  # the control
    "with privacy := cwt:replay=vqvae2:codebook=gradient:dp=generator:sigma=0.7",  # delta is 1/|D|, as in the paper
]

# Everything above at a size that a laptop runs in minutes.
QUICK = ["preset=quick", "model=resnet18", "model.width=4", "model.stem=small", "training.batch_size=8"]
QUICK += ["task.size=32", "task.train_size=64", "task.val_size=0"]
QUICK += ["generator.epochs=1", "generator.width=8", "generator.batch_size=8"]


def comparison(
    name: str, about: str, methods: list[str], options: list[str], group: str, paper: Printed | None
) -> Compared:
    """Return a comparison on BoneAge."""
    return Compared.led(name, about, methods, [*PAPER, *options], data=".", quick=QUICK, group=group, paper=paper)


def in_text(split: str) -> Printed | None:
    """Return what the paper prints of a split; it does not say whether optimizers' states are kept."""
    if split not in TEXT:
        return None
    values = {f"{name}{kept}": both for name, both in TEXT[split].items() for kept in ("", ", kept")}
    return Printed(source="Qu et al. 2022, section 4.2", values=values)


COMPARISONS = [
    *(
        comparison(name, f"Fig. 5, {name.replace('-', ' ')}.", FIGURE_5, how, "Figure 5, BoneAge", in_text(name))
        for name, how in SPLITS.items()
    ),
    *(
        comparison(
            f"table-2-{name}",
            f"Table 2, {name.replace('-', ' ')}.",
            TABLE_2,
            how,
            "Table 2, BoneAge",
            Printed(source="Qu et al. 2022, Table 2", values=PRINTED_2[name]),
        )
        for name, how in SPLITS.items()
    ),
]
