"""FedProx: the institution's half; the server's half is `strategies/fedprox.py`.

Source: Li et al. 2020 (arXiv:1812.06127), Algorithm 2: minimise h_k(θ_k; θ) = L(θ_k) + μ/2 ‖θ_k - θ‖².
"""

from torch import Tensor, nn

from flwr_replay.clients.fedavg import FedAvgClient
from flwr_replay.institution.learner import Learner
from flwr_replay.payloads.common import Train

__all__ = ["FedProxClient", "distance"]


class FedProxClient(FedAvgClient):
    """Trains the global model on the institution's data, near the global weights."""

    def passes(self, request: Train) -> Learner:
        """Train for E passes; the reported loss is L, without the proximal term."""
        data, learner = self.training_data(), self.learner(request)
        model, mu = learner.model, request.proximal_mu or 0.0
        anchor = [parameter.detach().clone() for parameter in model.parameters()]  # θ
        shuffle = self.shuffle(request.exchange)
        for _ in range(request.local_epochs):
            for x_B, y_B in learner.batches(data, shuffle):
                learner.step(x_B, y_B, penalty=mu / 2 * distance(model, anchor))
        return learner


def distance(model: nn.Module, anchor: list[Tensor]) -> Tensor:
    """Return the squared Euclidean distance between a model's parameters and `anchor`, as a differentiable scalar."""
    pairs = zip(model.parameters(), anchor, strict=True)
    total: Tensor = sum((parameter - theta).square().sum() for parameter, theta in pairs)  # type: ignore[assignment]
    return total
