"""Progress: round, metric, bytes, elapsed and remaining time; on a terminal with rich, elsewhere as log lines."""

import logging
import os
import sys
import time
from dataclasses import dataclass, field
from math import inf

__all__ = ["Display", "LogDisplay", "Progress", "TerminalDisplay", "without_colours"]

SOON = 2.0  # seconds


@dataclass(frozen=True)
class Progress:
    """The length of a run, and where it starts."""

    strategy: str
    rounds: int
    per_round: int  # exchanges
    done: int  # exchanges, at the start
    began: float = field(default_factory=time.monotonic)


def without_colours() -> None:
    """Take the colours from Flower's log where it goes into a file or a pipe, or NO_COLOR is set."""
    if os.environ.get("NO_COLOR") or not sys.stderr.isatty():
        for handler in logging.getLogger("flwr").handlers:
            handler.colored = False  # type: ignore[attr-defined]  # Flower's own handler colours a file, too


class Display:
    """Shows a run's progress; this base class shows nothing."""

    def begin(self, progress: Progress) -> None:
        """Show that a run begins."""

    def exchange(self, exchange: int, metrics: dict[str, float], total_bytes: int, seconds: float) -> None:
        """Show that an exchange has ended; `metrics` are the pooled ones, none if nobody evaluated after it."""

    def close(self) -> None:
        """Show that the run has ended."""


def shown_rounds(progress: Progress) -> str:
    """Write the length of a run: `10 rounds`, `1 round, resumed`."""
    return f"{progress.rounds} round{'s' * (progress.rounds > 1)}{', resumed' * (progress.done > 0)}"


def shown_metrics(metrics: dict[str, float]) -> str:
    """Write the main metric, what stands beside it, the loss and an epsilon: `accuracy 0.9472, loss 0.1831`.

    >>> shown_metrics({"accuracy": 0.4, "validation-accuracy": 0.5, "validation-auc": 0.6, "validation-loss": 1.0})
    'validation accuracy 0.5000, auc 0.6000, loss 1.0000'
    """
    from flwr_replay.report.metrics import BESIDE, VALIDATION  # late, as NumPy is: a wrong option is said before

    validated = {name.removeprefix(VALIDATION): value for name, value in metrics.items() if name.startswith(VALIDATION)}
    shown_of = validated or metrics
    leading = [name for name in shown_of if name != "loss"][:1]
    leading += [name for name in BESIDE if name in shown_of and name not in leading]
    shown = [f"{name} {shown_of[name]:.4f}" for name in [*leading, "loss"] if name in shown_of]
    shown += [f"{name} {value:.4f}" for name, value in metrics.items() if name.startswith("epsilon")]
    return f"{'validation ' * bool(validated)}{', '.join(shown)}" or "not evaluated"


def shown_bytes(count: float) -> str:
    """Write bytes for people, in powers of ten: `12.3 MB`."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def shown_time(seconds: float) -> str:
    """Write a duration as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class LogDisplay(Display):
    """A line in Flower's log for every exchange, as `flwr run --stream` shows it."""

    told = -inf  # when the last line was written
    first: tuple[int, float] | None = None  # an exchange from which on time is counted, and when it ended

    def begin(self, progress: Progress) -> None:
        """Log the strategy and the number of rounds."""
        self.progress = progress
        logging.getLogger("flwr").info("%s: %s", progress.strategy, shown_rounds(progress))

    def exchange(self, exchange: int, metrics: dict[str, float], total_bytes: int, seconds: float) -> None:
        """Log the round, metric, bytes and times."""
        if self.due(metrics):
            known, elapsed = self.known(exchange, metrics, total_bytes), shown_time(seconds)
            logging.getLogger("flwr").info("%s  elapsed %s%s", known, elapsed, self.remaining(exchange))

    def known(self, exchange: int, metrics: dict[str, float], total_bytes: int) -> str:
        """Write an exchange's round, and what is known then."""
        where = f"round {exchange / self.progress.per_round:.3g}/{self.progress.rounds}"
        return f"{where}  {shown_metrics(metrics)}  {shown_bytes(total_bytes)}"

    def due(self, metrics: dict[str, float]) -> bool:
        """Whether an exchange gets a line: not if it has no metrics and comes soon after the last line."""
        now = time.monotonic()
        due = bool(metrics) or now - self.told >= SOON
        self.told = now if due else self.told
        return due

    def remaining(self, exchange: int) -> str:
        """Estimate the time left, from the pace since the first exchange, which may prepare for all others.

        In a resumed run all exchanges of this process count.
        """
        now, progress = time.monotonic(), self.progress
        if exchange > progress.done and self.first is None:
            self.first = (progress.done, progress.began) if progress.done else (exchange, now)
        done = exchange - self.first[0] if self.first else 0
        if not self.first or not done:
            return ""
        if not (left := progress.rounds * progress.per_round - exchange):
            return "  testing"  # the last model, which may take longer than a round
        return f"  remaining {shown_time((now - self.first[1]) / done * left)}"


class TerminalDisplay(LogDisplay):
    """On a terminal a line for every round above a bar, which goes at the end; elsewhere a line for every exchange."""

    def begin(self, progress: Progress) -> None:
        """Show the bar, and let Flower's log lines pass above it."""
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self.progress = progress
        self.console = Console(stderr=True, highlight=False)
        self.console.print(f"{progress.strategy}: {shown_rounds(progress)}")
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        total = progress.rounds * progress.per_round
        self.line = self.bar.add_task("waiting for the first round", total=total, completed=progress.done, left="")
        without_colours()
        self.terminal = sys.stderr
        self.bar.start()
        # rich stands in for sys.stderr now, but Flower's handlers write to the stream that they were made with.
        handlers = [
            handler for handler in logging.getLogger("flwr").handlers if isinstance(handler, logging.StreamHandler)
        ]
        self.moved = [
            handler for handler in handlers if handler.stream is self.terminal and handler.setStream(sys.stderr)
        ]

    def exchange(self, exchange: int, metrics: dict[str, float], total_bytes: int, seconds: float) -> None:
        """Move the bar; print a line at the end of a round or, if there is no terminal, of an exchange."""
        known = self.known(exchange, metrics, total_bytes)
        elapsed, left = shown_time(seconds), self.remaining(exchange)
        if not self.console.is_terminal:
            if self.due(metrics):
                self.console.print(f"{known}  elapsed {elapsed}{left}", soft_wrap=True)
            return
        if exchange % self.progress.per_round == 0:
            whole = f"{known}  {elapsed}"  # the bar has the time, too
            self.console.print(whole if len(whole) <= self.console.width else known)
        self.bar.update(self.line, completed=exchange, description=known.partition("  ")[0], left=left.strip())

    def close(self) -> None:
        """Take the bar away, if there is one."""
        if hasattr(self, "bar"):
            for handler in self.moved:
                handler.setStream(self.terminal)
            self.bar.stop()
