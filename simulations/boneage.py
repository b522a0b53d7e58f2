"""Qu et al.'s figures and tables on BoneAge, from your own copy of the images: `study boneage --data DIR`.

Source: Qu et al. 2022, sections 4.1, 4.2 and 4.4.1: Fig. 5 (right) and Table 2. docs/data.md says what DIR holds.

`preset=paper` has the paper's network, sizes and training. The error is in months; less is better. Table 2 has a row
that the paper's lacks: DP-SGD needs a codebook that is learned by gradients, and this alone may cost something. So
"no privacy" is there with both kinds of codebook. With DP the generator's weights alone are protected: codes, labels
and the classifier are not.
"""

from __future__ import annotations

from flwr_replay.simulations.retina import FIGURE_5
from flwr_replay.studies.study import Part

__all__ = ["PARTS"]

PAPER = ["task=boneage", "preset=paper", "seeds=4"]  # section 4.2: the mean of four runs
SPLITS = {  # Fig. 3; four institutions. The text has no numbers for "mild" and "high": these are ours
    "split-1": ["partition=iid"],
    "split-2": ["partition=ks", "partition.ks=0.4"],
    "split-3": ["partition=ks", "partition.ks=0.9"],
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


def part(name: str, about: str, methods: list[str], options: list[str], group: str) -> Part:
    """Return a part on BoneAge."""
    return Part.led(name, about, methods, [*PAPER, *options], data=".", quick=QUICK, group=group)


PARTS = [
    *(
        part(name, f"Fig. 5, {name.replace('-', ' ')}.", FIGURE_5, how, "Figure 5, BoneAge")
        for name, how in SPLITS.items()
    ),
    *(
        part(f"table-2-{name}", f"Table 2, {name.replace('-', ' ')}.", TABLE_2, how, "Table 2, BoneAge")
        for name, how in SPLITS.items()
    ),
]
