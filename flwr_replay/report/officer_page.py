"""The data-protection officer's page, `officer.html`: what would leave, and what the policy says to it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flwr_replay.config.hiding import Hiding
from flwr_replay.files.atomic import write_atomic
from flwr_replay.report.progress import shown_bytes
from flwr_replay.report.run_page import KINDS, versions_table
from flwr_replay.report.summary import RECONSTRUCT
from flwr_replay.report.templates import render

__all__ = ["sums", "verdict", "write_officer_page"]

PAGE = "officer"
VERDICTS = ("allowed", "refused", "kept here")
RULES = {
    "strategies": "the method may be used (strategies)",
    "recording": "the server says that it keeps no messages, or the policy lets it (recording)",
    "limits": "the server asks for no more than allowed (limits)",
    "sealed": "weights are sealed, where the policy asks for it (sealed)",
    "masked": "weights are under masks, where the policy asks for it (masked)",
    "weights": "the frozen encoder is one that the policy accepts (weights)",
    "min-count": "no number of few examples, nor one from which it follows (min-count)",
    "max-delta": "δ is small enough (max-delta)",
    "max-total-epsilon": "other runs have left enough of ε and δ, by the state here (max-total-epsilon)",
    "min-colluders": "shared noise holds against enough institutions that help the server (min-colluders)",
    "max-evaluations": "the number of tests (max-evaluations)",
    "room": "other runs have left room for its tests and sums, by the state here (max-evaluations)",
}
ENFORCED = (
    "It reads its policy anew for every message, and refuses before it reads data where it can.",
    "It writes every field that leaves to a ledger of its own, on the disk, before it leaves.",
    "It refuses instructions that differ from the options on this page, and options that change while a run goes on.",
    "It keeps its account of ε, draws the noise from a key of its own, and lets no answer leave before it is charged.",
)


class Hidden(NamedTuple):
    """What a page says of a run that hides weights from the server."""

    readers: str = "the server"
    hides: str = ""
    not_hidden: tuple[str, ...] = ()
    enforced: tuple[str, ...] = ()


SEALED = Hidden(
    "the institutions with pinned keys; the server reads numbers only",
    "The seal hides weights and images from the server.",
    (
        "who exchanges with whom, when, and how many bytes.",
        "numbers of examples and steps, losses, and all results of tests.",
        "w of PushSum: it follows from the graph, which the server chooses.",
        "anything from the other institutions: each can open what the others send.",
        "earlier messages, once a private key is stolen. There is no forward secrecy: who has kept the parcels then "
        "opens all of them, since each is sealed for every institution.",
    ),
    (
        "It seals all weights and images that leave, for the institutions whose keys it has pinned. It refuses weights "
        "that come in plain, altered, a second time, out of order, from another run, or from an institution whose key "
        "it does not know. It knows what came before as long as its state directory is kept. With pinned keys, it "
        "takes no part in a run that is neither sealed nor masked.",
    ),
)
MASKED = Hidden(
    "the server, which reads the mean of weights over institutions, and this one's numbers",
    "The masks hide this institution's weights from the server, in those of all.",
    (
        "the mean of the weights of all institutions, which may tell of single examples. Masks are no DP.",
        "this institution's weights, from whoever has the keys of all the others.",
        "about what this institution's part is, from whoever compares two runs, one with it and one without.",
        "numbers of examples and steps, all results of tests, and whether a test fails. How many institutions' "
        "training diverged is seen, and not whose.",
        "the gradient of the loss in tests: a server computes it from losses at weights of its choice. With "
        "metrics: counted only counts of tests leave.",
        "earlier answers, once a private key is stolen: the masks that it shared can then be made again.",
    ),
    (
        "It puts the weights that leave under masks, made of the keys that it has pinned. They cancel in the sum of "
        "all institutions in that file, at least three, and only if all answer the same requests. No loss on "
        "training examples leaves. It masks one answer in an exchange, and repeats the same bytes if it is asked "
        "again, as long as its state directory is kept. With pinned keys, it takes no part in a run that is neither "
        "sealed nor masked; with masked: true in its policy, in no sealed one either.",
    ),
)
HIDDEN = {Hiding.NOTHING: Hidden(), Hiding.SEALED: SEALED, Hiding.MASKED: MASKED}
HANDS_ON = (
    "to hand on what institutions have sealed. It can hold a parcel back, and it chooses who gets whose, with which "
    "share."
)
ALONE = (
    "How many examples the others have is not known here. What a method asks only the institution with the most for, "
    "such as training an encoder, is on this page, too."
)
UNDRAWN = (
    "Only a fraction of the institutions trains in a round. Who is drawn depends on all names, which are not known "
    "here. So this page counts every round: no institution is asked for more, and no ε at the end is larger."
)
ASKED = (
    "to use what it receives for this study only, and to delete it afterwards. Nothing here can check that.",
    "to send weights as the method has them. Weights made for reading images are not recognised unless the policy pins "
    "them (weights).",
    "to run the flwr-replay that the institutions have reviewed. A server can send other code with a run. That code "
    "could read the data and ask no policy. Only the rights of the account under which the program runs limit it.",
    "to say truthfully whether it keeps messages for later attacks on them.",
)


def write_officer_page(folder: Path, forecast: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write `officer.html` and `officer.json` into a folder, over earlier ones; return their paths.

    `forecast` is what `flwr_replay.forecast.officer.findings` returned, here and below.
    """
    names, lines = list(forecast["institutions"]), forecast["fields"]
    of_each = {name: [line for line in lines if line["institution"] == name] for name in names}
    hides = forecast["hides"]
    reasons = list(dict.fromkeys(row["reason"] for row in [*forecast["rules"], *lines] if row["reason"]))
    number = {reason: f"{at}" for at, reason in enumerate(reasons, 1)}
    page, data = folder / f"{PAGE}.html", folder / f"{PAGE}.json"
    text = render(
        "officer",
        title=f"What would leave {_joined(names)}",
        about=_about(forecast),
        first=_first(forecast),
        allowed=forecast["allowed"],
        rules={
            "caption": "The rules, each by itself. The institution takes part only if none is broken",
            "heads": ["what the policy is asked", "the answer"],
            "rows": [[RULES.get(rule["rule"], rule["rule"]), _said(rule, number)] for rule in forecast["rules"]],
        },
        by_kind=_grouped({name: _by_kind(own) for name, own in of_each.items()}),
        fields=_grouped({name: _fields(own, number) for name, own in of_each.items()}),
        reasons=reasons,
        sums=sums(forecast),
        samples=_samples(lines),
        claim=forecast["claim"],
        protected=_protected(lines),
        unprotected=_unprotected(lines),
        pinned=_joined(forecast["pinned"]),
        enforced=[*ENFORCED[: len(ENFORCED) if forecast["private"] else -1], *HIDDEN[hides].enforced, _floor(forecast)],
        asked=ASKED if hides.readable else [ASKED[0], HANDS_ON, *ASKED[2:]],
        hides=HIDDEN[hides].hides,
        not_hidden=HIDDEN[hides].not_hidden,
        policy=forecast["policy"],
        policy_text=forecast["policy-text"],
        versions=versions_table("Versions here. The other places should have the same.", forecast["versions"]),
        options=forecast["options"],
        version=forecast["versions"]["flwr-replay"],
    )
    write_atomic(data, json.dumps(forecast, indent=2, ensure_ascii=False) + "\n")
    write_atomic(page, text)
    return page, data


def verdict(forecast: Mapping[str, Any]) -> str:
    """Say in a sentence or two what the policy's verdict on the whole run is."""
    alone, names = len(forecast["institutions"]) == 1, _joined(list(forecast["institutions"]))
    if not forecast["policy"]:
        return f"There is no policy: {names} would let all of it leave. Give one with --policy."
    under = f"Under this policy {names}"
    if forecast["allowed"]:
        kept = any(line["verdict"] == "kept here" for line in forecast["fields"])
        but = " Some fields stay here, as the policy says." if kept else ""
        return f"{under} {'takes' if alone else 'take'} part. The fields below may leave.{but}"
    if not forecast["takes-part"]:
        takes = "takes" if alone else "take"
        return f"{under} {takes} no part. Nothing leaves but the name, and a line that says why."
    refuses = "refuses" if alone else "refuse"
    return f"{under} {refuses} some of the messages below. In their place a line leaves that says why."


def _first(forecast: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary to sign; what this program cannot know is left open."""
    lines = [line for line in forecast["fields"] if line["verdict"] == "allowed"]
    names = list(forecast["institutions"])
    size = {kind: sum(line["bytes"] for line in lines if line["kind"] == kind) for kind in KINDS}
    leaves = "; ".join(f"{shown_bytes(size[kind])} of {kind} ({KINDS[kind]})" for kind in KINDS if size[kind])
    rows = [
        [
            "purpose",
            f"a model for the task {forecast['task']}, by {forecast['strategy']}, rounds: {forecast['rounds']}",
        ],
        [
            "data subjects",
            f"{sum(own['examples'] for own in forecast['institutions'].values()):,} training examples at "
            f"{_joined(names)}, and those of {'their' if names[1:] else 'its'} tests; of patients: "
            "____________________",
        ],
        ["verdict", verdict(forecast)],
        ["what leaves", leaves or "nothing"],
        ["to whom", f"{HIDDEN[forecast['hides']].readers}; run by: ____________________"],
        ["ε of this run", " ".join(_protected(lines)) or "none: nothing that leaves is differentially private"],
        ["ε before it", " ".join(forecast["all-runs"]) or "not known: the state of earlier runs is not here"],
        [
            "small cells",
            f"none below {forecast['min-count']} leaves (min-count)" if forecast["min-count"] else "no floor",
        ],
        [
            "retention",
            "here: ledger and accounts, until the institution removes them (deploy remove); at the server, which "
            "nothing here can check, until: ____________________",
        ],
        ["contact", "____________________"],
    ]
    return {"caption": "In short, to sign", "heads": ["what", "this study"], "rows": rows}


def _about(forecast: Mapping[str, Any]) -> list[str]:
    nodes, rounds = forecast["nodes"], forecast["rounds"]
    who = f" with {nodes} institutions" if nodes else ""
    return [
        f"The study would train a model for the task {forecast['task']} by {forecast['strategy']}{who}, in {rounds} "
        f"round{'s' * (rounds != 1)}. {forecast['idea']}",
        *([f"The network: {forecast['network']}"] if forecast["network"] else []),
        "This is a forecast. Nothing was trained and nothing was sent. Real messages were made with zeros in place of "
        "data, and put before the same checks that decide in the run.",
        *([ALONE] if forecast["others-unknown"] else []),
        *([UNDRAWN] if forecast["others-unknown"] and forecast["fraction"] < 1 else []),
    ]


def _floor(forecast: Mapping[str, Any]) -> str:
    """Say what is done about numbers of few examples."""
    if not (least := forecast["min-count"]):
        return "There is no floor for small cells (min-count is off): a number that leaves may be of one patient."
    return (
        f"No number of fewer than {least} examples leaves. Of a test all cells of the confusion leave if none is "
        f"smaller, else how many answers were right; if fewer than {least} were right, or wrong, a lower bound that "
        f"says only that. All runs together have {forecast['tests']:,} such tests, and any two can be subtracted. "
        "Numbers with noise leave whatever they are: the noise hides them, as far as ε says. Weights without "
        "differential privacy can tell counts, and no floor holds there."
    )


def _grouped(tables: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tables of institutions with who they are in the caption, and only one of those that are the same."""
    alike: dict[str, list[str]] = {}
    for name, table in tables.items():
        alike.setdefault(repr(table), []).append(name)
    return [
        {
            **tables[names[0]],
            "caption": tables[names[0]]["caption"].format("each of " * bool(names[1:]) + _joined(names)),
        }
        for names in alike.values()
    ]


def _by_kind(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum the fields by kind: the bytes by verdict, as far as there are any of it, and what the kind is."""
    rows, verdicts = [], [verdict for verdict in VERDICTS if any(line["verdict"] == verdict for line in lines)]
    for kind in dict.fromkeys(line["kind"] for line in lines):
        of_kind = [line for line in lines if line["kind"] == kind]
        sums = [sum(line["bytes"] for line in of_kind if line["verdict"] == verdict) for verdict in verdicts]
        rows.append([kind, *(shown_bytes(size) if size else "" for size in sums), KINDS[kind]])
    return {
        "caption": "What {} would be asked to send, by kind",
        "heads": ["kind", *verdicts, "what it is"],
        "rows": rows,
    }


def _fields(lines: Sequence[Mapping[str, Any]], number: Mapping[str, str]) -> dict[str, Any]:
    rows = [
        [
            line["field"],
            _said(line, number),
            line["stage"],
            line["kind"],
            line["meaning"],
            line["messages"],
            shown_bytes(line["bytes"]),
            f"{line['protection']}{', by ' * bool(line['mechanism'])}{line['mechanism']}",
        ]
        for line in lines
    ]
    heads = ["field", "verdict", "stage", "kind", "what it is", "messages", "size", "protection"]
    caption = "Every field that {} would be asked to send"
    if any(line["mechanism"] for line in lines):
        caption += ". An (ε, δ) that stands at several fields of a stage holds for them together"
    return {"caption": caption, "heads": heads, "rows": rows}


def _said(row: Mapping[str, str], number: Mapping[str, str]) -> str:
    return f"{row['verdict']}, reason {number[row['reason']]}" if row["reason"] else row["verdict"]


def sums(forecast: Mapping[str, Any]) -> list[str]:
    """Say for each institution how much would be allowed to leave, beside its raw data."""
    lines = []
    for name, own in forecast["institutions"].items():
        by_verdict, samples, raw = dict.fromkeys(VERDICTS, 0), 0, own["raw-bytes"]
        for field in forecast["fields"]:
            if field["institution"] == name:
                by_verdict[field["verdict"]] += field["bytes"]
                samples += field["bytes"] * (field["verdict"] == "allowed" and field["kind"] == "per-sample")
        rest = [f"; {shown_bytes(size)} {word}" for word, size in by_verdict.items() if size and word != "allowed"]
        times = f", {float(f'{samples / raw:.2g}'):g} times the raw data" if samples > raw else ""
        single = f", of which {shown_bytes(samples)} are functions of single patients{times}" if samples else ""
        size = shown_bytes(own["comes-down"])
        only = f"Of the {size} that would come down only the roll call does."
        down = f"{size} come down." if forecast["takes-part"] else only
        lines.append(
            f"{name} has {own['examples']:,} training examples of {shown_bytes(raw)}. "
            f"{shown_bytes(by_verdict['allowed'])} may leave{single}{''.join(rest)}. {down}"
        )
    return lines


def _samples(lines: Sequence[Mapping[str, Any]]) -> str:
    """Say what can be made of fields of single patients that may leave; empty if there are none."""
    per_sample = [line for line in lines if line["kind"] == "per-sample" and line["verdict"] == "allowed"]
    names = [*dict.fromkeys(line["field"] for line in per_sample)]
    warning = f"{_joined(names)} are functions of single patients. {RECONSTRUCT}"
    return f"{warning[0].upper()}{warning[1:]}" if names else ""


def _protected(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name what leaves under an (ε, δ): fields of one stage, which share it, in one line."""
    fields_by_claim: dict[tuple[str, str, str], dict[str, None]] = {}
    for line in lines:
        if mechanism := line["mechanism"]:
            fields_by_claim.setdefault((line["stage"], line["protection"], mechanism), {})[line["field"]] = None
    return [
        f"{_joined(list(names))} of stage {stage}{', together' * (len(names) > 1)}: {protection}, by {mechanism}."
        for (stage, protection, mechanism), names in fields_by_claim.items()
    ]


def _unprotected(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name what may leave without differential privacy, by kind."""
    stages: dict[str, dict[str, None]] = {}
    for line in lines:
        if line["verdict"] == "allowed" and line["kind"] != "notice" and not line["mechanism"]:
            stages.setdefault(line["kind"], {})[f"{line['field']} ({line['stage']})"] = None
    return [f"{kind}, {KINDS[kind]}: {', '.join(names)}." for kind, names in stages.items()]


def _joined(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + (" and " if names[1:] else "") + names[-1] if names else ""
