"""One sentence for each result of the privacy lab, as one would say it to a data-protection officer."""

from __future__ import annotations

from typing import Any

from flwr_replay.lab.verified import NUMBER
from flwr_replay.report.progress import shown_bytes

__all__ = ["AMONG", "DOES_NOT_SHOW", "sentence"]

DOES_NOT_SHOW = (
    "A failed attack proves nothing: a better one may succeed. Only an epsilon from an institution's account bounds "
    "what attacks find, and only in what its mechanism releases; a large one bounds little.",
    "The attacker here reads what honest institutions send and follows the protocol. A server that sends crafted "
    "weights or options can learn more; that is not tested.",
    "Where one message is of all of an institution's images, reconstructions are assigned to them as well as possible. "
    "Other people's images then seem to identify many, too: compare with the control.",
    "Where batches are an institution's secret, as under DP-SGD, nobody can say whose image a reconstruction is of. It "
    "then counts as identified if it is nearer to one of the institution's images than to any of other people's.",
    "How many are identified depends on the data, the model and the images that the attacker has. It is a figure of "
    "this run, and of no other.",
    "With fewer than 1,000 others, 'found at 0.1 % false alarms' means without any; with fewer than 100 so does 1 %.",
    "Images of other patients may look alike. The control says how often reconstructions of other patients point to "
    "the right one.",
)
AMONG = ", among its own and others' images"  # in tables, of an attack on batches that are a secret
TIMES = ((90, "second", 1), (5400, "minute", 60), (10**9, "hour", 3600))


def sentence(result: dict[str, Any]) -> str:
    """Say what an attack found."""
    whose, what = result["institution"], f"{result['field']} of stage {result['stage']}"
    if result["attack"] == "none":
        return f"{whose}, {what}: {result['not-judged']}"
    sent = f"{whose} sent {shown_bytes(result['bytes'])} ({what}, {_count(result['messages'], 'message')})."
    unsure = f" The originals were checked {NUMBER}." if result["originals"] == NUMBER else ""
    if "membership" in result:
        found = result["membership"]
        return (
            f"{sent} Whether an image was in the training, {result['attack']} tells with an AUC of "
            f"{_between(found['auc'])}, where 0.5 is guessing. Of {found['members']} members it finds "
            f"{found['tpr_at_1_percent']['value']:.1%} if it may be wrong about 1 % of the others.{unsure}"
        )
    if "labels" in result:
        found = result["labels"]
        even = f" Equal counts would be right for {found['equal-counts']:,}." if "equal-counts" in found else ""
        return (
            f"{sent} Labels, by {result['attack']}: {found['right']:,} of {found['number']:,} are right.{even}{unsure}"
        )
    if "picture" not in result:
        return f"{sent} {result['attack'][0].upper()}{result['attack'][1:]} was not tried: {result['not-judged']}"
    tried, note = f"in {_time(result['seconds'])}, by {result['attack']}", result["note"] and f" {result['note']}"
    if not result.get("scores"):
        return f"{sent} There are pictures, {tried}; nobody judged them: {result['not-judged']}"
    scores, control = result["scores"], result.get("control")
    tries, right = scores["number"], round(scores["identified"]["value"] * scores["number"])
    beside = f" As a control, other images: {control['identified']['value']:.1%}." if control else ""
    if "among" in result:
        own, others = result["among"]["own"], result["among"]["others"]
        return (
            f"{sent} Which of its {own:,} images are behind that, only the institution knows. Of what someone with "
            f"{_with(result['auxiliary'])} found {tried}, {right} of {tries} are nearer to one of these than to any of "
            f"{others:,} other people's; PSNR to the nearest {_number(scores['psnr'])}.{beside}{note}"
        )
    images = round(result["batch"] / scores["chance"])
    beside += (
        " Which reconstruction is of which image, the judge chose as well as possible." if result["batch"] > 1 else ""
    )
    return (
        f"{sent} From that, someone with {_with(result['auxiliary'])} found the right one of its {images:,} images in "
        f"{right} of {tries} tries, {tried}; PSNR {_number(scores['psnr'])}.{beside}{note}"
    )


def _with(auxiliary: str) -> str:
    return "no images of its own" if auxiliary == "none" else auxiliary


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _between(estimate: dict[str, float]) -> str:
    return f"{estimate['value']:.2f} [{estimate['low']:.2f}, {estimate['high']:.2f}]"


def _number(value: float | str) -> str:
    return f"{value:.1f} dB" if isinstance(value, float) else "infinite, at least one image is exact"


def _time(seconds: float) -> str:
    unit, each = next((unit, each) for most, unit, each in TIMES if seconds < most)
    return _count(max(1, round(seconds / each)), unit)
