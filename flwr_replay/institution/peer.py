"""The institution's half of gossip: where its model lives between rounds, and how it mixes what arrives.

Source: Kalra et al. 2023 (ProxyFL), Algorithm 1, lines 7-10. The server's half is `flwr_replay/movements/gossip.py`.

In the state directory lie, by exchange, `released` (θ as it was given away, with w) and `mixed` (θ after lines 8-10,
with w and the numbers of the parcels in it), each written in one step. A parcel that is brought twice is mixed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from torch import nn

from flwr_replay.errors import TrainingError
from flwr_replay.files.tensors import nested, unnested
from flwr_replay.institution.client import InstitutionClient
from flwr_replay.learning.pushsum import mixed, parcel
from flwr_replay.payloads.common import ReleaseRequest, RunRequest
from flwr_replay.payloads.relay import Committed, Deliver, TrainPeer
from flwr_replay.wire.records import StateDict, opened
from flwr_replay.wire.weights import check_weights, encoded, to_arrays

__all__ = ["PeerClient"]


class PeerClient(InstitutionClient):
    """Base of the clients that exchange models over a graph."""

    def begin(self, request: TrainPeer) -> tuple[StateDict, float]:
        """Return θ and w as they stood after the last mixing that the server knows of; fresh ones at first.

        Raises
        ------
        TrainingError
            If θ is gone: going on from fresh weights would give other results, and nobody would notice.
        """
        if not request.committed:
            theta, w = to_arrays(self.fresh(request.init_seed)), 1.0
        elif (kept := self.state.at("mixed", request.run, request.committed)) is not None:
            theta, w, _ = unpack_state(kept)
        else:
            raise TrainingError(
                f"an institution goes on with the model that it mixed in exchange {request.committed}; that of run "
                f"{request.run!r} is gone: restore the state directory, or begin a new run"
            )
        self.state.forget_after("mixed", request.run, request.committed)
        check_weights(theta)  # the server has chosen the shares
        return theta, w

    def release(self, request: ReleaseRequest, model: nn.Module, w: float) -> dict[str, Any]:
        """Keep what is given away, if anybody can receive it; return what an answer says of it."""
        theta = encoded(model)
        self.save("released", request, pack_state(opened(theta), w), give=True)
        return {"arrays": theta if request.exchanged else ArrayRecord(), "weight": w, **self.spent(request.run)}

    def deliver(self, request: Deliver) -> Committed:
        """Mix what was kept with what arrived, and keep it."""  # lines 8-10
        done = self.state.at("mixed", request.run, request.exchange)
        if done is None:
            released = self.state.at("released", request.run, request.exchange)
            if released is None:
                raise TrainingError(
                    f"parcels are mixed with the model that the institution released in exchange {request.exchange}; "
                    f"that of run {request.run!r} is gone: restore the state directory, or begin a new run"
                )
            theta, w, _ = unpack_state(released)
            models = unnested(opened(request.arrays))
            dealt = zip(sorted(models), request.weights, request.shares, strict=True)
            arrived = [parcel(models[number], w_k, share) for number, w_k, share in dealt]
            done = pack_state(*mixed(theta, w, request.kept, arrived), request.parcels)
            self.state.save("mixed", request.run, request.exchange, done, self.institution.durable, give=True)
        return Committed(num_examples=len(self.institution.train), parcels=unpack_state(done)[2])

    def own_theta(self, request: RunRequest) -> StateDict:
        """Return θ as it stands after this exchange's mixing."""
        return unpack_state(self.latest("mixed", request))[0]


def pack_state(theta: StateDict, w: float, parcels: Sequence[int] = ()) -> StateDict:
    """Return one state dict of θ, w and the parcels' numbers, so that they are written in one step."""
    scalars = {"w": np.array([w]), "parcels": np.array(parcels, np.int64)}
    return {**nested({"theta": theta}), **scalars}


def unpack_state(kept: StateDict) -> tuple[StateDict, float, list[int]]:
    """Take apart what `pack_state` has put together."""
    return unnested(kept)["theta"], float(kept["w"][0]), [int(number) for number in kept["parcels"]]
