"""ProxyFL: the institution's half; the server's half is `strategies/proxyfl.py`.

Source: Kalra et al. 2023, Algorithm 1, lines 2-6. A training step is in `flwr_replay/institution/mutual.py`, lines 7-10
in `flwr_replay/institution/peer.py`.
"""

from flwr_replay.institution.mutual import PairClient
from flwr_replay.institution.peer import PeerClient
from flwr_replay.learning.training import unstepped
from flwr_replay.payloads.mutual import EvaluatePair, PairEvaluation, ReleasedProxy, TrainProxy
from flwr_replay.wire.weights import joined

__all__ = ["ProxyFLClient"]


class ProxyFLClient(PairClient, PeerClient):
    """Trains a private model and a proxy; only the proxy is released."""

    def train_proxy(self, request: TrainProxy) -> ReleasedProxy:
        """Train both models for one pass and release the proxy."""
        data, (theta, w) = self.training_data(), self.begin(request)
        fresh = request.proxy_optimizer == "travels" and not request.committed
        learner = self.pair(request, joined(theta, unstepped(self.fresh(0), self.training)) if fresh else theta)
        learner.alone(data, self.lessons(request), self.shuffle(request.exchange, "private"))
        for x_B, y_B in learner.batches(data, self.shuffle(request.exchange)):  # lines 2-3
            learner.step(x_B, y_B)  # line 4
        statistics = self.keep_pair(request, learner)  # line 6
        return ReleasedProxy(**statistics, **self.release(request, self.proxy_of(request, learner), w))  # line 7

    def evaluate_pair(self, request: EvaluatePair) -> PairEvaluation:
        """Test the private model and, after this round's mixing, the proxy."""
        return self.tested(request, self.own_theta(request))
