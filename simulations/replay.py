"""The gain from generative replay, and the cost of its privacy: Qu et al.'s Table 2 in shape, on small public data.

Sources: Qu et al. 2022, section 4.2 (CWT+Replay and FedAVG+Replay under skew), section 4.4 and Table 2 (with and
without differential privacy), Algorithm 1 and footnote 1.

All methods use one small CNN with group norm, since DP-SGD cannot have batch norm. `central` is the reference; the gap
is the difference between it and a plain method. DP-SGD needs a codebook that is learned by gradients. Rows "gradient
codebook" have it without DP, as a control. Rows "DP generator" have Qu et al.'s noise (0.7); codes, labels and the
classifier are not protected. Rows "end to end" have a budget of epsilon 8 for everything that depends on training
examples, and larger batches, which suit the noise. "DP; no replay" spends that budget on the classifier alone. On
PneumoniaMNIST a visit has a few steps only, so all methods keep their momentum from visit to visit, as in the study
`partitions`. Its images have more detail than digits, so the generator trains longer, and images are encoded once more
at the end.
"""

from collections.abc import Sequence

from flwr_replay.studies.study import Compared

__all__ = ["COMPARISONS"]

BUDGET = "target_epsilon=8:batch_size=200:lr=0.1"
PRIVATE = {
    "codes; gradient codebook": "replay=vqvae2:codebook=gradient",
    "codes; DP generator": "replay=vqvae2:dp=generator:codebook=gradient",
    "prior; end to end": (
        f"replay=pixelcnn:dp=end-to-end:codebook=gradient:{BUDGET}:generator.batch_size=200:generator.epochs=10"
        ":prior.batch_size=200:prior.epochs=15"
    ),
}
REPLAY, WITH_PRIVACY = ["central", "cwt", "fedavg"], ["central", "cwt", "fedavg"]
for _name, _plain in (("CWT", "cwt"), ("FedAVG", "fedavg")):
    REPLAY += [f"{_name}+Replay codes := {_plain}:replay=vqvae2", f"{_name}+Replay prior := {_plain}:replay=pixelcnn"]
    WITH_PRIVACY += [f"{_name} DP; no replay := {_plain}:dp=classifier:{BUDGET}"]
    WITH_PRIVACY += [f"{_name}+Replay {form} := {_plain}:{options}" for form, options in PRIVATE.items()]
CODES = [f"CWT+Replay {codes} := cwt:replay=vqvae2:codes={codes}" for codes in ("last-pass", "stale")]
CNN = ["model=cnn", "model.norm=group"]
MNIST = ["task=mnist", "partition=ks", "ks=0.93", "rounds=4", *CNN]
PNEUMONIA = ["task=medmnist", "partition=ks", "ks=0.6", "drop=true", "rounds=20", "optimizer_state=keep", *CNN]
PNEUMONIA += ["generator.epochs=30", "codes=last-pass"]


def comparison(name: str, about: str, methods: Sequence[str], options: Sequence[str], seeds: int) -> Compared:
    """Return a comparison on MNIST or PneumoniaMNIST."""
    metric, data = ("", "mnist") if options is MNIST else ("balanced-accuracy", "pneumoniamnist.npz")
    return Compared.led(name, about, methods, [*options, f"seeds={seeds}"], metric=metric, data=data)


COMPARISONS = [
    comparison("mnist", "The largest skew of four equal institutions.", [*REPLAY, *CODES], MNIST, seeds=5),
    comparison("pneumonia", "Chest X-rays, two classes, some of the larger one left out.", REPLAY, PNEUMONIA, seeds=5),
    comparison("mnist-private", "The same under differential privacy.", WITH_PRIVACY, MNIST, seeds=5),
    comparison("pneumonia-private", "The same under differential privacy.", WITH_PRIVACY, PNEUMONIA, seeds=1),
]
