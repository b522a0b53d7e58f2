"""Replay of drawn features: the institution's half; the server's half is `flwr_replay.server.replay_sums`.

With replay=statistics a method's client extends this one, too (`flwr_replay.config.halves.load_client`): before its
first training it sums its features, once, and it keeps what all institutions' features are drawn from.
"""

from __future__ import annotations

from flwr_replay.clients.fedstats import FedStatsClient
from flwr_replay.config.sections import ReplayConfig
from flwr_replay.errors import TrainingError, WireError
from flwr_replay.generators.sampler import ReplaySampler
from flwr_replay.learning.draws import Draws, frozen_features
from flwr_replay.learning.heads import linear_head
from flwr_replay.payloads.common import ExpectsReplay, RunRequest
from flwr_replay.payloads.fedstats import ClassSums, KeepDraws, Summarise
from flwr_replay.payloads.replay import Kept
from flwr_replay.wire.records import StateDict, opened

__all__ = ["DrawsClient"]


class DrawsClient(FedStatsClient):
    """Has a method's client train on its own features and on drawn ones."""

    @property
    def options(self) -> ReplayConfig:
        """The run's options of the replay."""
        assert self.replay_options
        return self.replay_options

    def summarise(self, request: Summarise) -> ClassSums:
        """Return sums of a frozen encoder's features, and of nothing else."""
        if not request.sums or request.clip != self.options.clip:
            raise WireError(
                "with replay=statistics sums of a frozen encoder's features leave, clipped to replay.clip; the server "
                f"asks for {request.sums:,} numbers, clipped to {request.clip:g}: refused"
            )
        return super().summarise(request)

    def keep_draws(self, request: KeepDraws) -> Kept:
        """Keep what features are drawn from, if features of this model can be drawn from it."""
        arrays = opened(request.arrays)
        drawn = self.drawn(arrays, request)
        self.state.save("draws", request.run, request.server_round, arrays)
        return Kept(num_examples=len(drawn))

    def drawn(self, arrays: StateDict, request: RunRequest) -> Draws:
        """Return what draws features for an exchange; a WireError if they are not of this model's form."""
        model, purpose = self.scratch_model(), (self.seed, self.institution.name, request.server_round)
        drawn = Draws.of(arrays, self.options.clip, self.options, *purpose)
        wanted, got = (linear_head(model)[1].out_features, frozen_features(model)), tuple(drawn.means_CF.shape)
        if got != wanted:
            raise WireError(f"draws are of {wanted} classes and features; the server sends {got}: refused")
        return drawn

    def replay_sampler(self, request: RunRequest) -> ReplaySampler | None:
        """Return what draws features beside the own ones."""
        if not isinstance(request, ExpectsReplay):
            return super().replay_sampler(request)
        kept = self.state.load("draws", request.run, request.server_round + 1)
        drawn = self.drawn(kept, request) if kept else ()
        if len(drawn) != (request.replayed or 0):
            raise TrainingError(
                f"an institution draws as many features as it was told, {request.replayed}; what it keeps draws "
                f"{len(drawn)}: restore the state directory, or begin a new run"
            )
        return drawn or None
