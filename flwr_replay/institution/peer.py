"""The institution's half of gossip: where its model is kept between rounds, and how parcels are mixed into it.

Source: Kalra et al. 2023 (ProxyFL), Algorithm 1, lines 7-10. The server's half is `flwr_replay/movements/gossip.py`.

For each exchange the state directory has two files, each written in one step. `released` is θ as it left, with w.
`mixed` is θ after lines 8-10, with w and the numbers of the parcels in it. A parcel that arrives twice is mixed once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from flwr_replay.errors import TrainingError
from flwr_replay.files.tensors import nested, unnested
from flwr_replay.institution.client import InstitutionClient
from flwr_replay.learning.pushsum import mixed, parcel, sender_name
from flwr_replay.payloads.avgpush import EvaluatePeer, Push
from flwr_replay.payloads.mutual import EvaluatePair, TrainProxy
from flwr_replay.payloads.relay import Committed, Deliver, TrainPeer
from flwr_replay.wire.bounds import cut_back
from flwr_replay.wire.records import StateDict, opened
from flwr_replay.wire.weights import check_weights, to_arrays

__all__ = ["PeerClient"]

TestPeer = EvaluatePair | EvaluatePeer


class PeerClient(InstitutionClient):
    """Base of the clients that exchange models over a graph."""

    def begin(self, request: TrainPeer) -> tuple[StateDict, float]:
        """Return θ and w from after the last mixing that the server knows of; before the first, fresh ones.

        It is an error if θ is gone: fresh weights would silently give other results.
        """
        if not request.committed:
            theta, w = to_arrays(self.fresh(request.init_seed)), 1.0
        elif (mixed_before := self.state.at("mixed", request.run, request.committed)) is not None:
            theta, w, _ = unpack_state(mixed_before)
        else:
            raise TrainingError(
                f"an institution goes on from the model that it mixed in exchange {request.committed}; that of run "
                f"{request.run!r} is gone: restore the state directory, or begin a new run"
            )
        self.state.forget_after("mixed", request.run, request.committed)
        check_weights(theta)  # the server chose the shares, so θ may not be finite
        return {**theta, **cut_back(theta)}, w

    def release(self, request: Push | TrainProxy, theta: ArrayRecord, w: float) -> dict[str, Any]:
        """Save θ and w as they leave; return an answer's fields. θ leaves only if somebody may receive it."""
        self.save("released", request, pack_state(opened(theta), w), give=True)
        return {"arrays": theta if request.exchanged else ArrayRecord(), "weight": w, **self.spent(request.run)}

    def deliver(self, request: Deliver) -> Committed:
        """Mix the released model with the parcels that arrived, and save the result."""  # lines 8-10
        request.check_shares()
        done = self.state.at("mixed", request.run, request.released_in)
        if done is None:
            released = self.state.at("released", request.run, request.released_in)
            if released is None:
                raise TrainingError(
                    f"parcels are mixed with the model that was released in exchange {request.released_in}; "
                    f"that of run {request.run!r} is gone: restore the state directory, or begin a new run"
                )
            theta, w, _ = unpack_state(released)
            senders = [sender_name(i) for i in range(len(request.parcels))]
            models = unnested(opened(request.arrays), only=senders)
            parcels = zip(senders, request.weights, request.shares, strict=True)
            arrived = [parcel(models[sender], w_k, share) for sender, w_k, share in parcels]
            done = pack_state(*mixed(theta, w, request.kept, arrived), request.parcels)
            self.state.save("mixed", request.run, request.released_in, done, self.institution.durable, give=True)
        return Committed(num_examples=len(self.institution.train), parcels=unpack_state(done)[2])

    def own_theta(self, request: TestPeer) -> StateDict:
        """Return θ from after this exchange's mixing, or as it was released before."""
        if request.mixed:
            theta = unpack_state(self.latest("mixed", request))[0]
            check_weights(theta)  # of parcels that a server chose
            return theta
        if (released := self.state.at("released", request.run, request.exchange)) is None:
            raise TrainingError(
                f"before mixing, a model is tested as it was released; institution {self.institution.name!r} has "
                f"released none in exchange {request.exchange}"
            )
        return unpack_state(released)[0]


def pack_state(theta: StateDict, w: float, parcels: Sequence[int] = ()) -> StateDict:
    """Return one state dict of θ, w and the parcels' numbers, so that they are written in one step."""
    scalars = {"w": np.array([w]), "parcels": np.array(parcels, np.int64)}
    return {**nested({"theta": theta}), **scalars}


def unpack_state(arrays: StateDict) -> tuple[StateDict, float, list[int]]:
    """Undo `pack_state`: return θ, w and the parcels' numbers."""
    return unnested(arrays)["theta"], float(arrays["w"][0]), [int(number) for number in arrays["parcels"]]
