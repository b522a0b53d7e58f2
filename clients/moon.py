"""MOON: the institution's half; the server's half is `strategies/moon.py`.

Source: Li, He and Song 2021 (arXiv 2103.16257), Algorithm 1, PartyLocalTraining, and equation 3.
"""

import copy

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from flwr_replay.institution.client import InstitutionClient
from flwr_replay.learning.heads import features_of, linear_head
from flwr_replay.payloads.common import Trained
from flwr_replay.payloads.moon import TrainContrasted
from flwr_replay.wire.weights import load_arrays, to_arrays

__all__ = ["MoonClient"]


class MoonClient(InstitutionClient):
    """Trains the global model, and keeps what it became for the next contrast."""

    def train_contrasted(self, request: TrainContrasted) -> Trained:
        """Train for E passes and return the weights; the reported loss is L, without the contrastive term."""
        data, learner = self.training_data(), self.learner(request)
        before = self.kept("last", request) if request.mu else None
        fixed = [copy.deepcopy(learner.model) for _ in range(2)] if before else []  # of θ, and of the last θ_k
        if before:
            load_arrays(fixed[1], before)
        taken: list[Tensor] = []  # z of the batch: what the head has just received
        _, head = linear_head(learner.model)
        shuffle = self.shuffle(request.exchange)
        with head.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0])):
            for _ in range(request.local_epochs):
                for x_B, y_B in learner.batches(data, shuffle):
                    others = [features_of(model, x_B).clone() for model in fixed]

                    def contrast(others: list[Tensor] = others) -> Tensor:
                        return request.mu * contrastive(taken[-1], *others, request.temperature)

                    learner.step(x_B, y_B, penalty=contrast if before else None)
                    taken.clear()
        answer = self.trained(request, learner, len(data))
        if request.mu:
            self.save("last", request, to_arrays(learner.model), give=True)
        return answer


def contrastive(z_BF: Tensor, of_global_BF: Tensor, of_last_BF: Tensor, temperature: float) -> Tensor:
    """Return the mean of ℓ over a batch (equation 3), as a differentiable scalar."""
    alike_2B = torch.stack([cosine_similarity(z_BF, other_BF) for other_BF in (of_global_BF, of_last_BF)])
    return cross_entropy(alike_2B.T / temperature, torch.zeros(len(z_BF), dtype=torch.int64, device=z_BF.device))
