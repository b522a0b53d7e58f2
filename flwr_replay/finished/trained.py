"""The models that a finished run leaves, ready to use: from images or tables to probabilities, or numbers with a unit.

A server keeps `models/<name>.safetensors` in the run directory. Private models (ProxyFL, FML, Local) stay in the state
directories of their institutions.

`B` batch, `C` channels or classes, `H` height, `W` width.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from flwr_replay.config.binding import digest_of
from flwr_replay.config.compose import compose_own, model_named
from flwr_replay.config.halves import load_strategy
from flwr_replay.config.model import ModelConfig
from flwr_replay.config.run import RunConfig
from flwr_replay.config.sections import TaskConfig
from flwr_replay.data.classes import Classes
from flwr_replay.errors import DamagedError, DataError, RunError, nearest
from flwr_replay.files.atomic import home, read_text
from flwr_replay.files.disk import entries, there
from flwr_replay.files.tensors import OF_RUN, StateDict, read_with_texts, unnested
from flwr_replay.learning.pooling import Pool
from flwr_replay.learning.tasks import Regression, make_task
from flwr_replay.models.layers import as_input
from flwr_replay.models.zoo import build, encoder_digest
from flwr_replay.report.run_files import RESULT, model_of, read_result, read_run_id
from flwr_replay.runs.checkpoints import BestModel, Checkpoints
from flwr_replay.runs.options import kept_overrides, run_overrides
from flwr_replay.state.store import ENCODER, OPTIONS, ORIGIN, RUNS
from flwr_replay.wire.weights import load_arrays

__all__ = ["TrainedModel", "load_model"]

PRIVATE = ("pair", "model", "tested")  # keys of an institution's state that hold the model that it uses, own ones first
ANY_NUMBERS = ("own", "bags")  # formats whose examples need not lie in [0, 1]
LOWEST, HIGHEST = -0.5, 1.5  # of images: beyond what resizing makes of [0, 1]


class TrainedModel(nn.Module):
    """A network with what stands around it.

    Parameters
    ----------
    network : nn.Module
        In evaluation mode, with trained weights. It standardises its input itself.
    task : TaskConfig
        The form of an example, and the kind of label.
    mean, scale : float
        Of the labels of a regression, in their unit.

    Attributes
    ----------
    classes : tuple of str
        The names of the classes in the order of the outputs; numbers, if the run had no names. Empty for other kinds.
    in_unit_range : bool
        Whether examples are images in [0, 1].
    """

    def __init__(self, network: nn.Module, task: TaskConfig, mean: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.network, self.task, self.mean, self.scale = network, task, mean, scale
        self.classes = Classes(task).names if task.kind == "classification" else ()
        self.in_unit_range = task.size > 1 and task.format not in ANY_NUMBERS

    def forward(self, x: Tensor) -> Tensor:
        """Return what the network makes of examples.

        Parameters
        ----------
        x : Tensor
            (B, ...) as the task has them: images (B, C, H, W), uint8 or in [0, 1].

        Returns
        -------
        Tensor
            Classification: (B, C) probabilities. Regression: (B,) in the label's unit. Segmentation: (B, H, W)
            probabilities of the foreground.

        Raises
        ------
        DataError
            If numbers lie far outside [0, 1], as 0..255 or standardised ones do; a little, as after a cubic resize, is
            allowed. Tables, bags and a task of your own may have any numbers.
        """
        x = as_input(x)
        if self.in_unit_range and x.numel() and not torch.compiler.is_compiling():
            low, high = x.min().item(), x.max().item()
            if not (low >= LOWEST and high <= HIGHEST):  # also for a value that is no number
                raise DataError(
                    f"images must be bytes (uint8), or numbers in [0, 1]; got numbers from {low:.4g} to {high:.4g}: "
                    "divide by the highest possible value, and do not standardise: the model does that itself"
                )
        outputs: Tensor = self.network(x)
        if self.task.kind == "classification":
            return outputs.softmax(1)
        if self.task.kind == "regression":
            return outputs.flatten() * self.scale + self.mean
        return outputs.softmax(1)[:, 1] if outputs.shape[1] == 2 else outputs.sigmoid().squeeze(1)


def load_model(place: str | Path, institution: str = "", run: str = "", *, best: bool = False) -> TrainedModel:
    """Load the model of a finished run.

    Parameters
    ----------
    place : str or Path
        A run directory, or an institution's state directory.
    institution : str
        In a simulation of a method whose models stay, or travel one by one: whose. Empty: the global model, unless
        institutions tested models of their own: then `global` is what the server has.
    run : str
        In a state directory, the run's id; empty: the last one.
    best : bool
        The global model of the round with the best main metric, in place of the last round's. It was chosen by the
        examples by which rounds were judged, so its metrics on these are optimistic.

    Returns
    -------
    TrainedModel
        In evaluation mode, on the CPU.

    Raises
    ------
    RunError
        If there is no such model; the line says which there are.
    """
    folder = Path(place).expanduser().absolute()
    if best and (institution or not (folder / "config.yaml").exists()):
        raise RunError("only a run's global model has a best round: give the run directory, and no institution")
    if (folder / "config.yaml").exists():
        config = compose_own(run_overrides(folder))
        _check_encoder(read_result(folder).get("encoder", "") if there(folder / RESULT) else "", config)
        if best:
            network = _network(config, model_of(folder, BestModel(folder).file()))
        else:
            network = _of_run(folder, institution, config)
        scale = _label_scale(folder, config)
    elif (folder / RUNS).is_dir():
        of_run = _chosen(folder / RUNS, run)
        config, scale = compose_own(kept_overrides(of_run)), None
        _check_encoder(read_text(of_run / ENCODER) if there(of_run / ENCODER) else "", config)
        network = _private(of_run, config)
        if isinstance(task := make_task(config.task), Regression):
            if not task.bounded:
                raise RunError(
                    "a regression's labels were standardised by sums that only the server has: give the run directory"
                )
            scale = task.mean, task.scale
    else:
        raise RunError(
            f"a model is in a run directory or in an institution's state directory; {folder} is neither: "
            "`flwr-replay runs list` names the runs"
        )
    return TrainedModel(network, config.task, *(scale or (0.0, 1.0))).eval()


def _check_encoder(then: str, config: RunConfig) -> None:
    """Refuse a file of weights that is not the one whose encoder the run had; older runs had none."""
    if then and (now := encoder_digest(config.model, config.task)) != then:
        raise RunError(
            f"the encoder must be the run's, {then}; that of model.weights={config.model.weights} is {now}: put the "
            "file of then back"
        )


def _of_run(folder: Path, institution: str, config: RunConfig) -> nn.Module:
    """Return the global model; by an institution's name what the server has of it, or its private one if simulated."""
    file = folder / "models" / f"{institution or 'global'}.safetensors"
    own = load_strategy(config.strategy.name)[0].traits().own_models  # of which a global one is a part, or none
    if file.exists() and (institution or not own):
        return _network(config, model_of(folder, file))
    if not institution:
        names = [path.stem for path in entries(folder / "models", "*.safetensors")]
        named = f"NAME, of an institution, or one of {', '.join(names)}" if names else "NAME, of an institution"
        raise RunError(
            f"{folder} has no global model that was tested alone: institutions have models of their own; give "
            f"--institution {named}"
        )
    states = home() / "state" / "simulation"
    of_run = states / institution / RUNS / read_run_id(folder)
    if not of_run.is_dir():
        names = sorted(path.name for path in states.iterdir() if path.is_dir()) if states.is_dir() else []
        hint = nearest(institution, names) if names else "in a deployment, give its state directory"
        raise RunError(f"no model of {institution!r} is in {folder}, nor with a simulated institution: {hint}")
    return _private(of_run, config)


def _chosen(runs: Path, run: str) -> Path:
    """Return the folder of a run at an institution: the named one, or the last."""
    of_runs = [path for path in runs.iterdir() if there(path / OPTIONS)]
    names = [path.name for path in sorted(of_runs, key=lambda path: path.stat().st_mtime)]
    if not names or (run and run not in names):
        hint = nearest(run, names) if names else "it has none"
        raise RunError(f"--run must be a run of {runs.parent}; got {run!r}: {hint}")
    return runs / (run or names[-1])


def _private(of_run: Path, config: RunConfig) -> nn.Module:
    """Return the model that an institution uses, as its last exchange left it; with listen=pool both halves."""
    for key in PRIVATE:
        files = entries(of_run, f"{key}-[0-9]*.safetensors")
        if not files:
            continue
        arrays = _kept(files[-1])
        if key != "pair":
            return _network(config, arrays)
        model = _network(config, unnested(arrays)["model"])
        pools = entries(of_run, "pool-[0-9]*.safetensors")
        if not pools:
            return model
        pool = _kept(pools[-1])
        a, b = pool["weights"].tolist()
        return Pool(model, _network(config, unnested(pool)["other"]), (a, b))
    raise RunError(
        f"{of_run} holds no model that can be loaded: give the run directory, if its method has a global one"
    )


def _kept(file: Path) -> StateDict:
    """Return what an institution has kept of a run, if it is of this run and its options."""
    arrays, texts = read_with_texts(file)
    run, origin = file.parent.name, digest_of(read_text(file.parent / OPTIONS))
    if texts.get(ORIGIN, origin) != origin or texts.get(OF_RUN, run) != run:
        raise DamagedError(
            f"{file} must be of its folder's run and {OPTIONS}; it was made under others: put the run's own file back"
        )
    return arrays


def _network(config: RunConfig, arrays: StateDict) -> nn.Module:
    """Build the architecture that these weights fit: the run's, or one of its private models."""
    models: Sequence[ModelConfig] = [config.model, *map(model_named, config.strategy.private_models)]
    shapes = {name: tuple(array.shape) for name, array in arrays.items()}
    for model in models:
        network = build(model, config.task, 0)
        if {name: tuple(array.shape) for name, array in network.state_dict().items()} == shapes:
            load_arrays(network, arrays)
            return network.eval()
    raise RunError(f"the weights fit none of the run's networks, {', '.join(model.name for model in models)}")


def _label_scale(folder: Path, config: RunConfig) -> tuple[float, float] | None:
    if not isinstance(make_task(config.task), Regression):
        return None
    checkpoint = Checkpoints(folder, ()).read(lambda text: None)
    scale = checkpoint[1]["label-scale"] if checkpoint else None
    if scale is None:
        raise RunError(f"{folder / 'checkpoints'} must hold the mean and scale of the labels; they are missing")
    return float(scale[0]), float(scale[1])
