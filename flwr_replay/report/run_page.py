"""A run's page, `report.html`: one file in sentences, pictures and tables, from what the run directory holds."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr_replay.files.atomic import read_bytes, read_text, write_atomic
from flwr_replay.privacy.accounting import rounded_up
from flwr_replay.privacy.noise import shown_noise
from flwr_replay.report.charts import FEW, Chart, Row, curves, dots, write_figures
from flwr_replay.report.metrics import (
    SHARED,
    VALIDATION,
    beside,
    guessed,
    guessing_lines,
    judged,
    metric_rows,
    pooled_counts,
    shared,
    spread,
)
from flwr_replay.report.plots import heat_map
from flwr_replay.report.progress import shown_bytes, shown_time
from flwr_replay.report.run_files import CONFIG, ledger_of, options_of, read_result
from flwr_replay.report.summary import (
    best_lines,
    classes_of,
    confusion_of,
    dice_lines,
    judged_by,
    recorded_lines,
    sample_lines,
    skew_lines,
    tested_of,
    trained_on,
    untrained_lines,
    warnings,
)
from flwr_replay.report.templates import render
from flwr_replay.wire.masked import MASKED
from flwr_replay.wire.sealed import SEALED

__all__ = [
    "KINDS",
    "PAGE",
    "confusion_table",
    "labels_table",
    "left_table",
    "metrics_table",
    "privacy_table",
    "travelled_by_kind",
    "versions_table",
    "write_run_page",
]

PAGE, ALL = "report.html", "all institutions"
MOST_LINES = 7  # institutions that get a line of their own beside the pooled one
MOST_CLASSES = 20  # of a matrix
ROOM = 700_000  # bytes of pictures, so that the page stays below 1 MB
KINDS = {
    "model": "weights or gradients of a network",
    "per-sample": "numbers of single patients: latents, codes or labels",
    "per-sample-raw": "single patients' images or tables, as they are",
    "synthetic": "images that a generator drew",
    "statistic": "counts and sums over an institution's examples",
    "instruction": "what to do, and with which options",
    "notice": "the institution's name; if it answers, proof that it is the same one as before; if it refuses, why",
    "not received": "answers that an interruption lost; only the institutions' own ledgers have their fields",
}
HIDDEN = {SEALED: "the server cannot read them", MASKED: "the server reads their mean over institutions only"}
DOWN = "down"
UNKNOWN_SKEW = "How labels differ is counted where all data lie in one place, as in a simulation."
OWN = {"folder": "to classify their own images", "own": "a task of their own"}  # by task, where its name says little


def write_run_page(folder: Path, figures: Path | None = None) -> Path:
    """Write a run's page into its directory; return its path.

    With `figures`, a folder, every chart is there, too, as SVG and PDF, with the numbers behind it. If the run has not
    finished, or a file of its directory is damaged, it is a RunError.
    """
    result = read_result(folder)
    confusion, classes, final = confusion_of(folder), classes_of(folder), result["final"]["global"]
    tested = tested_of(folder)
    pictures, left_out = _pictures(folder)
    rows, fault = metric_rows(folder, result["rounds"])
    sums, own = travelled_by_kind(folder), result["final"]["institutions"]
    travelled = {name: sums[name] for name in (*own, *sums) if name in sums}
    metric = result["metric"]
    own = {name: metrics[metric] for name, metrics in own.items() if metric in metrics}
    guesses = {name: guessed(counts) for name, counts in confusion.items()} if metric == "accuracy" else {}
    dashed = "; dashed: what always naming the institution's most frequent label would have" if guesses else ""
    less = "" if result["higher-is-better"] else "; less is better"
    by_round, few = _curves(rows, result, [*beside(final, confusion), *({"dice-mean"} & final.keys())])
    by_institution = (
        {
            "by-institution": (
                dots(
                    {name: Row({name: value}, value, mark=guesses.get(name)) for name, value in own.items()},
                    "institution",
                ),
                f"{metric} of each institution's test examples{dashed}{less}",
            )
        }
        if own
        else {}
    )
    if figures:
        charts = {name: chart for name, (chart, _) in (by_round | by_institution).items()}
        write_figures(figures, charts | ({"forgetting": heat_map(matrix)} if (matrix := result["forgetting"]) else {}))
    fraction = options_of(folder).get("fraction", 1)  # runs of older versions have none
    drawn = f"No institution failed. Each round drew some of them only: fraction={fraction:g}."
    text = render(
        "run",
        title=f"{folder.name}: {result['strategy']} on {result['task']}, seed {result['seed']}",
        question=_question(result),
        answer=_answer(result, confusion, own, guesses, sum(tested.values())),
        warnings=[
            *filter(None, [fault, _lacking(folder, travelled, result["bytes"])]),
            *map(_sentence, untrained_lines(result)),
            *warnings(result, confusion, classes, tested),
        ],
        curves=by_round,
        few=map(_sentence, few),
        institutions=by_institution,
        metrics=metrics_table(result, folder, tested),
        notes=[
            *filter(None, [result.get("metrics-note", "")]),
            *map(_sentence, [*dice_lines(final), *best_lines(result)]),
        ],
        confusion=confusion_table(result, confusion, classes),
        skew=[*map(_sentence, skew_lines(result.get("skew")))] or [UNKNOWN_SKEW, _labels_sent(folder)],
        labels=labels_table(result, classes),
        claim=[result["privacy-claim"], *map(_sentence, sample_lines(result))],
        privacy=privacy_table(result),
        left=(left := left_table(travelled)),
        kinds=[
            f"{head}: {KINDS[kind]}{hidden and f'; {HIDDEN[hidden]}'}."
            for head, (kind, hidden) in ((head, _kind(head)) for head in left["heads"][1:])
            if kind in KINDS
        ],
        recorded=[*map(_sentence, recorded_lines(result, folder))],
        failures=[f"{f['institution']}, exchange {f['round']}: {f['reason']}" for f in result["failures"]],
        all_there=drawn if fraction < 1 else "All institutions took part in every exchange.",
        pictures=pictures,
        left_out=left_out,
        versions=versions_table("Versions", result["versions"]),
        config=read_text(folder / CONFIG),
        version=result["versions"]["flwr-replay"],
    )
    write_atomic(folder / PAGE, text)
    return folder / PAGE


def versions_table(caption: str, versions: Mapping[str, str]) -> dict[str, Any]:
    """Return a table of packages and their versions."""
    return {"caption": caption, "heads": ["package", "version"], "rows": list(versions.items())}


def _sentence(line: str) -> str:
    return f"{line[0].upper()}{line[1:]}{'' if line.endswith('.') else '.'}"


def _question(result: Mapping[str, Any]) -> str:
    skew = result.get("skew")
    how = f"whose labels differ (mean pairwise KS {skew['ks']:.2f}) " if skew and skew["ks"] > 0.1 else ""
    network = result.get("network", "")  # of pretrained and frozen ones
    replay = f" with {result['replay']} replay" if result["replay"] != "none" else ""
    return (
        f"Can {result['nodes']} institutions {how}learn {OWN.get(result['task'], result['task'])} by "
        f"{result['strategy']}{replay}, without pooling their data? The network is {result['model']}, the training "
        f"{result['rounds']} round{'s' * (result['rounds'] > 1)}. It took {shown_time(result['wall-seconds'])}."
        f"{network and f' Network: {network}'}"
    )


def _answer(
    result: Mapping[str, Any],
    confusion: Mapping[str, Sequence[int]],
    own: Mapping[str, float],
    guesses: Mapping[str, float],
    tested: int,
) -> str:
    metric, unit = result["metric"], f" {result['unit']}" if result["unit"] else ""
    number = f"{tested:,} " if tested else ""
    whole = result["final"]["global"]
    answer = f"At the end {metric} is {whole[metric]:.3f}{unit} over all {number}test examples"
    if len(own) > 1 and len({*own.values()}) == 1:
        answer += ", the same at each institution"
    elif len(own) > 1:
        low, high = min(own, key=lambda name: own[name]), max(own, key=lambda name: own[name])
        guess = {name: f" ({share:.3f})" for name, share in guesses.items()}
        answer += (
            f", from {own[low]:.3f}{guess.get(low, '')} at {low} to {own[high]:.3f}{guess.get(high, '')} at {high}"
        )
        answer += " (in brackets: always naming its most frequent label)" if guess else ""
    if metric == "accuracy" and confusion:
        answer += f"; always the most frequent label of all would have {guessed(pooled_counts(confusion)):.3f}"
    if more := beside(whole, confusion):
        shown = " and ".join(f"{name} is {value:.3f}" for name, value in more.items())
        answer += f". Labels are unequal; this model's {shown}"
    if both := shared(metric, whole):
        answer += (
            f". This is of models of the institutions' own; on the same examples {both} is {whole[both]:.3f}{unit}"
        )
    if spread_of := spread(result):
        answer += f"; {spread_of}"
    for line in guessing_lines(whole, confusion)[1:]:  # of test examples
        answer += f". {line[0].upper()}{line[1:]}"
    if (validated := whole.get(f"validation-{metric}")) is not None:
        answer += f". Test examples were used only then; of validation examples {metric} is {validated:.3f}{unit}"
    return f"{answer}."


def _curves(
    rows: Sequence[Mapping[str, Any]], result: Mapping[str, Any], more: Sequence[str]
) -> tuple[dict[str, tuple[Chart, str]], list[str]]:
    """Return charts of the main metric, of more, and of the loss: pooled, and of each of few institutions.

    Where a line would have a point or two, the pooled numbers stand in a sentence, among the second ones.
    """
    exchanges = max(result["rounds"], *(row["round"] for row in rows), 1)  # older versions counted exchanges there
    drawn, few = {}, []
    names = {row["metric"] for row in rows}
    for metric in dict.fromkeys(judged(name, names) for name in (result["metric"], *more, "loss")):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row["metric"] == metric:
                name = row["institution"] or ALL
                lines.setdefault(name, []).append((row["round"] * result["rounds"] / exchanges, row["value"]))
        if len(lines) > MOST_LINES + 1:
            lines = {name: line for name, line in lines.items() if name == ALL}
        plain = metric.removeprefix(VALIDATION)
        what = f"{plain} on the institutions' {judged_by(result)} examples, by round"
        if ALL in lines and max(map(len, lines.values())) <= FEW:
            few.append(f"{what}: {', '.join(f'{value:.3f} after {at:g}' for at, value in lines[ALL])}.")
        elif chart := curves(lines, "round"):
            drawn[f"{plain}-by-round"] = chart, what
    return drawn, few


def metrics_table(result: Mapping[str, Any], folder: Path, tested: Mapping[str, int]) -> dict[str, Any]:
    """Return a table of all metrics, beside the numbers of training examples and of those that they rest on."""
    final, trained = result["final"], trained_on(folder)
    shown = judged(result["metric"], final["global"])  # of those of validation examples
    heads = [name for name in final["global"] if name == shown or not name.startswith((VALIDATION, *SHARED))]
    heads = [name for own in heads for name in (own, shared(own, final["global"])) if name]
    own = {**final["institutions"], **{n: {} for n in result.get("untrained", []) if n not in final["institutions"]}}
    rows = [("all", final["global"]), *own.items()]
    counts = {name: (trained.get(name), tested.get(name)) for name in own}
    counts["all"] = sum(trained.values()) or None, sum(tested.values()) or None
    cells = [
        [
            name,
            *("" if count is None else f"{count:,}" for count in counts[name]),
            *(f"{metrics[head]:.4f}" if head in metrics else "" for head in heads),
        ]
        for name, metrics in rows
    ]
    columns = ["institution", "training examples", "test examples", *heads]
    return {"caption": "All metrics after the last round", "heads": columns, "rows": cells}


def confusion_table(
    result: Mapping[str, Any], confusion: Mapping[str, Sequence[int]], classes: Sequence[str]
) -> dict[str, Any] | None:
    """Return the confusion matrix of these institutions together; None for regression, and for many classes."""
    if not confusion:
        return None
    counts = pooled_counts(confusion)
    size = round(len(counts) ** 0.5)
    if size > MOST_CLASSES:
        return None
    rows = [counts[at * size : (at + 1) * size] for at in range(size)]
    masks = "dice" in result["final"]["global"]
    what = "Pixels" if masks else "Test examples"
    named = ["background", "foreground"] if masks else classes
    classes = named if len(named) == size else list(map(str, range(size)))
    whose = "all institutions" if len(confusion) > 1 else next(iter(confusion))
    caption = f"{what} of {whose}: a row for each label, a column for each prediction"
    return _shaded(caption, ["label", *classes], classes, rows)


def _labels_sent(folder: Path) -> str:
    """Say whose labels the server has."""
    told = sorted(
        {line["institution"] for line in ledger_of(folder) if line["direction"] == "up" and line["field"] == "labels"}
    )
    if not told:
        return "No label went to the server as a field of its own."
    return f"The labels of {', '.join(told)} went to the server, one for each example."


def labels_table(result: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any] | None:
    """Count training examples by institution and label; None where they are not known, and for many labels."""
    known = (result.get("skew") or {}).get("labels")
    if not known or len(known["values"]) > MOST_CLASSES:
        return None
    names, rows = list(known["institutions"]), list(known["institutions"].values())
    labels = [classes[int(value)] for value in known["values"]] if classes else known["values"]
    unit = f", in {result['unit']}" if result["unit"] else ""
    what = "share of foreground pixels" if "dice" in result["final"]["global"] else f"label{unit}"
    return _shaded(f"Training examples by {what}", ["institution", *labels], names, rows)


def _shaded(
    caption: str, heads: Sequence[str], names: Sequence[str], counts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return a table of counts, each with a shade from 0 to 10 by its share of its row."""
    rows = [
        [name, *((count, round(10 * count / max(1, sum(row)))) for count in row)]
        for name, row in zip(names, counts, strict=True)
    ]
    return {"caption": caption, "heads": heads, "rows": rows, "shaded": True}


def privacy_table(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Tabulate what accounts state; None if there is none."""
    rows = []
    for name, account in result["privacy"].items():
        if account:
            known = account["epsilon"] is not None
            bound = [rounded_up(account["epsilon"]), rounded_up(account["delta"], 2)] if known else ["none", ""]
            how = shown_noise(result.get("noise", {}).get(name, [])) or "not told"  # by older versions
            proven = "yes" if account.get("proven") else "no"
            rows.append([name, *bound, proven, account.get("dp", ""), account["mechanism"], how])
    heads = ["institution", "ε", "δ", "proven", "dp=", "mechanism", "noise"]
    return {"caption": "What each institution's account states", "heads": heads, "rows": rows} if rows else None


def left_table(sums: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Tabulate the ledger's bytes by institution and kind; what came down is one column."""
    kinds = {kind for own in sums.values() for kind in own if kind != DOWN}
    known = {kind: at for at, kind in enumerate(KINDS)}
    heads = sorted(kinds, key=lambda head: (known.get(_kind(head)[0], len(known)), head))
    rows = [[name, *(shown_bytes(own.get(kind, 0)) for kind in [*heads, DOWN])] for name, own in sums.items()]
    caption = "Bytes that left by kind, and bytes that came down, repeated messages included"
    return {"caption": caption, "heads": ["institution", *heads, "came down"], "rows": rows}


def travelled_by_kind(folder: Path) -> dict[str, dict[str, int]]:
    """Sum the ledger's bytes by institution, and by kind or `DOWN`."""
    sums: dict[str, dict[str, int]] = {}
    for line in ledger_of(folder):
        hidden = next((f", {word}" for word in HIDDEN if word in line["protection"]), "")
        kind = f"{line['kind']}{hidden}" if line["direction"] == "up" else DOWN
        own = sums.setdefault(line["institution"], {})
        own[kind] = own.get(kind, 0) + line["bytes"]
    return dict(sorted(sums.items()))


def _lacking(folder: Path, sums: Mapping[str, Mapping[str, int]], sent: Mapping[str, int]) -> str:
    """Say that the ledger has not all bytes that were sent, as where one of its segments is missing."""
    down, both = (sum(own.get(DOWN, 0) for own in sums.values()), sum(sum(own.values()) for own in sums.values()))
    if (down, both - down) == (sent["down"], sent["up"]):
        return ""
    return (
        f"{folder.name}: the ledger's lines have {shown_bytes(both)}, {shown_bytes(sent['up'] + sent['down'])} were "
        "sent. So the table of what left the institutions is wrong: restore the ledger and its segments from a backup."
    )


def _kind(head: str) -> tuple[str, str]:
    """Return a column's kind, and the word for how the server is kept from reading it."""
    kind, _, hidden = head.partition(", ")
    return kind, hidden


def _pictures(folder: Path) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Return the run's pictures as far as there is room, and a line that names the others."""
    room, shown, others = ROOM, [], []
    for path in [*sorted(folder.glob("*.png")), *sorted(folder.glob("pictures/*/*.png"))]:
        name = str(path.relative_to(folder))
        picture = read_bytes(path)
        if len(picture) * 4 / 3 > room:
            others.append(name)
            continue
        room -= len(picture) * 4 // 3
        shown.append((path.stem, base64.b64encode(picture).decode(), name))
    return shown, [f"More pictures are in the run directory: {', '.join(others)}."] if others else []
