"""A run directory as it is read: each file is as the run wrote it, of the declared form, and this run's own.

`SHA256SUMS` vouches for the options and the run's id; JSON files and checkpoints name both. `result.json` vouches by
lengths and checksums for the models, whose files are the same in equal runs, and for the files that only grow; before
it is there, the last checkpoint does for the latter. Whoever may write here can make all of them agree: this is
against mistakes and damage, not against forgery.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from flwr_replay.config.strict_yaml import LOADER
from flwr_replay.errors import DamagedError
from flwr_replay.files.atomic import NAME, Form, fits, read_bytes, read_json, read_text, tally, write_json
from flwr_replay.files.disk import entries, there
from flwr_replay.files.lines import LEDGER, check_begin, read_lines, segments
from flwr_replay.files.tensors import OF_RUN, StateDict, read_tensors, read_texts, read_with_texts

__all__ = [
    "BOUND",
    "CONFIG",
    "CONFUSION",
    "FORMS",
    "MEMBERS",
    "METRICS",
    "RESULT",
    "RUN_ID",
    "SUMS",
    "TRACKING",
    "check_grown",
    "check_own",
    "json_of",
    "ledger_of",
    "mark_of",
    "model_of",
    "options_of",
    "read_result",
    "read_run_id",
    "rows_of",
    "tensors_of",
    "write_of",
    "write_result",
]

CONFIG, RUN_ID, SUMS, RESULT = "config.yaml", "run-id", "SHA256SUMS", "result.json"
CONFUSION, MEMBERS, METRICS, TRACKING = "confusion.json", "members.jsonl", "metrics.jsonl", "tracking.json"
BOUND = "# The run's other files name it, by run-id and the SHA-256 of this file.\n"  # the first line of CONFIG
FILES = "files"  # key: the tallies of the files that have grown


def number(value: object) -> bool:
    """Say whether a value is a finite number."""
    return isinstance(value, int | float) and abs(value) < 1e300 and isfinite(value)


def _square(counts: object) -> bool:
    """Say whether counts are those of confusion matrices of one size, by institution."""
    if not fits(counts, {...: [int]}) or not isinstance(counts, dict):
        return False
    sizes = {len(matrix) for matrix in counts.values()}
    return len(sizes) <= 1 and all(round(size**0.5) ** 2 == size for size in sizes)


def _maybe(form: Any) -> Any:
    return lambda value: value is None or fits(value, form)


_SPENT = {"epsilon": _maybe(number), "delta": number, "mechanism": str}
FORMS: dict[str, Form] = {  # of a JSON file, of each line, and of the options
    CONFIG: {
        "strategy": {"name": str},
        "task": {"name": str, "class_names": [str]},
        "rounds": int,
        "timeout": number,
        "fraction": _maybe(number),
        ...: lambda value: fits(value, None | bool | int | float | str | list) or fits(value, {...: object}),
    },
    RESULT: {
        **dict.fromkeys(("strategy", "task", "model", "metric", "unit", "privacy-claim"), str),
        **dict.fromkeys(("nodes", "rounds", "seed"), int),
        "higher-is-better": bool,
        "final": {"global": {...: int | float}, "institutions": {...: {...: int | float}}},
        "best": {"round": int, ...: _maybe(int | float)},
        "bytes": {"up": int, "down": int},
        "bytes-by-kind": {"up": {...: int}, "down": {...: int}},
        "examples-seen": number,
        "wall-seconds": number,
        "failures": [{"institution": str, "round": int, "reason": str}],
        "privacy": {...: _maybe(_SPENT)},
        "versions": {"flwr-replay": str, ...: str},
        "replay": _maybe(str),
        "recorded": _maybe({"messages": int, "left-out": int}),
        "best-model": _maybe({"file": str, "none": str}),
        "untrained": _maybe([str]),
        "untested": _maybe([str]),
        "floored": _maybe([str]),
        "skew": _maybe({"ks": number, "tv": number, "dropped": int}),
        FILES: _maybe({...: [int]}),
    },
    CONFUSION: {"institutions": _square, "examples": _maybe({...: int})},
    TRACKING: {"tracker": str, "run": str, "exchange": int},
    MEMBERS: {"institution": str, "examples": int, "node": int, "proof": str, "trained": int},
    LEDGER: {
        **dict.fromkeys(("institution", "stage", "kind", "field", "protection"), str),
        **dict.fromkeys(("round", "bytes"), int),
        "direction": ("up", "down"),
    },
    METRICS: {"round": int, "exchange": int, "institution": str, "metric": str, "value": int | float},
    "timings.jsonl": {"round": int, "seconds": number},
    "failures.jsonl": {"round": int, "institution": str, "reason": str},
    "generator.jsonl": {"institution": str, "network": str, "epoch": int, "loss": int | float},
    "privacy.jsonl": {"institution": str, **_SPENT},
    "forgetting.jsonl": {"round": int, "taught": [str], "own": {...: int | float}},
}
GROWING = [name for name in FORMS if name.endswith(".jsonl")]


# --- which run it is --------------------------------------------------------------------------------------------------


def read_run_id(folder: Path) -> str:
    """Return a run's id at the institutions; raise `DamagedError` if it is missing or damaged."""
    file = folder / RUN_ID
    run_id = read_text(file).strip() if there(file) else ""
    if not NAME.fullmatch(run_id):
        raise DamagedError(f"{file} must hold the run's id; got {run_id[:99]!r}: begin a new run")
    return run_id


def mark_of(folder: Path) -> str:
    """Return what every file of a run names it by: its id and the beginning of its options' SHA-256.

    It is empty for a run of an older version, of which the log says so, and for a folder without options. Options or an
    id that are not as the run wrote them are a DamagedError.
    """
    if not there(folder / CONFIG):
        return ""
    options = read_bytes(folder / CONFIG)
    bound = options.startswith(BOUND.encode())
    if bound or there(folder / SUMS):
        sums = read_text(folder / SUMS).splitlines()
        for name in (CONFIG, RUN_ID):
            if f"{sha256(read_bytes(folder / name)).hexdigest()}  {name}" not in sums:
                raise DamagedError(
                    f"{folder / name} must be as the run wrote it; either it or {SUMS} was changed or is damaged: "
                    "restore it from a backup, or begin a new run"
                )
    if bound:
        return f"{read_run_id(folder)} {sha256(options).hexdigest()[:16]}"
    _say_older(folder)
    return ""


def options_of(folder: Path) -> dict[str, Any]:
    """Return a run's options, by section; raise `DamagedError` if they are missing, or not as the run wrote them."""
    mark_of(folder)
    file, why = folder / CONFIG, "another form"
    try:
        values = yaml.load(read_text(file), LOADER)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        values, why = None, " ".join(str(error).split())[:200]
    if not fits(values, FORMS[CONFIG]):
        raise DamagedError(f"a run's {CONFIG} must be as the run wrote it; {file} is damaged: {why}")
    return dict(values)


@lru_cache(maxsize=256)
def _say_older(folder: Path) -> None:
    logging.getLogger("flwr").warning(
        "%s is of an older version: whether its files are all of this run is not known", folder
    )


def check_own(path: Path, named: str, folder: Path) -> None:
    """Refuse a file that names another run, by the mark that was found in it; errors as of `json_of`."""
    if named != (mark := mark_of(folder)):
        other = "no run" if not named else named if named.split()[0] != mark.split(" ")[0] else "it with other options"
        raise DamagedError(
            f"{path} must be of the run {mark or folder.name}; it names {other}: put the run's own file back"
        )


# --- its files --------------------------------------------------------------------------------------------------------


def json_of(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of a run's JSON file; raise `DamagedError` if it is missing, damaged or another run's."""
    values = read_json(folder / name, FORMS[name])
    check_own(folder / name, str(values.pop(OF_RUN, "")), folder)
    return values


def tensors_of(folder: Path, path: Path) -> tuple[StateDict, dict[str, str]]:
    """Return a run's named arrays, and the texts beside them; errors as of `json_of`."""
    arrays, texts = read_with_texts(path)
    check_own(path, texts.get(OF_RUN, ""), folder)
    return arrays, texts


def model_of(folder: Path, path: Path) -> StateDict:
    """Return a model of a finished run, which its result vouches for; errors as of `json_of`."""
    if not there(folder / RESULT):
        raise DamagedError(f"there is no {folder / RESULT}, which vouches for {path}: resume the run, or restore it")
    check_grown(folder, _named(path, folder))
    return read_tensors(path)


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the lines of a run's file; none if it never had any. Errors are as of `check_grown`."""
    check_grown(folder, name)
    return read_lines(folder / name, FORMS[name])


def ledger_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's ledger, also of one that grows; errors as of `check_grown`."""
    from flwr_replay.wire.ledger import ledger_lines  # late, as Flower is: a list of runs needs none

    check_grown(folder, LEDGER)
    yield from ledger_lines(folder, FORMS[LEDGER])


def read_result(folder: Path) -> dict[str, Any]:
    """Return the content of a run's `result.json`; errors as of `json_of`."""
    result = json_of(folder, RESULT)
    result.pop(FILES, None)
    result.setdefault("replay", options_of(folder).get("replay", {}).get("name", "none"))  # of older versions
    return result


def check_grown(folder: Path, name: str) -> None:
    """Refuse a file, by `DamagedError`, that is not as the run left it or, while that goes on, begins in another way.

    Closed segments of a ledger may be missing, since they may be archived.
    """
    path = folder / name
    if there(folder / RESULT):
        if (grown := json_of(folder, RESULT).get(FILES)) is None:  # of an older version
            return
        if name in grown and not there(path):
            raise DamagedError(f"there is no {path}, which the run has written: restore it from a backup")
        present = filter(there, segments(path))
        if changed := [segment for segment in present if [*tally(segment)] != grown.get(_named(segment, folder))]:
            raise DamagedError(
                f"{changed[0]} must be as it was when the run ended; it has changed: restore it from a backup, or wait "
                "if the run goes on"
            )
        return
    for checkpoint in entries(folder / "checkpoints", "*.safetensors")[::-1]:
        try:
            texts = read_texts(checkpoint)
            grown = dict(json.loads(texts["values"])["files"])
        except (DamagedError, ValueError, TypeError, KeyError):  # as one that is removed while the run goes on
            continue
        check_own(checkpoint, texts.get(OF_RUN, ""), folder)
        check_begin(folder, {file: grown[file] for file in grown if file == name or file.startswith(f"{path.stem}-")})
        return


def write_of(folder: Path, name: str, values: Mapping[str, Any], indent: int | None = None) -> None:
    """Write a run's JSON file, which names the run."""
    mark = mark_of(folder)
    write_json(folder / name, {**({OF_RUN: mark} if mark else {}), **values}, indent)


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Write a run's result, which vouches for the files that have grown."""
    grown = [segment for name in GROWING for segment in segments(folder / name) if there(segment)]
    models = [path for place in ("models", "best") for path in entries(folder / place, "*.safetensors")]
    vouched = {_named(path, folder): tally(path) for path in (*grown, *models)}
    write_of(folder, RESULT, {**result, FILES: vouched}, indent=2)


def _named(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()
