"""The privacy lab's page: what recorded messages show, in sentences, pictures and figures; one file, no network."""

from __future__ import annotations

import base64
from importlib import metadata
from pathlib import Path
from typing import Any

from flwr_replay.files.atomic import read_bytes, write_atomic
from flwr_replay.lab.sentences import DOES_NOT_SHOW, between
from flwr_replay.report.templates import render

__all__ = ["write_page"]

SHARE = "{:.1%}"
FIELD = ("institution, field", "attack")
IMAGES = (
    *(*FIELD, "images", "PSNR, dB", "SSIM", "identified [95 %]", "control", "mean image, dB"),
    *("nearest auxiliary image, dB", "values per pixel", "steps", "s"),
)
MEMBERS = (*FIELD, "members, others", "AUC [95 %]", "found at 1 % false alarms", "at 0.1 %")


def write_page(folder: Path, found: dict[str, Any]) -> Path:
    """Write the content of `attacks.json` as `report.html` beside the pictures; return its path."""
    results = found["attacks"]
    by_institution: dict[str, list[dict[str, Any]]] = {}
    for one in results:
        shown = {**one, "image": "", "alt": "", "caption": ""}
        if one.get("picture") and (folder / one["picture"]).exists():
            rows = "Above the originals, below" if one.get("scores") else "In the picture"
            if "nearer" in (one.get("scores") or ()):
                rows = "Above the nearest of the institution's images, below"
            shown["image"] = base64.b64encode(read_bytes(folder / one["picture"])).decode()
            shown["caption"] = (
                f"{one['field']} of stage {one['stage']}, {one['attack']}, attacker's images: {one['auxiliary']}. "
                f"{rows} what the attack made of the message."
            )
            shown["alt"] = f"Reconstructions of {one['institution']}'s images by the attack {one['attack']}"
        by_institution.setdefault(one["institution"], []).append(shown)
    images = [_image_row(one) for one in results if one.get("scores")]
    members = [_member_row(one) for one in results if "membership" in one]
    text = render(
        "attacks",
        title="What the messages of this run show",
        about=found["run"]["about"],
        claim=found["run"]["claim"],
        by_institution=by_institution,
        images={"caption": "Reconstructed images", "heads": IMAGES, "rows": images},
        members={"caption": "Who was in the training", "heads": MEMBERS, "rows": members},
        not_shown=DOES_NOT_SHOW,
        version=metadata.version("flwr-replay"),
    )
    path = folder / "report.html"
    write_atomic(path, text)
    return path


def _image_row(one: dict[str, Any]) -> list[str]:
    scores = one["scores"]
    beside = [one.get(name) for name in ("mean-image", "nearest-image")]
    return [
        f"{one['institution']}, {one['stage']} {one['field']}",
        one["attack"],
        str(scores["number"]),
        f"{_shown(scores['psnr'])} ± {_shown(scores['psnr_sd'])}",
        "" if scores["ssim"] is None else _shown(scores["ssim"], 2),
        *_identified(one),
        *("" if other is None else _shown(other["psnr"]) for other in beside),
        _shown(one["values-per-pixel"], 2),
        str(one["settings"].get("steps", "")),
        _shown(one["seconds"]),
    ]


def _identified(one: dict[str, Any]) -> tuple[str, str]:
    """Return the cells of identified images and of the control; of pictures that are only nearer, what chance gives."""
    scores, control = one["scores"], one.get("control")
    if "nearer" in scores:
        return f"{scores['nearer']} of {scores['number']} nearer to own (p = {scores['p']:.3f})", "half, by chance"
    return between(scores["identified"], SHARE), between(control["identified"], SHARE) if control else ""


def _member_row(one: dict[str, Any]) -> list[str]:
    found = one["membership"]
    return [
        f"{one['institution']}, {one['stage']} {one['field']}",
        one["attack"],
        f"{found['members']:,}, {found['non_members']:,}",
        between(found["auc"]),
        between(found["tpr_at_1_percent"], SHARE),
        between(found["tpr_at_01_percent"], SHARE),
    ]


def _shown(value: float | str, digits: int = 1) -> str:
    return value if isinstance(value, str) else f"{value:.{digits}f}"
