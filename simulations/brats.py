"""Qu et al.'s Fig. 6 on BraTS 2017, from your own copy of the volumes: `study brats --data DIR`.

Source: Qu et al. 2022, section 4.3, Fig. 6. docs/data.md says what DIR holds.

Every institution has its own subjects. The paper reports the mean Dice coefficient over institutions (`dice-mean`);
beside it stands the Dice coefficient of all pixels together, of the same runs. The paper begins with the weights of
Buda et al. 2019, which do not come with this package; here every run begins with fresh weights.
"""

from flwr_replay.studies.methods import with_kept
from flwr_replay.studies.study import Compared, Printed

__all__ = ["COMPARISONS"]

PAPER = ["task=brats", "preset=paper", "partition=natural", "seeds=3"]  # section 4.3: three trials
FIGURE_6 = ["central", *with_kept(["cwt", "fedavg", "fedavgshare"]), "fedreplay"]

# The same at a size that a laptop runs in minutes: all subjects, in small.
QUICK = ["preset=quick", "model=unet", "model.width=4", "task.size=32", "task.train_size=0", "task.test_size=0"]

# Section 4.3 prints these two; the rest is in Fig. 6 only.
PRINTED = Printed(source="Qu et al. 2022, section 4.3", values={"central": "0.853", "fedreplay": "0.854"})

COMPARISONS = [
    Compared(
        name=name,
        about=about,
        methods=FIGURE_6,
        options=PAPER,
        quick=QUICK,
        metric=metric,
        data=".",
        group="Figure 6, BraTS",
        paper=PRINTED if metric == "dice-mean" else None,
    )
    for name, metric, about in (
        ("mean", "dice-mean", "Fig. 6: mean over the institutions."),
        ("pooled", "dice", "The same runs: all pixels together."),
    )
]
