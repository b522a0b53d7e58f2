"""A model as an ordered list of named stages, and how to cut it after one of them.

`B` batch, `C` channels, `H` height, `W` width.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Self, TypeVar, overload

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_replay.config.sections import one_of, require
from flwr_replay.errors import ConfigError
from flwr_replay.models.frozen import Frozen

__all__ = ["Part", "StagedModel", "TracedPart", "has_batch_norm", "placed", "split", "split_before_head", "staged"]

Module = TypeVar("Module", bound=nn.Module)


class StagedModel(nn.Sequential):
    """A sequence of named stages; built from an ``OrderedDict`` of modules as `torch.nn.Sequential` is.

    A stage's name is the first part of its parameters' names in the state dict (``layer1.0.conv1.weight``).
    """

    channels_last = False  # whether it is faster on a CPU with weights in this memory order; `placed` uses it
    foreign: Mapping[str, str] = MappingProxyType({})  # its publisher's names of the weights, by ours

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages, from input to output."""
        return tuple(self._modules)


class TracedPart(fx.GraphModule):
    """What a model's own `forward` does before or after a cut; it keeps the model's names."""

    stages: tuple[str, ...]  # from input to output

    @classmethod
    def of(cls, model: nn.Module, graph: fx.Graph, stages: tuple[str, ...]) -> Self:
        """Return the part of a model that a graph computes."""
        part = cls(model, graph)
        part.stages = stages
        return part


Part = StagedModel | TracedPart


def staged(net: nn.Module, /, **stages: nn.Module) -> StagedModel:
    """Make a model of a network's layers, whose weights may then be loaded by the network's own names.

    Parameters
    ----------
    net : Module
        The network from which layers were taken.
    stages : Module
        The stages by name, from input to output; the last is `head`.
    """
    names = {id(tensor): name for name, tensor in net.state_dict(keep_vars=True).items()}
    built = StagedModel(OrderedDict(stages))
    state = built.state_dict(keep_vars=True)
    built.foreign = {ours: names[id(tensor)] for ours, tensor in state.items() if id(tensor) in names}
    return built


def placed(model: Module, device: torch.device | str) -> Module:
    """Move a whole model to a device, with its weights in the memory order that is fastest there.

    Call it before the model is split. The order changes results by rounding only.
    """
    if torch.device(device).type == "cpu" and getattr(model, "channels_last", False):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.to(device)


@overload
def split(model: nn.Sequential, cut: str) -> tuple[StagedModel, StagedModel]: ...


@overload
def split(model: nn.Module, cut: str) -> tuple[Part, Part]: ...


def split(model: nn.Module, cut: str) -> tuple[Part, Part]:
    """Cut a model after one of its stages; Qu et al. 2022, Fig. 4, cut ResNet-34 after conv1.

    ``primary(encoder(x))`` performs the same operations as ``model(x)``.

    Parameters
    ----------
    model : Module
        The whole model; it is not changed. If it is no sequence, its `forward` is traced, and the stages are the
        layers that it calls once; whatever it does between two of them belongs to the later part.
    cut : str
        The encoder's last stage: any stage except the model's last, the head. Empty: the first stage.

    Returns
    -------
    encoder, primary : StagedModel, or TracedPart
        The stages up to and including `cut`, and the rest. Both share their parameters and buffers with `model`
        and keep its names: ``encoder.state_dict() | primary.state_dict()`` is ``model.state_dict()``.

    Raises
    ------
    ConfigError
        If `cut` is not a stage of `model` or is the head, if `model` cannot be traced, or more than one value passes
        the cut, or if both parts would train the same parameter.
    """
    graph = None if isinstance(model, nn.Sequential) else _traced(model)
    stages = tuple(model._modules) if graph is None else _called_once(graph)
    require(len(stages) > 1, f"a model that is cut has two stages or more; got {type(model).__name__}: name its parts")
    cuts = stages[:-1]
    if cut:
        frozen = isinstance(next(model.children(), None), Frozen)
        one_of(f"cut, with all up to {cuts[0]} frozen by model.train," if frozen else "cut", cut, cuts)
    first = cuts.index(cut) + 1 if cut else 1
    parts = (stages[:first], stages[first:])
    before, after = _halves(model, first) if graph is None else _graphs(model, graph, *parts)
    require(
        {*map(id, before.parameters())}.isdisjoint(map(id, after.parameters())),
        f"a model is cut where its parts share no weights; at cut={cuts[first - 1]!r} they do: cut elsewhere",
    )
    return before, after


def _halves(model: nn.Module, first: int) -> tuple[StagedModel, StagedModel]:
    stages = list(model.named_children())
    return StagedModel(OrderedDict(stages[:first])), StagedModel(OrderedDict(stages[first:]))


class _Layers(fx.Tracer):
    """Traces a model's own `forward`, not those of its children."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return "." not in module_qualified_name


def _traced(model: nn.Module) -> fx.Graph:
    """Return what a model computes with its children; a ConfigError if that depends on its input or its mode."""
    name, training = type(model).__name__, model.training
    try:
        graphs = [_Layers().trace(model.train(mode)) for mode in (False, True)]
    except Exception as error:
        line = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"a model is cut by tracing its forward; that of {name} cannot be traced ({line}): build it as a "
            "torch.nn.Sequential of named stages"
        ) from None
    finally:
        model.train(training)
    require(
        str(graphs[0]) == str(graphs[1]),
        f"the forward of {name} does otherwise in training, and only its layers may: use nn.Dropout, as one of them",
    )
    return graphs[1]


def _called_once(graph: fx.Graph) -> tuple[str, ...]:
    called = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    return tuple(name for name, times in called.items() if times == 1)


def _graphs(
    model: nn.Module, graph: fx.Graph, before: tuple[str, ...], after: tuple[str, ...]
) -> tuple[TracedPart, TracedPart]:
    """Cut a graph after the last layer of `before`; refuse what any other value passes, such as a skip connection's."""
    nodes = list(graph.nodes)
    at = next(place for place, node in enumerate(nodes) if node.target == before[-1])
    passing = {value for node in nodes[at + 1 :] for value in node.all_input_nodes} & {*nodes[: at + 1]}
    require(
        passing == {nodes[at]},
        f"one value passes a cut; at cut={before[-1]!r} of {type(model).__name__} {len(passing)} do: cut elsewhere",
    )
    encoder, primary = fx.Graph(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes[: at + 1]:
        copies[node] = encoder.node_copy(node, copies.__getitem__)
    encoder.output(copies[nodes[at]])
    copies = {nodes[at]: primary.placeholder("latents")}
    for node in nodes[at + 1 :]:
        copies[node] = primary.node_copy(node, copies.__getitem__)
    return TracedPart.of(model, encoder, before), TracedPart.of(model, primary, after)


def split_before_head(model: nn.Module, cut: str) -> tuple[StagedModel, StagedModel, StagedModel]:
    """Cut a model after one of its stages and again before its head, for U-shaped split learning.

    Returns
    -------
    encoder, middle, head : StagedModel
        As from `split`; the head is the model's last stage.

    Raises
    ------
    ConfigError
        As `split`, and if no stage is left between the two cuts.
    """
    if not isinstance(model, nn.Sequential):
        raise ConfigError(
            f"only a torch.nn.Sequential of named stages is cut twice; got {type(model).__name__}: build it as one"
        )
    encoder, rest = split(model, cut)
    earlier = "cut at an earlier stage" if len(encoder) > 1 else "train one there, model.train=from:STAGE"
    require(
        len(rest) > 1, f"encoder and head must leave a stage between them; got cut={encoder.stages[-1]!r}: {earlier}"
    )
    middle, head = split(rest, rest.stages[-2])
    return encoder, middle, head


def has_batch_norm(module: nn.Module) -> bool:
    """Say whether a module contains batch norm that trains: it mixes the examples of a batch and keeps statistics.

    Such a module has no per-example gradients, so it cannot be trained by DP-SGD. If its feature map is one pixel, it
    cannot be trained on a batch of one.
    """
    return any(isinstance(layer, _BatchNorm) for layer in module.modules())
