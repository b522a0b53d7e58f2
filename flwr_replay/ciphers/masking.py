"""Between the wire and the ClientApp of an institution in a masked run: the weights that leave are under masks.

Secure aggregation for institutions that know each other. Every two of them share a secret, by the keys that each has
pinned. Of this secret and of one exchange both make the same mask; one adds it, the other subtracts it:

    s_jk = HKDF-SHA256(X25519(own private key, pinned public key), of this run, its options, the pinned keys, this
           exchange, a digest of the request and one of all requests that came before)
    m_k  = Σ_{j > k} ChaCha20(s_jk) - Σ_{j < k} ChaCha20(s_jk)   (mod 2^64), j and k by name
    u_k  = the same of other secrets, in 32 bits each and without the modulus, times 2^-32: `flwr_replay/wire/masked.py`

This is the only place where it happens, so no method knows of it. Six rules protect a single institution:

- Masks depend on the request, its statistics too, on what training it goes on from, and on all requests of the run that
  came before, answered or not, since an optimizer's state may come from these. So a request is noted before training
  begins. A server that asked one institution anything else gets a sum that it cannot read. With shared noise nothing
  comes from earlier requests, and who was away answers the next one.
- An exchange has one request and one answer. If it is asked again, as after a crash, the answer is the same bytes.
- The institutions are those in the file of pinned keys, at least three, the same in the whole run. With shared noise
  some may be missing (privacy.dropouts): masks are then between those whom the request names, and who fails later is
  made up for: `flwr_replay/ciphers/recovery.py`.
- Each one's training examples are the same in the whole run: of two sums, before and after a patient came, the
  difference is this patient's.
- With replay=statistics an exchange has two sums, each with a request, an answer and masks of its own: of features,
  perhaps with shared noise, and of weights. The latter's masks depend on what replayed features are drawn from.
- Weights that are too large leave as random numbers. From then on the institution's masks cancel no more, so a run
  tells once at most that weights of some institution have diverged.

Source: Bonawitz et al. 2017 (doi:10.1145/3133956.3133982), section 4.0.1, with pinned keys. That masks depend on the
request answers Pasquini et al. 2022 (doi:10.1145/3548606.3560557), who send different weights to different clients.
"""

import json
import secrets
from collections.abc import Sequence
from hashlib import sha256
from logging import WARNING

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.common.logger import log
from numpy.typing import NDArray

from flwr_replay.ciphers.recovery import SECRET, joined, mask, points_of, shares_under
from flwr_replay.ciphers.sealing import Cover, KeyOwner
from flwr_replay.config.run import RunConfig
from flwr_replay.errors import RefusedError
from flwr_replay.files.atomic import write_once
from flwr_replay.files.tensors import digest
from flwr_replay.payloads.common import ExpectsReplay, RollCall, Unmask, Unmasked
from flwr_replay.payloads.fedstats import DRAWS
from flwr_replay.privacy.plan import STATISTICS
from flwr_replay.state.store import proof_of
from flwr_replay.wire.fields import RECORD_OF
from flwr_replay.wire.masked import MASKED, check_room, exact, fixed_point
from flwr_replay.wire.payload import Payload, Request
from flwr_replay.wire.records import StateDict, array_record, config_in, metrics_in, opened, undecoded
from flwr_replay.wire.sealed import joined_body

__all__ = ["FEWEST", "Masking"]

FEWEST = 3  # of two, each knows the other's weights: the mean without its own
PINS, TRAINED, KEPT = "pins.sha256", "trained.sha256", "masked"  # in a run's folder: files, and the answers' files
ASKED, HISTORY = "request", "history"  # beside a masked answer: digests of its request, and of all up to this one
COHORT, POINTS, TOLD = "cohort", "points", "told"  # where some may fail: who was asked, points, and the survivors
NOTES = (ASKED, HISTORY, COHORT, POINTS)  # what does not leave as arrays
OWN = ("stated", "run")  # instructions of which training does not depend; the run is in the masks' context


class Masking(Cover):
    """Masks the weights that answer one message of a run; takes the place of `Sealing`.

    It needs pinned keys of at least three institutions, its own among them.
    """

    kept: StateDict | None = None  # the answer of this exchange, if there is one already
    asked = history = b""
    key = KEPT  # of answers like this one
    shares = False  # whether this answer has a share of noise

    def __init__(self, institution: KeyOwner, config: RunConfig, run: str) -> None:
        super().__init__(institution, config, run)
        self.institution = institution
        if len(self.seal.pins) < FEWEST:
            raise RefusedError(
                f"masked=true needs at least {FEWEST} institutions with pinned keys; got {len(self.seal.pins)}: of "
                "two, each could compute the other's weights from the mean"
            )
        if config.privacy.noise == "shared" and len(self.seal.pins) != config.nodes:
            raise RefusedError(
                f"noise is shared by all institutions; the run says nodes={config.nodes}, and here "
                f"{len(self.seal.pins)} have pinned keys: set nodes to their number"
            )

    def opened(self, message: Message, request: type[Request] | None) -> Message:
        """Return the message as it is, if its answer may be masked.

        Raises
        ------
        RefusedError
            If the answer would have other arrays than whole weights, the exchange has another answer already, the
            pinned keys are no longer those with which the run began, or the total of examples cannot be.
        DivergedError
            If the request's weights are so large that those of an answer may be too large.
        """
        if request is None:
            raise RefusedError("in a masked run an institution answers its own method's requests only: refused")
        fields = [field for field in request.answer.declared().values() if RECORD_OF[field.kind] == "arrays"]
        if request is RollCall or not fields:
            return message
        if any(field.shape != "state dict" or field.part for field in fields):
            raise RefusedError(f"in a masked run nothing but whole weights leaves; stage {request.stage_name}: refused")
        instructions = config_in(message.content)
        exchange = int(instructions.get("server-round", 0))
        mechanisms = {*fields[0].dp.split("+")} & {*self.config.privacy.mechanisms}
        self.shares = self.config.privacy.noise == "shared" and bool(mechanisms)
        self._bind()
        if not self.shares:  # else an account is about one data set
            examples = f"{self.run}\nmasked\n{self.institution.data.train.digest}"
            line = (
                "a masked run keeps each institution's training examples; here they are others than when it began, and "
                "two sums would show whose: restore them, or begin a new run"
            )
            self._keep(TRAINED, proof_of(self.institution.state, examples, self.durable), line)
        scalars = {**metrics_in(message.content), **instructions}  # a mean and a scale of labels are statistics
        # with shared noise an answer depends on its own request alone, and who was away has trained less
        own_words = (*OWN, "continues") if self.shares else OWN
        shared = {name: scalars[name] for name in request.by_key() if name in scalars and name not in own_words}
        if self.config.replay.name != "none":
            self.key = f"{KEPT}-{request.stage_name}"
            drawn = self.store.load(DRAWS, self.run, exchange + 1) if issubclass(request, ExpectsReplay) else None
            shared[DRAWS] = digest(drawn or {})
        self.spare = instructions.get("spare", 0)
        self.others = self._others(instructions.get("cohort", []))
        total, own = instructions.get("total", 0), len(self.institution.data.train)
        if total < own:
            raise RefusedError(
                f"a masked request says how many examples all institutions have; got {total}, here alone are {own}: "
                "refused; use the same version of flwr-replay everywhere"
            )
        record = undecoded(message.content) or ArrayRecord()
        check_room(opened(record))  # of the request alone, so all institutions refuse it, or none
        self.share, body = own / total, joined_body(record)
        self.asked = sha256(json.dumps(shared, sort_keys=True).encode() + b"\n" + body).digest()
        kept = self.store.at(self.key, self.run, exchange)
        if kept and kept[ASKED].tobytes() != self.asked:
            raise RefusedError(
                f"in a masked run an exchange has one answer; exchange {exchange} is asked again, with another "
                "request: refused, since the difference of two answers would show what the masks hide"
            )
        newest = self.store.newest(self.key, self.run, before=2**64)  # the largest number that Flower sends is below
        if not kept and exchange <= newest:
            raise RefusedError(
                f"in a masked run an exchange of long ago is not repeated; {newest} is answered, {exchange} is asked: "
                "refused; begin a new run"
            )
        if not kept and newest < (answered := int(instructions.get("continues", 0))):
            raise RefusedError(
                f"masks cancel after the same exchanges only; exchange {answered} is answered, and this institution's "
                f"state knows of {newest or 'none'}: restore the newest state directory, or begin a new run"
            )
        if kept and MASKED in kept:
            self.kept = kept
        elif kept:  # asked, and not answered
            self.history = kept[HISTORY].tobytes()
        elif self.shares:  # an answer depends on its own request alone, and who was away answers the next one
            self.history = sha256(self.asked).digest()
        else:
            before = self.store.at(self.key, self.run, newest)
            self.history = sha256((before[HISTORY].tobytes() if before else b"") + self.asked).digest()
            self.store.save(self.key, self.run, exchange, self._notes(), self.durable)
        return message

    def unmasked(self, message: Message) -> Unmasked:
        """Return shares of the keys by which the sum of some survivors can be read; their names are noted before.

        Raises
        ------
        RefusedError
            If this institution has not answered that exchange as one of those, they are too few, or shares were told
            for others. Of sums that are made once in a run, they are the same in all exchanges.
        """
        self._bind()
        request = Unmask.of({}, config_in(message.content))
        exchange, survivors, names = request.exchange, [*request.survivors], _bytes(request.survivors)
        kept = self.store.at(KEPT, self.run, exchange) or {}
        cohort: list[str] = json.loads(kept[COHORT].tobytes()) if COHORT in kept else []
        among = [name for name in cohort if name in survivors]
        if among != survivors or self.seal.name not in among or len(among) < self.least:
            raise RefusedError(
                f"keys are told for a sum of {self.least} institutions or more, sorted, that an exchange has asked, "
                f"this one among them, if it has answered; the server says {', '.join(survivors)[:200]} of exchange "
                f"{exchange}: refused"
            )
        place = 0 if self.config.privacy.dp == STATISTICS else exchange
        told = self.store.at(TOLD, self.run, place)
        if told and not np.array_equal(told[TOLD], names):
            raise RefusedError(
                f"keys are told for one sum; those of exchange {exchange} were told for other institutions than "
                f"{', '.join(survivors)[:200]}: refused, since two sums would show what one adds; where sums are made "
                "once, begin a new run"
            )
        if not told:
            self.store.save(TOLD, self.run, place, {TOLD: names}, self.durable)
        self.history = kept[HISTORY].tobytes()
        failed, shares = [i for i, name in enumerate(cohort) if name not in survivors], list[int]()
        for name in survivors:
            own = shares_under(self._keys([name], name, exchange, self.run)[name], len(cohort))
            shares += [own[i] for i in (cohort.index(name), *failed)]
        return Unmasked(shares=joined(shares))

    def _bind(self) -> None:
        """Refuse other options, or other pinned keys, than those with which the run began."""
        self.store.bind(self.run, self.bound)
        line = "a masked run keeps its pinned keys: who left or came could be computed from two sums; begin a new run"
        self._keep(PINS, self.seal.digest, line)

    def _keep(self, file: str, digest: str, line: str) -> None:
        """Write a digest down in a file of the run; refuse another one later."""
        if write_once(self.store.of_run(self.run) / file, digest, self.durable) != digest:
            raise RefusedError(line)

    def _notes(self) -> StateDict:
        return {ASKED: np.frombuffer(self.asked, np.uint8), HISTORY: np.frombuffer(self.history, np.uint8)}

    @property
    def least(self) -> int:
        """How many institutions a sum has at least."""
        return len(self.seal.pins) - self.config.privacy.dropouts

    def _others(self, cohort: Sequence[str]) -> list[str]:
        """Return whose masks cancel this institution's: of all others, or of those in the cohort that is summed."""
        names = {*cohort} or {*self.seal.pins}
        if (
            len(cohort) not in (0, len(names))
            or self.seal.name not in names
            or names - {*self.seal.pins}
            or not 0 <= self.spare == len(names) - self.least
        ):
            raise RefusedError(
                f"a sum is of {self.least} institutions with pinned keys or more, this one among them "
                f"(privacy.dropouts); the server asks for one of {', '.join(map(str, cohort))[:200]}, {self.spare} of "
                "whom may fail yet: refused"
            )
        return sorted(names - {self.seal.name})

    def closed(self, reply: Message, answer: type[Payload], exchange: int) -> None:
        """Put the weights of an answer under masks, in their place; note them before they leave."""
        record = undecoded(reply.content)
        if not record:
            return
        kept = self.kept
        if not kept:
            weights = opened(record)
            if self.shares:
                numbers = exact(weights)
            else:
                numbers = fixed_point(weights, self.share, self._cancelling(weights, "<u4", exchange))
            masks = self._cancelling(numbers, "<i8", exchange, self.run)
            recovers = self._recoverable(masks, exchange) if self.spare else {}
            masked = {
                name: np.add(of, numbers[name].view(np.int64), out=of).view(np.uint64) for name, of in masks.items()
            }
            if numbers[MASKED].any():
                log(WARNING, "the weights have diverged: random numbers leave; lower training.lr and begin a new run")
                self.history = secrets.token_bytes(32)  # from now on masks cancel no more
            kept = {**masked, **self._notes(), **recovers}
            self.store.save(self.key, self.run, exchange, kept, self.durable)
        leaves = {name: array for name, array in kept.items() if name not in NOTES}
        reply.content["arrays"] = array_record(leaves)
        if POINTS in kept:
            reply.content["config"] = ConfigRecord({POINTS: kept[POINTS].tobytes()})

    def _cancelling(self, like: StateDict, dtype: str, *context: object) -> dict[str, NDArray[np.int64]]:
        """Return random numbers of these shapes that are zeros in the sum of all institutions: m_k modulo 2^64, or u_k.

        The run is no part of u_k's context: of two runs with one seed the means have the same bits.
        """
        numbers = {name: np.zeros(array.shape, np.int64) for name, array in like.items()}
        for other, key in self._keys(self.others, *context).items():
            mask(key, numbers, self.seal.name < other, dtype)
        return numbers

    def _recoverable(self, masks: dict[str, NDArray[np.int64]], exchange: int) -> StateDict:
        """Add the mask of a key of this institution's own; return the names of those asked, and points of all keys."""
        own, cohort = secrets.token_bytes(SECRET), sorted([self.seal.name, *self.others])
        keys = self._keys(self.others, exchange, self.run) | {self.seal.name: own}
        of = self._keys(cohort, self.seal.name, exchange, self.run)
        mask(own, masks, adds=True)
        shares = [shares_under(of[name], len(cohort)) for name in cohort]
        points = points_of([keys[name] for name in cohort], shares, self.spare)
        return {COHORT: _bytes(cohort), POINTS: np.frombuffer(points, np.uint8)}

    def _keys(self, others: Sequence[str], *context: object) -> dict[str, bytes]:
        """Return the keys that this institution and others have for this exchange, this request and what they are for.

        Masks' keys have no name in the context; shares' have the name of the institution whose secrets they share.
        """
        label = json.dumps([*context, self.options, self.seal.digest, self.history.hex()]).encode()
        return self.seal.pair_keys(label, others)


def _bytes(names: Sequence[str]) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps([*names]).encode(), np.uint8)
