"""Try every known attack on what a run has recorded, and let the judge say how much of it came true.

`<run>/attacks/attacks.json` grows by one attack at a time, so an interrupted command goes on where it stopped. Pictures
stand beside it; they show patients.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flwr_replay.attacks.attacker import Attacker, Attempt, Auxiliary
from flwr_replay.attacks.catalogue import Attack
from flwr_replay.attacks.distances import distances
from flwr_replay.attacks.scores import ImageScores, Judge, assigned, image_metrics
from flwr_replay.config.run import RunConfig
from flwr_replay.errors import ConfigError, DataError, FlwrReplayError, RunError
from flwr_replay.files.atomic import private_folder, read_json, sweep, write_json
from flwr_replay.generators.pictures import SHOWN, draw_grid
from flwr_replay.lab.auxiliary import auxiliary_of, without
from flwr_replay.lab.changes import NOT_ANEW
from flwr_replay.lab.evidence import Evidence, Exhibit
from flwr_replay.lab.judge import Originals, OtherOriginals, originals_of
from flwr_replay.lab.labels import judged_labels, label_attacks
from flwr_replay.lab.membership import by_function, member_attacks
from flwr_replay.lab.own import asked, seen_in
from flwr_replay.lab.registry import DIGEST, Only, checked, nothing_tried, number_timed, trial_of
from flwr_replay.lab.sentences import sentence
from flwr_replay.lab.sums import sum_attacks, summed
from flwr_replay.lab.trials import Question, Trial, failed
from flwr_replay.models.layers import as_input
from flwr_replay.privacy.plan import UPDATE
from flwr_replay.report.run_files import read_result
from flwr_replay.rng import derived_seed
from flwr_replay.runs.execute import Job, claim

__all__ = ["FOLDER", "RESULTS", "attack_run"]

FOLDER = "attacks"
FEWEST = 8  # images of an institution, and others, below which nobody says to whom a picture is nearer
RESULTS = {"attacks": list, "options": dict, "run": {"about": str, "claim": str}}


def attack_run(
    folder: Path,
    only: Only,
    aux: str,
    data: str,
    minutes: float,
    say: Callable[[str], None],
    run: str = "",
) -> dict[str, Any]:
    """Attack a run's recorded messages; return the content of `attacks.json`.

    Parameters
    ----------
    folder, run : Path, str
        A run directory; or an institution's state directory and the run's id, empty for the last recorded one.
    aux : str
        The attacker's own images: none, `undealt` (images of a simulation's data set that no institution has), the name
        of another institution of the simulation (collusion), or a data folder.
    data : str
        The institution's own data, for the judge; empty: those of the simulation.
    minutes : float
        For all attacks together, about; `say` receives a line for each.

    Raises
    ------
    FlwrReplayError
        If the run, its messages or the options are not usable; nothing has been written then.
    """
    if not minutes > 0:
        raise ConfigError(f"--minutes must be positive; got {minutes:g}")
    evidence = Evidence.of(folder, only.institution, only.field, run)
    config = evidence.config
    if config.hiding.sums_only:
        evidence = replace(evidence, exhibits=summed(evidence.exhibits, config, evidence.answers), sent=())
    if config.task.size <= 1 or config.task.format == "bags":
        raise ConfigError(
            f"attacks look for images; task={config.task.name} has tables or bags, for which none is built in: their "
            "rows are as recorded in messages/"
        )
    if not only.own or only.own.gives == "images":
        image_metrics()  # refused before anything is written
    about = {"about": _about(folder, config), "claim": claim(Job.of(config).strategy(""))}
    auxiliary = auxiliary_of(config, aux)
    Attacker(evidence.form, auxiliary, 0)  # refuses images of another form
    names = list(dict.fromkeys(exhibit.institution for exhibit in evidence.exhibits))
    for name in names if data else []:
        checked(name, evidence, originals_of(config, name, data))  # refuses others' data
    place = private_folder(folder / FOLDER)
    sweep(place)
    options = {"aux": auxiliary.source if auxiliary else "none", "data": data, "run": evidence.run}
    answers = {(each.institution, each.stage, each.field): len(each.answers) for each in evidence.exhibits}
    attacks = [
        result
        for result in _earlier(place, options, minutes, answers)
        if not only.own or result["attack"] != only.attack
    ]  # it may have changed
    if attacks:
        say(f"{len(attacks)} results are of an earlier command")
    done = {(result["institution"], result["stage"], result["field"], result["attack"]) for result in attacks}
    timed = sum(number_timed(exhibit.means, len(exhibit.answers)) for exhibit in evidence.exhibits)
    seconds = 60 * minutes / max(1, timed)
    for name in names:
        lab = Lab(evidence, name, only, auxiliary, data, seconds, place)
        for exhibit in (each for each in evidence.exhibits if each.institution == name):
            for result in lab.results(exhibit, done):
                result |= {"minutes": minutes, "sentence": sentence(result)}
                attacks.append(result)
                write_json(place / "attacks.json", {"run": about, "options": options, "attacks": attacks}, indent=2)
                say(result["sentence"])
    if only.attack and not any(result["attack"] == only.attack for result in attacks):
        if not any(place.iterdir()):
            place.rmdir()
        lacking = only.one and "auxiliary" in only.one.needs and not auxiliary
        hint = ", or none without the attacker's own images (--aux)" if lacking else ""
        raise ConfigError(
            f"--attack {only.attack!r}: no recorded field takes it{hint}: leave it out to see which are tried"
        )
    return {"run": about, "options": options, "attacks": attacks}


def _about(folder: Path, config: RunConfig) -> str:
    many = f"{config.nodes} institutions" if config.nodes else "institutions"
    rounds = read_result(folder)["rounds"] if (folder / "result.json").exists() else config.rounds
    return (
        f"{config.strategy.name} on {config.task.name}, {many}, model {config.model.name}, {rounds} "
        f"round{'s' * (rounds != 1)}, seed {config.seed}. "
        "The attacker reads what the institutions sent, and follows the protocol."
    )


def _earlier(
    place: Path, options: dict[str, Any], minutes: float, answers: Mapping[tuple[str, str, str], int]
) -> list[dict[str, Any]]:
    """Return the attacks of an interrupted command.

    Those are left out that had less time than they would have now, or fewer answers, since the run has gone on. Those
    of other options are refused.
    """
    file = place / "attacks.json"
    if not file.exists():
        return []
    before = read_json(file, RESULTS)
    if before["options"] == options:
        return [
            row
            for row in before["attacks"]
            if row.get("minutes", 0.0) >= minutes
            and row.get("answers") == answers.get((row["institution"], row["stage"], row["field"]), row.get("answers"))
        ]
    raise RunError(
        f"{file} has attacks with other options, {before['options']}: rename the folder {place.name}/, or remove it"
    )


class Lab:
    """Attacks on the fields of one institution.

    Its originals are dealt or read, and checked; `data` as in `originals_of`. Each attack takes so many `seconds`,
    about; pictures lie in `place`.
    """

    def __init__(
        self,
        evidence: Evidence,
        institution: str,
        only: Only,
        auxiliary: Auxiliary | None,
        data: str,
        seconds: float,
        place: Path,
    ) -> None:
        self.evidence, self.only, self.seconds, self.place = evidence, only, seconds, place
        self.auxiliary = auxiliary  # the attacker's own images, without those that the judge has
        self.originals: Originals | None = None  # the judge's
        self.why, self.checked = "", ""  # why there are none; how it was found that they are the run's
        try:
            originals = originals_of(evidence.config, institution, data)
            self.auxiliary = without(auxiliary, [originals.x_NCHW, originals.others_NCHW])
            self.checked = checked(institution, evidence, originals)
            self.originals = originals
        except DataError as error:
            self.why = str(error)

    def results(self, exhibit: Exhibit, done: Collection[tuple[str, ...]]) -> Iterator[dict[str, Any]]:
        """Attack a field; yield a result for each attack, or why there is none."""
        key = (exhibit.institution, exhibit.stage, exhibit.field)
        head = {
            "institution": exhibit.institution,
            "stage": exhibit.stage,
            "field": exhibit.field,
            "kind": exhibit.declared.kind,
            "means": exhibit.means,
            "answers": len(exhibit.answers),
            "messages": len(exhibit.answers),
            "bytes": exhibit.bytes,
            "auxiliary": self.auxiliary.source if self.auxiliary else "none",
            "originals": self.checked or "none",
            "images": len(self.originals.y_N) if self.originals else 0,
        }
        tried = False
        try:
            for name, attempt in self.attempts(exhibit):
                tried = True
                if (*key, name) in done or self.only.attack not in ("", name):
                    continue
                begun = time.monotonic()
                try:
                    outcome = attempt()
                except FlwrReplayError as error:
                    outcome = {"not-judged": str(error)}
                yield {**head, "attack": name, "seconds": time.monotonic() - begun, **outcome}
            reason = (
                "" if tried or self.only.own else nothing_tried(exhibit.means, exhibit.declared.kind == "synthetic")
            )
        except FlwrReplayError as error:
            reason = str(error)
        if reason and (*key, "none") not in done:
            yield {**head, "attack": "none", "not-judged": reason}

    def attempts(self, exhibit: Exhibit) -> Iterator[Question]:
        """Yield the attacks on a field: on membership and labels where there are originals, then on images."""
        seed = derived_seed(self.evidence.config.seed, "attack", exhibit.institution, exhibit.stage, exhibit.field)
        attacker = Attacker(self.evidence.form, self.auxiliary, seed, self.seconds)
        if own := self.only.own:
            if not own.takes or exhibit.means in own.takes:
                yield own.name, partial(self.by_own, own, exhibit, seed)
            return
        if exhibit.means == "weights" and UPDATE in self.evidence.config.privacy.mechanisms:
            raise RunError("no attack is known here on updates that are clipped as a whole and have noise")
        trial: Trial | None = None
        try:
            trial = trial_of(exhibit, self.evidence)
        except RunError as error:
            yield "reconstruction", partial(failed, error)
        if self.originals:
            yield from member_attacks(exhibit, self.evidence, self.originals, self.auxiliary, seed, self.seconds)
            yield from label_attacks(exhibit, self.evidence, trial, self.originals, attacker)
            yield from sum_attacks(exhibit, self.evidence, self.originals, seed)
        for tried in filter(None, (trial, trial.last()) if trial else ()):
            for attempt in tried.attempts(attacker):
                yield attempt.attack.name, partial(self.seen, exhibit, attempt, tried)

    def by_own(self, own: Attack, exhibit: Exhibit, seed: int) -> dict[str, Any]:
        """Try an attack of the user's own, and judge what it gives."""
        originals = self.originals
        if own.gives != "images" and not originals:
            raise DataError(self.why)
        if own.gives == "membership" and originals:
            return by_function(own, exhibit, self.evidence, originals, self.auxiliary, seed)
        if not (trial := trial_of(exhibit, self.evidence)):
            raise DataError("no image of the institution is behind these numbers")

        def found() -> Tensor:
            seen = seen_in(own, trial, self.auxiliary)
            return asked(own, seen, trial.places_n.clone(), seed=seed, task=self.evidence.config.task)

        if own.gives == "labels" and originals:
            if self.evidence.config.task.kind != "classification":
                raise DataError("labels are judged of tasks with classes")
            return judged_labels(trial, originals, found)
        return self.seen(exhibit, Attempt(own, lambda: (found(), {})), trial)

    def seen(self, exhibit: Exhibit, attempt: Attempt, trial: Trial) -> dict[str, Any]:
        """Look for images; let the judge score them, and draw them below the originals."""
        begun, originals, why = time.monotonic(), self.originals, self.why
        images, settings = attempt.images()
        result: dict[str, Any] = {
            "auxiliary": self.auxiliary.source if self.auxiliary else "none",
            "settings": settings,
            "seconds": time.monotonic() - begun,
            "message": trial.answer.file,
            "messages": 1,
            "bytes": exhibit.bytes_of(trial.answer),
            "batch": trial.mixed,
            "note": trial.note,
        }
        pictured: dict[str, Tensor] = {"reconstruction": images[:SHOWN]}
        if originals:
            try:
                rows = trial.rows(originals)
                if rows is None:
                    judged, rows = self.nearer(images, originals)
                else:
                    rows = rows[trial.places_n[: len(images)]]
                    own = rows >= 0  # behind the others are images of other institutions, which replay has put there
                    if not bool(own.any()):
                        raise DataError(
                            "all images that were attacked are of other institutions, which replay has put there"
                        )
                    images, rows = images[own], rows[own]
                    judged = self.scores(images, rows, trial.mixed, originals)
                    if trial.mixed > 1:
                        rows = rows[assigned(images, originals.x_NCHW[rows])]
                result |= {**judged, "values-per-pixel": trial.values_per_pixel}
                pictured = {"original": originals.x_NCHW[rows[:SHOWN]], "reconstruction": images[:SHOWN]}
            except OtherOriginals as error:
                why = NOT_ANEW if self.checked == DIGEST else str(error)
            except DataError as error:
                why = str(error)
        words = (exhibit.institution, exhibit.stage, exhibit.field, attempt.attack.name)
        plain = "-".join("".join(c if c.isalnum() else "-" for c in word) for word in words)
        path = self.place / f"{plain}.png"
        draw_grid(path, pictured)
        return {**result, "not-judged": why, "picture": path.name}

    def scores(self, images: Tensor, rows: Tensor, mixed: int, originals: Originals) -> dict[str, Any]:
        """Score images against the originals, and beside them what needs no attack at all."""
        judge = Judge(originals.x_NCHW)
        scores: dict[str, ImageScores | None] = {
            "scores": judge.scores(images, rows, mixed),
            "control": judge.control(images, rows, mixed) or self.as_others(images, rows, mixed, originals),
        }
        if self.auxiliary is not None:
            scores["mean-image"] = judge.mean_image(self.auxiliary.images_mCHW, rows)
            scores["nearest-image"] = judge.nearest_auxiliary(self.auxiliary.images_mCHW, rows)
        return {name: None if score is None else _finite(asdict(score)) for name, score in scores.items()}

    def nearer(self, images: Tensor, originals: Originals) -> tuple[dict[str, Any], Tensor]:
        """Score images of unknown people beside as many other people's; return rows of the nearest."""
        own, others = originals.beside_others(self.evidence.config.seed)
        if len(own) < FEWEST:
            raise DataError(
                f"which images are behind it is not known; beside other people's they are judged only if there are "
                f"{FEWEST} or more of the same classes; there are {len(own)}"
            )
        judge, seed = Judge(originals.x_NCHW[own]), self.evidence.config.seed
        sides = originals.y_N[own], originals.others_NCHW[others], originals.other_y[others]
        rows = own[distances(as_input(images).cpu(), judge.originals_NCHW).argmin(1)]
        scores = _finite(asdict(judge.nearer(images, *sides, seed)))
        return {"scores": scores, "secret": bool(self.evidence.config.privacy.mechanisms)}, rows

    def as_others(self, images: Tensor, rows: Tensor, mixed: int, originals: Originals) -> ImageScores | None:
        """Score images as those of other people of the same labels, in their order; None if there are too few."""
        own, others = originals.beside_others(self.evidence.config.seed)
        if len(own) < len(originals.y_N):
            return None
        instead = torch.empty_like(originals.x_NCHW)
        by_label, other_by_label = (y.argsort(stable=True) for y in (originals.y_N, originals.other_y[others]))
        instead[by_label] = originals.others_NCHW[others[other_by_label]]
        return Judge(instead).scores(images, rows, mixed)


def _finite(value: Any) -> Any:
    """Return scores as JSON holds them: a number that is not finite becomes a text."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return str(value) if isinstance(value, float) and not isfinite(value) else value
