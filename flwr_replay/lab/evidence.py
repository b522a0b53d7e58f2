"""What an honest-but-curious server has: the messages that a run recorded, answer by answer with their requests.

It also knows the weights with which a training began (`begun_with`). A request brings them, in SplitNN the first of a
visit. An institution of a gossip begins with fresh ones, whose seed the server has told it, and later with what it has
mixed. The server relays every model that is mixed, so it computes the same: Kalra et al. 2023, Algorithm 1, lines 7-10.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray
from torch import nn

from flwr_replay.config.compose import compose_own
from flwr_replay.config.halves import load_strategy
from flwr_replay.config.run import RunConfig
from flwr_replay.errors import RunError, nearest
from flwr_replay.files.atomic import read_text
from flwr_replay.files.disk import there
from flwr_replay.files.tensors import OF_RUN, StateDict, unnested
from flwr_replay.learning.pushsum import mixed, parcel, sender_name
from flwr_replay.models.zoo import backbone
from flwr_replay.report.run_files import CONFIG, check_own, ledger_of
from flwr_replay.runs.options import kept_overrides, run_overrides
from flwr_replay.state.store import DATA, RUNS
from flwr_replay.wire.fields import Field, Meaning
from flwr_replay.wire.ledger import ledger_lines
from flwr_replay.wire.payload import REQUESTS
from flwr_replay.wire.recording import FOLDER, Recorded, read_message
from flwr_replay.wire.weights import parted, to_arrays

__all__ = ["ALL", "NO_MODEL", "UNKNOWN_NETWORK", "Answer", "Evidence", "Exhibit", "begun_with", "visit"]

ALL = "all institutions"  # whose sums the server reads under masks
NO_MODEL = "the request that brought the network was not recorded: record the run with record=all"

UNKNOWN_NETWORK = (
    "the requests of this stage bring no network; which one the institution had then, the server does not know exactly"
)


@dataclass(frozen=True)
class Answer:
    """A recorded answer, and the request that it answers; None if that was not recorded."""

    file: str
    content: Recorded
    request: Recorded | None


@dataclass(frozen=True)
class Exhibit:
    """One array field of all answers of one stage from one institution, in the order in which they came."""

    institution: str
    stage: str
    field: str
    declared: Field
    answers: Sequence[Answer]

    @property
    def means(self) -> Meaning:
        """What its numbers are."""
        assert self.declared.means is not None
        return self.declared.means

    @property
    def bytes(self) -> int:
        """Bytes of the field in all these answers."""
        return sum(map(self.bytes_of, self.answers))

    def bytes_of(self, answer: Answer) -> int:
        """Bytes of the field in one answer."""
        return sum(array.nbytes for array in self.arrays(answer).values())

    def arrays(self, answer: Answer) -> StateDict:
        """Return the field in one answer: a state dict, or one array under the field's key."""
        arrays = answer.content.arrays
        return arrays if self.declared.shape == "state dict" else {self.field: arrays[self.field]}

    def array(self, answer: Answer) -> NDArray[Any]:
        """Return the field in one answer, of a field that is one array."""
        return answer.content.arrays[self.field]


@dataclass(frozen=True)
class Evidence:
    """All that a run's server has recorded, and what it knows anyway: options and networks."""

    folder: Path
    config: RunConfig
    exhibits: Sequence[Exhibit]  # what is attacked
    sent: Sequence[Exhibit]  # all fields that the institutions of these have sent
    answers: Sequence[Answer]  # all of their answers in the order in which they came, without a field to attack, too
    run: str  # at an institution, the run's id; else empty

    @classmethod
    def of(cls, folder: Path, institution: str = "", field: str = "", run: str = "") -> Self:
        """Read a run directory with recorded messages; or an institution's state directory, whose run is the last one.

        Only answers of this institution and fields of this name are taken; empty: all. `run` is another run of a state
        directory; empty: the last.

        Raises
        ------
        RunError
            If there is no run, nothing is recorded, a message is damaged or missing, or no answer is of the
            institution or has the field.
        """
        lines = list(ledger_of(folder) if there(folder / CONFIG) else ledger_lines(folder))
        config, run = _options(folder, lines, run)
        if not config.hiding.readable:
            raise RunError(
                f"attacks are tried on messages that can be read; those in {folder} are sealed: run again with "
                "sealed=false"
            )
        if config.hiding.sums_only and institution not in ("", ALL):
            raise RunError(
                f"under masks sums of all can be attacked, nobody's own; got --institution {institution!r}: omit it"
            )
        institution = "" if institution == ALL else institution
        load_strategy(config.strategy.name)  # declares the method's payloads
        names = [
            line[key] for line in lines if line.get("run", run) == run for key in ("request", "message") if key in line
        ]
        if not names:
            raise RunError(
                f"attacks are tried on recorded messages; {folder} has none: run again with record=all, as in a "
                "rehearsal. What synthetic images show can be measured without: flwr-replay privacy synthetic"
            )
        if not (folder / FOLDER).exists():
            raise RunError(
                f"{folder} had recorded messages; its folder {FOLDER}/ is gone, as after runs clean: run again with "
                "record=all"
            )
        exhibits: dict[tuple[str, str, str], list[Answer]] = {}
        answered: list[Answer] = []
        declared: dict[tuple[str, str], Field] = {}
        asked: dict[tuple[str, str], Recorded] = {}
        begun: dict[tuple[str, str], Recorded] = {}
        institutions: set[str] = set()
        for name in dict.fromkeys(names):
            message = read_message(file := folder / FOLDER / name)
            check_own(file, message.about.get(OF_RUN, ""), folder)
            who, stage = str(message.about["institution"]), str(message.about["stage"])
            institutions.add(who)
            if (request := REQUESTS.get(stage)) is None or (institution and who != institution):
                continue
            if message.about["direction"] == "down":
                goes_on = any(field.optional for field in request.declared().values())  # may ask so, without weights
                if message.arrays or not goes_on:  # else the first message of the training says more
                    begun[who, stage] = message
                asked[who, stage] = begun.get((who, stage), message)
                continue
            if "failure" in message.scalars:
                continue
            answer = Answer(name, message, asked.pop((who, stage), None))
            answered.append(answer)
            for key, known in request.answer.by_key().items():
                present = message.arrays if known.shape == "state dict" else message.arrays.keys() & {key}
                if known.means and present:
                    declared[stage, key] = known
                    exhibits.setdefault((who, stage, key), []).append(answer)
        sent = [Exhibit(*key, declared[key[1], key[2]], answers) for key, answers in exhibits.items()]
        chosen = [exhibit for exhibit in sent if field in ("", exhibit.field)]
        if not chosen:
            known_fields = sorted({key[2] for key in exhibits})
            if institution and institution not in institutions:
                raise RunError(
                    f"--institution must be one of the run's; got {institution!r}: "
                    f"{nearest(institution, sorted(institutions))}"
                )
            if field and known_fields:
                raise RunError(f"--field must be one that was recorded; got {field!r}: {nearest(field, known_fields)}")
            left = sum("message" not in line for line in lines if line.get("direction") == "up")
            full = f"; {left} were not recorded: begin the run again with a larger record-mb" if left else ""
            raise RunError(
                f"there is nothing to attack in {folder}: no recorded answer has weights, images or the like{full}"
            )
        return cls(folder, config, chosen, sent, answered, run)

    def of_institution(self, name: str) -> Sequence[Answer]:
        """Return all answers of an institution."""
        return [answer for answer in self.answers if answer.content.about["institution"] == name]

    def digests(self, institution: str) -> list[str]:
        """Return the digests of all training data that an institution had in the run; none of a run without them."""
        own = self.folder / RUNS / self.run / DATA
        file = own if self.run else self.folder / FOLDER / f"{institution}.sha256"
        return read_text(file).split() if file.exists() else []

    def model(self, seed: int = 0) -> nn.Module:
        """Build the network that institutions exchange, with fresh weights."""
        return backbone(self.config.model, self.config.task)(seed)

    @property
    def form(self) -> tuple[int, int, int]:
        """(C, H, W) of an image."""
        task = self.config.task
        return task.channels, task.size, task.size


def _options(folder: Path, lines: Sequence[dict[str, Any]], run: str) -> tuple[RunConfig, str]:
    """Return the options of a run; at an institution those to which its recorded run was bound, and its id."""
    recorded = [str(line["run"]) for line in lines if "message" in line and "run" in line]
    of_run = there(folder / CONFIG)
    if run and of_run:
        raise RunError(f"--run is for an institution's state; {folder} is a run's directory: leave it out")
    if of_run or not recorded:
        return compose_own(run_overrides(folder)), ""
    run = run or recorded[-1]
    if run not in recorded:
        raise RunError(f"--run must be one that was recorded; got {run!r}: {nearest(run, sorted(set(recorded)))}")
    return compose_own(kept_overrides(folder / RUNS / run)), run


def begun_with(answer: Answer, evidence: Evidence) -> StateDict:
    """Return the weights with which the training behind an answer began; empty: they are not known."""
    if answer.request is None:
        return {}
    asked: dict[str, Any] = answer.request.scalars
    if "gradients" in answer.request.arrays:
        begun = visit(answer, evidence)
        return begun[0].request.arrays if begun and begun[0].request else {}
    if answer.request.arrays:
        return parted(answer.request.arrays)[0]
    if committed := asked.get("committed", 0):
        return _mixed(str(answer.content.about["institution"]), committed, evidence)
    if "init-seed" in asked and ("committed" in asked or not asked.get("continues", True)):
        return to_arrays(evidence.model(int(asked["init-seed"])))
    return {}


def visit(answer: Answer, evidence: Evidence) -> list[Answer]:
    """Return the answers of one of SplitNN's visits that ends with this one; none if its first was not recorded."""
    answers: list[Answer] = []
    for earlier in evidence.of_institution(str(answer.content.about["institution"])):
        scalars = earlier.request.scalars if earlier.request else {}
        if scalars.get("message") == 0:
            answers = []  # a visit that failed begins anew
        if "message" in scalars:
            answers.append(earlier)
        if earlier.file == answer.file:
            break
    first = answers[0].request if answers else None
    return answers if first and first.scalars["message"] == 0 else []


def _mixed(institution: str, exchange: int, evidence: Evidence) -> StateDict:
    """Mix what an institution released in an exchange with the parcels of that exchange that it acknowledged."""
    released: Answer | None = None
    delivered: Answer | None = None
    for answer in evidence.of_institution(institution):
        scalars = answer.request.scalars if answer.request else {}
        if "committed" in scalars and scalars["server-round"] == exchange and answer.content.arrays:
            released = answer
        elif scalars.get("exchange") == exchange and answer.content.scalars.get("parcels", []) == scalars.get(
            "parcels", []
        ):
            delivered = answer
    if released is None or delivered is None or delivered.request is None:
        return {}
    scalars = delivered.request.scalars
    senders = [sender_name(i) for i in range(len(scalars.get("weights", [])))]
    models = unnested(delivered.request.arrays, only=senders)
    shares = zip(senders, scalars.get("weights", []), scalars.get("shares", []), strict=True)
    parcels = [parcel(models[sender], w, share) for sender, w, share in shares]
    theta, _ = mixed(released.content.arrays, released.content.scalars["weight"], scalars["kept"], parcels)
    return parted(theta)[0]
