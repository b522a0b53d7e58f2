"""The privacy lab's page: what recorded messages show, in sentences, pictures and figures; one file, no network."""

import base64
from collections.abc import Sequence
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flwr_replay.files.atomic import write_atomic
from flwr_replay.generators.pictures import SCALE, SHOWN
from flwr_replay.lab.sentences import DOES_NOT_SHOW, between, found, headline
from flwr_replay.report.charts import Chart, Row, dots, write_figures
from flwr_replay.report.templates import render

__all__ = ["write_page"]

SHARE = "{:.1%}"
FIELD = ("institution, field", "attack")
IMAGES = (
    *(*FIELD, "images", "PSNR, dB", "SSIM", "identified [95 %]", "control", "mean image, dB"),
    *("nearest auxiliary image, dB", "values per pixel", "steps", "s"),
)
MEMBERS = (*FIELD, "members, others", "AUC [95 %]", "found at 1 % false alarms", "at 0.1 %")


def write_page(folder: Path, document: dict[str, Any], figures: Path | None = None) -> Path:
    """Write the content of `attacks.json` as `report.html` beside the pictures; return its path.

    With `figures`, a folder, every figure is there, too, as SVG and PDF, with the numbers behind it as CSV.
    """
    results, drawn = document["attacks"], dict[str, Chart]()
    by_institution: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        shown = {**result, "pairs": [], "alt": "", "caption": ""}
        if result.get("picture") and (folder / result["picture"]).exists():
            rows = "Above the originals, below" if result.get("scores") else "In the picture"
            if "nearer" in (result.get("scores") or ()):
                rows = "Above the nearest of the institution's images, below"
            shown["pairs"] = _columns(folder / result["picture"])
            drawn[Path(result["picture"]).stem] = _picture(folder / result["picture"], result)
            shown["caption"] = (
                f"{result['field']} of stage {result['stage']}, {result['attack']}, attacker's images: "
                f"{result['auxiliary']}. {rows} what the attack made of the message."
            )
            shown["alt"] = (
                f"An image of {result['institution']} and its reconstruction by the attack {result['attack']}"
            )
        by_institution.setdefault(result["institution"], []).append(shown)
    charts = {name: chart for name, own in by_institution.items() if (chart := _found(own))}
    if figures:
        write_figures(figures, drawn | {f"{name}-found": chart for name, chart in charts.items()})
    told, worst = headline(results)
    first = [
        row for row in by_institution.get(worst.get("institution", ""), []) if row["sentence"] == worst["sentence"]
    ]
    images = [_image_row(result) for result in results if result.get("scores")]
    members = [_member_row(result) for result in results if "membership" in result]
    text = render(
        "attacks",
        title="What the messages of this run show",
        headline=told,
        first=first,
        about=document["run"]["about"],
        claim=document["run"]["claim"],
        by_institution=by_institution,
        charts=charts,
        images={"caption": "Reconstructed images", "heads": IMAGES, "rows": images},
        members={"caption": "Who was in the training", "heads": MEMBERS, "rows": members},
        not_shown=DOES_NOT_SHOW,
        version=metadata.version("flwr-replay"),
    )
    path = folder / "report.html"
    write_atomic(path, text)
    return path


def _found(results: Sequence[dict[str, Any]]) -> Chart | None:
    """Draw what each attack on an institution's messages found, beside guessing; None if nothing was judged."""
    rows = {}
    for result, share in ((result, share) for result in results if (share := found(result))):
        rate, name = share.rate, f"{result['stage']} {result['field']}, {result['attack']}"
        interval = (rate["low"], rate["high"]) if "high" in rate else None
        rows[name] = Row({"found": rate["value"]}, rate["value"], interval, share.guess)
    return dots(rows, "what") if rows else None


def _picture(picture: Path, result: dict[str, Any]) -> Chart:
    """Return a picture of `draw_grid` with the scores of its images, as far as anybody judged them."""
    from matplotlib.figure import Figure

    with Image.open(picture) as grid:
        figure = Figure(figsize=(grid.width / 72, grid.height / 72))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.imshow(np.asarray(grid.convert("RGB")), interpolation="none")
    rows = [
        (of, measure, *(value.values() if isinstance(value, dict) else (value, "", "")))
        for of in ("scores", "control", "mean-image", "nearest-image")
        for measure, value in (result.get(of) or {}).items()
    ]
    return Chart(figure, result["sentence"], ("of", "measure", "value", "low", "high"), rows)


def _columns(picture: Path) -> list[str]:
    """Cut a picture of `draw_grid` into its columns, each an image above its reconstruction: PNG in base64."""
    columns = []
    with Image.open(picture) as grid:
        step = (grid.width - SCALE) // SHOWN
        for left in range(SCALE, SHOWN * step, step):
            column, file = grid.crop((left, SCALE, left + step - SCALE, grid.height - SCALE)), BytesIO()
            if np.asarray(column).min() < 255:  # else there were fewer images
                column.save(file, "PNG")
                columns.append(base64.b64encode(file.getvalue()).decode())
    return columns


def _image_row(result: dict[str, Any]) -> list[str]:
    scores = result["scores"]
    beside = [result.get(name) for name in ("mean-image", "nearest-image")]
    return [
        f"{result['institution']}, {result['stage']} {result['field']}",
        result["attack"],
        str(scores["number"]),
        f"{_shown(scores['psnr'])} ± {_shown(scores['psnr_sd'])}",
        "" if scores["ssim"] is None else _shown(scores["ssim"], 2),
        *_identified(result),
        *("" if other is None else _shown(other["psnr"]) for other in beside),
        _shown(result["values-per-pixel"], 2),
        str(result["settings"].get("steps", "")),
        _shown(result["seconds"]),
    ]


def _identified(result: dict[str, Any]) -> tuple[str, str]:
    """Return the cells of identified images and of the control; of pictures that are only nearer, what chance gives."""
    scores, control = result["scores"], result.get("control")
    if "nearer" in scores:
        return f"{scores['nearer']} of {scores['number']} nearer to own (p = {scores['p']:.3f})", "half, by chance"
    return between(scores["identified"], SHARE), between(control["identified"], SHARE) if control else ""


def _member_row(result: dict[str, Any]) -> list[str]:
    rates = result["membership"]
    return [
        f"{result['institution']}, {result['stage']} {result['field']}",
        result["attack"],
        f"{rates['members']:,}, {rates['non_members']:,}",
        between(rates["auc"]),
        between(rates["tpr_at_1_percent"], SHARE),
        between(rates["tpr_at_01_percent"], SHARE),
    ]


def _shown(value: float | str, digits: int = 1) -> str:
    return value if isinstance(value, str) else f"{value:.{digits}f}"
