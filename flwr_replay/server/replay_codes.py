"""Generative replay: the server's half; the institution's half is `flwr_replay/institution/replay.py`.

Source: Qu et al. 2022, Algorithm 1, lines 22-27, and section 3.1; footnote 1 for priors.
Idea: Before a method's first round a generator visits the institutions once, one after another. Each trains it on its
own images and on replayed images of those before it. Then every institution receives what replayed images are made of:
the decoder with codes and labels of all real images, or decoders with priors from which codes are drawn. The method's
rounds follow; their batches hold real and replayed examples.

    θ_G ← fresh weights
    for each institution k:
        θ_G ← train θ_G at k on x_k and on D(e)                                   # lines 24-26
        e ← codes of x_U = D_old(e) ∪ x_k, with their labels                       # codes=paper, last-pass
        e ← e ∪ codes of x_k                                                       # codes=stale
        P_k ← prior over the codes of x_k;  D_k ← D                                # replay=pixelcnn, in place of e
    e ← {codes of x_1, …, codes of x_K}, by the generator after its last visit     # codes=last-pass
    D, e (or all D_k, P_k) to every institution
    in every round: a batch ← ratio · b replayed examples, and b real ones              `institution/learner.py`

Deviations: With replay=pixelcnn each prior P_k keeps its own decoder D_k, the one for which it was trained. An
institution draws codes from P_k once, as many of each label as P_k's label counts say, and replays these.

Failures: A failed visit is repeated before every following exchange. It is repeated once more at once before the last
round, or if no institution could be visited. An institution that joins late is visited then. The run stops before its
last round if replay is still incomplete: an institution's images are not replayed, or an institution has not received
what to replay. The run can be resumed. With replay.missing=say it does not stop, and the first line of its result says
what is missing. The last pass of codes=last-pass takes effect once all institutions have made it.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flwr_replay.config.sections import PriorConfig
from flwr_replay.errors import WireError
from flwr_replay.files.tensors import OF_RUN, nested, read_own, unnested, write_tensors
from flwr_replay.generators.autoencoder import VQVAE2Config
from flwr_replay.generators.codes import unpack_codes
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.payloads.replay import (
    Codes,
    EncodeImages,
    Generated,
    KeepCodes,
    KeepDecoder,
    KeepPrior,
    Kept,
    TrainedPrior,
    TrainGenerator,
    TrainPrior,
)
from flwr_replay.server.exchange import Exchange, Exchanger
from flwr_replay.server.members import Member
from flwr_replay.server.pieces import Answer, Asking
from flwr_replay.server.replay_base import Replay
from flwr_replay.server.roll import Roll
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import StateDict, opened
from flwr_replay.wire.weights import load_arrays, to_arrays

__all__ = ["GenerativeReplay"]

KEPT = ("itinerary", "visits", "trained", "codes_at", "rows", "coded", "counts", "missing")


class GenerativeReplay(Replay):
    """Trains generator and priors before a method's first round, and sends them to every institution.

    `checkpoint` writes one, given the number of the last complete exchange and the global weights.
    """

    def __init__(
        self, exchanger: Exchanger, roll: Roll, replay_plan: ReplayPlan, checkpoint: Callable[[int, StateDict], None]
    ) -> None:
        super().__init__(exchanger, replay_plan.replay)
        self.roll, self.replay_plan, self.checkpoint = roll, replay_plan, checkpoint
        self.run, self.stages = exchanger.settings.run, replay_plan.stages
        self.model = replay_plan.fresh_generator()
        self.itinerary: list[str] = []  # names in the order of visits; a failed one is added again
        self.visits = 0  # visits made, failed ones included
        self.trained: list[int] = []  # numbers of the visits that succeeded
        self.codes_at, self.rows = -1, 0  # replay=vqvae2: number of the file of codes, and of codes
        self.coded = 0  # codes=last-pass: number of visits at the last complete pass
        self.uncoded: list[str] = []  # codes=last-pass: names of those that have not encoded again
        self.counts: list[list[int]] = []  # replay=pixelcnn: by prior, examples of each label
        self.held: dict[str, int] = {}  # by institution: 1 if it has decoder and codes, or its number of priors

    @property
    def codes_travel(self) -> bool:
        """Whether codes of real images travel; otherwise priors do."""
        return self.replay_plan.replay.name == "vqvae2"

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold; weights and codes are in files named by the visit."""
        return {name: getattr(self, name) for name in KEPT}

    def restore(self, values: dict[str, Any]) -> None:
        """Restore what `state` returned; checkpoints of older versions may have other entries."""
        vars(self).update({name: value for name, value in values.items() if name in KEPT})

    @property
    def begun(self) -> bool:
        """Whether an institution has trained the generator."""
        return bool(self.trained)

    def complete(self, arrays: StateDict) -> None:
        """Make the visits that are due, then send the results to the institutions that lack them."""
        self.train(arrays)
        if lacking := [member for member in self.exchanger.members if self.lacks(member)]:
            self.distribute(lacking)

    def lacking(self) -> dict[str, str]:
        """Return, by institution, what is incomplete."""
        reasons = {member.name: "has received no replays" for member in self.exchanger.members if self.lacks(member)}
        if self.unfinished:
            reasons |= dict.fromkeys(self.uncoded, "has not encoded its images once more")
        ours = {member.name for member in self.exchanger.members.known if member.ours}
        names = ({*self.itinerary} | ours) - {*self.visited}
        return dict(sorted((reasons | dict.fromkeys(names, "is not replayed")).items()))

    def lacks(self, member: Member) -> bool:
        """Return whether an institution has not received everything to replay."""
        whole = min(1, len(self.trained)) if self.codes_travel else len(self.trained)
        return self.held.get(member.name, 0) < whole

    @property
    def visited(self) -> list[str]:
        """Names of the institutions whose images are replayed, in the order of the visits."""
        return [self.itinerary[visit] for visit in self.trained]

    @property
    def unfinished(self) -> bool:
        """Whether images must still be encoded by the current generator."""
        last_pass = self.codes_travel and self.replay_plan.replay.codes == "last-pass"
        return last_pass and self.coded < len(self.trained)

    def holding(self, name: str) -> int:
        """Return how many examples an institution has for replay."""
        held = self.held.get(name, 0)
        return self.rows * held if self.codes_travel else sum(map(sum, self.counts[:held]))

    # --- Algorithm 1, lines 24-27 -------------------------------------------------------------------------------------

    def train(self, arrays: StateDict) -> None:
        """Let the generator visit, one after another, the institutions whose images are not replayed yet."""
        members = self.exchanger.members
        if self.visits == len(self.itinerary):
            self.itinerary += [member.name for member in members if member.name not in self.visited]
        while self.visits < len(self.itinerary):
            if (member := members.get(self.itinerary[self.visits])) and self.visit(member):
                self.trained.append(self.visits)
                self.held = {} if self.codes_travel else self.held  # their codes and decoders are now outdated
            self.visits += 1
            self.checkpoint(self.exchange - 1, arrays)
        if self.unfinished:
            self.encode_once_more()
            self.checkpoint(self.exchange - 1, arrays)

    def visit(self, member: Member) -> bool:
        """Have an institution train the generator and encode, or train a prior; return whether it succeeded."""
        if not self.prepared(member):
            return False
        stale = self.replay_plan.replay.codes == "stale"
        replayed = self.rows if self.codes_travel else sum(map(sum, self.counts))  # how many can be, so far
        request = self.train_request(self.generator, replayed)
        generated = self.trained_by(member, request, Generated, self.replay_plan.generator)
        if generated is None:
            return False
        weights = opened(generated.arrays or {})
        if fault := self.fault_of(weights):
            self.exchanger.recorder.failed(self.exchange, member.name, fault)
            return False
        self.exchanger.recorder.saw(generated.examples_seen)
        perplexity = list(generated.perplexity)
        self.exchanger.recorder.generated(member.name, "generator", list(generated.losses), perplexity=perplexity)
        if not self.codes_travel:
            return self.take_prior(member, weights)
        codes = self.encoded(member, weights, 0 if stale else replayed)
        if codes is None:
            return False
        self.keep("generator", self.visits, weights)
        self.keep_all([self.codes, codes] if stale and self.trained else [codes])
        return True

    def prepared(self, member: Member) -> bool:
        """Send an institution what it is to replay; D_old is part of the generator in the next request."""
        if self.codes_travel:
            return not self.trained or bool(self.give([member], [self.keep_codes()]))
        self.distribute([member])
        return self.held.get(member.name, 0) == len(self.trained)

    def encoded(self, member: Member, weights: StateDict, replayed: int) -> StateDict | None:
        """Have an institution encode its images and `replayed` ones; return None if it fails."""
        answer = self.asking.answers({member: self.encode_request(weights, replayed)}, Codes).get(member.name)
        if answer is None:
            return None
        n, masks = member.num_examples + replayed, self.replay_plan.kind == "segmentation"  # whose labels are zeros
        try:
            unpack_codes(answer.codes, self.model.codes_per_image, self.model.codebook_size)
            fitting = not answer.labels.any() if masks else self.exchanger.task.accepts(answer.labels)
            if not len(answer.codes) == len(answer.labels) == n or not fitting:
                raise WireError(
                    f"codes and labels of {n} examples were asked for; got {len(answer.codes)}, or invalid labels"
                )
        except WireError as error:
            self.exchanger.recorder.failed(self.exchange, member.name, str(error))
            return None
        return {"codes": answer.codes, "labels": answer.labels}

    def encode_once_more(self) -> None:
        """Have every institution encode its real images with the current generator; e changes once all have."""
        all_codes: list[StateDict] = []
        self.uncoded = []
        for name in self.visited:
            member = self.exchanger.members.get(name)
            codes = self.encoded(member, self.generator, 0) if member else None
            if codes is None:
                self.uncoded.append(name)
            else:
                all_codes.append(codes)
        if not self.uncoded:
            self.keep_all(all_codes)
            self.coded, self.held = len(self.trained), {}

    def take_prior(self, member: Member, weights: StateDict) -> bool:
        """Have an institution train a prior for the generator that it has just trained; return whether it succeeded."""
        answer = self.trained_by(member, self.prior_request(weights), TrainedPrior, self.replay_plan.prior)
        if answer is None:
            return False
        if fault := self.fault_of_prior(member, answer):
            self.exchanger.recorder.failed(self.exchange, member.name, fault)
            return False
        self.exchanger.recorder.saw(answer.examples_seen)
        self.exchanger.recorder.generated(member.name, "prior", list(answer.losses))
        self.keep("generator", self.visits, weights)
        self.keep("source", self.visits, nested({"decoder": self.decoder(weights)}) | opened(answer.arrays or {}))
        self.counts.append(list(answer.label_counts))
        return True

    def fault_of(self, weights: StateDict) -> str:
        """Return why a generator is unusable, before anybody receives it; empty if a decoded image has a loss."""
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
        """Return why a prior is unusable, before anybody receives it; empty if it draws codes."""
        prior = self.replay_plan.fresh_prior(self.model).eval()
        plan, counts, n = self.exchanger.settings.privacy, answer.label_counts, member.num_examples
        slack = 6 * plan.config.count_sigma * prior.classes if plan and plan.covers("prior") else 0.0
        if len(counts) != prior.classes or not sum(counts) > 0 or abs(sum(counts) - n) > slack:
            return f"must count its {n} examples of {prior.classes} kinds of label; it reported {sum(counts)}"
        try:
            load_arrays(prior, unnested(opened(answer.arrays or {}), only=("prior",))["prior"])
            prior.sample(torch.arange(prior.classes), torch.Generator().manual_seed(0))
        except (WireError, RuntimeError, IndexError) as error:
            return f"sent a prior that draws no codes: {' '.join(str(error).split())[:200]}"
        return ""

    # --- what institutions keep ---------------------------------------------------------------------------------------

    def distribute(self, members: Iterable[Member]) -> None:
        """Send decoder and codes, or priors with their decoders, to the institutions that lack them."""
        for number, requests in enumerate(self.packets()):
            lacking = [member for member in members if self.held.get(member.name, 0) == number]
            self.held |= {member.name: number + 1 for member in self.give(lacking, requests)}

    def packets(self) -> Iterable[list[Request]]:
        """Yield the requests of one delivery: for vqvae2 decoder and codes, for pixelcnn one prior after another."""
        if self.codes_travel:
            decoder = KeepDecoder(**self.head, arrays=self.decoder(self.generator))
            yield [decoder, self.keep_codes()]
            return
        for number, (visit, counts) in enumerate(zip(self.trained, self.counts, strict=True)):
            models = read_own(self.path("source", visit), self.run)
            yield [KeepPrior(**self.head, arrays=models, source=number, label_counts=counts)]

    def give(self, members: list[Member], requests: list[Request]) -> list[Member]:
        """Send requests, one after another, to all; return the institutions that have saved everything."""
        for request in requests if members else []:
            messages = [self.exchanger.message(member, request, self.extra) for member in members]
            replies = self.exchanger(self.grid, self.exchange, messages, needed=False)
            members = [member for member, _ in self.exchanger.answers(replies)]
        return members

    @property
    def head(self) -> dict[str, Any]:
        """The instructions of every request."""
        return {"run": self.run, "exchange": self.exchange}

    # --- requests -----------------------------------------------------------------------------------------------------

    def train_request(self, weights: StateDict, replayed: int) -> TrainGenerator:
        """Ask to train the generator."""
        return TrainGenerator(**self.head, arrays=weights, replayed=replayed)

    def encode_request(self, weights: StateDict, replayed: int) -> EncodeImages:
        """Ask for codes."""
        return EncodeImages(**self.head, arrays=weights, replayed=replayed)

    def keep_codes(self) -> KeepCodes:
        """Send e."""
        e = self.codes
        return KeepCodes(**self.head, codes=e["codes"], labels=e["labels"])

    def prior_request(self, weights: StateDict) -> TrainPrior:
        """Ask to train a fresh prior."""
        fresh = to_arrays(self.replay_plan.fresh_prior(self.model))
        return TrainPrior(**self.head, arrays=nested({"generator": weights, "prior": fresh}))

    @property
    def asking(self) -> Asking:
        """What asks institutions in this exchange."""
        return Asking(self.exchanger, self.roll, self.grid, self.exchange, self.extra)

    def trained_by(
        self, member: Member, request: Request, declared: type[Answer], config: VQVAE2Config | PriorConfig
    ) -> Answer | None:
        """Have an institution train; return the last answer, or None if it failed, which is then recorded."""
        most = config.epochs * -(-member.num_examples // config.batch_size)  # steps
        answers = self.asking.train({member: most}, request, declared)
        return answers[member.name][-1] if answers else None

    # --- files --------------------------------------------------------------------------------------------------------

    @property
    def generator(self) -> StateDict:
        """The current θ_G."""
        if not self.trained:
            return to_arrays(self.model)
        return read_own(self.path("generator", self.trained[-1]), self.run)

    @property
    def codes(self) -> StateDict:
        """The current e: codes and labels."""
        return read_own(self.path("codes", self.codes_at), self.run)

    def decoder(self, weights: StateDict) -> StateDict:
        """Return the weights of the decoder, which turns codes into images."""
        return {name: array for name, array in weights.items() if self.model.decodes.match(name)}

    def path(self, what: str, visit: int) -> Path:
        """Return where a file of a visit lies."""
        return self.exchanger.recorder.folder("replay") / f"{what}-{visit:03d}.safetensors"

    def keep(self, what: str, visit: int, arrays: StateDict) -> None:
        """Write a file of a visit; the next checkpoint refers to it."""
        write_tensors(self.path(what, visit), arrays, {OF_RUN: self.run})

    def keep_all(self, answers: list[StateDict]) -> None:
        """Write the union of codes and labels to a new file; the last checkpoint still refers to the old one."""
        union = {key: np.concatenate([own[key] for own in answers]) for key in ("codes", "labels")}
        self.codes_at, self.rows = max(self.visits, self.codes_at + 1), len(union["labels"])
        self.keep("codes", self.codes_at, union)

    # --- forecast -----------------------------------------------------------------------------------------------------

    def forecast(self, members: Sequence[Member]) -> list[Exchange]:
        """Every training takes one message; one that takes longer has more, which hold numbers and no weights."""
        self.rows = total = sum(member.num_examples for member in members)
        self.counts, self.held = [[total]], {member.name: 1 for member in members}  # as if replay were complete
        plan, coded, exchanges, kept = self.replay_plan, 0, list[Exchange](), Kept.blank()
        weights, prior = to_arrays(self.model), plan.fresh_prior(self.model)
        generated = Generated.blank(weights, losses=[0.0] * plan.generator.epochs, perplexity=[0.0, 0.0])
        prior_weights, labels, losses = to_arrays(prior), [0] * prior.classes, [0.0] * plan.prior.epochs
        own = TrainedPrior.blank(nested({"prior": prior_weights}), losses=losses, label_counts=labels)
        models = nested({"decoder": self.decoder(weights), "prior": prior_weights})
        keep_prior = KeepPrior(run=self.run, arrays=models, source=0, label_counts=labels)
        decoder, encode = KeepDecoder(run=self.run, arrays=self.decoder(weights)), self.encode_request(weights, 0)
        for member in members:
            exchanges.append((member, self.train_request(weights, 0), generated, 1))
            if not self.codes_travel:
                exchanges += [(member, self.prior_request(weights), own, 1), (member, keep_prior, kept, len(members))]
                continue
            if coded:
                exchanges.append((member, KeepCodes(run=self.run, **self.blank(coded)), kept, 1))
            passes = [member.num_examples + (0 if plan.replay.codes == "stale" else coded)]
            passes += [member.num_examples] if plan.replay.codes == "last-pass" else []
            exchanges += [(member, encode, Codes.blank(**self.blank(n)), 1) for n in passes]
            exchanges += [(member, decoder, kept, 1), (member, KeepCodes(run=self.run, **self.blank(total)), kept, 1)]
            coded += member.num_examples
        return exchanges

    def blank(self, rows: int) -> dict[str, Any]:
        """Return blank codes and labels, as large as real ones."""
        codes = np.broadcast_to(np.zeros((), np.uint8), (rows, self.replay_plan.code_bytes(self.model)))
        kind = np.float32 if self.replay_plan.kind == "regression" else np.int64
        return {"codes": codes, "labels": np.zeros(rows, kind)}
