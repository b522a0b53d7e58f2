"""Parallel: in one exchange all institutions train, or a fraction of them, and the server averages.

Answers are held until all are there, since sums in floating point have an order. Those under masks are added as they
come, whole numbers modulo 2^64: one message is held, however many institutions there are.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf, sqrt
from typing import ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from flwr_replay.ciphers.recovery import SECRET, strip
from flwr_replay.config.privacy import ON_SUMS
from flwr_replay.config.sections import require
from flwr_replay.errors import RunError, WireError
from flwr_replay.files.tensors import unnested
from flwr_replay.learning.heads import norm_of
from flwr_replay.movements.base import Exchange, Outcome
from flwr_replay.movements.evaluating import SPLIT_OF, Metrics, own_metrics, trained_metrics
from flwr_replay.movements.participation import AtOnce, participants
from flwr_replay.payloads.common import Trained, Unmask, Unmasked
from flwr_replay.privacy.plan import UPDATE
from flwr_replay.privacy.shares import check_sums
from flwr_replay.server.members import Member
from flwr_replay.wire.masked import MASKED, add, blank_masked, mean_of, sums_of
from flwr_replay.wire.payload import Payload, Request
from flwr_replay.wire.records import StateDict, Weights, array_record, opened

__all__ = ["Parallel", "weighted_mean"]


class Parallel(AtOnce):
    """Base of the methods in which all institutions train at once."""

    answer: ClassVar[type[Trained]] = Trained
    returned: Mapping[str, ArrayRecord]  # by institution: what it has trained in this exchange, if that is to be tested
    sent: StateDict  # the global weights of this exchange, as sent to all
    request: Request  # of this exchange, without what is an institution's own
    exchange: int = 0
    arrived: dict[str, tuple[Trained, Metrics | None]]  # by name: this exchange's answers, masked ones without arrays
    total: StateDict  # the sum of masked arrays so far
    cohort: Sequence[str] = ()  # whose answers this exchange sums, where some may be missing
    away: frozenset[int] = frozenset()  # nodes that have left such an exchange without an answer
    spare: int = 0  # how many of the cohort may fail yet: its sum is read by the others' shares of keys
    points: dict[str, bytes]  # by name: those of the keys of its masks
    told: dict[str, bytes]  # by name: shares of the survivors' keys

    @abstractmethod
    def train_request(self, exchange: int, arrays: Weights) -> Request:
        """Return the request to train, the same for every institution."""

    @abstractmethod
    def combine(self, answers: Sequence[Trained]) -> StateDict:
        """Return the new global weights; answers come in the order of the institutions' names."""

    def mean(self, answers: Sequence[Trained]) -> StateDict:
        """Average: θ ← Σ_k (n_k / n) θ_k; of updates over n_k, which weights of n_k / n sum over n: θ ← θ + mean."""
        sizes = [answer.num_examples for answer in answers]
        mean = weighted_mean([opened(answer.arrays) for answer in answers], sizes)
        if self.noised != UPDATE:
            return mean
        each = sum(sizes) / len(self.arrived)  # n / K
        return {name: (of + each * mean[name]).astype(of.dtype) for name, of in self.sent.items()}

    @property
    def numbers(self) -> int:
        """How many numbers a sum has that gets noise: those that train."""
        assert self.settings.model is not None
        return sum(parameter.numel() for parameter in self.settings.model(0).parameters() if parameter.requires_grad)

    @property
    def noised(self) -> str:
        """By which mechanism a sum of answers gets noise; empty: by none."""
        plan = self.settings.privacy
        mechanism = plan.covering(self.answer.declared()["arrays"].dp) if plan else ""
        return mechanism if mechanism in ON_SUMS else ""

    @property
    def added(self) -> list[Member]:
        """Institutions whose answers this exchange adds; before the run, the first."""
        drawn = participants(self.members.names, self.settings.fraction, self.settings.seed, self.exchange or 1)
        return [member for member in self.members.known if member.name in drawn]

    @property
    def noise(self) -> float:
        """Standard deviation of a sum's noise, in units of what one patient, or one update, can add; 0: none."""
        plan, mechanism = self.settings.privacy, self.noised
        if not plan or not mechanism:
            return 0.0
        unit = plan.config.sensitivity(mechanism) / plan.config.clip_of(mechanism)
        return unit * sqrt(sum(plan.share(mechanism, member.num_examples) ** 2 for member in self.added))

    def reach(self, norm: float, clip: float) -> float:
        """How much of the clip an example reaches at most, whose features have this norm; infinite: nobody knows."""
        return inf

    def begin_run(self) -> None:
        """Say how large a sum's noise will be beside the sum, before anything leaves.

        Refused where each number has more noise than a class has examples, or than all updates: then nothing shows.
        """
        plan, noise = self.settings.privacy, self.noise
        if not plan or not noise or self.settings.model is None or not self.members.complete:
            return
        norm, whole, sizes = noise * sqrt(self.numbers), self.noised == UPDATE, [of.num_examples for of in self.added]
        most, classes = (len(sizes), 1) if whole else (sum(sizes), getattr(self.task, "classes", 1))
        what, shown = ("updates", "") if whole else ("examples", f", of {classes} classes")
        each = min(1, self.reach(norm_of(self.settings.model(0)), plan.config.clip))
        line = f"the noise of a sum has norm {norm:,.3g}, and {most:,} {what} add at most {float(most * each):,.6g}"
        clip = ", or a smaller clip" * (each < 1)
        summed = most * each * sqrt(sum(passes.epochs for passes in plan.passes if passes.mechanism == self.noised))
        require(
            noise * classes <= summed,
            f"a sum must show more than its noise; {line}{shown}, and each number has noise {noise:,.3g}: choose a "
            f"larger epsilon{clip}",
        )
        if norm > summed:
            line += f": little can be learnt; choose a larger epsilon{clip}"
        self.recorder.notes["noise-of-sum"] = line
        self.recorder.log(line)

    def forecast(self, arrays: StateDict, num_rounds: int) -> list[Exchange]:
        """One exchange with every institution in every round in which it trains."""
        request = self.asking(0, arrays, self.members)
        masked, form = self.settings.hiding.sums_only, answer_form(request)
        answer = self.answer.blank(blank_masked(form) if masked else form)
        answer = replace(answer, train_loss=None) if masked else answer  # it would give the gradient
        exchanges: list[tuple[Request, Payload]] = [(request, answer)]
        if self.spare:
            exchanges = [
                (request, replace(answer, points=bytes(self.length_of_points))),
                (self.unmask(self.cohort), Unmasked(shares=bytes(len(self.cohort) * SECRET))),
            ]
        return self.every_round(((m, *exchange, 1) for exchange in exchanges for m in self.members), num_rounds)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the same request to all that train."""
        self.sent, self.exchange, self.cohort = opened(arrays), server_round, ()
        self.arrived, self.total, self.points, self.told, self.spare = {}, {}, {}, {}, 0
        trainers = self.trainers(server_round)
        if (plan := self.settings.privacy) and plan.dropouts and (trainers or not len(self.members)):
            self.away &= {member.node_id for member in trainers}  # who has gone is asked again when it is back
            trainers = [member for member in trainers if member.node_id not in self.away]
            if len(trainers) < (least := plan.institutions - plan.dropouts):
                raise RunError(
                    f"with privacy.dropouts={plan.dropouts} a sum needs {least} institutions; exchange {server_round} "
                    f"has {len(trainers)}; {self.recorder.failures_line()}: resume the run when more are there"
                )
        self.request = self.asking(server_round, arrays, trainers)
        return (self.message(member, self.request, config) for member in trainers)

    @property
    def form(self) -> StateDict:
        """Arrays of the form that all answers have: of the request, and what it asks for beside them."""
        return answer_form(self.request)

    def asking(self, exchange: int, arrays: Weights, members: Iterable[Member]) -> Request:
        """Return the request to train to all of these; where some may be missing, it names them."""
        request = self.train_request(exchange, arrays)
        if (plan := self.settings.privacy) and plan.dropouts:
            self.cohort = sorted(member.name for member in members)
            self.spare = max(0, len(self.cohort) - plan.institutions + plan.dropouts)
            request = replace(request, cohort=self.cohort, spare=self.spare or None)  # type: ignore[call-arg]
        return request

    def all_stages(self) -> list[str]:
        """Return those of the base class, and that in which keys are told if institutions may be missing."""
        plan = self.settings.privacy
        return [*super().all_stages(), *([Unmask.stage_name] if plan and plan.dropouts else [])]

    def unmask(self, survivors: Sequence[str]) -> Unmask:
        """Return the request for shares of the keys by which the sum of these can be read."""
        return Unmask(exchange=self.exchange, run=self.settings.run, survivors=survivors)

    @property
    def least(self) -> int:
        """How many of the cohort must answer, and tell keys."""
        return len(self.cohort) - self.spare

    @property
    def length_of_points(self) -> int:
        """Bytes of the points in an answer."""
        return len(self.cohort) * (self.spare + 1) * SECRET if self.spare else 0

    def tested_on(self, split: str, member: Member, arrays: Weights) -> Weights | None:
        """Return the global weights, or those that the institution has trained in this exchange."""
        return self.returned.get(member.name) if split in SPLIT_OF else arrays

    def exchange_round(
        self, grid: Grid, exchange: int, arrays: ArrayRecord, config: ConfigRecord, needed: bool = True
    ) -> Outcome:
        """Train in one exchange; add answers under masks as they come. If none is `needed`, none may come."""
        messages = self.configure_train(exchange, arrays, config, grid)
        take = self.take if self.settings.hiding.sums_only else None
        replies = self.exchanger(grid, exchange, messages, needed, take)
        if self.spare and len(self.arrived) >= self.least:
            self.read_sum(grid)
        return self.aggregate_train(exchange, replies)

    def read_sum(self, grid: Grid) -> None:
        """Ask the survivors for shares of keys; if enough tell, take off the masks that do not cancel."""
        exchanger = self.exchanger
        before = exchanger.answered, exchanger.failed, exchanger.diverged, exchanger.lost
        request = self.unmask(sorted(self.arrived))
        messages = [self.message(member, request) for member in self.members if member.name in self.arrived]
        exchanger(grid, self.exchange, messages, needed=False, take=self.take_shares)
        exchanger.answered, exchanger.failed, exchanger.diverged, exchanger.lost = before
        if len(self.told) >= self.least:
            self.take_masks_off()

    def take_masks_off(self) -> None:
        """Take off the masks that do not cancel; if that fails, without each one's shares in turn, if enough remain."""
        under_masks, read = self.total, sorted(self.told)[: self.least]
        for wrong in ("", *(read if len(self.told) > self.least else ())):
            self.total = {name: array.copy() for name, array in under_masks.items()}
            told = {name: shares for name, shares in self.told.items() if name != wrong}
            strip(self.total, self.cohort, self.points, told)
            if not self.total[MASKED][1]:
                if wrong:
                    line = f"{wrong} has told wrong shares of keys, or two others have together"
                    self.recorder.log(f"{line}; exchange {self.exchange} is read without those of {wrong}")
                return

    def take_shares(self, member: Member, reply: Message) -> None:
        """Note an institution's shares."""
        shares, failed = Unmasked.decode(reply.content).shares, len(self.cohort) - len(self.arrived)
        if len(shares) != (wanted := len(self.arrived) * (1 + failed) * SECRET):
            raise WireError(f"shares of the keys of masks have {wanted} bytes; got {len(shares)}")
        self.told[member.name] = shares

    def take(self, member: Member, reply: Message) -> None:
        """Note a valid answer; one under masks is added to the sum, and its arrays are let go."""
        answer = (self.answer.decode if member.ours else self.answer.from_foreign)(reply.content)
        if self.settings.hiding.sums_only:
            points = answer.points or b""
            if len(points) != self.length_of_points:
                raise WireError(f"points of the keys of masks have {self.length_of_points} bytes; got {len(points)}")
            if member.name not in self.arrived:  # else the sum has it already
                add(opened(answer.arrays), to=self.total)
                self.points[member.name] = points
            answer = replace(answer, arrays={}, points=None)
        self.arrived[member.name] = answer, own_metrics(member, reply)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Outcome:
        """Combine the answers: these, and those that came before."""
        for member, reply in self.answers(replies):
            self.take(member, reply)
        by_name = {name: answer for name, (answer, _) in sorted(self.arrived.items())}
        answers = list(by_name.values())
        keeps = self.settings.evaluate_before_mixing
        self.returned = {name: self.trained_model(a.arrays) for name, a in by_name.items()} if keeps else {}
        self.count_missed()
        heard = self.told if self.spare and len(by_name) >= self.least else by_name
        lost = [name for name in self.cohort if name not in heard]
        if len(lost) > self.spare:
            self.lose(lost)
            return None, None
        if lost:
            self.leave(lost, f"the sum of exchange {self.exchange} is read though {', '.join(lost)} did not answer")
        if not answers:
            return None, None
        self.recorder.saw(sum(answer.examples_seen for answer in answers))
        if self.settings.hiding.sums_only:
            answers = [self.unmasked(answers)]
        return array_record(self.combine(answers)), trained_metrics([*self.arrived.values()])

    def trained_model(self, arrays: Weights) -> ArrayRecord:
        """Return the model in an answer, to be tested before mixing: what θ has, or the part `model` of `nested`."""
        whole = opened(arrays)
        plain = self.sent.keys() <= whole.keys() or whole.keys() <= self.sent.keys()  # all of θ, or a part
        among = whole if plain else unnested(whole)["model"]
        return array_record({name: among[name] for name in self.sent if name in among})

    def lose(self, lost: Sequence[str]) -> None:
        """Go on without those whose answers lack in a sum, which nobody can read."""
        self.leave(lost, f"no sum can be read in exchange {self.exchange}, which {', '.join(lost)} did not answer")

    def leave(self, lost: Sequence[str], line: str) -> None:
        """Have the next sums without these, and say so.

        In an exchange that was begun before the run was resumed nobody is to blame: who has answered it adds to no sum
        of others.
        """
        if self.repeated:
            line += "; it was begun before the run was resumed, and the next sums are of all that are there"
        else:
            self.away |= {member.node_id for member in self.members.known if member.name in lost}
            line += "; the next sums are without them, until they have gone and are back"
        self.recorder.log(line)

    @property
    def repeated(self) -> bool:
        """Whether this exchange was begun before the run was resumed, perhaps by others than now."""
        return bool(self.cohort) and self.exchange <= self.recorder.begun

    def stops_without_answers(self) -> bool:
        """Stop as all do, but not in an exchange that others have begun: it can never be repeated."""
        return super().stops_without_answers() and not self.repeated

    def unmasked(self, answers: Sequence[Trained]) -> Trained:
        """Return the mean of the weights that came under masks, as one answer with the examples of all.

        Raises
        ------
        RunError
            If an institution's answer is missing, or the masks have not cancelled: nothing can be read then.
        DivergedError
            If weights of an institution are too large, or the mean or a sum is.
        """
        needed = [*self.points] if self.spare else self.cohort or [member.name for member in self.members.known]
        if lacking := [name for name in needed if name not in self.exchanger.answered]:
            raise RunError(
                f"with masked=true an exchange needs every institution; exchange {self.exchange} has no answer of "
                f"{', '.join(lacking)}; {self.recorder.failures_line()}: resume the run when all are there"
            )
        plan, form, n = self.settings.privacy, self.form, sum(answer.num_examples for answer in answers)
        if not (plan and plan.institutions and self.noised):
            return replace(answers[0], arrays=mean_of(self.total, like=form), num_examples=n)
        step = plan.step(self.noised, n, sum(array.size for array in form.values()))
        sums, scale = sums_of(self.total, form), step * plan.config.sensitivity(self.noised) / n
        check_sums(sums, (len(answers) / 2 if self.noised == UPDATE else n) / step, len(answers))
        mean = {name: whole * scale for name, whole in sums.items()}
        return replace(answers[0], arrays=mean, num_examples=n)


def answer_form(request: Request) -> StateDict:
    """Return arrays of the form of an answer's: those of the request, and what it asks for beside them."""
    sent, _, instructions = request.contents()
    return {**opened(sent or {}), **request.added(instructions)}


def weighted_mean(states: Sequence[StateDict], weights: Sequence[float]) -> StateDict:
    """Average state dicts, each array in its own dtype; sums run in float64 and in the order given.

    Given are K state dicts with the same names and shapes, and K non-negative weights, which are divided by their sum;
    returned is Σ_k w_k θ_k / Σ_k w_k. Whole-number arrays (batch counters) are rounded.
    """
    shares = np.asarray(weights, dtype=np.float64) / np.sum(weights)
    mean: StateDict = {}
    for name, first in states[0].items():
        total = np.full(first.shape, -0.0)  # neutral in sums; 0.0 would lose the sign of -0.0
        for share, state in zip(shares, states, strict=True):
            total += np.multiply(state[name], share, dtype=np.float64)
        if not np.issubdtype(first.dtype, np.floating):
            np.rint(total, out=total)
        mean[name] = total.astype(first.dtype)
    return mean
