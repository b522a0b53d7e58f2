"""FedProx: the institution's half; the server's half is `strategies/fedprox.py`.

Source: Li et al. 2020 (arXiv:1812.06127), Algorithm 2: minimise h_k(θ_k; θ) = L(θ_k) + μ/2 ‖θ_k - θ‖².
"""

from __future__ import annotations

from torch import Tensor, nn

from flwr_replay.client import InstitutionClient
from flwr_replay.payloads.common import Visit, Visited
from flwr_replay.training import encoded, mean_loss, step

__all__ = ["FedProxClient"]


class FedProxClient(InstitutionClient):
    """Trains the global model on the institution's data, near where it began."""

    def train(self, visit: Visit) -> Visited:
        """Train for E passes and return the weights; the loss reported is L, without the proximal term."""
        data, losses, seen = self.training_data(), [], 0
        learner = self.learner(visit)
        model = learner.model
        anchor = [parameter.detach().clone() for parameter in model.parameters()]  # θ
        shuffle = self.shuffle(visit.server_round)
        for _ in range(visit.local_epochs):
            for x_B, y_B in learner.batches(data, shuffle):
                loss = self.task.loss(model(x_B), y_B)
                losses.append(loss.detach())
                step(model, learner.optimizer, loss + (visit.proximal_mu or 0.0) / 2 * distance(model, anchor))
                seen += len(y_B)
        mean = mean_loss(losses)
        self.suspend(visit, learner.optimizer)
        return Visited(arrays=encoded(model), num_examples=len(data), examples_seen=seen, train_loss=mean)


def distance(model: nn.Module, anchor: list[Tensor]) -> Tensor:
    """Return the squared Euclidean distance of a model's parameters from others, as a differentiable scalar."""
    pairs = zip(model.parameters(), anchor, strict=True)
    total: Tensor = sum((parameter - fixed).square().sum() for parameter, fixed in pairs)  # type: ignore[assignment]
    return total
