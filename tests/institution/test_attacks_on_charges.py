"""Attacks on a budget: what an institution refuses costs nothing, and what it begins can be released."""

import math

import pytest
from harness import SHARDS, write_shards
from hostile_server import HostileServer, refusal

from flwr_replay.files.tensors import nested
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.institution.budget import PrivacyBudget
from flwr_replay.payloads.avgpush import Push
from flwr_replay.payloads.common import Train
from flwr_replay.payloads.fedreplay import Encode, Extract
from flwr_replay.payloads.fedsgd import Differentiate
from flwr_replay.payloads.fedstats import Summarise
from flwr_replay.payloads.local import TrainOwn
from flwr_replay.payloads.mutual import TrainMutually, TrainProxy
from flwr_replay.payloads.replay import TrainGenerator, TrainPrior
from flwr_replay.payloads.synthetic import TrainPiece
from flwr_replay.wire.weights import to_arrays

TASK = [*SHARDS, "classes=3", "model=mlp", "model.width=6", "batch_size=16", "device=cpu"]
CNN = ["model=cnn", "model.width=4", "model.norm=group"]
SMALL = ["generator.width=4", "generator.codes=8", "generator.dim=4", "generator.epochs=1", "generator.batch_size=16"]
SMALL += ["codebook=gradient", "prior.width=4", "prior.layers=1", "prior.epochs=1", "prior.batch_size=16"]
CODES = ["strategy=cwt", "replay=pixelcnn", *SMALL, "dp=generator+prior"]
IMAGES = ["strategy=feder", "generator=vqvae2", *CNN, *SMALL, "dp=generator+prior", "generator.classes=[all]"]
LATENTS = ["latent_clip=1", "latent_epsilon=4", "label_epsilon=4"]

STEP = {"exchange": 1}
SGD = {**STEP, "lr": 0.1}
PAIR = {"alpha": 0.5, "beta": 0.0, "private_seed": 1, "private_optimizer": "sgd", "private_lr": 0.1}
PAIR |= {"private_epochs": 0, "private_batch_size": 16, "private_shift": 0}
CUT = {"cut": "conv1"}
STAGES = {  # options, the request, and its instructions
    "cwt": (["strategy=cwt", "dp=classifier"], Train, SGD),
    "fedavg": (["strategy=fedavg", "dp=update"], Train, SGD),
    "fedprox": (["strategy=fedprox", "dp=update"], Train, {**SGD, "proximal_mu": 0.01}),
    "fedsgd": (["strategy=fedsgd", "dp=gradient"], Differentiate, STEP),
    "fedstats": (["strategy=fedstats", "dp=statistics"], Summarise, {**STEP, "clip": 10.0}),
    "local": (["strategy=local", "dp=classifier"], TrainOwn, {**SGD, "init_seed": 1}),
    "avgpush": (["strategy=avgpush", "dp=classifier"], Push, {**SGD, "init_seed": 1, "committed": 0}),
    "proxyfl": (
        ["strategy=proxyfl", "dp=proxy", "beta=0"],
        TrainProxy,
        {**SGD, **PAIR, "init_seed": 1, "committed": 0},
    ),
    "fml": (["strategy=fml", "dp=proxy", "beta=0"], TrainMutually, {**SGD, **PAIR}),
    "encoder": (["strategy=fedreplay", *CNN, "dp=encoder"], Encode, {**SGD, **CUT, "max_epochs": 1, "patience": 3}),
    "latents": (
        ["strategy=fedreplay", *CNN, "dp=latents", *LATENTS],
        Extract,
        {**STEP, **CUT, "latent_dtype": "float32", "first": 0, "chunk_bytes": 10**6, "views": 1},
    ),
    "codes": (CODES, TrainGenerator, {**STEP, "replayed": 0}),
    "prior": (CODES, TrainPrior, STEP),
    "images": (IMAGES, TrainPiece, STEP),
}
SILLY = {float: (-1.0, math.nan, 1e300), int: (-1, 2**62), str: ("silly",), bool: (True,)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    write_shards(folder, {"a": 40})
    return folder


def asked_of(server, request, **instructions):
    """Send a request, with weights where it has such."""
    if "arrays" in request.declared():
        instructions = {"arrays": weights_for(server, request), **instructions}
    return server.send(request(**instructions))


def weights_for(server, request):
    if request is Extract:
        return {name: array for name, array in server.weights.items() if name.startswith("conv1.")}
    if request not in (TrainGenerator, TrainPrior):
        return server.weights
    generator = (plan := ReplayPlan.of(server.config)).fresh_generator()
    fresh = to_arrays(generator)
    return (
        fresh
        if request is TrainGenerator
        else nested({"generator": fresh, "prior": to_arrays(plan.fresh_prior(generator))})
    )


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_refused_costs_nothing(folder, stage):
    """Whatever an instruction says: either it is refused and the account stays as it was, or what it costs leaves."""
    options, request, instructions = STAGES[stage]
    server, refused = HostileServer(folder, *TASK, *options), 0
    valid = asked_of(server, request, run=stage, **instructions)
    assert (refusal(valid), len(server.charges(stage)) > 0) == ("", True)
    for field, (_, kind) in request.scalar_types().items():
        for number, value in enumerate(SILLY[kind.base] if field not in ("run", "stage", "exchange") else ()):
            run = f"{stage}-{field}-{number}".replace("_", "-")
            silly = {field: [value] if kind.listed else value}
            reply = asked_of(server, request, run=run, **{**instructions, **silly})
            assert bool(refusal(reply)) == (not server.charges(run)), (silly, refusal(reply))
            refused += bool(refusal(reply))
    assert refused


@pytest.mark.parametrize(
    ("options", "request_of", "budget", "enough"),
    [
        (IMAGES, TrainPiece, "privacy.epsilon=4", "privacy.epsilon=6"),  # of a generator that draws by a prior
        ([*CODES, "privacy.epsilon=4"], TrainPrior, "count_sigma=0.5", "count_sigma=50"),  # of a prior, with counts
    ],
)
def test_a_training_that_cannot_end_does_not_begin(folder, options, request_of, budget, enough):
    for short, option in enumerate((enough, budget)):
        run, server = f"{request_of.stage_name}-{short}", HostileServer(folder, *TASK, *options, option)
        said = [refusal(asked_of(server, request_of, run=run, **STEP)) for _ in range(3)]
        assert len(server.charges(run)) > 0 if not short else server.charges(run) == []
        assert ["the privacy budget is epsilon" in line for line in said] == [bool(short)] * 3


def test_a_training_that_diverged_is_not_kept(folder, monkeypatch):
    """Nobody is told that it diverged: the next one begins with a fresh optimizer, and what it finds leaves."""
    norms, noisy = [], PrivacyBudget.noisy

    def noted(self, mechanism, sums, *about):
        norms.append(max(float(of.abs().max()) for of in sums.values()))
        return noisy(self, mechanism, sums, *about)

    monkeypatch.setattr(PrivacyBudget, "noisy", noted)
    server = HostileServer(folder, *TASK, "strategy=fedavg", "dp=update", "optimizer_state=keep")
    for exchange, lr in ((1, 0.1), (2, 1e30), (3, 0.1)):
        keeps = {"exchange": exchange, "continues": exchange - 1, "optimizer_state": "keep", "lr": lr}
        assert not refusal(asked_of(server, Train, run="diverged", **keeps))
    assert norms[1] == 0 < min(norms[0], norms[2])
