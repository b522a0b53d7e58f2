"""The run directory: configuration, environment, metrics, ledger, checkpoints, models, result.

`<runs-dir>/<date>-<strategy>-<task>-<seed>/` holds

- `config.yaml`: all options, resolved
- `run-id`: the run's id at the institutions
- `SHA256SUMS`: of these two files, which never change; all others name them, or `result.json` vouches for them
- `resume.toml`: in a deployment, a run config by which `flwr run` goes on
- `ended.txt`: why a run without a result ended, unless it was killed
- `environment.json`: versions, device, cores
- `metrics.jsonl`: a line per round, institution ("" is pooled over all) and metric
- `confusion.json`: of the last evaluation at each institution, examples by label and prediction, and their number
- `timings.jsonl`: a line per exchange, seconds since the run began
- `shared/`, `latents/`: examples or latents that institutions uploaded; they stay until the directory is deleted
- `privacy.jsonl`: a line per answer that states an epsilon, with its exchange
- `ledger.jsonl`, `ledger-0001.jsonl`, …: a line per message and field sent, repeated messages included
- `ledger.begun`: the ledger has lines, so that none begins anew in its place
- `messages/`: with `record`, what travelled, a file for each message; lines of the ledger name them;
  in a simulation, when it has ended, digests of each institution's training data
- `forgetting.jsonl`, `forgetting.png`: the forgetting matrix, with `forgetting=true`
- `generator.jsonl`, `generator.png`, `prior.png`: losses of replay's generator and priors, drawn from three epochs on
- `mailbox/`: in gossip, models that their recipients have not fetched yet
- `replay/`: with replay, the weights, codes and priors after each visit of the generator
- `pictures/`: with replay, in a simulation: each institution's real, reconstructed and replayed images
- `members.jsonl`: the institutions, a line whenever something about one changes
- `failures.jsonl`: who refused, failed or did not answer, and why
- `checkpoints/`: the run's state after the last two exchanges
- `models/`: the final global weights, if the server has any
- `best/`: the global weights of the evaluated round with the best main metric
- `tracking.json`, `tensorboard/`, `wandb/`: with `tracking`, what a tracker was told, and its local files
- `result.json`: final metrics, bytes, privacy, failures

Only its owner may read it.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from flwr_replay.config.run import RunConfig
from flwr_replay.errors import RunError
from flwr_replay.files.atomic import private_folder, sweep, tighten, write_atomic
from flwr_replay.files.lines import Lines, add_line, read_lines
from flwr_replay.files.tensors import OF_RUN, nested, unnested, write_tensors
from flwr_replay.learning.tasks import make_task
from flwr_replay.models.zoo import encoder_digest
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.report.forgetting import ForgettingMatrix
from flwr_replay.report.metrics import VALIDATION, judged, largest, without_beside
from flwr_replay.report.progress import Display, Progress
from flwr_replay.report.run_files import CONFUSION, FORMS, mark_of, write_of, write_result
from flwr_replay.report.summary import confusion_of, warnings
from flwr_replay.runs.checkpoints import BestModel, Checkpoints, TakingPart, best_of
from flwr_replay.runs.environment import environment, versions
from flwr_replay.runs.opening import refuse_fewer
from flwr_replay.runs.tracking import Tracking
from flwr_replay.server.members import Member
from flwr_replay.server.recorder import Recorder, Snapshot
from flwr_replay.wire.ledger import LEDGER, Ledger, Traffic, ledger_lines, unanswered
from flwr_replay.wire.payload import LedgerRow
from flwr_replay.wire.recording import DIRECTIONS, FOLDER, Recording
from flwr_replay.wire.records import StateDict

__all__ = ["RunDirectory"]

VALIDATED = "Rounds are judged by validation examples; test examples are used at the end only."
TESTED = "Rounds are judged by test examples, so the best of them is optimistic."
LOST_BEST = "its file was damaged or removed before the run was resumed"
GROWING = [name for name in FORMS if name.endswith(".jsonl") and name != "generator.jsonl"]
IN_A_ROW = 2  # evaluations of a worthless model before the log says so


class RunDirectory(Recorder):
    """Writes a run to its directory while it runs.

    Parameters
    ----------
    config : RunConfig
        As `open_run` returned it.
    display : Display
        Shows the progress.
    """

    def __init__(self, config: RunConfig, display: Display) -> None:
        super().__init__()
        self.config = config
        self.path = Path(config.runs_dir) / config.run_name
        self.display = display
        self.examples_seen, self.seconds = 0, 0.0  # running totals; checkpoints hold them
        self.started = time.monotonic()
        self.traffic = Traffic()
        self.forgetting = ForgettingMatrix(self.path / "forgetting.jsonl")
        self.task = make_task(config.task)
        self.encoder = encoder_digest(config.model, config.task)  # empty: all of the model trains
        self.leading = self.task.metric
        self.finished = False
        self.worthless = 0  # evaluations in a row with a model that is worth nothing
        self.no_best = ""  # why the run keeps no best global model; empty: it keeps one
        self.spent_then: dict[str, float] = {}  # the largest epsilon at the last evaluation, for the display
        self.history: list[tuple[int, dict[str, float], dict[str, dict[str, float]]]] = []
        self.confusion: dict[str, list[int]] = {}  # of the last evaluation
        self.floored: list[str] = []  # who sent right answers alone (min-count); then no confusion is kept
        sweep(self.path)
        tighten(self.path)
        self._mark = mark_of(self.path)
        self._checkpoints = Checkpoints(self.path, GROWING)
        self._first: list[Callable[[], None]] = []  # writes what must be there before the next checkpoint
        self._best = BestModel(self.path)
        self._tracking = Tracking(config, self.path)
        write_atomic(self.path / "environment.json", json.dumps(environment(config), indent=2) + "\n")
        self.after_others = any(self.path.parent.glob(f"*/{LEDGER}"))  # this run's own, too, if it goes on
        self._ledger = Ledger(self.path)
        self._ledger.append(unanswered(ledger_lines(self.path, FORMS[LEDGER])))  # before the roll is called again
        self._members = TakingPart(self.path)
        self._recording = Recording(self.path / FOLDER, DIRECTIONS[config.record], config.record_mb)
        self._metrics, self._timings = Lines(self.path / "metrics.jsonl"), Lines(self.path / "timings.jsonl")

    # --- Recorder -----------------------------------------------------------------------------------------------------

    def begin(self, strategy: str, num_rounds: int, per_round: int, done: int) -> None:
        """Begin to show the progress."""
        self.per_round = per_round
        refuse_fewer(self.path, num_rounds, done // per_round)
        self.display.begin(Progress(strategy, num_rounds, per_round, done))
        self._tracking.tell(self.history, per_round, {})

    def kept_private(self, run: str, key: str) -> None:
        """Say nothing: `flwr-replay predict` finds private models by this directory."""

    def travelled(
        self,
        exchange: int,
        member: Member,
        direction: str,
        fields: list[LedgerRow],
        stage: str = "",
        raw_bytes: int | None = None,
        split: str = "",
        content: RecordDict | None = None,
    ) -> None:
        """Write a message's fields to the ledger; with `record`, first the message itself."""
        message = {"round": exchange, "institution": member.name, "direction": direction, "stage": stage}
        message |= {"split": split} if split else {}
        if content is not None and (name := self._recording.keep({**message, OF_RUN: self._mark}, content)):
            message["message"] = name
        self._ledger.record(message, fields, raw_bytes)
        self.traffic.record(direction, fields, raw_bytes)

    def flush(self) -> None:
        """Write the ledger's buffered lines to the file."""
        self._ledger.flush()

    def saw(self, examples: int) -> None:
        """Add to the number of training examples used."""
        self.examples_seen += examples

    def evaluated(self, exchange: int, pooled: dict[str, float], own: dict[str, dict[str, float]]) -> None:
        """Write a round's metrics."""
        self.history.append((exchange, pooled, own))
        if spent := largest(self.released.values()):
            named = f"epsilon (dp={spent.dp}{'' if spent.proven else ', no proof'})"
            self.spent_then = {named: inf if spent.epsilon is None else spent.epsilon}
            self.spent_then |= {"epsilon alone": spent.alone} if spent.alone else {}
        self.floored = sorted(name for name, test in self.tested.items() if test.hits is not None)
        counts = {n: list(test.confusion) for n, test in self.tested.items() if test.confusion and not self.floored}
        if examples := {name: test.num_examples for name, test in self.tested.items()}:
            values = {"round": exchange, "institutions": counts, "examples": examples}
            self._first.append(partial(write_of, self.path, CONFUSION, values))
        self.confusion = counts
        so_far = {"metric": self.leading, "final": {"global": pooled}}
        warned = warnings(so_far, counts, self.config.task.class_names, {})
        self.worthless = self.worthless + 1 if warned else 0
        for line in warned if self.worthless == IN_A_ROW else []:
            self.log(f"warning: {line}")
        at = exchange // self.per_round
        self._metrics.append(
            {"round": at, "exchange": exchange, "institution": name, "metric": metric, "value": value}
            for name, metrics in [("", pooled), *own.items()]
            for metric, value in metrics.items()
        )
        self._tracking.tell(self.history, self.per_round, self.spent_then)

    def forgetting_row(self, exchange: int, data_of: Sequence[str], own: dict[str, dict[str, float]]) -> None:
        """Write a row of the forgetting matrix."""
        leading = {name: metrics[self.leading] for name, metrics in own.items() if self.leading in metrics}
        self.forgetting.add(exchange, data_of, leading)  # a user's own ClientApp may not report it

    def spent(
        self, exchange: int, name: str, epsilon: float | None, delta: float, plan: PrivacyPlan, *, proven: bool
    ) -> None:
        """Record what epsilon an institution has spent; the ledger records its messages."""
        super().spent(exchange, name, epsilon, delta, plan, proven=proven)
        self.released[name]["dp"] = self.config.privacy.dp
        add_line(self.path / "privacy.jsonl", {"round": exchange, "institution": name, **self.released[name]})

    def generated(
        self, name: str, network: str, losses: list[float], **figures: Sequence[float] | float | None
    ) -> None:
        """Write the losses of a generator or prior; they replace those of an attempt before the run was resumed."""
        super().generated(name, network, losses, **figures)
        path = self.path / "generator.jsonl"
        network_of = {"institution": name, "network": network}
        rows: list[dict[str, Any]] = [{**network_of, "epoch": i, "loss": loss} for i, loss in enumerate(losses, 1)]
        for row in rows[-1:]:
            row.update({figure: values for figure, values in figures.items() if values not in (None, [])})
        before = [row for row in self._lines("generator") if (row["institution"], row["network"]) != (name, network)]
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in [*before, *rows]))

    def failed(self, exchange: int, name: str, reason: str) -> None:
        """Record which institution takes no part, and why."""
        super().failed(exchange, name, reason)
        add_line(self.path / "failures.jsonl", self.failures[-1])

    def end_exchange(self, snapshot: Snapshot) -> None:
        """Write a checkpoint, delete all but the last two, show progress."""
        seconds = self.seconds + time.monotonic() - self.started
        values = {
            "server-round": snapshot.exchange,
            "examples-seen": self.examples_seen,
            "seconds": seconds,
            "state": snapshot.state_values,
            "label-scale": snapshot.label_scale,
            "encoder": self.encoder,
        }
        self._timings.append([{"round": snapshot.exchange, "seconds": seconds}])
        self._members.note(snapshot)
        for lines in (self._ledger, self._metrics, self._timings):  # the checkpoint records their length
            lines.flush()
        state = {name: array.copy() for name, array in snapshot.state_arrays.items()}  # training goes on
        named = nested({"arrays": snapshot.arrays, "state": state}, mark="/")
        best = not self.no_best and self.history and best_of(self.history, *self._judged())[0] == snapshot.exchange
        if best:
            self._first.append(partial(self._best.write, snapshot.exchange, snapshot.arrays, self.confusion))
        self._checkpoints.write(snapshot.exchange, named, values, self._first)
        self._first = []
        self._best.settle(snapshot.exchange - 2)  # a resumed run may begin at the checkpoint before the last
        metrics = {}
        if self.history and self.history[-1][0] == snapshot.exchange:
            metrics = without_beside(self.history[-1][1], self.confusion) | self.spent_then
        self.display.exchange(snapshot.exchange, metrics, sum(self.traffic.bytes.values()), seconds)

    def restore(self) -> Snapshot | None:
        """Return the last checkpoint of a resumed run, and drop the metrics written after it.

        Raises
        ------
        RunError
            If the checkpoints or the run's other files are damaged or missing.
        """
        checkpoint = self._checkpoints.read(self.log)
        if checkpoint is None:
            if len({row["round"] for row in self._lines("timings")}) > 2:  # the first is on the disk before the third
                raise RunError(
                    f"{self.path / 'checkpoints'} must hold the run's last two checkpoints; they are missing: restore "
                    "them from a backup, or begin a new run"
                )
            self._best.rewind(-1, self.log)
            self._rewind(-1)
            return None
        arrays, values = checkpoint
        if (before := values["encoder"]) != self.encoder:
            raise RunError(
                f"a resumed run keeps its encoder, {before}; that of model.weights is now {self.encoder}: put the file "
                "of then back"
            )
        self._best.rewind(values["server-round"], self.log)
        self.examples_seen, self.seconds = values["examples-seen"], values["seconds"]
        self._rewind(values["server-round"])
        self.confusion = confusion_of(self.path)
        groups = unnested(arrays, mark="/")
        scale = tuple(values["label-scale"]) if values["label-scale"] else None
        return Snapshot(
            values["server-round"],
            groups["arrays"],
            groups["state"],
            values["state"],
            label_scale=scale,
            **self._members.restore(values),
        )

    def folder(self, name: str, fresh: bool = False) -> Path:
        """Return a folder inside the run directory; if `fresh`, an empty one."""
        if fresh:
            shutil.rmtree(self.path / name, ignore_errors=True)
        return private_folder(self.path / name)

    # --- the end ------------------------------------------------------------------------------------------------------

    def finish(self, models: Mapping[str, StateDict], claim: str, missing: dict[str, str]) -> dict[str, Any]:
        """Write the final models that the server has, by name, and `result.json`; return its content."""
        self._checkpoints.wait()
        for name, arrays in models.items():
            write_tensors(self.folder("models") / f"{name}.safetensors", arrays)
        if not self.history:
            raise RunError(
                f"{self.path / 'metrics.jsonl'} must hold the last round's metrics; it has none: begin a new run"
            )
        exchange, pooled, own = self.history[-1]
        judging, higher_is_better = self._judged()
        metric, basis = judging.removeprefix(VALIDATION), VALIDATED if judging.startswith(VALIDATION) else TESTED
        best = best_of(self.history, judging, higher_is_better)
        last = models.get("global") if best[0] == exchange and not self.no_best else None
        kept = self._best.end(best[0], last)
        config, sent = self.config, self.traffic.bytes
        names = {*own, *self.notes.get("untrained", ()), *self._members.names}
        result = {
            "strategy": config.strategy.name,
            "task": config.task.name,
            "partition": config.partition.name,
            "model": config.model.name,
            "encoder": self.encoder,
            "replay": config.replay.name,
            "metrics-note": f"{note.rstrip('.')}. {basis}" if (note := config.strategy.traits.metrics_note) else basis,
            "nodes": len(names),
            "untested": sorted(names - {*own}),
            "floored": self.floored,
            "rounds": exchange // self.per_round,
            "seed": config.seed,
            "metric": metric,
            "unit": config.task.unit,
            "higher-is-better": higher_is_better,
            "final": {"global": pooled, "institutions": own},
            "best": {"round": best[0] // self.per_round, judging: best[1].get(judging)},
            "best-model": {
                "file": str(kept.relative_to(self.path)) if kept else "",
                "none": self.no_best or ("" if kept else LOST_BEST),
            },
            "forgetting": self.forgetting.summary(self.leading, higher_is_better),
            "examples-seen": self.examples_seen,
            "bytes": {**sent, "per-round": round(sum(sent.values()) / (exchange // self.per_round))},
            "bytes-by-kind": self.traffic.by_kind,
            "recorded": self._recording.summary(),
            "privacy": {name: self.released.get(name) for name in sorted({*own, *self.released})},
            "privacy-claim": claim,
            "replay-lacks": missing,
            "failures": self.failures,
            "wall-seconds": round(self.seconds + time.monotonic() - self.started, 3),
            "versions": versions(),
            **self.notes,
        }
        for lines in (self._ledger, self._metrics, self._timings):  # the result records their length
            lines.flush()
        write_result(self.path, result)
        self.finished = True
        self.forgetting.draw(result["forgetting"])
        if rows := self._lines("generator"):
            from flwr_replay.report.plots import draw_losses

            draw_losses(self.path, rows)
        return result

    def _judged(self) -> tuple[str, bool]:
        """Return the metric that rounds are judged by, and whether more of it is better."""
        pooled = self.history[-1][1]
        if (judging := judged(self.leading, pooled)) in pooled:
            return judging, self.task.higher_is_better
        return next(iter(pooled), self.leading), False  # no institution runs this package's ClientApp

    def close(self) -> None:
        """Wait for the last checkpoint, then close the ledger and the display."""
        self._checkpoints.close()
        for lines in (self._ledger, self._metrics, self._timings, self._members):
            lines.close()
        self._tracking.close(self.finished)
        self.display.close()

    def _rewind(self, exchange: int) -> None:
        """Reload the metrics up to a checkpoint, and the bytes of all messages sent, repeated ones included."""
        metrics = self.path / "metrics.jsonl"
        kept = [entry for entry in self._lines("metrics") if entry["exchange"] <= exchange]
        self._metrics.close()
        write_atomic(metrics, "".join(json.dumps(entry) + "\n" for entry in kept))
        self._metrics = Lines(metrics)
        rounds: dict[int, dict[str, dict[str, float]]] = {}
        for entry in kept:
            by_institution = rounds.setdefault(entry["exchange"], {})
            by_institution.setdefault(entry["institution"], {})[entry["metric"]] = entry["value"]
        if lacking := [at for at, own in rounds.items() if "" not in own]:
            raise RunError(f"{metrics} must have pooled metrics; exchange {lacking[0]} has none: begin a new run")
        self.history = [(at, own.pop(""), own) for at, own in rounds.items()]
        self.forgetting.rewind(exchange)
        self.traffic = Traffic(ledger_lines(self.path, FORMS[LEDGER]))
        self.begun = self.traffic.begun
        self.failures = self._lines("failures")
        for failure in self.failures:
            self.characters[failure["institution"]] += len(failure["reason"])
        self.earlier = len(self.failures)
        for row in self._lines("privacy"):  # what was released stays released
            row.pop("round", None)  # older versions wrote none
            self.released[row.pop("institution")] = row

    def _lines(self, name: str) -> list[dict[str, Any]]:
        return read_lines(self.path / f"{name}.jsonl", FORMS[f"{name}.jsonl"])
