"""FedAvg+Share: the institution's half; the server's half is `strategies/fedavgshare.py`.

Source: Zhao et al. 2018, section 4; Qu et al. 2022, section 4.1. Training is that of FedAvg, on more examples.
"""

from dataclasses import replace

import torch

from flwr_replay.clients.fedavg import FedAvgClient
from flwr_replay.errors import TrainingError
from flwr_replay.institution.owner import Shard
from flwr_replay.payloads.common import Trained
from flwr_replay.payloads.fedavgshare import Give, Given, Receive, Received, TrainEnlarged, number_shared

__all__ = ["FedAvgShareClient"]


class FedAvgShareClient(FedAvgClient):
    """Gives some of its examples to all, and trains on its own examples and on those that others gave."""

    given_by_others: Shard | None = None

    def give(self, request: Give) -> Given:
        """Return S_k, a random share of D_k, which is the same at every request of a run."""
        data = self.institution.train
        order = torch.randperm(len(data), generator=self.shuffle("share"))
        chosen = order[: number_shared(len(data), request.share)].to(data.y.device)
        images, labels = data.x[chosen].cpu().numpy(), data.y[chosen].cpu().numpy()
        return Given(images=images, labels=labels, num_examples=len(data), raw_bytes=images.nbytes + labels.nbytes)

    def receive(self, request: Receive) -> Received:
        """Save the others' examples in the state directory."""
        arrays = {"images": request.images, "labels": request.labels}
        self.state.save("shared", request.run, request.exchange, arrays)
        return Received(num_examples=len(request.labels))

    def train_enlarged(self, request: TrainEnlarged) -> Trained:
        """Train as in FedAvg, on D_k and all S_j that the server knows to be here."""
        # Not the newest: an interrupted attempt, or an exchange whose answer was lost, may have left others.
        shared = self.state.at("shared", request.run, request.received_in)
        if request.held != (0 if shared is None else len(shared["labels"])):
            raise TrainingError(
                f"an institution trains on the {request.held} examples of others that it has received; they are gone: "
                "restore the state directory, or begin a new run"
            )
        if shared is not None:
            device = self.institution.device
            x, y = (torch.from_numpy(shared[key]).to(device) for key in ("images", "labels"))
            self.given_by_others = Shard(x, y, 0)
        return self.train(request)

    def training_data(self, pooled: bool = False) -> Shard:
        """Return the institution's own examples and those of others."""
        own, others = super().training_data(pooled), self.given_by_others
        if others is None:
            return own
        return replace(own, x=torch.cat([own.x, others.x]), y=torch.cat([own.y, others.y]))
