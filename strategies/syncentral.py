"""SynCentral: the server's half; the institution's half is `clients/syncentral.py`.

Source: Pennisi et al. 2023 (FedER), section IV-C.1, Table I: "centralized distributed learning with synthetic data".
Idea: Every institution sends synthetic images once, and the server trains one model on all of them.
Travels: a buffer of synthetic images with labels from every institution, once (`Buffer`); for evaluation the model.

    every institution i: train a generator on D_i;  B_i ← images that it draws          `Buffers`
    for each round: for each batch of ∪ B_i: θ ← θ − η ∇L(θ; B)                         at the server

What is protected: Nothing by a guarantee; see `strategies/feder.py`.

Deviations: An institution that is late draws its buffer when it comes, and training goes on with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid

from flwr_replay.config.sections import within
from flwr_replay.config.strategy import StrategyConfig, Traits
from flwr_replay.errors import ConfigError, RunError
from flwr_replay.files.tensors import read_own
from flwr_replay.learning.augment import augment_of, changed
from flwr_replay.learning.training import batches, make_optimizer, mean_loss, refuse_single_batches, torch_rng
from flwr_replay.models import placed
from flwr_replay.models.layers import step
from flwr_replay.movements.base import Exchange, Outcome
from flwr_replay.movements.one_shot import OneShot
from flwr_replay.server.synthesis import FOLDER, STAGES, Buffers
from flwr_replay.wire.records import StateDict, array_record, opened
from flwr_replay.wire.weights import load_arrays, load_optimizer_arrays, optimizer_arrays, to_arrays

__all__ = ["SynCentral", "SynCentralConfig"]

LARGEST = 100_000  # images in a buffer


@dataclass(frozen=True, kw_only=True)
class SynCentralConfig(StrategyConfig):
    """Options of SynCentral."""

    name = "syncentral"
    traits = Traits(needs_roll_call=True, draws_images=True, dp_mechanisms=("generator", "prior"))
    buffer: int = 256  # images that every institution draws; paper: 256

    def __post_init__(self) -> None:
        within("strategy.", self, buffer=(1, LARGEST))

    @property
    def classifiers(self) -> str:
        """The server trains the only one."""
        return "none"

    @property
    def instructed(self) -> Mapping[str, object]:
        """The one buffer is drawn once."""
        return {"buffer_refresh": "never"}


class SynCentral(OneShot):
    """The server trains on synthetic images of all institutions."""

    config_type = SynCentralConfig
    config: SynCentralConfig
    stages = (*STAGES[:2], "evaluate")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.settings.synthesis is None or self.settings.model is None:
            raise ConfigError("SynCentral needs a generator and a model: give Settings(synthesis=..., model=...)")
        self.buffers = Buffers(self.exchanger, self.settings.synthesis, self.config.buffer)
        self.model = placed(self.settings.model(0), self.settings.device)

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of θ, which keeps its state over rounds."""
        return make_optimizer(self.model, self.settings.training, self.settings.training.lr)

    def exchange_round(self, grid: Grid, exchange: int, arrays: ArrayRecord, config: ConfigRecord) -> Outcome:
        """Collect the buffers that are missing, then train one epoch on their union."""
        self.buffers.prepare(grid, exchange, config)
        if not self.buffers.numbers:
            raise RunError(f"no institution has sent a buffer; {self.recorder.failures_line()}")
        folder = self.recorder.folder(FOLDER)
        files = [folder / f"{number:06d}.safetensors" for number in sorted(self.buffers.numbers.values())]
        buffers = [read_own(file, self.settings.run) for file in files]
        x, y = (torch.from_numpy(np.concatenate([buffer[key] for buffer in buffers])) for key in ("images", "labels"))
        refuse_single_batches(self.model, len(y), self.settings.training.batch_size)
        load_arrays(self.model.train(), opened(arrays))
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr(exchange)
        device, losses = self.settings.device, []
        shuffle = torch_rng(self.settings.seed, "server", exchange)
        drawn = batches(x.to(device), y.to(device), self.settings.training.batch_size, shuffle)
        draws = partial(torch_rng, self.settings.seed, "server", exchange, "augment")
        for x_B, y_B in changed(drawn, augment_of(self.settings.training.changes, draws)):
            losses.append(step(self.model, self.optimizer, self.task.loss(self.model(x_B), y_B)))
            self.recorder.saw(len(y_B))
        return array_record(to_arrays(self.model)), MetricRecord({"train-loss": mean_loss(losses)})

    def state(self) -> tuple[StateDict, dict[str, Any]]:
        """Return the optimizer's state, and what is known of buffers, which are in files."""
        return optimizer_arrays(self.optimizer), {"buffers": self.buffers.state()}

    def restore(self, arrays: StateDict, values: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        load_optimizer_arrays(self.optimizer, arrays)
        self.buffers.restore(values["buffers"])

    def forecast(self, arrays: StateDict, num_rounds: int) -> list[Exchange]:
        """Every institution trains its generator and sends its buffer once."""
        return self.buffers.forecast({}, {member.name: 1 for member in self.members})
