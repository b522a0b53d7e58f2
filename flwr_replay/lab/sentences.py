"""One sentence for each result of the privacy lab, as one would say it to a data-protection officer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from flwr_replay.attacks.intervals import share
from flwr_replay.config.parts import is_part
from flwr_replay.lab.registry import NUMBER
from flwr_replay.report.progress import shown_bytes

__all__ = ["DOES_NOT_SHOW", "between", "headline", "sentence"]

DOES_NOT_SHOW = (
    "A failed attack proves nothing: a better one may succeed. Only an epsilon from an institution's account bounds "
    "what attacks find, and only in what its mechanism releases; a large one bounds little.",
    "The attacker here reads what honest institutions send and follows the protocol. A server that sends crafted "
    "weights or options can learn more; that is not tested.",
    "Where one message is of all of an institution's images, reconstructions are assigned to them as well as possible. "
    "Any pictures then seem to identify many. The control scores the same reconstructions, assigned in the same way, "
    "as those of other people with the same labels.",
    "Where nobody can say which images are behind a message, as under DP-SGD, a reconstruction is only compared: is it "
    "nearer to one of the institution's images than to any of as many other people's? By chance half of them are, and "
    "several together, since one image may be near to all. How many chance gives is told beside them.",
    "Those who were not in the training are test images of the same source. No digest proves that they are the run's.",
    "How many are identified depends on the data, the model and the images that the attacker has. It is a figure of "
    "this run, and of no other.",
    "With fewer than 1,000 others, 'found at 0.1 % false alarms' means without any; with fewer than 100 so does 1 %.",
    "Images of other patients may look alike. The control says how often reconstructions of other patients point to "
    "the right one.",
)
TIMES = ((90, "second", 1), (5400, "minute", 60), (10**9, "hour", 3600))


def sentence(result: dict[str, Any]) -> str:
    """Say what an attack found."""
    whose, what = result["institution"], f"{result['field']} of stage {result['stage']}"
    if result["attack"] == "none":
        return f"{whose}, {what}: {result['not-judged']}"
    sent = f"{whose} sent {shown_bytes(result['bytes'])} ({what}, {_count(result['messages'], 'message')})."
    unsure = f" The originals were checked {NUMBER}." if result["originals"] == NUMBER else ""
    if "membership" in result:
        rates = result["membership"]
        return (
            f"{sent} Whether an image was in the training, {result['attack']} tells with an AUC of "
            f"{between(rates['auc'])}, where 0.5 is guessing. Of {rates['members']:,} members it finds "
            f"{rates['tpr_at_1_percent']['value']:.1%} if it may be wrong about 1 % of the others."
            f"{_allowed(result) if 'allowed' in result else ''}{unsure}"
        )
    if "alone" in result:
        hits, number = round(result["alone"]["value"] * result["number"]), _count(result["number"], "image")
        return (
            f"{sent} Of {number} alone in a class, {hits} are found among {result['among']:,} by the sums of "
            f"features.{unsure}"
        )
    if "labels" in result:
        tally = result["labels"]
        even = f" Equal counts would be right for {tally['equal-counts']:,}." if "equal-counts" in tally else ""
        return (
            f"{sent} Labels, by {result['attack']}: {tally['right']:,} of {tally['number']:,} are right.{even}{unsure}"
        )
    if "picture" not in result:
        name = result["attack"]
        shown = name if is_part(name) else f"{name[0].upper()}{name[1:]}"
        return f"{sent} {shown} was not tried: {result['not-judged']}"
    tried, note = f"in {_time(result['seconds'])}, by {result['attack']}", result["note"] and f" {result['note']}"
    if not result.get("scores"):
        return f"{sent} There are pictures, {tried}; nobody judged them: {result['not-judged']}"
    scores, control = result["scores"], result.get("control")
    if "nearer" in scores:
        unknown = "only the institution knows" if result["secret"] else "the judge could not compute"
        return (
            f"{sent} Which of its {result['images']:,} images are behind that, {unknown}. Of what someone with "
            f"{_with(result['auxiliary'])} found {tried}, {_nearer(scores)}. PSNR to the nearest of its own "
            f"{_number(scores['psnr'])}.{note}"
        )
    tries, right = scores["number"], round(scores["identified"]["value"] * scores["number"])
    share = f"{control['identified']['value']:.1%}" if control else ""
    beside = f" As a control, the same pictures scored as if they were of other images: {share}." if control else ""
    images = round(result["batch"] / scores["chance"])
    beside += (
        " Which reconstruction is of which image, the judge chose as well as possible." if result["batch"] > 1 else ""
    )
    return (
        f"{sent} From that, someone with {_with(result['auxiliary'])} found the right one of its {images:,} images in "
        f"{right} of {tries} tries, {tried}; PSNR {_number(scores['psnr'])}.{beside}{note}"
    )


def headline(results: Sequence[Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]]:
    """Say the worst of what attacks found: how much, what guessing finds, and what that means to a patient.

    The worst surely exceeds guessing by most, by the lower end of its interval, as a share of what guessing leaves.
    Returned with it is its result, empty if nothing exceeds guessing.
    """
    told = [(*alarm, result) for result in results if (alarm := _beyond(result))]
    if not told:
        return "No attack here found more than guessing does. That proves nothing: a better one may.", {}
    _, text, worst = max(told, key=lambda each: each[0])
    return text, worst


def _beyond(result: Mapping[str, Any]) -> tuple[float, str] | None:
    """Return how far an attack exceeds guessing, at most 1, with a sentence; None if it is not shown to."""
    whose, scores, tally = result["institution"], result.get("scores") or {}, result.get("labels", {})
    if "identified" in scores:
        number, rate, control = scores["number"], scores["identified"], result.get("control")
        guess = number * max(scores["chance"], control["identified"]["value"] if control else 0)
        text = (
            f"Of {number:,} images made from what {whose} sent, {number * rate['value']:,.0f} point to the right "
            f"patient, where guessing finds {guess:,.1f}: whoever reads the messages has a way back to a patient's "
            "image."
        )
    elif "nearer" in scores:
        number, guess = scores["number"], scores["by_chance"]
        rate = {"low": scores["nearer"] / number if scores["p"] < 0.05 else 0}
        text = (
            f"Of {number:,} images made from what {whose} sent, {scores['nearer']:,} are nearer to its patients' than "
            f"to other people's, where guessing finds {guess:.1f}: the messages tell something of its patients."
        )
    elif "alone" in result:
        number, rate = result["number"], result["alone"]
        guess = number / result["among"]
        text = (
            f"Of {_count(number, 'patient')} of {whose} alone in a class, {number * rate['value']:,.0f} are found "
            f"among {result['among']:,}, where guessing finds {guess:.1f}: whoever has a patient's image learns the "
            "label."
        )
    elif guesses := tally.keys() & {"always-one", "equal-counts"}:  # results of earlier versions have neither
        number, guess, counted = tally["number"], tally[min(guesses)], "equal-counts" in guesses
        rate = asdict(share(tally["right"], number))
        learns = "how many patients have which diagnosis" if counted else "a patient's diagnosis"
        text = (
            f"Of {number:,} labels of {whose}, {tally['right']:,} are known from what it sent, where guessing finds "
            f"{guess:,}: whoever reads the messages learns {learns}."
        )
    elif "membership" in result:
        number, guess, rate = 1, 0.5, result["membership"]["auc"]
        text = (
            f"Of a patient of {whose} and another person, what it sent tells the patient in {rate['value']:.0%} of "
            "pairs, where guessing does in 50 %: whoever has an image can learn that its patient was there."
        )
    else:
        return None
    chance = guess / number
    return ((rate["low"] - chance) / (1 - chance), text) if rate["low"] > chance else None


def _allowed(result: dict[str, Any]) -> str:
    """Say what the stated epsilon allows, and how much of it was seen."""
    most, stated = result["allowed"], result["stated"]
    return (
        f" Epsilon {stated['epsilon']:.2f} allows an AUC of {most['auc']:.2f} and {most['tpr_at_1_percent']:.1%}; the "
        f"scores show that it is {result['shown']:.2f} or more. The noise is {result['noise']:.3f} of what is due."
    )


def _nearer(scores: dict[str, Any]) -> str:
    """Say how many pictures are nearer to own images than to other people's, and how many chance gives."""
    return (
        f"{scores['nearer']} of {scores['number']} are nearer to an image of its own than to any of other people's "
        f"({scores['own']:,} images on each side, with the same labels); by chance {scores['by_chance']:.1f}, and in "
        f"95 % of cases at most {scores['by_chance_95']} (p = {scores['p']:.3f})"
    )


def _with(auxiliary: str) -> str:
    return "no images of its own" if auxiliary == "none" else auxiliary


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def between(estimate: dict[str, float], form: str = "{:.2f}") -> str:
    """Write a value with its interval."""
    return f"{form.format(estimate['value'])} [{form.format(estimate['low'])}, {form.format(estimate['high'])}]"


def _number(value: float | str) -> str:
    return f"{value:.1f} dB" if isinstance(value, float) else "infinite, at least one image is exact"


def _time(seconds: float) -> str:
    unit, each = next((unit, each) for most, unit, each in TIMES if seconds < most)
    return _count(max(1, round(seconds / each)), unit)
