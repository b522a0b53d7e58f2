"""SCAFFOLD: the institution's half; the server's half is `strategies/scaffold.py`.

Source: Karimireddy et al. 2020 (arXiv 1910.06378), Algorithm 1, lines 7-14, option II.
"""

from dataclasses import replace

import torch

from flwr_replay.institution.client import InstitutionClient
from flwr_replay.learning.training import make_optimizer, refuse_single_batches
from flwr_replay.payloads.common import Trained
from flwr_replay.payloads.scaffold import CONTROL, TrainControlled, weights_and_control, zeros
from flwr_replay.wire.weights import joined, to_arrays

__all__ = ["ScaffoldClient"]


class ScaffoldClient(InstitutionClient):
    """Trains the global model by corrected gradients, and keeps a control of its own."""

    def train_controlled(self, request: TrainControlled) -> Trained:
        """Train for E passes; return the weights, and by how much the control has changed."""
        theta, c = weights_and_control(request.arrays)
        data, model = self.training_data(), self.scratch_model(theta)
        refuse_single_batches(model, len(data), self.batch_size)
        optimizer = make_optimizer(model, self.training, request.lr)
        learner = self.learner_of(model, optimizer, request, request.local_epochs)
        own = self.kept("control", request, known=True) or zeros(c)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        correction = {name: torch.from_numpy(c[name] - own[name]).to(p.device) for name, p in trained.items()}
        shuffle = self.shuffle(request.exchange)
        for _ in range(request.local_epochs):
            for x_B, y_B in learner.batches(data, shuffle):
                inner = [(p * correction[name]).sum() for name, p in trained.items()]  # its gradient is c - c_k
                learner.step(x_B, y_B, penalty=torch.stack(inner).sum())  # line 10
        answer, after = self.trained(request, learner, len(data)), to_arrays(model)
        far = travelled(learner.steps, request.lr, self.training.momentum)
        change = {
            name: (theta[name] - after[name]) / far - c[name] if far and name in trained else array * 0
            for name, array in c.items()
        }  # line 12, option II
        self.save("control", request, {name: own[name] + delta for name, delta in change.items()}, give=True)
        return replace(answer, arrays=joined(answer.arrays, change, CONTROL))


def travelled(steps: int, lr: float, momentum: float) -> float:
    """Return the sum of all steps that SGD's gradients have made: K η without momentum.

    The gradient of step s makes η (1 + m + … + m^(K-s)) of the way, with momentum m.

    >>> travelled(3, 0.5, 0.0), travelled(2, 1.0, 0.5)
    (1.5, 2.5)
    """
    return lr * sum((1 - momentum**step) / (1 - momentum) for step in range(1, steps + 1))
