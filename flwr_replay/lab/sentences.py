"""One sentence for each result of the privacy lab, as one would say it to a data-protection officer."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from flwr_replay.attacks.catalogue import ALONE
from flwr_replay.attacks.intervals import share
from flwr_replay.config.own_code import is_own
from flwr_replay.lab.registry import NUMBER
from flwr_replay.report.progress import shown_bytes

__all__ = ["DOES_NOT_SHOW", "between", "found", "headline", "sentence"]

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
JUDGED = {"membership", "alone", "labels", "scores"}  # keys of a result that has figures
TIMES = ((90, "second", 1), (5400, "minute", 60), (10**9, "hour", 3600))


class Success(NamedTuple):
    """A share that an attack got right, what guessing gets, and what that means to a patient."""

    rate: Mapping[str, float]  # value, low, high; without high nobody knows the interval, and low is 0 if it is chance
    guess: float
    told: str

    @property
    def beyond(self) -> float:
        """How much of what guessing leaves it has surely found; 0 if nothing."""
        low = self.rate["low"]
        return (low - self.guess) / (1 - self.guess) if low > self.guess else 0.0


def sentence(result: Mapping[str, Any], least: int = 0) -> str:
    """Say what an attack found.

    With `least`, a policy's `min-count`, it tells no number of fewer images, of all but so few, nor what these follow
    from.
    """
    whose, what = result["institution"], f"{result['field']} of stage {result['stage']}"
    why = _unnumbered(result.get("not-judged", ""), "attacks.json says why, with numbers", least)
    if result["attack"] == "none":
        return f"{whose}, {what}: {why}"
    sent = f"{whose} sent {shown_bytes(result['bytes'])} ({what}, {_count(result['messages'], 'message')})."
    unsure = f" The originals were checked {NUMBER}." if result["originals"] == NUMBER else ""
    if least and result["attack"] == ALONE.name:
        return f"{sent} Whether images are alone in a class, and found, is not told here (min-count).{unsure}"
    if "membership" in result:
        rates, members = result["membership"], result["membership"]["members"]
        recognised = _some(round(rates["tpr_at_1_percent"]["value"] * members), members, least)
        if 0 < result.get("images", members + 1) - members < least:  # as many have no other of their label
            recognised = "an untold number of"
        return (
            f"{sent} Whether an image was in the training, {result['attack']} tells with an AUC of "
            f"{between(rates['auc'])}, where 0.5 is guessing. It finds {recognised} members "
            "if it may be wrong about 1 % of the others."
            f"{_allowed(result, least) if 'allowed' in result else ''}{unsure}"
        )
    if "alone" in result:
        hits, number = round(result["alone"]["value"] * result["number"]), _count(result["number"], "image")
        return (
            f"{sent} Of {number} alone in a class, {hits} are found among {result['among']:,} by the sums of "
            f"features.{unsure}"
        )
    if "labels" in result:
        tally = result["labels"]
        counted, right = "equal-counts" in tally, _some(tally["right"], tally["number"], least)
        even = f" Equal counts would be right for {tally['equal-counts']:,}." if counted and not least else ""
        if counted and least:  # beside the guessed counts, which follow from what was sent, it tells those of classes
            right = "an untold number"
        return f"{sent} Labels, by {result['attack']}: {right} are right.{even}{unsure}"
    if "picture" not in result:
        name = result["attack"]
        shown = name if is_own(name) else f"{name[0].upper()}{name[1:]}"
        return f"{sent} {shown} was not tried: {why}"
    unit, each = next((unit, each) for most, unit, each in TIMES if result["seconds"] < most)
    tried = f"in {_count(max(1, round(result['seconds'] / each)), unit)}, by {result['attack']}"
    if not result.get("scores"):
        return f"{sent} There are pictures, {tried}; nobody judged them: {why}"
    note, scores, control = _unnumbered(result["note"], "", least), result["scores"], result.get("control")
    note = note and f" {note}"
    auxiliary = _unnumbered(result["auxiliary"], "images of its own", least)
    owner = f"someone with {'no images of its own' if auxiliary == 'none' else auxiliary}"
    if "nearer" in scores:
        unknown = "only the institution knows" if result["secret"] else "the judge could not compute"
        return (
            f"{sent} Which of its {_few(result['images'], least)} images are behind that, {unknown}. Of what {owner} "
            f"found {tried}, {_nearer(scores, result['images'], least)}. PSNR to the nearest of its own "
            f"{_number(scores['psnr'])}.{note}"
        )
    right = _some(_hits(scores), scores["number"], least)
    share = _some(_hits(control), control["number"], least) if control else ""
    beside = f" As a control, the same pictures scored as if they were of other images: {share}." if control else ""
    beside += (
        " Which reconstruction is of which image, the judge chose as well as possible." if result["batch"] > 1 else ""
    )
    return (
        f"{sent} From that, {owner} found the right one of its "
        f"{_few(round(result['batch'] / scores['chance']), least)} images in {right} tries, {tried}; PSNR "
        f"{_number(scores['psnr'])}.{beside}{note}"
    )


def headline(results: Sequence[Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]]:
    """Say the worst of what attacks found: how much, what guessing finds, and what that means to a patient.

    The worst surely exceeds guessing by most, by the lower end of its interval, as a share of what guessing leaves.
    Returned with it is its result, empty if nothing exceeds guessing.
    """
    if not any(JUDGED & result.keys() for result in results):
        return "Nothing was judged here: no attack fits, or none was tried. The lines say why; that proves nothing.", {}
    told = [(share, result) for result in results if (share := found(result)) and share.beyond]
    if not told:
        return "No attack here found more than guessing does. That proves nothing: a better one may.", {}
    most, worst = max(told, key=lambda each: each[0].beyond)
    return most.told, worst


def found(result: Mapping[str, Any]) -> Success | None:
    """Return what an attack found beside guessing; None if nothing was judged."""
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
        rate = {"value": (nearer := scores["nearer"] / number), "low": nearer if scores["p"] < 0.05 else 0}
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
    return Success(rate, guess / number, text)


def _allowed(result: Mapping[str, Any], least: int) -> str:
    """Say what the stated epsilon allows, and how much of it was seen."""
    most, stated = result["allowed"], result["stated"]
    shown = "" if least else f"; the scores show that it is {result['shown']:.2f} or more"  # it follows from counts
    return (
        f" Epsilon {stated['epsilon']:.2f} allows an AUC of {most['auc']:.2f} and {most['tpr_at_1_percent']:.1%}"
        f"{shown}. The noise is {result['noise']:.3f} of what is due."
    )


def _nearer(scores: Mapping[str, Any], images: int, least: int) -> str:
    """Say how many pictures are nearer to own images than to other people's, and how many chance gives."""
    side = f"({scores['own']:,} images on each side, with the same labels)"
    chance = (
        f"; by chance {scores['by_chance']:.1f}, and in 95 % of cases at most {scores['by_chance_95']} "
        f"(p = {scores['p']:.3f})"
    )
    few = min(scores["nearer"], scores["number"] - scores["nearer"]) < least  # p follows from it
    if min(scores["own"], images - scores["own"] or least) < least:
        side = "(as many with the same labels)"
    return (
        f"{_some(scores['nearer'], scores['number'], least)} are nearer to an image of its own than to any of other "
        f"people's {side}{'' if few else chance}"
    )


def _hits(scores: Mapping[str, Any]) -> int:
    return round(scores["identified"]["value"] * scores["number"])  # type: ignore[no-any-return]


def _few(number: int, least: int) -> str:
    return f"{number:,}" if number >= least else f"fewer than {least}"


def _some(number: int, of: int, least: int) -> str:
    """Say how many of how many; neither few nor all but few, if there is a floor, nor between what they are."""
    if of < 2 * least:
        return f"an untold number of {_few(of, least)}"
    if number < least:
        return f"fewer than {least} of {of:,}"
    return f"{number:,} of {of:,}" if of - number >= least else f"more than {of - least:,} of {of:,}"


def _unnumbered(text: str, instead: str, least: int) -> str:
    """Return a text; under a floor another one if it has numbers, of which nobody knows what they count."""
    return instead if least and re.search(r"\d", text) else text


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def between(estimate: dict[str, float], form: str = "{:.2f}") -> str:
    """Write a value with its interval."""
    return f"{form.format(estimate['value'])} [{form.format(estimate['low'])}, {form.format(estimate['high'])}]"


def _number(value: float | str) -> str:
    return f"{value:.1f} dB" if isinstance(value, float) else "infinite, at least one image is exact"
