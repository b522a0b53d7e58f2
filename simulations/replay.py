"""What generative replay gives back, and what its privacy costs: Qu et al.'s Table 2 in shape, on small public data.

Sources: Qu et al. 2022, section 4.2 (CWT+Replay and FedAVG+Replay under skew), section 4.4 and Table 2 (with and
without differential privacy), Algorithm 1 and footnote 1.

One small CNN with group norm for all methods, since DP-SGD cannot have batch norm. `central` is the reference; a gap is
what lies between a plain method and it. Rows "DP generator" have Qu et al.'s noise (0.7) and claim nothing for codes,
labels and the classifier; rows "end to end" keep a budget of epsilon 8 for all that depends on training examples, and
take larger batches, as noise wants them. "DP, no replay" is what that budget gives to the classifier alone.
"""

from __future__ import annotations

from flwr_replay.study import Part

__all__ = ["PARTS"]

BUDGET = "epsilon=8:sigma=0:batch_size=200:lr=0.1"
FORMS = {
    "codes": "replay=vqvae2",
    "prior": "replay=pixelcnn",
    "codes; DP generator": "replay=vqvae2:dp=generator:codebook=gradient",
    "prior; end to end": (
        f"replay=pixelcnn:dp=end-to-end:codebook=gradient:{BUDGET}:generator.batch_size=200:generator.epochs=10"
        ":prior.batch_size=200:prior.epochs=15"
    ),
}
METHODS = ["central"]
for _name, _plain in (("CWT", "cwt"), ("FedAVG", "fedavg")):
    METHODS += [_plain, f"{_name} DP; no replay := {_plain}:dp=classifier:{BUDGET}"]
    METHODS += [f"{_name}+Replay {form} := {_plain}:{options}" for form, options in FORMS.items()]
CNN = ["model=cnn", "model.norm=group"]

PARTS = [
    Part(
        name="mnist",
        about="As skewed as four equal institutions can be.",
        methods=[
            *METHODS,
            "CWT+Replay last-pass := cwt:replay=vqvae2:codes=last-pass",
            "CWT+Replay stale := cwt:replay=vqvae2:codes=stale",
        ],
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
