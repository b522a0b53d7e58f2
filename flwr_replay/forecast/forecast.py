"""The forecast: the ledger that a run would write, computed before any training, on one page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import torch

from flwr_replay.config.sources import idea_of
from flwr_replay.data.dealt import loaded
from flwr_replay.engines.simulate import Simulation
from flwr_replay.learning.tasks import make_task
from flwr_replay.models.zoo import backbone
from flwr_replay.movements.base import Exchange, Movement
from flwr_replay.payloads.common import Present
from flwr_replay.privacy.accounting import rounded_up
from flwr_replay.privacy.noise import noise_of, shown_noise
from flwr_replay.privacy.plan import GRADIENT, STATISTICS
from flwr_replay.report.progress import shown_bytes
from flwr_replay.report.summary import RECONSTRUCT
from flwr_replay.runs.execute import Job, claim, network_of
from flwr_replay.runs.opening import new_run_id
from flwr_replay.server.members import Member
from flwr_replay.server.recorder import Recorder
from flwr_replay.wire.payload import Payload, Request, rows
from flwr_replay.wire.recording import DIRECTIONS
from flwr_replay.wire.records import metrics_in
from flwr_replay.wire.weights import to_arrays

__all__ = ["Expected", "exchanged", "expected", "forecast", "forecast_page", "planned_privacy"]


@dataclass(frozen=True)
class Line:
    """One field, summed over all messages of one stage between the server and one institution."""

    institution: str
    direction: str
    stage: str
    field: str
    kind: str
    messages: int
    bytes: int
    protection: str


class Silent(Recorder):
    """Keeps its notes to itself: what a run would log stands on the forecast's page, and may need real data."""

    def log(self, text: str) -> None:
        """Say nothing."""


class Expected(NamedTuple):
    """A message and its answer that a run would exchange with an institution, `times` alike."""

    member: Member
    request: Request
    answer: Payload
    times: int


def expected(simulation: Simulation, complete: bool = True) -> tuple[Movement, list[Expected]]:
    """Return the strategy of a simulated run, and what it would exchange if all are present and none fails.

    The messages are real ones, with zeros in place of weights and data. Where not `complete`, numbers of examples but
    for one institution's are made up, and messages are as large as with any others.
    """
    config, partition = simulation.job.config, simulation.partition
    task = make_task(config.task)
    present = []
    for k, name in enumerate(partition.names):
        train = partition.examples(loaded(config.task), k).train
        sums = task.label_sums(torch.from_numpy(train.y))
        sizes = {"num_examples": len(train), "raw_bytes": train.nbytes, "proof": "0" * 64}
        present.append(Present(name=name, pins="0" * 64 if config.hiding.pinned else "", **sizes, **sums))  # type: ignore[arg-type]
    return exchanged(simulation.job, present, complete)


def exchanged(job: Job, present: Sequence[Present], complete: bool = True) -> tuple[Movement, list[Expected]]:
    """Return a run's strategy, and what it would exchange with institutions of which only their roll call is known."""
    config, strategy = job.config, job.strategy(new_run_id(job.config), Silent())
    plan, strategy.members.complete = strategy.settings.privacy, complete
    for k, institution in enumerate(present):
        sums = institution.label_sum, institution.label_squares
        strategy.members.add(Member(institution.name, k, institution.num_examples, institution.raw_bytes, *sums))
    strategy.exchanger.scale_labels(strategy.members.label_scale())
    strategy.begin()
    arrays = to_arrays(backbone(config.model, config.task)(0))
    by_name = {institution.name: institution for institution in present}  # the members are in the order of their names
    exchanges: list[Exchange] = [(m, strategy.roll.request(), by_name[m.name], 1) for m in strategy.members]
    exchanges += strategy.replay.forecast(list(strategy.members)) if strategy.replay else []
    exchanges += strategy.forecast(arrays, config.rounds)
    exchanges += strategy.forecast_evaluation(arrays, config.rounds)
    whole, shares = sum(member.num_examples for member in strategy.members), shares_of(strategy, config.rounds)
    expected = []
    for member, request, answer, times in exchanges:
        if plan:
            examples = whole if plan.pooled else member.num_examples
            answer = plan.answered(answer, examples, shares[member.name])
        expected.append(Expected(member, strategy.addressed(member, request), answer, times))
    return strategy, expected


def shares_of(strategy: Movement, rounds: int) -> Mapping[str, float]:
    """Return by institution the share of a run's rounds in which it trains, if all stay."""
    times = strategy.trainings(rounds)
    return {name: times[name] / rounds for name in strategy.members.names}


def forecast(simulation: Simulation) -> list[Line]:
    """Compute the ledger of a simulated run in which every institution is present and none fails.

    Real messages are encoded and counted, so the bytes are those that the run's own ledger will have.
    """
    return _counted(*expected(simulation))


def _counted(strategy: Movement, exchanges: Sequence[Expected]) -> list[Line]:
    plan = strategy.settings.privacy
    lines: dict[tuple[str, str, str, str, str, str], tuple[int, int]] = {}
    for member, request, answer, times in exchanges:
        for direction, payload in (("down", request), ("up", answer)):
            content = payload.encode()
            fields = list(rows(content, type(payload)))
            if plan and direction == "up":
                fields = plan.protected(fields, type(payload), metrics_in(content))
            for row in fields:
                key = (member.name, direction, request.stage_name, row.field, row.kind, row.protection)
                messages, size = lines.get(key, (0, 0))
                lines[key] = (messages + times, size + row.bytes * times)
    return [Line(*key[:5], messages=messages, bytes=size, protection=key[5]) for key, (messages, size) in lines.items()]


def forecast_page(simulation: Simulation) -> str:
    """Write the forecast as a page that a data-protection officer can read."""
    job, (strategy, exchanges) = simulation.job, expected(simulation)
    lines = _counted(strategy, exchanges)
    config = job.config
    names = sorted({line.institution for line in lines})
    train = loaded(config.task).train
    raw = sum(train.take(indices).nbytes for indices in simulation.partition.train)
    what = f"{config.strategy.name} on {config.task.name}, {len(names)} institutions, {config.rounds} rounds"
    text = [f"Forecast of the ledger: {what}", "", idea_of(config.strategy.name)[0]]
    text += ["", f"Network: {network}"] if (network := network_of(config)) else []
    merged: dict[tuple[str, str, str, str, str], tuple[int, int]] = {}
    small: dict[str, int] = {}
    for line in lines:
        if line.kind == "instruction":
            small[line.direction] = small.get(line.direction, 0) + line.bytes
            continue
        key = (line.direction, line.stage, line.field, line.kind, line.protection)
        messages, size = merged.get(key, (0, 0))
        merged[key] = (messages + line.messages, size + line.bytes)
    for direction, heading in {"up": "Sent up, by all institutions", "down": "Sent down, to all institutions"}.items():
        text += ["", heading, f"  {'field':21}{'kind':15}{'messages':>8}{'bytes':>16}  protection"]
        for stage, of_stage in groupby((key for key in merged if key[0] == direction), key=itemgetter(1)):
            text.append(stage)
            for key in of_stage:
                text += _row(key[2], key[3], f"{merged[key][0]:,}", merged[key][1], key[4])
        if direction in small:
            text += ["all stages", *_row("instructions", "instruction", "", small[direction], "none")]
    text += ["", "By institution"]
    for name in names:
        its_lines = [line for line in lines if line.institution == name]
        up, down = (sum(line.bytes for line in its_lines if line.direction == way) for way in ("up", "down"))
        text.append(f"  {name}: up {shown_bytes(up)}, down {shown_bytes(down)}")
    if lines_of := planned_privacy(strategy, config.rounds, names):
        text += ["", *lines_of]
    if recorded := sum(line.bytes for line in lines if line.direction in DIRECTIONS[config.record]):
        text += [
            "",
            f"record={config.record} keeps {shown_bytes(min(recorded, config.record_mb * 1e6))} of these messages in "
            "the run directory, as they travelled. They hold patients' data.",
        ]
    leaves = [(key[2], key[3], size) for key, (_, size) in merged.items() if key[0] == "up"]
    samples = sum(size for _, kind, size in leaves if kind == "per-sample")
    shared = sum(size for _, kind, size in leaves if kind == "per-sample-raw")
    noisy = {key[2]: key[4] for key in merged if key[0] == "up"}.get("labels", "none") != "none"
    labels = "a label for every row, changed at random" if noisy else "all labels, as they are"
    leaving = [labels] if ("labels", "per-sample") in {leaf[:2] for leaf in leaves} else []
    leaving += [f"{shown_bytes(shared)} of examples, to every other institution"] if shared else []
    stay = " Of these, the institutions send: " + ", ".join(leaving) if leaving else " They never leave an institution"
    text += ["", f"The raw training data of all institutions are {shown_bytes(raw)}.{stay}."]
    if samples:
        text.append(
            f"{shown_bytes(samples)} of what is sent up are functions of single patients (kind per-sample). "
            f"{RECONSTRUCT}"
        )
    if (plan := strategy.settings.privacy) and {*plan.mechanisms} & {STATISTICS, GRADIENT} and train.patients is None:
        text.append("These data name no patients, so an epsilon is of one example.")
    if plan and plan.institutions:
        text.append(
            f"Features: {config.model.name}. preset=private takes lite0 for images of 32 pixels or more, if it is "
            "installed where the run is planned, else gabor; and fedstats for rounds=1."
        )
    if alone := strategy.recorder.notes.get("draws-one"):
        text.append(f"{alone}.")
    if advice := strategy.recorder.notes.get("upload-advice"):
        text.append(f"The {advice}.")
    text += [
        f"{claim(job.strategy(new_run_id(config)))} TLS protects messages on the network, not from the server.",
        "Kinds: model = weights; per-sample = one row per patient; per-sample-raw = patients' "
        "examples as they are; statistic = numbers computed from the data; "
        "instruction = what the server asks for; notice = the institution's name and proof of identity.",
        "roll-call: before the first round each institution says its name and how many examples it has, and proves by "
        "a key of its own that it is the same one as before.",
    ]
    return "\n".join(text)


def planned_privacy(strategy: Movement, rounds: int, names: Sequence[str]) -> list[str]:
    """Say which epsilon and delta these institutions will have, of what, against whom; nothing without secret noise."""
    plan = strategy.settings.privacy
    if not plan or not plan.config.secret:
        return []
    counts = {member.name: member.num_examples for member in strategy.members}
    whole, shares = sum(counts.values()), shares_of(strategy, rounds)
    what, read = " and ".join(plan.mechanisms), "the sums" if plan.institutions else "these"
    whom = f"whoever reads {read}, the server too" if plan.colluders or not plan.institutions else "the server"
    text = [f"Privacy by institution, at the end of the run: of its {what}, against {whom}"]
    for name in names:
        examples = whole if plan.pooled else counts[name]
        epsilon, delta = plan.planned(examples, shares[name])
        if not epsilon:
            text.append(f"  {name}: trains in no round, so it has no epsilon")
            continue
        shown = f"epsilon {rounded_up(epsilon)} at delta {rounded_up(delta, 2)}"
        how = shown_noise(noise_of(plan, examples, shares[name]))
        text.append(f"  {name}: {shown}{', no proof' if plan.unproven else ''}; {how}")
    return text + ([f"  {noise}"] if (noise := strategy.recorder.notes.get("noise-of-sum")) else [])


def _row(field: str, kind: str, messages: str, size: int, protection: str) -> list[str]:
    """Return a row of 80 columns; a protection that is too long for it stands below."""
    row = f"  {field:21}{kind:15}{messages:>8}{size:>16,}"
    return [f"{row}  {protection}"] if len(protection) <= 16 else [row, f"    {protection}"]
