"""Canaries that are images: what stands in their rows, who is in the batches, how released models are scored."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from flwr_replay.attacks.membership import auc
from flwr_replay.config.compose import compose
from flwr_replay.data import Dataset, Examples
from flwr_replay.files.tensors import nested
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.lab.canaries import Canaries
from flwr_replay.lab.canary_images import ImageCanaries
from flwr_replay.learning.tasks import make_task
from flwr_replay.learning.training import batches
from flwr_replay.models.layers import as_input, step
from flwr_replay.models.zoo import backbone
from flwr_replay.privacy.accounting import SampledGaussian
from flwr_replay.privacy.secret import Stream
from flwr_replay.wire.records import array_record
from flwr_replay.wire.weights import load_arrays, to_arrays

N, M = 96, 48
DIGITS = ["strategy=fedavg", "task=digits", "model=mlp", "model.width=32"]
CANARIES = Canaries.tossed(M, N, 0)


def data():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 17, (N, 1, 8, 8)).astype(np.float32) / 16, rng.integers(0, 10, N)
    return Dataset("digits", Examples(x, y), Examples(x[:1], y[:1]))


def messages(before, after):
    """Return the contents of a request and its answer, with these weights."""
    return RecordDict({"arrays": array_record(before)}), RecordDict({"arrays": array_record(after)})


def auc_of(probe):
    """Return how well the scores tell which canaries were in."""
    return auc(probe.scores_m[CANARIES.was_in_m], probe.scores_m[~CANARIES.was_in_m])


def test_without_dp_a_canary_that_is_out_leaves_its_row_to_a_copy_of_another_example():
    real, probe = data().train, ImageCanaries(CANARIES, data(), compose(DIGITS), noise=False)
    inside, outside = CANARIES.rows_m[CANARIES.was_in_m], CANARIES.rows_m[~CANARIES.was_in_m]
    others = np.delete(np.arange(N), CANARIES.rows_m)
    assert len(probe.data.train) == N
    assert np.array_equal(probe.data.train.x[inside], real.x[inside])
    assert (probe.data.train.y[inside] != real.y[inside]).all()
    assert np.array_equal(probe.data.train.x[others], real.x[others])
    assert np.array_equal(probe.data.train.y[others], real.y[others])
    for row in outside:
        assert (probe.data.train.x[row] == real.x[others]).all((1, 2, 3)).any()


def test_under_dp_a_canary_that_is_out_is_in_no_batch_and_keeps_its_row():
    probe = ImageCanaries(CANARIES, data(), compose([*DIGITS, "dp=classifier"]), noise=False)
    training = probe.training(1.0, SampledGaussian(1.0, 1.0, 2), Stream(bytes(32)))
    drawn = [set(rows.tolist()) for rows in training.rows(N)]
    assert drawn == [set(range(N)) - set(CANARIES.rows_m[~CANARIES.was_in_m].tolist())] * 2
    assert (probe.data.train.y[CANARIES.rows_m] != data().train.y[CANARIES.rows_m]).all()
    assert training.left == 2


def test_a_classifier_that_has_learned_them_gives_them_away():
    config = compose(DIGITS)
    probe, task = ImageCanaries(CANARIES, data(), config, noise=False), make_task(config.task)
    model = backbone(config.model, config.task)(1)
    before = to_arrays(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, y = torch.from_numpy(probe.data.train.x), torch.from_numpy(probe.data.train.y)
    for epoch in range(40):
        for x_B, y_B in batches(x, y, 16, torch.Generator().manual_seed(epoch)):
            step(model, optimizer, task.loss(model(x_B), y_B))
    probe.saw(*messages(before, to_arrays(model)))
    assert probe.releases == 1
    assert auc_of(probe) > 0.95
    twice = probe.scores_m.copy()
    probe.saw(*messages(before, to_arrays(model)))
    assert np.allclose(probe.scores_m, 2 * twice)  # every release counts


@pytest.mark.sampled(2, of="slow audits")
def test_a_generator_that_has_learned_images_of_noise_gives_them_away():
    config = compose([*DIGITS, "replay=vqvae2", "generator.width=16"])
    probe, plan = ImageCanaries(CANARIES, data(), config, noise=True), ReplayPlan.of(config)
    model = plan.fresh_generator()
    before = to_arrays(model)
    optimizer, rng = torch.optim.Adam(model.parameters(), lr=0.003), torch.Generator().manual_seed(0)
    images = torch.from_numpy(probe.data.train.x)
    assert set(np.unique(probe.data.train.x[CANARIES.rows_m[CANARIES.was_in_m]])) == {0.0, 1.0}
    for _ in range(60):
        for rows in torch.randperm(N, generator=rng).split(16):
            step(model, optimizer, model.loss(as_input(images[rows]), rng)[0])
    probe.saw(*messages(before, to_arrays(model)))
    assert auc_of(probe) > 0.8


def test_a_part_of_a_network_is_scored_in_the_one_that_the_request_brought():
    """Where all has changed but the part, only the part counts."""
    config = compose([*DIGITS, "model=cnn", "model.width=4", "model.norm=group"])
    probe, task = ImageCanaries(CANARIES, data(), config, noise=False), make_task(config.task)
    before, after = (to_arrays(backbone(config.model, config.task)(seed)) for seed in (0, 1))
    part = {name: array for name, array in after.items() if name.startswith("conv1")}
    probe.saw(*messages(before, part))
    x, y = (torch.from_numpy(side[CANARIES.rows_m]) for side in (probe.data.train.x, probe.data.train.y))
    losses = []
    for weights in (before, before | part):
        model = backbone(config.model, config.task)(2)
        load_arrays(model, weights)
        losses.append(task.losses(model.eval()(x), y).detach().numpy())
    inside = CANARIES.was_in_m  # other rows have copies
    assert np.allclose(probe.scores_m[inside], (losses[0] - losses[1])[inside], atol=1e-5)
    probe.saw(*messages({}, part))  # no network to put it into
    assert probe.releases == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("options", "passes"),
    [(["prior.width=16"], 60), (["prior=maskgit", "prior.width=32", "prior.layers=2"], 250)],
    ids=["pixelcnn", "maskgit"],
)
def test_a_prior_that_has_learned_codes_of_noise_gives_them_away(options, passes):
    config = compose([*DIGITS, "replay=pixelcnn", "generator.width=16", *options])
    probe, plan = ImageCanaries(CANARIES, data(), config, noise=True), ReplayPlan.of(config)
    generator = plan.fresh_generator().eval()
    prior = plan.fresh_prior(generator)
    sent = nested({"generator": to_arrays(generator), "prior": to_arrays(prior)})
    x, y = torch.from_numpy(probe.data.train.x), torch.from_numpy(probe.data.train.y)
    with torch.no_grad():
        codes = generator.encode(plan.generator_input(as_input(x), y))
    optimizer, rng = torch.optim.Adam(prior.parameters(), lr=0.01), torch.Generator().manual_seed(0)
    for _ in range(passes):
        for rows in torch.randperm(N, generator=rng).split(32):
            step(prior, optimizer, prior.loss(codes[rows], y[rows], prior.uniform(len(rows), rng)))
    request, answer = messages(sent, nested({"prior": to_arrays(prior)}))
    probe.saw(request, answer)
    assert probe.releases == 0  # not the stage that trains a prior
    request["config"] = ConfigRecord({"stage": "train-prior"})
    probe.saw(request, answer)
    assert probe.releases == 1
    assert auc_of(probe) > 0.8
    in_two = ImageCanaries(CANARIES, data(), config, noise=True)  # a training in two messages is scored at its end
    in_two.saw(request, RecordDict())
    assert in_two.releases == 0
    in_two.saw(RecordDict({"config": request["config"]}), answer)
    assert np.array_equal(in_two.scores_m, probe.scores_m)


def test_drawn_images_give_away_those_that_they_copy():
    probe = ImageCanaries(CANARIES, data(), compose(["strategy=feder", "task=digits"]), noise=True)
    copies = probe.data.train.x[CANARIES.rows_m[CANARIES.was_in_m]]
    request, answer = messages({}, {"images": copies, "labels": np.zeros(len(copies), np.int64)})
    request["config"] = ConfigRecord({"stage": "draw-buffer"})
    probe.saw(request, answer)
    assert auc_of(probe) == 1
    probe.saw(request, RecordDict())  # an institution that failed
    assert probe.releases == 1


@pytest.mark.parametrize("content", [{}, {"arrays": ArrayRecord()}])
def test_an_answer_without_the_model_is_not_scored(content):
    probe = ImageCanaries(CANARIES, data(), compose(DIGITS), noise=False)
    probe.saw(RecordDict(content), RecordDict(content))
    assert probe.releases == 0
    assert not probe.scores_m.any()
