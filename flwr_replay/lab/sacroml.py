"""What SACRO-ML's report.json says of an exported model, for the evidence page: known attacks and figures only.

The file is anybody's. No text of it is handed on but a version and digests, whose form is sure. Its fields are those of
sacroml 2.0.1 (`attacks/attack.py`, `metrics.py`, `structural_attack.py`), which writes NaN as null.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from flwr_replay.errors import ConfigError
from flwr_replay.files.atomic import fits, parsed, read_bytes

__all__ = ["sacroml_found"]

ATTACKS = (
    "WorstCase attack",
    "LiRA Attack",
    "QMIA Attack",
    "Structural Attack",
    "Instance-Based Model Attack",
    "Attribute inference attack",
    "Meta Attack",
)
RATES = ("AUC", "P_HIGHER_AUC", "ACC", "Advantage", "TPR", "FPR", "FDIF01", "TPR@0.1%")
COUNTS = {"n_pos_test_examples": "members judged", "n_neg_test_examples": "others judged"}
RISKS = (
    "unnecessary_risk",
    "gen_error_risk",
    "dof_risk",
    "k_anonymity_risk",
    "class_disclosure_risk",
    "smallgroup_risk",
    "data_leakage_confirmed",
)
DIGEST, VERSION = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9]{1,4}(\.[0-9]{1,4}){1,3}")


def sacroml_found(file: Path, least: int, model: Path | None) -> dict[str, Any]:
    """Return what a report of sacroml says, for page and JSON.

    Under `least`, a policy's `min-count`, an AUC is all, and only where each repetition judged 2 `least` members and as
    many others: all other figures are shares of few, or tell how many there are.

    Parameters
    ----------
    file : Path
        The report.json.
    least : int
        The floor; 0: none.
    model : Path or None
        The file that leaves, which must be what was attacked.

    Raises
    ------
    ConfigError
        If it is no such report, or of another model.
    RunError
        If a file cannot be read.
    """
    report = parsed(read_bytes(file))
    form = {"attack_name": ATTACKS, "sacroml_version": lambda text: isinstance(text, str) and VERSION.fullmatch(text)}
    if not report or not fits(report, {...: {"metadata": form}}):
        raise ConfigError(
            f"--sacroml takes a report.json as sacroml 2.0.1 writes it; {file} is another: run its attacks"
        )
    digests, figures = set(), []
    for attack in report.values():
        params = attack["metadata"].get("target_model_params")
        digest = params.get("sha256") if isinstance(params, dict) else None
        digests.add(digest if isinstance(digest, str) and DIGEST.fullmatch(digest) else "")
        rows = [*_figures(_repetitions(attack), least, file)] or [("no figure that is told here", 0, "", "", "")]
        heads = ("attack", "figure", "repetitions", "mean", "lowest", "highest")
        figures += [dict(zip(heads, (attack["metadata"]["attack_name"], *row), strict=True)) for row in rows]
    leaves = {f"{model.name}, which leaves": sha256(read_bytes(model)).hexdigest()} if model else {}
    if foreign := leaves and digests - {"", *leaves.values()}:
        raise ConfigError(f"--sacroml must be of the file in --model; {file} is of {min(foreign)}: attack that file")
    version = ", ".join(sorted({attack["metadata"]["sacroml_version"] for attack in report.values()}))
    named = " and ".join(sorted(digests - {""})) or "none"
    whose = f" and is that of {', '.join(leaves)}" if leaves and "" not in digests else ""
    floor = " Under min-count an AUC alone is told, and that of many." if least else ""
    sentence = (
        f"SACRO-ML {version} on the exported model: the SHA-256 that its report has is {named}{whose}. An AUC of 0.5 "
        f"is guessing.{floor}"
    )
    return {"said": sentence, "figures": figures, "model": leaves}


def _repetitions(attack: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an attack's repetitions; a failed one has none."""
    logger = attack.get("attack_experiment_logger")
    runs = logger.get("attack_instance_logger") if isinstance(logger, dict) else None
    return [run for run in runs.values() if isinstance(run, dict)] if isinstance(runs, dict) else []


def _figures(runs: Sequence[Mapping[str, Any]], least: int, file: Path) -> Iterator[tuple[str, int, str, str, str]]:
    """Say each known figure over the repetitions: its name, in how many it is, its mean and ends, as texts."""
    read = {name: [run[name] for run in runs if run.get(name) is not None] for name in (*RATES, *COUNTS, *RISKS)}
    for name, values in read.items():
        most = 1e9 if name in COUNTS else 1
        if not all(fits(value, int | float) and isfinite(value) and abs(value) <= most for value in values):
            raise ConfigError(
                f"--sacroml takes numbers in their range; {name} in {file} is outside, or none: run its attacks again"
            )
    if least:
        many = runs and all(len(read[name]) == len(runs) and min(read[name]) >= 2 * least for name in COUNTS)
        read = {"AUC": read["AUC"]} if many else {}
    for name, values in read.items():
        if values and name in RISKS:
            yield name, len(values), "yes" if any(values) else "no", "", ""
        elif values:
            form = ",.0f" if name in COUNTS else ".2f" if least else ".3f"
            shown = [format(value, form) for value in (fmean(values), min(values), max(values))]
            yield COUNTS.get(name, name), len(values), shown[0], shown[1], shown[2]
