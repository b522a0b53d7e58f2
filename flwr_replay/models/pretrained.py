"""Weights from a user's file, of a model to begin with or of an encoder; nothing is downloaded."""

import logging
import re
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

from flwr_replay.config.model import LITE0, is_name
from flwr_replay.errors import ConfigError
from flwr_replay.models.hub import fetched
from flwr_replay.models.timm_models import for_channels, packaged

__all__ = ["load_pretrained", "read_encoder", "read_weights"]

# Foreign names of layers, and ours: torchvision's ResNet, Buda et al.'s U-Net for brain MRI; DenseNet's old names.
NAMES: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
    (r"^conv1\.weight$", lambda m: "conv1.conv.weight"),
    (r"^bn1\.", lambda m: "conv1.norm."),
    (r"^fc\.", lambda m: "head.fc."),
    (r"^encoder1\.enc1", lambda m: "enc1."),
    (r"^encoder(\d)\.enc\d", lambda m: f"rest.down.{int(m[1]) - 2}."),
    (r"^bottleneck\.bottleneck", lambda m: "rest.down.3."),
    (r"^upconv(\d)\.", lambda m: f"rest.up.{int(m[1]) - 1}."),
    (r"^decoder(\d)\.dec\d", lambda m: f"rest.join.{int(m[1]) - 1}."),
    (r"^conv\.", lambda m: "head.conv."),
    (r"(denselayer\d+\.(?:norm|conv))\.(\d)\.", lambda m: f"{m[1]}{m[2]}."),
)
DEPTH = 3  # of what wraps a model: in its checkpoint (state.model), and before its names (module.backbone.)
BLOCKED = re.compile(r"GLOBAL ([\w.]+)|(TorchScript) archives")  # in PyTorch's error, what is no tensor
# How files begin that should be weights, and are none.
NO_WEIGHTS = (
    (rb"\Z", "it is empty"),
    (rb"version https://git-lfs", "it is a pointer of Git LFS, not the file itself, which `git lfs pull` fetches"),
    (rb"(\xef\xbb\xbf)?\s*<", "it is a web page, perhaps of a login: download the file itself"),
)
TENSORS = (
    ".weight",
    ".bias",
    ".running_var",
    "gain",
    "gamma",
)  # what trains is called so; other numbers of a file may be its constants


class Found(NamedTuple):
    """The weights of one model in a file, by its own names, and where they were: under 'ema', after 'module.'."""

    arrays: dict[str, Tensor]
    where: str


def load_pretrained(model: nn.Module, file: str, library: str = "", own_code: bool = False) -> nn.Module:
    """Copy the weights of `model.weights` into a model, in place.

    A head of another shape keeps its fresh weights; so does one beside a publisher's network, whose head is for other
    classes.

    It is a .safetensors file, or a .pt or .pth file of a state dict or of a checkpoint that holds one, with the model's
    names, its publisher's, torchvision's (ResNet) or those of Buda et al. 2019 (U-Net); a prefix as `module.` may stand
    before. With `library="timm"` it may also be the name of weights on timm's hub that were fetched, or `lite0`. With
    `own_code` the model may be a part of the file's network. The model's last stage is `head`.

    Raises
    ------
    ConfigError
        If the file cannot be read, if a weight outside the head is missing or has another shape, or if the model's
        stages have not all that the file has of them.
    """
    own, foreign = model.state_dict(), getattr(model, "foreign", {})
    if library and file == LITE0:
        weights = Found(packaged({foreign[name]: tensor for name, tensor in own.items() if name in foreign}), "")
    else:
        path = fetched(file) if library and is_name(file) else Path(file).expanduser().absolute()
        weights = read_weights(path, "model.weights", {*own, *foreign.values()})
    theirs = any(there in weights.arrays and name not in weights.arrays for name, there in foreign.items())
    for name, tensor in own.items():
        published = foreign.get(name, name) if theirs else name
        if theirs and name not in foreign and name.startswith("head."):
            continue
        held = weights.arrays.get(published)
        if held is not None and foreign:
            held = for_channels(held, tensor)
        if held is not None and held.shape == tensor.shape:
            tensor.copy_(held)
        elif name.startswith("head."):
            logging.getLogger("flwr").info("%s: %s keeps its fresh weights", file, name)
        elif not name.endswith("num_batches_tracked"):  # older files lack it
            raise _lacking("model.weights", published, tuple(tensor.shape), file, weights)
    known = {*foreign.values()} if theirs else {*own}
    stages = {name.partition(".")[0] for name in known if not own_code}
    stages -= {"head"}  # a publisher's is for other classes
    for name in weights.arrays:
        if name not in known and name.partition(".")[0] in stages and name.endswith(TENSORS):
            raise ConfigError(
                f"model.weights must be of the model's own architecture, which has no {name!r}; {file}{weights.where} "
                "has: choose the model, or model.name, as the file's publisher does"
            )
    return model


def read_weights(path: Path, option: str, names: Collection[str] = ()) -> Found:
    """Read a model's weights from a .safetensors, .pt or .pth file.

    It has a state dict, or a checkpoint that holds one: `{"state_dict": …, "epoch": 3}`. `names` are some of the model.
    Of several models in the file, and of prefixes before their names, those are taken with which most of these names
    are found. `option` is that which asked.

    Raises
    ------
    ConfigError
        If the file cannot be read, holds several models that fit, or numbers that are not dense, finite and real, of at
        least 16 bits.
    """
    none = None
    try:
        # timm's scripts keep their arguments in a Namespace
        with open(path, "rb") as file, torch.serialization.safe_globals([Namespace]):
            begins = file.read(64)
            none = next((what for begin, what in NO_WEIGHTS if re.match(begin, begins)), None)
            file.seek(0)
            safe = begins[8:9] == b"{"  # after the length of a safetensors header
            loaded = load_file(path) if safe else torch.load(file, "cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise any error
        blocked = BLOCKED.search(str(error))
        line = f"{type(error).__name__} {' '.join(str(error).split())[:200]}"
        if isinstance(error, UnpicklingError):  # PyTorch's line advises to run whatever the file holds
            line = "torch.save did not write it so"
        if blocked:  # a whole model, or arguments beside the weights
            line = (
                f"it also holds {blocked[1] or blocked[2]}, which may run code when it is read: where you trust its "
                "author, save its weights alone, torch.save(model.state_dict(), 'weights.pth')"
            )
        raise ConfigError(
            f"{option} must be a .safetensors or .pth file of weights; got {path}: {none or line}"
        ) from None
    views = [view for state in _states(loaded) for view in _views(state, names)]
    if not views:
        raise ConfigError(
            f"{option} must be a .safetensors or .pth file of weights; {path} has no arrays by name: save "
            "torch.save(model.state_dict(), 'weights.pth')"
        )
    wanted = {name for name in names if not name.endswith("num_batches_tracked")}  # older files lack it
    fitting = [len(view.arrays.keys() & wanted) for view in views]
    best = [view for view, fits in zip(views, fitting, strict=True) if fits == max(fitting)]
    if len(best) > 1 and 2 * max(fitting) >= len(wanted) > 0:
        places = ",".join(view.where or " at its top" for view in best)
        raise ConfigError(
            f"{option} must hold one model; {path} has several that fit:{places}: save the one that you want alone, "
            "torch.save(torch.load(FILE)[NAME], 'weights.pth')"
        )
    arrays = dict(best[0].arrays)
    for name, tensor in best[0].arrays.items():
        dense = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized or tensor.is_complex())
        whole = dense and (tensor.element_size() > 1 or tensor.dtype is torch.bool)  # int8 and float8 have other scales
        arrays[name] = tensor.float() if whole and tensor.is_floating_point() else tensor
        if whole and torch.isfinite(arrays[name]).all():
            continue
        if not names or name in names:
            raise ConfigError(
                f"{option} must hold dense, finite, real numbers of at least 16 bits; {name!r} in {path} does not"
            )
        del arrays[name]  # a publisher's thresholds, NaN for classes that it did not train
    return best[0]._replace(arrays=arrays)


def read_encoder(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[Any]]:
    """Read the encoder's weights from the user's file.

    Raises
    ------
    ConfigError
        If it cannot be read, or a weight before the cut is missing or has another shape.
    """
    weights = read_weights(path, "strategy.encoder-file", shapes)
    for name, shape in shapes.items():
        if name not in weights.arrays or weights.arrays[name].shape != shape:
            raise _lacking("strategy.encoder-file", name, shape, path, weights)
    return {name: weights.arrays[name].numpy() for name in shapes}


def _lacking(option: str, name: str, shape: tuple[int, ...], file: str | Path, weights: Found) -> ConfigError:
    has = f"has {tuple(weights.arrays[name].shape)}" if name in weights.arrays else "lacks it"
    held = "" if name in weights.arrays else f"; it holds {', '.join(list(weights.arrays)[:4])}, …"
    return ConfigError(f"{option} must hold {name!r} with shape {shape}; {file}{weights.where} {has}{held}")


def _states(loaded: Any, where: tuple[str, ...] = ()) -> Iterator[Found]:
    """Yield the state dicts in what a file holds, and where each is; an optimizer's lie under numbers."""
    if not isinstance(loaded, Mapping) or len(where) > DEPTH:
        return
    arrays = {name: value for name, value in loaded.items() if isinstance(name, str) and isinstance(value, Tensor)}
    if any(tensor.ndim for tensor in arrays.values()):  # not a best score alone
        yield Found(arrays, f" under {'.'.join(where)!r}" if where else "")
    for name, value in loaded.items():
        if isinstance(name, str):
            yield from _states(value, (*where, name))


def _views(state: Found, names: Collection[str]) -> Iterator[Found]:
    """Yield a state with the names as they are; if none of them fits, with each prefix left out with which one does."""
    plain = _renamed(state.arrays, names)
    if not names or any(name in plain for name in names):
        yield Found(plain, state.where)
        return
    paths = (name.split(".") for name in state.arrays)
    prefixes = {".".join(path[:depth]) + "." for path in paths for depth in range(1, min(len(path), DEPTH + 1))}
    fits = False
    for prefix in sorted(prefixes):
        under = {name.removeprefix(prefix): a for name, a in state.arrays.items() if name.startswith(prefix)}
        arrays = _renamed(under, names)
        if any(name in arrays for name in names):
            fits = True
            yield Found(arrays, f"{state.where} after {prefix!r}")
    if not fits:
        yield state


def _renamed(arrays: dict[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """Return weights by our names of layers, where more of those fit than of their own."""
    renamed = arrays
    for pattern, ours in NAMES:
        renamed = {re.sub(pattern, ours, name): tensor for name, tensor in renamed.items()}
    return max(arrays, renamed, key=lambda weights: len(weights.keys() & set(names)))
