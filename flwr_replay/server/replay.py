"""Generative replay: the server's half; the institution's half is `flwr_replay/institution/replay.py`.

Source: Qu et al. 2022, Algorithm 1, lines 22-27, and section 3.1; footnote 1 for priors.
Idea: before a method's first round, a generator goes once from institution to institution. Each trains it on its own
images and on replays of those before it. What then makes images goes to every institution: the decoder, with codes and
labels of all real images, or with priors that draw codes. The method's rounds follow; their batches hold real and
replayed examples.

    θ_G ← fresh weights
    for each institution k:
        θ_G ← train θ_G at k on x_k and on D(e)                                   # lines 24-26
        e ← codes of x_U = D_old(e) ∪ x_k, with their labels                       # codes=paper, last-pass
        e ← e ∪ codes of x_k                                                       # codes=stale
        P_k ← prior over the codes of x_k;  D_k ← D                                # replay=pixelcnn, in place of e
    e ← {codes of x_1, …, codes of x_K}, by the generator as it is now             # codes=last-pass
    D, e (or all D_k, P_k) to every institution

Deviations: replay=pixelcnn keeps the decoder D_k of the time of each prior P_k, so that they fit each other for good;
an institution draws from it once, as many codes of each label as P_k stands for, and replays these.

A visit that fails is made again before every exchange that follows, and before the last round, or where nobody could be
visited, once more at once. Who comes late is visited when it comes. What is missing then stops the run, which can be
resumed, or with replay.missing=say stands in the first line of its result: an institution whose images are not
replayed, or one that has not received what is. The last pass of codes=last-pass counts once all have made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from flwr_replay.errors import RunError, WireError
from flwr_replay.files.tensors import nested, read_tensors, unnested, write_tensors
from flwr_replay.generators.codes import unpack_codes
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.payloads.replay import (
    Codes,
    EncodeImages,
    Generated,
    KeepCodes,
    KeepDecoder,
    KeepPrior,
    TrainedPrior,
    TrainGenerator,
    TrainPrior,
)
from flwr_replay.server.exchange import Exchanging
from flwr_replay.server.members import Member
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import StateDict, opened
from flwr_replay.wire.weights import load_arrays, to_arrays

__all__ = ["GenerativeReplay"]

Answer = TypeVar("Answer", Codes, Generated, TrainedPrior)
KEPT = ("itinerary", "visits", "trained", "codes_at", "rows", "coded", "counts", "missing")


class GenerativeReplay:
    """Trains what replays before a method's first round, and brings it to every institution.

    Parameters
    ----------
    movement : Exchanging
        Asks the institutions.
    replay_plan : ReplayPlan
        What is replayed.
    checkpoint : Callable[[int, StateDict], None]
        Keeps what a resumed run needs, given the number of the last exchange that is over and the global weights.
    """

    def __init__(
        self, movement: Exchanging, replay_plan: ReplayPlan, checkpoint: Callable[[int, StateDict], None]
    ) -> None:
        self.movement, self.replay_plan, self.checkpoint = movement, replay_plan, checkpoint
        self.run = movement.settings.run
        self.model = replay_plan.fresh_generator()
        self.itinerary: list[str] = []  # who fails stands in it again
        self.visits = 0  # that are over, failed ones included
        self.trained: list[int] = []  # those that came to something: their files are there
        self.codes_at, self.rows = -1, 0  # replay=vqvae2: which file the codes are in, and how many
        self.coded = 0  # codes=last-pass: for how many visits all have encoded once more
        self.uncoded: list[str] = []  # who has not
        self.counts: list[list[int]] = []  # replay=pixelcnn: how many examples of each label every prior stands for
        self.missing: dict[str, str] = {}  # in the last round: whom replay lacks, and how
        self.server_round = 0
        self.held: dict[str, int] = {}  # how much an institution was sent: of vqvae2 all or nothing, else priors

    @property
    def codes_travel(self) -> bool:
        """Say whether codes of real images travel, not priors."""
        return self.replay_plan.replay.name == "vqvae2"

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold; weights and codes lie in files named by the visit."""
        return {name: getattr(self, name) for name in KEPT}

    def restore(self, values: dict[str, Any]) -> None:
        """Take back what `state` gave; older versions' checkpoints lack some of it, and hold more."""
        vars(self).update({name: value for name, value in values.items() if name in KEPT})

    def prepare(self, grid: Grid, server_round: int, arrays: StateDict, extra: ConfigRecord, last: bool) -> None:
        """Train what replays, and bring it to who lacks it; called before every exchange.

        Raises
        ------
        RunError
            If nobody could train the generator, or something is missing for the last round and may not be.
        """
        self.grid, self.server_round, self.extra = grid, server_round, extra
        self.complete(arrays)
        if not self.trained or (last and self.lacking() != self.missing):  # said already: it goes on without
            self.complete(arrays)
        failures = self.movement.recorder.failures_line()
        if not self.trained:
            raise RunError(f"no institution could train the generator; {failures}: resume the run when one can")
        self.missing = self.lacking() if last else {}
        if self.missing and self.replay_plan.replay.missing == "stop":
            lacks = "; ".join(f"{name} {what}" for name, what in self.missing.items())
            raise RunError(
                f"the last round needs all that is replayed; {lacks} ({failures}): resume the run when they answer, "
                "or with replay.missing=say"
            )

    def complete(self, arrays: StateDict) -> None:
        """Make the visits that are due, and bring what they came to to who lacks it."""
        self.train(arrays)
        if lacking := [member for member in self.movement.members if self.lacks(member)]:
            self.distribute(lacking)

    def lacking(self) -> dict[str, str]:
        """Say of institutions what replay lacks of them, or they of it."""
        found = {member.name: "has received no replays" for member in self.movement.members if self.lacks(member)}
        if self.unfinished:
            found |= dict.fromkeys(self.uncoded, "has not encoded its images once more")
        ours = {member.name for member in self.movement.members.known if member.ours}
        names = ({*self.itinerary} | ours) - {*self.visited}
        return dict(sorted((found | dict.fromkeys(names, "is not replayed")).items()))

    def lacks(self, member: Member) -> bool:
        """Say whether an institution has received less than all that is replayed."""
        whole = min(1, len(self.trained)) if self.codes_travel else len(self.trained)
        return self.held.get(member.name, 0) < whole

    @property
    def visited(self) -> list[str]:
        """Names of those whose images are replayed, in the order of the visits."""
        return [self.itinerary[visit] for visit in self.trained]

    @property
    def unfinished(self) -> bool:
        """Say whether images are still to be encoded by the generator as it is now."""
        last_pass = self.codes_travel and self.replay_plan.replay.codes == "last-pass"
        return last_pass and self.coded < len(self.trained)

    def expect(self, members: list[Member]) -> None:
        """Take everything for done and everybody for equipped, so that what follows can be forecast."""
        self.rows = sum(member.num_examples for member in members)
        self.counts, self.held = [[self.rows]], {member.name: 1 for member in members}

    def holding(self, name: str) -> int:
        """Return for how many examples an institution holds codes and decoders."""
        held = self.held.get(name, 0)
        return self.rows * held if self.codes_travel else sum(map(sum, self.counts[:held]))

    # --- Algorithm 1, lines 24-27 -------------------------------------------------------------------------------------

    def train(self, arrays: StateDict) -> None:
        """Let the generator visit the institutions, one after another, whose images are not replayed yet."""
        members = self.movement.members
        if self.visits == len(self.itinerary):
            self.itinerary += [member.name for member in members if member.name not in self.visited]
        while self.visits < len(self.itinerary):
            if (member := members.get(self.itinerary[self.visits])) and self.visit(member):
                self.trained.append(self.visits)
                self.held = {} if self.codes_travel else self.held  # what they have is older
            self.visits += 1
            self.checkpoint(self.server_round - 1, arrays)
        if self.unfinished:
            self.encode_once_more()
            self.checkpoint(self.server_round - 1, arrays)

    def visit(self, member: Member) -> bool:
        """Have an institution train the generator and encode, or train a prior; say whether that came to something."""
        if not self.prepared(member):
            return False
        stale = self.replay_plan.replay.codes == "stale"
        request = self.train_request(self.generator, self.num_replay_examples)
        generated = self.asked(member, request, Generated)
        if generated is None:
            return False
        weights = opened(generated.arrays)
        if fault := self.fault_of(weights):
            self.movement.recorder.failed(self.server_round, member.name, fault)
            return False
        self.movement.recorder.saw(generated.examples_seen)
        self.movement.recorder.generated(member.name, list(generated.losses), list(generated.perplexity))
        if not self.codes_travel:
            return self.take_prior(member, weights)
        codes = self.encoded(member, weights, 0 if stale else self.num_replay_examples)
        if codes is None:
            return False
        self.keep("generator", self.visits, weights)
        self.keep_all([self.codes, codes] if stale and self.trained else [codes])
        return True

    def prepared(self, member: Member) -> bool:
        """Give an institution what it is to replay; the generator that follows brings D_old."""
        if self.codes_travel:
            return not self.trained or bool(self.give([member], [self.keep_codes()]))
        self.distribute([member])
        return self.held.get(member.name, 0) == len(self.trained)

    def encoded(self, member: Member, weights: StateDict, replayed: int) -> StateDict | None:
        """Have an institution encode its images, and with `replayed` what it keeps; None if it does not."""
        answer = self.asked(member, self.encode_request(weights, replayed), Codes)
        if answer is None:
            return None
        n = member.num_examples + replayed
        try:
            unpack_codes(answer.codes, self.model.codes_per_image, self.model.codebook_size)
            if not len(answer.codes) == len(answer.labels) == n or not self.accepts(answer):
                raise WireError(f"codes and labels of {n} examples were asked for; got {len(answer.codes)}, or others")
        except WireError as error:
            self.movement.recorder.failed(self.server_round, member.name, str(error))
            return None
        return {"codes": answer.codes, "labels": answer.labels}

    def accepts(self, answer: Codes) -> bool:
        """Say whether labels can be the task's; those of masks are zeros."""
        masks = self.replay_plan.kind == "segmentation"
        return not answer.labels.any() if masks else bool(self.movement.task.accepts(answer.labels))

    def encode_once_more(self) -> None:
        """Have every institution encode its real images with the generator as it is; e changes once all have."""
        found: list[StateDict] = []
        self.uncoded = []
        for name in self.visited:
            member = self.movement.members.get(name)
            codes = self.encoded(member, self.generator, 0) if member else None
            if codes is None:
                self.uncoded.append(name)
            else:
                found.append(codes)
        if not self.uncoded:
            self.keep_all(found)
            self.coded, self.held = len(self.trained), {}

    def take_prior(self, member: Member, weights: StateDict) -> bool:
        """Have an institution train a prior for the generator that it has just trained."""
        answer = self.asked(member, self.prior_request(weights), TrainedPrior)
        if answer is None:
            return False
        if fault := self.fault_of_prior(member, answer):
            self.movement.recorder.failed(self.server_round, member.name, fault)
            return False
        self.movement.recorder.saw(answer.examples_seen)
        self.movement.recorder.generated(f"{member.name}, prior", list(answer.losses))
        self.keep("generator", self.visits, weights)
        self.keep("source", self.visits, nested({"decoder": self.decoder(weights)}) | opened(answer.arrays))
        self.counts.append(list(answer.label_counts))
        return True

    def fault_of(self, weights: StateDict) -> str:
        """Say what makes a generator useless, before anybody is given it; nothing if an image of codes has a loss."""
        model = self.replay_plan.fresh_generator().eval()
        try:
            load_arrays(model, weights)
            image = model.decode(torch.zeros(1, model.codes_per_image, dtype=torch.int64))
            with torch.no_grad():
                loss, _ = model.loss(image, torch.Generator().manual_seed(0))
        except WireError as error:
            return str(error)
        return "" if loss.isfinite() else "sent a generator under which an image's loss is not finite"

    def fault_of_prior(self, member: Member, answer: TrainedPrior) -> str:
        """Say what makes a prior useless, before anybody is given it; nothing if it draws."""
        prior = self.replay_plan.fresh_prior(self.model).eval()
        plan, counts, n = self.movement.settings.privacy, answer.label_counts, member.num_examples
        slack = 6 * plan.config.count_sigma * prior.classes if plan and plan.covers("prior") else 0.0
        if len(counts) != prior.classes or not sum(counts) > 0 or abs(sum(counts) - n) > slack:
            return f"must count its {n} examples of {prior.classes} kinds of label; it told {sum(counts)}"
        try:
            load_arrays(prior, unnested(opened(answer.arrays), only=("prior",))["prior"])
            prior.sample(torch.arange(prior.classes), torch.Generator().manual_seed(0))
        except (WireError, RuntimeError, IndexError) as error:
            return f"sent a prior that draws no codes: {' '.join(str(error).split())[:200]}"
        return ""

    # --- what institutions keep ---------------------------------------------------------------------------------------

    def distribute(self, members: Iterable[Member]) -> None:
        """Bring decoder and codes, or priors with their decoders, to who lacks them."""
        for number, requests in enumerate(self.packets()):
            lacking = [member for member in members if self.held.get(member.name, 0) == number]
            self.held |= {member.name: number + 1 for member in self.give(lacking, requests)}

    def packets(self) -> Iterable[list[Request]]:
        """Yield what is sent to keep, together: of vqvae2 everything, of pixelcnn a prior with its decoder."""
        if self.codes_travel:
            decoder = KeepDecoder(**self.head, arrays=self.decoder(self.generator))
            yield [decoder, self.keep_codes()]
            return
        for number, (visit, counts) in enumerate(zip(self.trained, self.counts, strict=True)):
            yield [KeepPrior(**self.head, arrays=self.file("source", visit), source=number, label_counts=counts)]

    def give(self, members: list[Member], requests: list[Request]) -> list[Member]:
        """Send requests, one after another, to all; return who has kept everything."""
        for request in requests if members else []:
            asked = [self.movement.message(member, request, self.extra) for member in members]
            replies = self.movement.exchange(self.grid, self.server_round, asked, needed=False)
            members = [member for member, _ in self.movement.answers(replies)]
        return members

    @property
    def num_replay_examples(self) -> int:
        """Return how many examples what was trained so far stands for."""
        return self.rows if self.codes_travel else sum(map(sum, self.counts))

    @property
    def head(self) -> dict[str, Any]:
        """Return what every request says."""
        return {"run": self.run, "server_round": self.server_round}

    # --- requests -----------------------------------------------------------------------------------------------------

    def train_request(self, weights: StateDict, replayed: int) -> TrainGenerator:
        """Ask for the generator's training."""
        return TrainGenerator(**self.head, arrays=weights, replayed=replayed)

    def encode_request(self, weights: StateDict, replayed: int) -> EncodeImages:
        """Ask for codes."""
        return EncodeImages(**self.head, arrays=weights, replayed=replayed)

    def keep_codes(self) -> KeepCodes:
        """Send e."""
        e = self.codes
        return KeepCodes(**self.head, codes=e["codes"], labels=e["labels"])

    def prior_request(self, weights: StateDict) -> TrainPrior:
        """Ask for a prior."""
        fresh = to_arrays(self.replay_plan.fresh_prior(self.model))
        return TrainPrior(**self.head, arrays=nested({"generator": weights, "prior": fresh}))

    def asked(self, member: Member, request: Request, declared: type[Answer]) -> Answer | None:
        """Send one request; None, with the failure noted, if no answer came that can be used."""
        message = self.movement.message(member, request, self.extra)
        for reply in self.movement.exchange(self.grid, self.server_round, [message], needed=False):
            try:
                return declared.decode(reply.content)
            except WireError as error:
                self.movement.recorder.failed(self.server_round, member.name, str(error))
        return None

    # --- files --------------------------------------------------------------------------------------------------------

    @property
    def generator(self) -> StateDict:
        """Return θ_G as it is now."""
        return self.file("generator", self.trained[-1]) if self.trained else to_arrays(self.model)

    @property
    def codes(self) -> StateDict:
        """Return e as it is now: codes and labels."""
        return self.file("codes", self.codes_at)

    def decoder(self, weights: StateDict) -> StateDict:
        """Return the part of the weights that makes images of codes."""
        return {name: array for name, array in weights.items() if self.model.decodes.match(name)}

    def file(self, what: str, visit: int) -> StateDict:
        """Read what a visit left."""
        return read_tensors(self.movement.recorder.folder("replay") / f"{what}-{visit:03d}.safetensors")

    def keep(self, what: str, visit: int, arrays: StateDict) -> None:
        """Write what a visit leaves; a checkpoint then names it."""
        write_tensors(self.movement.recorder.folder("replay") / f"{what}-{visit:03d}.safetensors", arrays)

    def keep_all(self, parts: list[StateDict]) -> None:
        """Write the union of codes and labels, beside the one that the last checkpoint names."""
        union = {key: np.concatenate([part[key] for part in parts]) for key in ("codes", "labels")}
        self.codes_at, self.rows = max(self.visits, self.codes_at + 1), len(union["labels"])
        self.keep("codes", self.codes_at, union)
