"""A finished run's model as one file for other programs, with a card that says what it is and what it is not."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flwr_replay.data.datasets import PREPARES
from flwr_replay.errors import ConfigError, RunError
from flwr_replay.files.atomic import write_atomic
from flwr_replay.files.disk import there
from flwr_replay.finished.trained import TrainedModel
from flwr_replay.privacy.noise import shown_noise
from flwr_replay.report.metrics import VALIDATION, epsilon_suffix
from flwr_replay.report.run_files import METRICS, RESULT, read_result, rows_of
from flwr_replay.report.summary import judged_by
from flwr_replay.runs.checkpoints import BestModel
from flwr_replay.terminal import installing

__all__ = ["FORMATS", "card", "export"]

PRIVATE = (
    "- This model stayed at its institution. Where the run's epsilon covers proxies or generators, it does not cover "
    "this model, which was trained without noise. It should not be passed on."
)
CHOSEN = (
    "- This round was chosen among all that were evaluated by these same examples. So the metrics above are "
    "optimistic: test it on examples that had no part in the choice."
)
LABEL_UNIT = ("mae", "rmse")  # metrics in the label's unit
FORMATS = {"torch": ".pt2", "onnx": ".onnx"}


def export(model: TrainedModel, form: str, out: Path, text: str) -> tuple[Path, Path]:
    """Write a model as one file, and its card beside it.

    The file maps float32 inputs, images in [0, 1], (B, C, H, W) of any B, to the outputs of `TrainedModel.forward`. It
    does not look at the range of what it is given. ONNX names them `input` and `output`; its metadata have `classes`,
    a JSON list.

    Parameters
    ----------
    model : TrainedModel
        From `load_model`.
    form : str
        torch: for `torch.export.load`. onnx: for ONNX runtimes; needs the extra `onnx`.
    out : Path
        The file, without or with its suffix.
    text : str
        The card.

    Returns
    -------
    tuple of Path
        The model's file and the card's.

    Raises
    ------
    ConfigError
        For another form, or if a package is missing.
    RunError
        If a file cannot be written.
    """
    if form not in FORMATS:
        raise ConfigError(f"--format must be one of {', '.join(FORMATS)}; got {form!r}")
    if out.is_dir():
        raise ConfigError(f"--out names a file; {out} is a folder: name a file in it")
    task, file = model.task, out if out.suffix == FORMATS[form] else out.with_name(out.name + FORMATS[form])
    example = (torch.zeros(2, task.channels, task.size, task.size),)
    whole = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(model, example, dynamic_shapes=({0: torch.export.Dim("batch")},))
            if form == "torch":
                torch.export.save(program, whole)
            else:
                exported = torch.onnx.export(
                    program, (), dynamo=True, verbose=False, input_names=["input"], output_names=["output"]
                )
                assert exported is not None  # with dynamo it returns a program
                exported.model.metadata_props["classes"] = json.dumps(model.classes)
                whole.write(exported.model_proto.SerializeToString())
    except ImportError as error:
        raise ConfigError(f"--format onnx needs {error.name}: {installing('onnx')}") from None
    write_atomic(file, whole.getvalue())
    write_atomic(file.with_suffix(".md"), text)
    return file, file.with_suffix(".md")


def card(folder: Path, model: TrainedModel, institution: str, best: bool = False) -> str:
    """Return a model card in Markdown: what it was trained on, how well it does, what is protected, and limits.

    The arguments are those by which `load_model` found the model in the run directory, which must have a result.
    """
    if not there(folder / RESULT):
        raise RunError(f"a model card needs a finished run; {folder} has no result.json: give a run directory")
    result, task = read_result(folder), model.task
    metrics = result["final"]["institutions"].get(institution, {}) if institution else result["final"]["global"]
    whose = f"the model of {institution}" if institution else "the global model"
    if best:
        exchange = BestModel(folder).exchange
        rows = [row for row in rows_of(folder, METRICS) if row["exchange"] == exchange]
        metrics = {row["metric"]: row["value"] for row in rows if row["institution"] == ""}
        whose = f"the global model of round {rows[0]['round']}, the best"
    by = judged_by(result) if best else "test"
    metrics = {name: value for name, value in metrics.items() if name.startswith(VALIDATION) == (by == "validation")}
    tested = f"the test examples of {institution}" if institution else f"all institutions' {by} examples"
    unit = f" {result['unit']}" if result["unit"] else ""
    figures = [f"{name} {value:.4f}{unit if name in LABEL_UNIT else ''}" for name, value in metrics.items()] or [
        "no test"
    ]
    return "\n".join(
        [
            f"# {result['strategy']} on {result['task']}: {whose}",
            "",
            f"- Network: {result.get('network') or _size(model)}",
            f"- Input: {_inputs(model)}. Output: {_outputs(model, unit)}.",
            f"- Trained by {result['strategy']} at {_trained_at(result)} institutions, {result['rounds']} rounds, seed "
            f"{result['seed']}; replay: {result['replay']}.",
            f"- On {tested}: {', '.join(figures)}{epsilon_suffix(result)}.",
            f"- Privacy of the run: {result['privacy-claim']}",
            *(
                f"  - {name}: {account['mechanism']}; {shown_noise(result.get('noise', {}).get(name, []))}".rstrip("; ")
                for name, account in result["privacy"].items()
                if account
            ),
            *([PRIVATE] if institution and not (folder / "models" / f"{institution}.safetensors").exists() else []),
            f"- Made with {', '.join(f'{name} {version}' for name, version in result['versions'].items())}.",
            "",
            "## Limits",
            "",
            *([CHOSEN] if best else []),
            "- The metrics are those of these examples. On examples from elsewhere the model may be far worse.",
            *(["- The probabilities are not calibrated."] if task.kind != "regression" else []),
            "- Nobody has examined this model as a medical device.",
            "- The weights depend on patients' data. What they may show of one, only an epsilon bounds.",
            "",
        ]
    )


def _size(model: TrainedModel) -> str:
    return f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters."


def _trained_at(result: Mapping[str, Any]) -> str:
    never = len(result.get("untrained", []))  # runs of older versions did not say
    return f"{result['nodes'] - never} of {result['nodes']}" if never else str(result["nodes"])


def _inputs(model: TrainedModel) -> str:
    task = model.task
    form = f"(B, {task.channels}, {task.size}, {task.size})"
    shown = f"images {form}, float in [0, 1]" if model.in_unit_range else f"float {form}"
    plain = model.in_unit_range and task.name not in PREPARES
    return shown if plain else f"{shown}, made as task={task.load or task.name} made them for the training"


def _outputs(model: TrainedModel, unit: str) -> str:
    if model.classes:
        return f"(B, {len(model.classes)}), probabilities of the classes {', '.join(model.classes)}"
    if model.task.kind == "regression":
        return f"(B,), numbers{unit and f' in{unit}'}"
    return f"(B, {model.task.size}, {model.task.size}), probabilities of the foreground, pixel by pixel"
