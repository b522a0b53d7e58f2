"""Small hospitals that the tests of the strategies share: data on the disk, SuperNodes, a recorder."""

import numpy as np
import torch

from flwr_replay.models.zoo import backbone
from flwr_replay.rng import derived_seed
from flwr_replay.server.recorder import Recorder
from flwr_replay.wire.records import array_record
from flwr_replay.wire.weights import to_arrays


def write_shards(folder, sizes):
    """Write an .npz of 8 x 8 images for each hospital; return its training examples, as numbers in [0, 1]."""
    rng = np.random.default_rng(0)
    data = {}
    for name, n in sizes.items():
        x, y = rng.integers(0, 256, (n + 9, 8, 8), np.uint8), rng.integers(0, 3, n + 9)
        parts = {"train_images": x[:n], "train_labels": y[:n], "test_images": x[n:], "test_labels": y[n:]}
        np.savez(folder / f"{name}.npz", **parts)
        data[name] = torch.from_numpy(x[:n, None]) / 255, torch.from_numpy(y[:n])
    return data


def node_configs(folder, state, names="cab"):
    """Return the SuperNodes' configurations; their order is not that of the names."""
    return [{"name": name, "data": str(folder / f"{name}.npz"), "state": str(state)} for name in names]


def fresh(config, purpose="model"):
    """Encode the backbone's fresh weights, as the server does."""
    return array_record(to_arrays(backbone(config.model, config.task)(derived_seed(0, purpose))))


class Seen(Recorder):
    """Counts the examples used; keeps the metrics of the last evaluation."""

    examples = 0

    def saw(self, examples):
        self.examples += examples

    def evaluated(self, server_round, pooled, own):
        self.last = pooled, own
