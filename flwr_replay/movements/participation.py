"""Who trains in a round, where only a fraction of the institutions does.

Source: McMahan et al. 2017 (arXiv:1602.05629), Algorithm 1: max(C · K, 1) institutions, drawn anew in every round.

The draw follows from the run's seed, the round and the institutions' names. So it is the same after a resumption, and
who joins or leaves changes little of it. Whoever knows the seed knows the draw: it hides nobody, and no epsilon may be
lowered for it.
"""

from collections.abc import Mapping, Sequence

from flwr_replay.movements.base import Movement
from flwr_replay.rng import derived_seed
from flwr_replay.server.members import Member

__all__ = ["AtOnce", "number_chosen", "participants"]


def number_chosen(institutions: int, fraction: float) -> int:
    """Return how many institutions train in a round: C · K, rounded, and at least one.

    >>> number_chosen(1000, 0.1), number_chosen(4, 0.1), number_chosen(7, 1.0)
    (100, 1, 7)
    """
    return max(1, round(fraction * institutions))


def participants(names: Sequence[str], fraction: float, seed: int, number: int) -> list[str]:
    """Draw the institutions that train in a round, without replacement, each with the same chance.

    `number` is the round, or the cycle of a serial method. Returned are `number_chosen` of the names, in the order
    given; all of them if the fraction is 1.
    """
    if fraction == 1:
        return list(names)
    drawn = sorted(names, key=lambda name: derived_seed(seed, "participation", number, name))
    chosen = {*drawn[: number_chosen(len(names), fraction)]}
    return [name for name in names if name in chosen]


class AtOnce(Movement):
    """Base of the movements in which all institutions train at once, or those that are drawn for the round."""

    missed: frozenset[str] = frozenset()  # who has been asked since the last answer, and failed

    def exchanges_per_round(self) -> int:
        """One: all institutions train in it."""
        return 1

    def trainers(self, exchange: int) -> list[Member]:
        """Return the institutions that train in an exchange, by name."""
        present = {member.name: member for member in self.members}
        return [
            present[name] for name in participants([*present], self.settings.fraction, self.settings.seed, exchange)
        ]

    def trains_in(self, num_rounds: int) -> Mapping[str, Sequence[int]]:
        """Return the rounds for which each institution is drawn."""
        if self.settings.fraction == 1:
            return super().trains_in(num_rounds)
        rounds: dict[str, list[int]] = {}
        for at in range(1, num_rounds + 1):
            for member in self.trainers(at):
                rounds.setdefault(member.name, []).append(at)
        return rounds

    def stops_without_answers(self) -> bool:
        """Stop once all that are present have failed since the last answer: the same one may be drawn again."""
        return {member.name for member in self.members} <= self.missed | {*self.exchanger.failed}

    def count_missed(self) -> None:
        """Add those that failed in the last exchange, unless somebody answered it."""
        self.missed = frozenset() if self.exchanger.answered else self.missed | {*self.exchanger.failed}
