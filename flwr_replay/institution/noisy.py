"""An upload under local DP: made once in a run, charged once, and sent again as the same bytes.

A server may ask for any rows, in chunks of any size, as often as it likes. Fresh noise for every answer would average
out, so there is none: rows that leave a second time are those of the file. Another encoder, another cut or a lost file
would take fresh noise; this costs a second upload, which the budget does not allow. It is refused.

The upload is whole and on the disk before it is charged, and charged before any row of it leaves. What a crash left
uncharged has not left: it is thrown away and made anew. A mark beside the upload says that rows may have left. If the
account is damaged or gone then, nothing leaves: its charge is not on the disk any more, but what left is in the world.
"""

import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flwr_replay.errors import PrivacyError
from flwr_replay.files.atomic import alone, private_folder, write_once
from flwr_replay.files.disk import there
from flwr_replay.files.tensors import digest
from flwr_replay.institution.budget import PrivacyBudget
from flwr_replay.learning.latents import LatentStore, pack
from flwr_replay.payloads.fedreplay import Extract, Latents
from flwr_replay.privacy.local import LATENTS, LocalDP, randomised
from flwr_replay.wire.records import opened

__all__ = ["NoisyUpload"]

FOLDER = "noisy-latents"  # in the run's state
MARK = "released"  # a file there: rows may have left
AT_ONCE = 2**23  # bytes of latents that are written together


class NoisyUpload:
    """The noisy latents and labels of an institution in one run; `request` names run, encoder, cut and dtype."""

    def __init__(self, budget: PrivacyBudget, local: LocalDP, request: Extract) -> None:
        self.budget, self.local, self.request = budget, local, request
        self.folder = budget.state.of_run(request.run) / FOLDER
        made_by = {f"{request.cut}/{name}": array for name, array in opened(request.arrays).items()}
        self.name = digest(made_by).removeprefix("sha256:")

    def rows(self, latents: Iterator[Tensor], total: int, first: int, stop: int) -> dict[str, NDArray[np.generic]]:
        """Return noisy rows `first` to `stop`: latents, labels and, of int8, scales; charged and on the disk.

        `latents` are all rows without noise, in order and in batches, taken only if the upload is yet to be made. It
        has `total` rows, V for each example; 0 ≤ first < stop ≤ total.

        Raises
        ------
        PrivacyError
            If the run's upload was made by another encoder or is lost, the account lacks it or states less than before,
            or the noise is for another number of views.
        """
        if total != self.local.views * len(self.budget.institution.train):
            raise PrivacyError(
                f"an upload has the noise of {self.local.views} rows for each example; the server asks for {total} rows"
            )
        private_folder(self.folder)
        with alone(self.folder.parent.parent, wait=True):  # of all runs: their epsilons add up
            account = self.budget.account(self.request.run)
            cost = self.local.cost(account.delta)
            if LATENTS in account.mechanisms:
                cost = replace(cost, steps=0, label_epsilon=0.0)  # the same bytes again
                store = LatentStore(self.folder)
                if self.name not in store.complete:
                    raise PrivacyError(
                        "under dp=latents an institution makes its latents once in a run, by one encoder; in this run "
                        "it made others, or they are gone; fresh noise would cost as much again: begin a new run"
                    )
            else:
                self._check_accounts()
                self.budget.institution.policy.check_local(self.budget.all_runs.local(cost, account.delta))
                store = self._made(latents, total, cost.sigma)
            self.budget.charge(LATENTS, cost, self.request)
            write_once(self.folder / MARK, self.name)
            return store.rows(self.name, first, stop)

    def _check_accounts(self) -> None:
        """Refuse if this run's account lacks an upload that may have left; where runs add up, if any run's does."""
        adds_up = self.budget.institution.policy.max_local_epsilon is not None
        for folder in self.budget.state.runs() if adds_up else [self.folder.parent]:
            if there(folder / FOLDER / MARK) and LATENTS not in self.budget.charged(folder.name):
                logging.getLogger("flwr").error("%s has lost the charge for the latents of its run", folder)
                raise PrivacyError(
                    "an account has the charge for all latents that have left; one here has lost it, and the "
                    "institution's log says which: restore its newest copy, or begin a new run"
                )

    def _made(self, latents: Iterator[Tensor], total: int, sigma: float) -> LatentStore:
        """Make the whole upload, in a folder that holds nothing else."""
        for old in self.folder.iterdir():
            if old.is_dir():  # never charged, so it never left
                shutil.rmtree(old)
        train, store = self.budget.institution.train, LatentStore(self.folder)
        labels = self.budget.stream("labels", self.request)
        noise = self.budget.stream(LATENTS, self.request)
        given_N = randomised(train.y, self.local.classes, self.local.label_epsilon, labels).numpy()
        first = 0
        for batch in _gathered(self.local.noisy(batch, sigma, noise) for batch in latents):
            codes, scales = pack(batch, self.request.latent_dtype)
            rows = np.arange(first, first + len(codes))
            chunk = Latents(
                latents=codes,
                labels=given_N[rows % len(train)],
                scales=scales,
                num_examples=len(train),
                first=first,
                total=total,
                raw_bytes=0,
            )
            store.add(self.name, chunk)
            first += len(codes)
        return store


def _gathered(batches: Iterator[Tensor]) -> Iterator[Tensor]:
    """Join rows that are written together; every write waits for the disk."""
    held: list[Tensor] = []
    for batch in batches:
        held.append(batch)
        if sum(rows.nbytes for rows in held) >= AT_ONCE:
            yield torch.cat(held)
            held = []
    if held:
        yield torch.cat(held)
