"""What generative replay gives back, and what its privacy costs: Qu et al.'s Table 2 in shape, on small public data.

Sources: Qu et al. 2022, section 4.2 (CWT+Replay and FedAVG+Replay under skew), section 4.4 and Table 2 (with and
without differential privacy), Algorithm 1 and footnote 1.

One small CNN with group norm for all methods, since DP-SGD cannot have batch norm. `central` is the reference; a gap is
what lies between a plain method and it. Rows with dp=generator have Qu et al.'s noise (0.7) and no claim for codes,
labels and the classifier; rows with dp=end-to-end keep a budget of epsilon 8 for all that depends on training examples.
"""

from __future__ import annotations

from flwr_replay.study import Part

__all__ = ["PARTS"]

CODES, PRIOR = ":replay=vqvae2", ":replay=pixelcnn"
GENERATOR = f"{CODES}:dp=generator:codebook=gradient"
END_TO_END = (
    f"{PRIOR}:dp=end-to-end:codebook=gradient:epsilon=8:sigma=0:batch_size=200:lr=0.05"
    ":generator.batch_size=200:generator.epochs=20:prior.batch_size=200:prior.epochs=30"
)
FORMS = ["", CODES, PRIOR, GENERATOR, END_TO_END]
METHODS = ["central", *(f"{method}{form}" for method in ("cwt", "fedavg") for form in FORMS)]
CNN = ["model=cnn", "model.norm=group"]

PARTS = [
    Part(
        name="mnist",
        about="As skewed as four equal institutions can be.",
        methods=[*METHODS, f"cwt{CODES}:codes=last-pass", f"cwt{CODES}:codes=stale"],
        options=["task=mnist", "partition=ks", "ks=0.93", "rounds=4", "seeds=3", *CNN],
        against="central",
        data="mnist",
    ),
    Part(
        name="pneumonia",
        about="Chest X-rays, two classes, examples of the larger one left out.",
        methods=METHODS,
        options=["task=medmnist", "partition=ks", "ks=0.6", "drop=true", "rounds=10", "seeds=3", *CNN],
        against="central",
        metric="balanced-accuracy",
        data="pneumoniamnist.npz",
    ),
]
