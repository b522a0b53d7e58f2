"""What an honest-but-curious server finds in recorded messages: Qu et al.'s Table 3 in shape, on digits and X-rays.

Source: Qu et al. 2022, sections 3.3 and 4.4.2, Table 3: accuracy and PSNR of FedAVG and of latents behind four cuts.
They attack by optimisation only, and score by PSNR only. Here a decoder learned on others' images attacks, too, and
`identified` says how often a reconstruction points to the right one of the institution's images.

Two institutions; the attacker has 2,000 images of the same source that no institution has. All attacks on a run share
twelve seconds, so that the study takes an hour: a longer search finds more (--minutes). An institution of `gradient-1`
has one image, so that "identified" says nothing there.
"""

from collections.abc import Sequence

from flwr_replay.studies.study import Compared

__all__ = ["COMPARISONS"]

MNIST = ["task=mnist", "partition=ks", "ks=0.9", "partition.size=1000", "nodes=2", "rounds=5", "evaluate_every=5"]
XRAYS = [
    "task=medmnist",
    "classes=2",
    "partition=iid",
    "partition.size=1000",
    "nodes=2",
    "rounds=5",
    "evaluate_every=5",
]
CUTS = ("conv1", "layer1", "layer2", "layer3")
RESNET = "model=resnet18:model.width={width}:model.norm={norm}"
MODELS = {  # batch norm refuses batches of one image
    "mlp": "model=mlp",
    "lenet5": "model=lenet5",
    "cnn": "model=cnn:model.norm=group",
    "resnet18": RESNET.format(width=16, norm="group"),
}
PRIVATE = "dp=classifier:target-epsilon=8:delta=1e-5"
LATENTS = "dp=latents:latent-clip=10:label-epsilon=20"
FEW = ["task=mnist", "partition=iid", "nodes=2", "rounds=1"]


def comparison(
    name: str, about: str, methods: Sequence[str], options: Sequence[str], data: str = "mnist-full", field: str = ""
) -> Compared:
    """Return a comparison whose runs record their messages and are attacked."""
    recorded = [*options, "record=all", "seeds=5"]
    return Compared.led(name, about, methods, recorded, data=data, attack="undealt", field=field)


def latents(width: int) -> list[str]:
    """Return FedReplay behind each cut of a ResNet-18."""
    own = RESNET.format(width=width, norm="batch")
    return [f"latents, {cut} := fedreplay:cut={cut}:{own}" for cut in CUTS]


def table() -> list[str]:
    """Return the rows of Table 3: FedReplay and SplitNN behind each cut, FedAvg and FedSGD."""
    own = RESNET.format(width=16, norm="batch")
    halves = [f"splitnn, {cut} := splitnn:cut={cut}:{own}" for cut in CUTS]
    return [*latents(16), *halves, *(f"{name} := {name}:{own}" for name in ("fedavg", "fedsgd"))]


def gradients(examples: int, steps: int = 1) -> Compared:
    """Return a comparison of trainings of so many steps of so many images, and of one gradient of all images."""
    kinds = ("fedavg", "fedsgd") if steps == 1 < examples else ("fedavg",)  # of one image they are the same
    models = list(MODELS.items())[: 3 if steps > 1 else 4]  # unrolled steps of a ResNet-18 take too long
    methods = [f"{name} {model} := {name}:{options}" for name in kinds for model, options in models]
    methods += [f"fedavg {model}, epsilon 8 := fedavg:{options}:{PRIVATE}" for model, options in models[:3]]
    size = examples * steps + examples - 1  # some images take no part in a training
    about = f"{steps} steps of {examples} of {size} images; gradients are of all of them."
    options = [*FEW, f"partition.size={size}", f"training.batch-size={examples}"]
    return comparison(f"gradient-{examples}" if steps == 1 else f"steps-{steps}", about, methods, options)


def gradients_of_xrays() -> Compared:
    """Return what Table 3 has of FedAvg, on X-rays: weights after one step on 8 of 15 images, and a gradient of all."""
    methods = [f"{name} {model} := {name}:{own}" for name in ("fedavg", "fedsgd") for model, own in MODELS.items()]
    options = ["task=medmnist", "classes=2", *FEW[1:], "partition.size=15", "training.batch-size=8"]
    about = "1 step of 8 of 15 X-rays; gradients are of all of them."
    return comparison("gradient-8-xrays", about, methods, options, "pneumoniamnist.npz")


def of_the_network(examples: int) -> Compared:
    """Return a comparison of weights that are of a part of the network, or of proxies that have mixed."""
    halves = {"lenet5, conv1": "lenet5:cut=conv1", "lenet5, hidden2": "lenet5:cut=hidden2", "mlp": "mlp"}
    kinds = {"encoder": "fedreplay:encoder-epochs=1", "half": "splitnn"}
    methods = [
        f"{kind} {name} := {method}:model={own}" for kind, method in kinds.items() for name, own in halves.items()
    ]
    methods += [
        f"proxy {name}, beta {beta} := proxyfl:rounds=3:dp=none:model={name}:beta={beta}"
        for name in ("mlp", "lenet5")
        for beta in (0, 0.5)
    ]
    options = [*FEW, f"partition.size={examples + max(1, examples // 9)}", f"training.batch-size={examples}"]
    about = f"One step of {examples} images: what came back is a part of the network, or a proxy."
    return comparison(f"parts-{examples}", about, methods, options, field="arrays")


def local_dp() -> Compared:
    """Return FedReplay behind layer3 with and without local DP."""
    methods = ["none := fedreplay"]
    methods += [f"epsilon {e + 20} := fedreplay:{LATENTS}:latent-epsilon={e}" for e in (200, 50, 8)]  # of both
    options = [*MNIST, "model=resnet18", "model.width=16", "cut=layer3", "delta=1e-5"]
    return comparison("local-dp", "Latents behind layer3 under local DP.", methods, options)


COMPARISONS = [
    comparison(
        "mnist", "Table 3 on digits: ResNet-18 of width 16, at about the paper's values per pixel.", table(), MNIST
    ),
    comparison("mnist-narrow", "Latents of width 5: a third of the paper's values per pixel.", latents(5), MNIST),
    comparison("xrays", "Table 3 on chest X-rays.", table(), XRAYS, "pneumoniamnist.npz"),
    *map(gradients, (1, 8, 32)),
    gradients_of_xrays(),
    *(gradients(8, steps) for steps in (4, 16)),
    *map(of_the_network, (8, 32)),
    local_dp(),
    comparison("codes", "Codes of a VQ-VAE-2, with CWT.", ["cwt, codes := cwt:replay=vqvae2"], [*MNIST, "model=cnn"]),
]
