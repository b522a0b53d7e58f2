"""ProxyFL: the institution's half; the server's half is `strategies/proxyfl.py`.

Source: Kalra et al. 2023, Algorithm 1, lines 2-6; a step is in `flwr_replay/institution/mutual.py`, lines 7-10 in
`flwr_replay/institution/peer.py`.
"""

from __future__ import annotations

from flwr_replay.institution.pair import PairClient
from flwr_replay.institution.peer import PeerClient
from flwr_replay.payloads.mutual import EvaluatePair, PairEvaluation, ReleasedProxy, TrainProxy

__all__ = ["ProxyFLClient"]


class ProxyFLClient(PairClient, PeerClient):
    """Trains a private model and a proxy; only the proxy is given away."""

    dp_mechanisms = ("proxy",)

    def train_proxy(self, visit: TrainProxy) -> ReleasedProxy:
        """Train both for one pass and release the proxy."""
        data, (theta, w) = self.training_data(), self.begin(visit)
        learner = self.pair(visit, theta)
        learner.alone(data, self.shuffle(visit.server_round, "private"))
        for x_B, y_B in learner.batches(data, self.shuffle(visit.server_round)):  # lines 2-3
            learner.step(x_B, y_B)  # line 4
        told = self.keep_pair(visit, learner)  # line 6
        return ReleasedProxy(**told, **self.release(visit, learner.proxy.model, w))

    def evaluate_pair(self, request: EvaluatePair) -> PairEvaluation:
        """Test the private model, and the proxy after this round's mixing."""
        return self.tested(request, self.own_theta(request))
