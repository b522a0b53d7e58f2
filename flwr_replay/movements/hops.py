"""The orders in which models hop between institutions: along cycles, or through queues.

Source: Pennisi et al. 2023, section III-C.

A model has the name of the institution where it began. Who takes part for the first time begins one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from flwr_replay.movements.topology import mixing_matrix, receivers
from flwr_replay.rng import derived_seed

__all__ = ["Cycles", "Hops", "Queues", "Reopening", "Turn"]

T = TypeVar("T")


class Turn(NamedTuple):
    """An institution is to train a model, which comes from where it was `before`; empty: it begins here."""

    institution: str
    model: str
    before: str


class Reopening(Iterator[T]):
    """An iterator that ends while `draw` returns None, and goes on when it returns something again."""

    def __init__(self, draw: Callable[[], T | None]) -> None:
        self.draw = draw

    def __next__(self) -> T:
        """Draw."""
        if (drawn := self.draw()) is None:
            raise StopIteration
        return drawn


class Cycles:
    """In each round all models of the institutions present go one place along a random cycle through all of them.

    With `stay` models stay; the cycle then says only whose predecessor an institution is.
    """

    at_once: int | None = None  # how many may train at a time; None: all

    def __init__(self, seed: int, stay: bool = False) -> None:
        self.seed, self.stay = seed, stay
        self.at: dict[str, str] = {}  # by institution: the model that is there
        self.before: dict[str, str] = {}  # by institution, in this round: its predecessor
        self.left: list[str] = []  # who has not begun in this round
        self.new: set[str] = set()  # where a model begins in this round

    def begin_round(self, exchange: int, present: Sequence[str]) -> None:
        """Begin a round: draw the cycle, and move the models; that of an absent institution waits there."""
        here = sorted(name for name in present if name in self.at)
        cycle = mixing_matrix("random", max(1, len(here)), exchange - 1, self.seed)
        self.before = {here[to]: name for k, name in enumerate(here) for to in receivers(cycle, k)[0]}
        if not self.stay:
            self.at |= {name: self.at[before] for name, before in self.before.items()}
        self.new = {*present} - self.at.keys()
        self.at |= {name: name for name in self.new}
        self.left = sorted(present)

    def sources(self) -> Mapping[str, Sequence[str]]:
        """Return, by institution, where the models that it may train in this round come from: its predecessor."""
        return {name: [before] for name, before in self.before.items()}

    def start(self) -> Turn | None:
        """Begin the next turn, None while nobody can; all may train at a time."""
        if not self.left:
            return None
        return self.turn(self.left.pop(0))

    def turn(self, institution: str) -> Turn:
        """Return the turn that an institution has begun."""
        return Turn(institution, self.at[institution], self.before.get(institution, ""))

    def pass_on(self, institution: str, trained: bool) -> None:
        """End a turn: the model stays; one that could not begin begins when this institution is asked next."""
        if institution in self.new and not trained:
            del self.at[institution]

    def names(self) -> Mapping[str, str]:
        """Return the models, between rounds, by the institutions where they are."""
        return self.at

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold: where the models are; between rounds nobody trains."""
        return {"at": dict(self.at)}

    def restore(self, values: dict[str, Any]) -> None:
        """Restore where the models are."""
        self.at = values["at"]


class Queues:
    """Who has trained a model passes it on to another institution at random, where it waits: first in, first out.

    Where the institutions' durations are given, time is virtual: who would finish first is asked first, and a run can
    be repeated. Otherwise all who are free are asked at once, and the order of their answers decides.

    `durations` say how long institutions train, in the order of their names; empty: the order of answers decides.
    """

    def __init__(self, seed: int, durations: Sequence[float] = ()) -> None:
        self.seed, self.durations = seed, tuple(durations)
        self.at_once = 1 if self.durations else None
        self.waiting: dict[str, list[tuple[float, str]]] = {}  # by institution: when models came, and their names
        self.free: dict[str, float] = {}  # by institution: when its last turn ended
        self.training: dict[str, str] = {}  # by institution: the model that it trains now
        self.last: dict[str, str] = {}  # by model: where it was trained last
        self.passed = 0  # how many times a model has been passed on
        self.left = 0  # turns of this round that have not begun
        self.present: list[str] = []

    def begin_round(self, exchange: int, present: Sequence[str]) -> None:
        """Begin a round; a model that waits at an absent institution goes on waiting."""
        self.present, self.left, self.training = sorted(present), len(present), {}
        for name in self.present:
            if name not in self.waiting:
                self.waiting[name], self.free[name] = [(0.0, name)], 0.0

    def sources(self) -> Mapping[str, Sequence[str]]:
        """Return all others: any model may come."""
        return {name: [other for other in self.waiting if other != name] for name in self.present}

    def start(self) -> Turn | None:
        """Begin the turn of an institution that is free, of the one that ends first."""
        ready = [name for name in self.present if self.waiting[name] and name not in self.training]
        if not ready or not self.left or len(self.training) == self.at_once:
            return None
        name = min(ready, key=lambda name: (self._ends(name), name))
        ends, (_, model) = self._ends(name), self.waiting[name].pop(0)
        self.free[name], self.training[name], self.left = ends, model, self.left - 1
        return self.turn(name)

    def turn(self, institution: str) -> Turn:
        """Return the turn that an institution has begun."""
        model = self.training[institution]
        return Turn(institution, model, self.last.get(model, ""))

    def _ends(self, name: str) -> float:
        """Return when an institution would end the turn of the first model of its queue."""
        duration = self.durations[sorted(self.waiting).index(name)] if self.durations else 0.0
        return max(self.free[name], self.waiting[name][0][0]) + duration

    def pass_on(self, institution: str, trained: bool) -> None:
        """Pass the model on to another institution; who is alone keeps it."""
        model = self.training.pop(institution)
        others = [other for other in self.present if other != institution] or [institution]
        rng = np.random.default_rng(derived_seed(self.seed, "queue", self.passed))
        self.passed += 1
        if trained:
            self.last[model] = institution
        self.waiting[others[rng.integers(len(others))]].append((self.free[institution], model))

    def names(self) -> Mapping[str, str]:
        """Return the models by their own names: several may wait in one queue."""
        return {model: model for models in self.waiting.values() for _, model in models}

    def state(self) -> dict[str, Any]:
        """Return the queues."""
        waiting = {name: [list(pair) for pair in pairs] for name, pairs in self.waiting.items()}
        return {"waiting": waiting, "free": dict(self.free), "last": dict(self.last), "passed": self.passed}

    def restore(self, values: dict[str, Any]) -> None:
        """Restore the queues."""
        self.waiting = {name: [(came, model) for came, model in pairs] for name, pairs in values["waiting"].items()}
        self.free, self.last, self.passed = values["free"], values["last"], values["passed"]


Hops = Cycles | Queues  # which institution trains which model next; a round has as many turns as institutions
