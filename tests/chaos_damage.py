"""Damage to files of a run and its institutions between two processes: the same bits all the same, or one line.

The line names the file, the folder in which it lies, or what it holds. No account becomes smaller than what was stated.
A file that nothing reads again may be missing, with what is made of it: a picture, losses, a model that was handed on.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from random import Random

from chaos_faults import TAKEN, Fault, slot
from chaos_runs import Ended, Place, check_results, secretly, undisturbed_run

from flwr_replay.files.lines import read_lines

WAYS = {
    "cut to half": lambda data: data[: len(data) // 2],
    "emptied": lambda data: b"",
    "one byte flipped": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :]
    ),
    "removed": None,
}
SECRET = "privacy.noise=secret"  # no two runs are equal then, but accounts have a finite epsilon


class Broken:
    """A run that was killed at a step on the disk, to be copied and damaged.

    Parameters
    ----------
    folder : Path
        A new folder for it and an undisturbed one.
    options : list[str]
        The job's.
    share : float
        Of all steps, those before the kill.
    """

    def __init__(self, folder: Path, options: list[str], share: float) -> None:
        folder.mkdir()
        self.folder, self.repeatable, self.copies = folder, SECRET not in options, 0
        options = options if self.repeatable else [*secretly(options), SECRET]
        self.once, _ = undisturbed_run(folder / "once", options)
        self.place = Place(folder / "broken", options)
        self.place.attempt(Fault("kill", at=round(share * self.once.shared[TAKEN])))
        self.run_id = (self.place.run / "run-id").read_text().strip()
        self.stated = self._stated(self.place)

    def kinds(self) -> dict[str, list[Path]]:
        """Return the files by their names, without numbers and the run's id, relative to the place."""
        by_kind: dict[str, list[Path]] = {}
        for path in sorted(self.place.folder.rglob("*")):
            inside = path.relative_to(self.place.folder)
            if path.is_file() and path.name not in (".lock", "said") and path.stat().st_size:
                by_kind.setdefault(re.sub(r"\d+", "#", str(inside).replace(self.run_id, "ID")), []).append(inside)
        return by_kind

    def resumed(self, inside: Path, way: str) -> str:
        """Damage a file of a copy and resume it; return what was said of it, empty if nothing was lost."""
        self.copies += 1
        place = self.place.copy(self.folder / f"copy-{self.copies}")
        path, change = place.folder / inside, WAYS[way]
        if change:
            path.write_bytes(change(path.read_bytes()))
        else:
            path.unlink()
        error = self._judged(place, path, place.attempt())
        place.clear()
        return error

    def _judged(self, place: Place, path: Path, ended: Ended) -> str:
        if ended.code:
            error = ended.error
        else:
            reasons = [failure["reason"] for failure in place.result["failures"]]
            error = reasons[0] if reasons else ""
            stated = self._stated(place)
            assert all(stated[name] >= epsilon for name, epsilon in self.stated.items()), f"{stated}, was {self.stated}"
            if not error and path.parent.name == "best" and (lost := place.result["best-model"]["none"]):
                error = f"no model of the best round is kept: {lost}"
                assert error in " ".join(ended.output.split())
                return error
            if not error and self.repeatable:
                check_results(self.once, place, but=self._missing(place, path))
            if not error:
                undisturbed = self._stated(self.once)
                assert all(stated[name] >= undisturbed[name] for name in undisturbed), f"{stated}, not {undisturbed}"
        assert "Traceback" not in ended.output, ended.output
        known = (path.name, str(path.parent), path.parent.name.removesuffix("s"), self.run_id)
        assert not error or any(name in error for name in known), error
        self._check_charges(place, path)
        return error

    def _missing(self, place: Place, path: Path) -> frozenset[str]:
        """Return the names of the damaged file and of what is made of it."""
        made = [path]
        if path.name == "generator.jsonl":
            made.append(path.with_suffix(".png"))
        if path.parent.name == "pictures":
            institution = path.relative_to(place.folder / "state" / "simulation").parts[0]
            made.append(place.run / "pictures" / institution / path.name)
        return frozenset(map(place.named, made))

    def _check_charges(self, place: Place, damaged: Path) -> None:
        for state in (place.folder / "state" / "simulation").iterdir():
            account = state / "runs" / self.run_id / "privacy.jsonl"
            if account != damaged and account.parent.exists():
                charged, taken = sum(line["steps"] for line in read_lines(account)), place.shared[slot(state.name)]
                assert charged >= taken, f"{state.name} took {taken} noisy steps and is charged for {charged}"

    def _stated(self, place: Place) -> Mapping[str, float]:
        """Return the largest epsilon that each institution has stated to the server."""
        stated: dict[str, float] = {}
        for row in read_lines(place.run / "privacy.jsonl"):
            stated[row["institution"]] = max(stated.get(row["institution"], 0.0), row["epsilon"] or 0.0)
        return stated


def drawn_damage(broken: Broken, rng: Random, number: int) -> list[tuple[Path, str]]:
    """Draw kinds of files, one of each, and a way for each."""
    kinds = broken.kinds()
    return [(rng.choice(kinds[kind]), rng.choice(sorted(WAYS))) for kind in rng.sample(sorted(kinds), number)]
