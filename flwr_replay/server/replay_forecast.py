"""The forecast of replay: what it will send, before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flwr_replay.files.tensors import nested
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.payloads.replay import Codes, Generated, KeepCodes, KeepDecoder, KeepPrior, Kept, TrainedPrior
from flwr_replay.server.members import Member
from flwr_replay.server.replay_base import Replay
from flwr_replay.server.replay_buffers import BufferReplay
from flwr_replay.server.replay_codes import GenerativeReplay
from flwr_replay.wire.payload import Payload, Request
from flwr_replay.wire.weights import to_arrays

__all__ = ["exchanges_of"]


def exchanges_of(replay: Replay, members: Sequence[Member]) -> list[tuple[Member, Request, Payload, int]]:
    """Return the exchanges if every institution stays: member, request, answer, how often; codes are zeros.

    Every training of a generator or prior takes one message. One that takes longer than a message may has more, which
    hold numbers and no weights.

    From then on the replay is as if they had been made.
    """
    if isinstance(replay, BufferReplay):
        replay.buffers.numbers = {name: i for i, name in enumerate(replay.givers(), 1)}
        replay.buffers.held = {member.name: replay.others(member.name) for member in members}
        deliveries = {member.name: len(members) - 1 for member in members}
        return replay.buffers.forecast(deliveries, dict.fromkeys(replay.givers(), 1))
    assert isinstance(replay, GenerativeReplay)
    replay.expect(members)
    plan, before = replay.replay_plan, 0
    found: list[tuple[Member, Request, Payload, int]] = []
    weights, prior = to_arrays(replay.model), plan.fresh_prior(replay.model)
    losses, kept, total = [0.0] * plan.generator.epochs, Kept(num_examples=0), sum(m.num_examples for m in members)
    counts: dict[str, Any] = {"num_examples": 0, "examples_seen": 0, "steps": 0, "steps_left": 0}
    generated = Generated(arrays=weights, losses=losses, perplexity=[0.0, 0.0], **counts)
    given = to_arrays(prior)
    own = TrainedPrior(
        arrays=nested({"prior": given}), losses=[0.0] * plan.prior.epochs, label_counts=[0] * prior.classes, **counts
    )
    both = nested({"decoder": replay.decoder(weights), "prior": given})
    keep_prior = KeepPrior(run=replay.run, arrays=both, source=0, label_counts=[0] * prior.classes)
    decoder = KeepDecoder(run=replay.run, arrays=replay.decoder(weights))
    for member in members:
        found.append((member, replay.train_request(weights, 0), generated, 1))
        if not replay.codes_travel:
            found += [(member, replay.prior_request(weights), own, 1), (member, keep_prior, kept, len(members))]
            continue
        encode, n = replay.encode_request(weights, 0), member.num_examples
        if before:
            found.append((member, KeepCodes(run=replay.run, **blank(plan, replay, before)), kept, 1))
        union = 0 if plan.replay.codes == "stale" else before
        found.append((member, encode, Codes(**blank(plan, replay, n + union), num_examples=0, raw_bytes=0), 1))
        if plan.replay.codes == "last-pass":
            found.append((member, encode, Codes(**blank(plan, replay, n), num_examples=0, raw_bytes=0), 1))
        found += [
            (member, decoder, kept, 1),
            (member, KeepCodes(run=replay.run, **blank(plan, replay, total)), kept, 1),
        ]
        before += n
    return found


def blank(plan: ReplayPlan, replay: GenerativeReplay, rows: int) -> dict[str, Any]:
    """Return blank codes and labels, as large as real ones."""
    codes = np.broadcast_to(np.zeros((), np.uint8), (rows, plan.code_bytes(replay.model)))
    return {"codes": codes, "labels": np.zeros(rows, np.float32 if plan.kind == "regression" else np.int64)}
