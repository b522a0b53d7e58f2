"""Uploads of latents: what an institution is asked for next, what may come, and what all of it will be.

Source: Qu et al. 2022 (doi:10.1016/j.media.2022.102424), Algorithm 2, lines 1-7: e_k ← E(x_k) with labels, once, in
chunks that fit one message each. What has come lies on the server's disk (`flwr_replay/learning/latents.py`).
"""

import math
from functools import cached_property

import numpy as np
import torch
from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from flwr_replay.learning.latents import LatentStore, bytes_by_cut, check_chunk, rows_per_chunk
from flwr_replay.models import Part
from flwr_replay.payloads.fedreplay import Extract, Latents
from flwr_replay.report.summary import upload_advice
from flwr_replay.server.exchange import Exchange, Exchanger
from flwr_replay.server.members import Member
from flwr_replay.wire.records import StateDict

__all__ = ["Uploads"]

UNDER_WAY = 128e6  # bytes of uploads in memory at a time (at least one chunk), however many institutions there are


class Uploads:
    """What institutions upload of latents and labels.

    `parts` are the model before and after the cut. Latents travel as `dtype`: float32, float16 or int8. A message holds
    `chunk_bytes` of them at most, and an upload `views` rows for each example.
    """

    store: LatentStore

    def __init__(
        self, exchanger: Exchanger, parts: tuple[Part, Part], dtype: str, chunk_bytes: int, views: int
    ) -> None:
        self.exchanger, self.parts = exchanger, parts
        self.dtype, self.chunk_bytes, self.views = dtype, chunk_bytes, views

    def open(self, fresh: bool = False) -> None:
        """Open the store of what has come, or begin a fresh one."""
        self.store = LatentStore(self.exchanger.recorder.folder("latents", fresh), self.exchanger.settings.run)

    def advise(self) -> None:
        """Compare what will be uploaded with the raw data."""
        settings, members = self.exchanger.settings, self.exchanger.members
        rows, raw = sum(m.num_examples for m in members) * self.views, sum(m.raw_bytes for m in members)
        blank_1 = torch.zeros(1, *(settings.input_shape or ()), device=settings.device)
        sizes = bytes_by_cut(self.parts, blank_1, self.label_bytes, self.dtype)
        advice = upload_advice("uploads", sizes, self.parts[0].stages[-1], rows, raw, "freezes more of the network")
        self.exchanger.recorder.advised(advice)

    @cached_property
    def latent_shape(self) -> tuple[int, ...]:
        """The shape of one example's latents."""
        settings, encoder = self.exchanger.settings, self.parts[0].eval()
        assert settings.input_shape is not None
        with torch.inference_mode():
            return tuple(encoder(torch.zeros(1, *settings.input_shape, device=settings.device)).shape[1:])

    @property
    def label_bytes(self) -> int:
        """Bytes of one example's label."""
        return int(self.exchanger.method.blank_labels(1).nbytes)

    def fitting_rows(self) -> int:
        """Return how many examples' latents and labels fit one message."""
        return rows_per_chunk(math.prod(self.latent_shape), self.label_bytes, self.dtype, self.chunk_bytes)

    def collect(self, grid: Grid, exchange: int, encoder: StateDict, config: ConfigRecord) -> None:
        """Ask for what is missing, chunk by chunk; those that fail are asked again when this is called next."""
        failed, at_once = set[str](), max(1, int(UNDER_WAY / max(1, self.chunk_bytes)))
        while True:
            rows = {m: self.store.next_row(m.name) for m in self.exchanger.members if m.name not in failed}
            asked = {m: self.request(encoder, first, exchange) for m, first in rows.items() if first is not None}
            messages = (self.exchanger.message(member, request, config) for member, request in asked.items())
            if not asked:
                return
            self.exchanger(grid, exchange, messages, needed=False, take=self.keep, at_once=at_once)
            failed |= {*self.exchanger.failed}

    def request(self, encoder: StateDict, first: int, exchange: int) -> Extract:
        """Ask for the rows from `first` on that fit one message."""
        return Extract(
            exchange=exchange,
            arrays=encoder,
            run=self.exchanger.settings.run,
            cut=self.parts[0].stages[-1],
            latent_dtype=self.dtype,
            first=first,
            chunk_bytes=self.chunk_bytes,
            views=self.views,
        )

    def keep(self, member: Member, reply: Message) -> None:
        """Store a chunk, if it is what was asked for: e ← e ∪ e_k."""  # Alg. 2, line 7
        chunk = Latents.decode(reply.content)
        shapes, fit, method = self.store.row_shapes, 0, self.exchanger.method
        if self.exchanger.settings.input_shape:
            shapes, fit = (self.latent_shape, method.blank_labels(1).shape[1:]), self.fitting_rows()
        check_chunk(member.name, chunk, self.dtype, self.views, fit, method.task, self.parts[1], shapes)
        self.store.add(member.name, chunk)

    def forecast(self, encoder: StateDict) -> list[Exchange]:
        """Every institution's latents, chunk by chunk, once."""
        fit, exchanges = self.fitting_rows(), list[Exchange]()
        for member in self.exchanger.members:
            total = member.num_examples * self.views
            for first in range(0, total, fit):
                labels = self.exchanger.method.blank_labels(min(fit, total - first))
                latents = np.broadcast_to(np.zeros((), self.dtype), (len(labels), *self.latent_shape))
                scales = np.zeros(len(labels), np.float32) if self.dtype == "int8" else None
                chunk = Latents.blank(latents=latents, labels=labels, scales=scales)
                exchanges.append((member, self.request(encoder, first, 0), chunk, 1))
        return exchanges
