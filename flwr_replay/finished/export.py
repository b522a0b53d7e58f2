"""A finished run's model as one file for other programs, with a card that says what it is and what it is not."""

import io
import json
import warnings
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import yaml

from flwr_replay.data.datasets import PREPARES
from flwr_replay.errors import ConfigError, FlwrReplayError, RunError
from flwr_replay.files.atomic import read_bytes, write_atomic
from flwr_replay.files.disk import there
from flwr_replay.finished.trained import TrainedModel, load_model
from flwr_replay.learning.tasks import make_task
from flwr_replay.models.layers import Prepared
from flwr_replay.report.comparison import markdown_table
from flwr_replay.report.metrics import SHARED, VALIDATION, epsilon_suffix
from flwr_replay.report.run_files import METRICS, RESULT, read_result, rows_of
from flwr_replay.report.run_page import confusion_table, labels_table, metrics_table, privacy_table
from flwr_replay.report.summary import confusion_of, judged_by, tested_of
from flwr_replay.runs.checkpoints import BestModel
from flwr_replay.terminal import installing

__all__ = ["FORMATS", "card", "export", "recognised"]

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
    does not look at the range of what it is given. ONNX names them `input` and `output`, and their free axis `batch`;
    its metadata have `classes`, a JSON list.

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
    if out.is_dir():
        raise ConfigError(f"--out names a file; {out} is a folder: name a file in it")
    whole = _exported(model, form)
    file = out if out.suffix == FORMATS[form] else out.with_name(out.name + FORMATS[form])
    write_atomic(file, whole)
    write_atomic(file.with_suffix(".md"), text)
    return file, file.with_suffix(".md")


def _exported(model: TrainedModel, form: str) -> bytes:
    """Return the content of the file that `export` writes; the same versions make the same of a model."""
    if form not in FORMATS:
        raise ConfigError(f"--format must be one of {', '.join(FORMATS)}; got {form!r}")
    task = model.task
    example = (torch.zeros(2, task.channels, task.size, task.size),)
    free, whole = ({0: torch.export.Dim("batch")},), io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(model, example, dynamic_shapes=free)
            graphs = (module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule))
            for node in chain.from_iterable(module.graph.nodes for module in graphs):
                node.meta.pop("stack_trace", None)  # it has this machine's folders
            if form == "torch":
                torch.export.save(program, whole)
            else:
                onnx = torch.onnx.export(
                    program,
                    (),
                    dynamo=True,
                    verbose=False,
                    dynamic_shapes=free,
                    input_names=["input"],
                    output_names=["output"],
                )
                assert onnx is not None  # with dynamo it returns a program
                onnx.model.metadata_props["classes"] = json.dumps(model.classes)
                whole.write(onnx.model_proto.SerializeToString())
    except ImportError as error:
        raise ConfigError(f"--format onnx needs {error.name}: {installing('onnx')}") from None
    return whole.getvalue()


def recognised(file: Path, place: Path) -> str:
    """Say whether a file is what `export` makes here of a run's model, its best round's, or a state's."""
    form = next((form for form, suffix in FORMATS.items() if suffix == file.suffix), "")
    whole = read_bytes(file)
    for institution, best in (("", False), ("", True), ("global", False)):
        with suppress(FlwrReplayError):  # there is no such model, or the file is of no form
            if _exported(load_model(place, institution, best=best), form) == whole:
                return f"{file.name} is this run's model, exported again here with the same bits."
    return f"Whether {file.name} is this run's model was not found: exported again here, none has its bits."


def card(folder: Path, model: TrainedModel, institution: str, best: bool = False) -> str:
    """Return a model card in Markdown: what it was trained on, how well it does, what is protected, and limits.

    The arguments are those by which `load_model` found the model in the run directory, which must have a result.
    """
    if not there(folder / RESULT):
        raise RunError(f"a model card needs a finished run; {folder} has no result.json: give a run directory")
    result, task = read_result(folder), model.task
    final, confusion = result["final"], BestModel(folder).confusion if best else confusion_of(folder)
    whose = f"the model of {institution}" if institution else "the global model"
    prefix = f"{institution}-"
    shared = prefix in SHARED and institution not in final["institutions"]  # tested beside institutions' own models
    if shared:
        own = {name: value for name, value in final["global"].items() if name.startswith(prefix)}
        whose, final = "the global model", {"global": {n.removeprefix(prefix): value for n, value in own.items()}}
    elif institution:
        final = {"global": final["institutions"].get(institution, {})}
    if institution:
        confusion = {name: counts for name, counts in confusion.items() if name == institution}
    if best:
        exchange = BestModel(folder).exchange
        rows = [row for row in rows_of(folder, METRICS) if row["exchange"] == exchange]
        tested_by: dict[str, dict[str, float]] = {}
        for row in rows:
            tested_by.setdefault(row["institution"], {})[row["metric"]] = row["value"]
        final = {"global": tested_by.pop("", {}), "institutions": tested_by}
        whose = f"the global model of round {rows[0]['round']}, the best"
    by = judged_by(result) if best else "test"
    metrics = {n: value for n, value in final["global"].items() if n.startswith(VALIDATION) == (by == "validation")}
    tested = f"the test examples of {institution}" if institution and not shared else f"all institutions' {by} examples"
    by_site = None
    if metrics and not institution:
        of_round = {**result, "final": {**final, "global": metrics}}
        by_site = metrics_table(of_round, folder, tested_of(folder) if by == "test" else {}) | {
            "caption": f"On {tested}"
        }
    never = len(result.get("untrained", []))  # runs of older versions did not say
    trained_at = f"{result['nodes'] - never} of {result['nodes']}" if never else result["nodes"]
    unit = f" {result['unit']}" if result["unit"] else ""
    figures = [f"{name} {value:.4f}{unit if name in LABEL_UNIT else ''}" for name, value in metrics.items()] or [
        "no test"
    ]
    return "\n".join(
        [
            *_front_matter(result, model, by, metrics),
            f"# {result['strategy']} on {result['task']}: {whose}",
            "",
            f"- Network: {result.get('network') or _size(model)}",
            f"- Input: {_inputs(model)}. Output: {_outputs(model, unit)}.",
            *([f"- Preparation: {_preparation(model)}."] if model.in_unit_range else []),
            f"- Trained by {result['strategy']} at {trained_at} institutions, {result['rounds']} rounds, seed "
            f"{result['seed']}; replay: {result['replay']}.",
            f"- On {tested}: {', '.join(figures)}{epsilon_suffix(result)}.",
            f"- Privacy of the run: {result['privacy-claim']}",
            *([PRIVATE] if institution and not (folder / "models" / f"{institution}.safetensors").exists() else []),
            f"- Made with {', '.join(f'{name} {version}' for name, version in result['versions'].items())}.",
            "",
            "## Intended use",
            "",
            "For who releases it to fill in: for whom, for which decision, on which images, and for what not.",
            "",
            *_headed("Results by institution", by_site),
            *_headed("Confusion matrix", confusion_table(result, confusion, model.classes)),
            *_headed("Class counts", labels_table(result, model.classes)),
            *_headed("Privacy", privacy_table(result)),
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


def _front_matter(
    result: Mapping[str, Any], model: TrainedModel, split: str, metrics: Mapping[str, float]
) -> list[str]:
    """Return the metadata with which Hugging Face's model cards begin; its tasks have no regression on images."""
    task, kind = model.task, model.task.kind
    form = f"tabular-{kind}" if task.size == 1 else "other" if kind == "regression" else f"image-{kind}"
    named = {name.removeprefix(VALIDATION): value for name, value in metrics.items()}
    shown = [{"type": name, "value": value} for name, value in named.items() if name in make_task(task).metrics]
    data = {"name": task.name, "type": task.name, "split": split}
    results = [{"task": {"type": form}, "dataset": data, "metrics": shown}] if shown else []
    matter = {
        "pipeline_tag": form,
        "tags": ["federated-learning", "flower", result["strategy"]],
        "metrics": [metric["type"] for metric in shown],
        "model-index": [{"name": f"{result['strategy']}-{task.name}", "results": results}],
    }
    license_line = "license: unknown  # for who releases it to fill in"
    return ["---", license_line, *yaml.safe_dump(matter, sort_keys=False).splitlines(), "---", ""]


def _headed(heading: str, table: Mapping[str, Any] | None) -> list[str]:
    """Return a heading and a table of a run's page, whose cells may have a shade beside them; nothing of None."""
    if not table:
        return []
    lines = [table["heads"], *([cell[0] if isinstance(cell, tuple) else cell for cell in row] for row in table["rows"])]
    heads, *rows = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
    return [f"## {heading}", "", f"{table['caption']}:", "", *markdown_table(heads, rows), ""]


def _preparation(model: TrainedModel) -> str:
    """Say how an image becomes the input, and what the network then does to it itself."""
    task = model.task
    fitted = f"{task.channels} channel{'s' * (task.channels > 1)}, {task.size} x {task.size} pixels (fit: {task.fit})"
    own = [layer.extra_repr() for layer in model.network.modules() if isinstance(layer, Prepared)]
    if task.mean and not own:
        mean, std = (", ".join(f"{number:g}" for number in of) for of in (task.mean, task.std))
        own = [f"mean {mean}; standard deviation {std}"]
    return f"{fitted}, bytes divided by 255; {f'the model itself then: {own[0]}' if own else 'not standardised'}"


def _size(model: TrainedModel) -> str:
    return f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters."


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
