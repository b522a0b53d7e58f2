"""FedAvg by fluke, for `benchmarks/engines.py`: prints the seconds at which rounds ended, as JSON.

    python benchmarks/fluke_fedavg.py DATA.npz INSTITUTIONS ROUNDS WIDTH LR MOMENTUM BATCH

It is called with the Python of an environment that has fluke (`pip install fluke-fl`), and takes fluke's own classes
only. `DATA.npz` has the images and labels that the other engines deal.
"""

import json
import sys
import time

import numpy as np
import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataContainer, DataSplitter
from fluke.evaluation import ClassificationEval
from fluke.utils import ServerObserver

CLASSES = 10


class Clock(ServerObserver):
    """Notes when rounds end."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def end_round(self, round: int) -> None:
        """Note the time."""
        self.stamps.append(time.perf_counter())


def main() -> None:
    """Run."""
    file, (nodes, rounds, width, batch) = sys.argv[1], map(int, [*sys.argv[2:5], sys.argv[7]])
    lr, momentum = map(float, sys.argv[5:7])
    torch.set_num_threads(1)
    with np.load(file) as arrays:
        tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    x, test_x = (tensors[name].float().div(255).flatten(1) for name in ("x", "test_x"))
    layers = [torch.nn.Linear(x.shape[1], width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(width, CLASSES))
    env = FlukeENV()
    env.set_seed(0)
    env.set_device("cpu")
    env.set_inmemory(True)
    env.set_evaluator(ClassificationEval(eval_every=1, n_classes=CLASSES))
    env.set_eval_cfg(task="classification", eval_every=1, pre_fit=False, post_fit=False, locals=False, server=True)
    client = DDict(
        batch_size=batch,
        local_epochs=1,
        loss="CrossEntropyLoss",
        optimizer=DDict(name="SGD", lr=lr, momentum=momentum),
        scheduler=DDict(name="StepLR", step_size=1, gamma=1.0),
    )
    data = DataContainer(x, tensors["y"], test_x, tensors["test_y"], CLASSES)
    parameters = DDict(client=client, server=DDict(weighted=True), model=model)
    fedavg, clock = FedAVG(nodes, DataSplitter(data), parameters), Clock()
    fedavg.attach(clock)
    begun = time.perf_counter()
    fedavg.run(rounds, 1.0)
    print(json.dumps([stamp - begun for stamp in clock.stamps]))


if __name__ == "__main__":
    main()
