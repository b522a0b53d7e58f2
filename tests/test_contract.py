"""Every registered strategy keeps the contract, and every name stands in its five places."""

import re
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flwr_replay.check import check_strategy
from flwr_replay.check.strategy import JOB, LONG, _check_failure, _check_masked, _run
from flwr_replay.clients.fedavg import FedAvgClient
from flwr_replay.config.catalogue import choices
from flwr_replay.config.halves import load_strategy
from flwr_replay.memory import forget
from flwr_replay.movements.one_shot import OneShot
from flwr_replay.movements.parallel import Parallel, weighted_mean
from flwr_replay.movements.relay import Relay
from flwr_replay.movements.serial import Serial
from flwr_replay.payloads.common import Trained
from flwr_replay.strategies.fedavg import FedAvg, FedAvgConfig
from flwr_replay.wire.records import opened
from flwr_replay.wire.weights import to_arrays

ROOT = Path(__file__).resolve().parents[1]
SMALL = "partition.size=70"  # several batches of each institution
GENERATOR = ["generator.epochs=1", "generator.width=4", "prior.epochs=1", "prior.width=4", "prior.layers=1"]
FEW = {"feder": ["buffer=40"], "syncentral": ["buffer=40"]}  # images that institutions draw
# methods that compare probabilities, or take or draw images class by class
CLASSES = {"proxyfl", "fml", "feder", "syncentral", "fedstats"}


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the check has its run directories


@pytest.mark.parametrize("name", choices("strategy"))
def test_strategy_keeps_the_contract(name):
    check_strategy(name, [SMALL, *GENERATOR, *FEW.get(name, [])])


def test_a_mechanism_that_is_asked_for_is_checked_without_secret_noise():
    check_strategy("fedavg", ["dp=classifier", "partition.size=40"])


def test_a_server_that_needs_more_than_the_mean_does_not_pass_as_summed(monkeypatch):
    """It would silently be the mean under masks."""

    def median(self, answers):
        states = [opened(answer.arrays) for answer in answers]
        return {name: np.median([state[name] for state in states], 0).astype(a.dtype) for name, a in states[0].items()}

    monkeypatch.setattr(FedAvg, "combine", median)
    _check_masked.cache_clear()
    with pytest.raises(AssertionError, match=r"under masks .* is another: leave summed out of traits"):
        check_strategy("fedavg", [SMALL])
    _check_masked.cache_clear()


def feddyn(state, sent, mean):  # h / α
    state["h"] = state.get("h", 0) + sent - mean
    return mean - state["h"]


def adam(state, sent, mean):
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * (mean - sent)
    state["v"] = 0.99 * state.get("v", 0) + 0.01 * (mean - sent) ** 2
    return sent + 0.01 * state["m"] / (state["v"] ** 0.5 + 1e-9)


def momentum(state, sent, mean):
    state["v"] = 0.9 * state.get("v", 0) + (mean - sent)
    return sent + 0.03 * state["v"]


@pytest.mark.parametrize("server_step", [feddyn, adam, momentum])
def test_a_server_that_extrapolates_variances_is_refused(server_step, monkeypatch):
    """All arrays are corrected: two batches leave variances positive, and a real run's rounds do not."""

    def combine(self, answers):
        mean = weighted_mean([opened(answer.arrays) for answer in answers], [1] * len(answers))
        floating = {name: array for name, array in mean.items() if np.issubdtype(array.dtype, np.floating)}
        step = {name: server_step(self.of.setdefault(name, {}), self.sent[name], a) for name, a in floating.items()}
        return {**mean, **{name: array.astype(np.float32) for name, array in step.items()}}

    forget()
    monkeypatch.setattr(FedAvg, "combine", combine)
    monkeypatch.setattr(FedAvg, "of", {}, raising=False)
    job = ["strategy=fedavg", *JOB, SMALL]
    _run(job)
    FedAvg.of.clear()
    with pytest.raises(AssertionError, match=r"variances must stay .* after the server's step; conv1.norm.running_var"):
        _check_failure([*job, *LONG])


def test_under_masks_no_number_of_a_training_leaves_in_clear(monkeypatch):
    declared = Trained.by_key()
    changed = {**declared, "num-steps": replace(declared["num-steps"], public=False)}
    monkeypatch.setattr(Trained, "by_key", lambda: changed)
    _check_masked.cache_clear()
    with pytest.raises(AssertionError, match="num-steps does: leave summed out of traits, or declare it withheld"):
        check_strategy("fedavg", [SMALL])
    _check_masked.cache_clear()


@pytest.mark.parametrize("own_models", [False, True])
def test_a_model_of_which_institutions_keep_a_part_is_refused(own_models, monkeypatch):
    """FedBN's norm layers: the server has none of them that was trained."""

    def kept(self, request):
        own = {name: array for name, array in to_arrays(self.fresh(request.exchange)).items() if "norm" in name}
        return self.evaluated({**opened(request.arrays), **{name: array * 3 for name, array in own.items()}}, "test")

    monkeypatch.setattr(FedAvgClient, "evaluate_model", kept)
    monkeypatch.setattr(FedAvgConfig, "traits", replace(FedAvgConfig.traits, own_models=own_models))
    with nullcontext() if own_models else pytest.raises(AssertionError, match="must be the one that institution-1"):
        check_strategy("fedavg", [SMALL])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "job",
    [
        "fedavg optimizer_state=keep training.optimizer=adam",
        "fedavg fraction=0.4 dp=classifier model.norm=group privacy.noise=seeded",
        "fedavgm fraction=0.7 optimizer_state=keep",
        "fedsgd fraction=0.4 training.optimizer=adam",
        "fedstats model=gabor dp=statistics target_epsilon=4 delta=0.001 privacy.noise=seeded",
        "fedstats head=mlp passes=2 model=gabor model.train=head dp=statistics sigma=5 delta=0.001 noise=seeded",
        "fedreplay latents=drawn model=gabor model.train=head dp=statistics sigma=5 delta=0.001 privacy.noise=seeded",
        "fedreplay latents=drawn model=gabor model.train=head listen=pool own_epochs=1",
        "fedprox fraction=0.7 optimizer_state=keep",
        "fedavgshare fraction=0.7",
        "scaffold fraction=0.7 local_epochs=2",
        "scaffold model.norm=batch masked=true",
        "moon fraction=0.7 optimizer_state=keep replay=vqvae2",
        "fedbn fraction=0.7 model.norm=batch optimizer_state=keep",
        "ditto fraction=0.7 lam=0.5 replay=vqvae2",
        "local fraction=0.4 optimizer_state=keep evaluate_every=2",
        "avgpush fraction=0.7 topology=complete rounds=5 evaluate_every=2",
        "proxyfl fraction=0.7 rounds=4",
        "proxyfl fraction=0.4 dp=none private_models=[mlp,lenet5]",
        "fml fraction=0.7 proxy_optimizer=travels training.optimizer=adam",
        "feder fraction=0.7 agreement=true rounds=4",
        "feder fraction=0.7 mode=buffer-only buffer_refresh=round",
        "feder fraction=0.7 order=queue memory=all",
        "cwt fraction=0.7 optimizer_state=keep order=shuffled forgetting=true",
        "cwt fraction=0.4 dp=classifier model.norm=group privacy.noise=seeded",
        "fedreplay encoder=random latent_dtype=int8 chunk_mb=0.01 upload_views=3 listen=pool own_epochs=1",
        "splitnn optimizer_state=keep micro_batches=4 share_labels=false",
        "avgpush topology=none",
        "proxyfl proxy_optimizer=travels training.optimizer=adam topology=complete",
        "proxyfl proxy_optimizer=reset topology=none",
        "fml proxy_optimizer=travels training.optimizer=sgd dp=none",
        "fml proxy_optimizer=reset",
        "feder mode=synthetic-only",
        "feder buffer_refresh=round memory=all local_epochs=2",
        "feder order=queue durations=[1,3,2] agreement=true",
    ],
)
def test_options_keep_the_contract(job):
    name, *options = job.split()
    check_strategy(name, [*options, SMALL, *GENERATOR, *FEW.get(name, [])])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "job",
    [
        "cwt replay=vqvae2",
        "cwt replay=statistics model=gabor hidden=8 model.train=from:hidden",
        "fedavg replay=statistics model=gabor model.train=head dp=statistics+classifier sigma=5 noise=seeded",
        "proxyfl replay=statistics model=gabor model.train=head dp=statistics+proxy sigma=5 noise=seeded",
        "fml replay=statistics model=gabor model.train=head listen=pool alpha=0 private_epochs=1 dp=none",
        "fedprox replay=vqvae2 replay.codes=stale",
        "fedavgshare replay=pixelcnn",
        "cwt replay=buffer replay.images=7",
        "splitnn replay=buffer replay.ratio=0.5",
        "cwt replay=vqvae2 dp=generator codebook=gradient noise=seeded",
        "fedavg replay=pixelcnn dp=end-to-end codebook=gradient model.norm=group noise=seeded",
        "fedavg replay=pixelcnn prior=maskgit",
        "cwt replay=pixelcnn prior=maskgit dp=end-to-end codebook=gradient model.norm=group noise=seeded",
        "cwt replay=buffer replay.images=7 prior=maskgit",
        "fedreplay dp=encoder model.norm=group noise=seeded strategy.encoder_epochs=2",
        "fedreplay dp=latents latent_clip=1 latent_epsilon=8 label_epsilon=2 upload_views=2 chunk_mb=0.1 noise=seeded",
        "local dp=classifier model.norm=group noise=seeded",
        "central dp=classifier model.norm=group noise=seeded",
        "feder mode=buffer-only dp=end-to-end codebook=gradient generator.classes=[all] noise=seeded",
        "fedavg replay=buffer dp=end-to-end codebook=gradient generator.classes=[all] model.norm=group noise=seeded",
    ],
)
def test_replay_and_privacy_keep_the_contract(job):
    name, *options = job.split()
    check_strategy(name, [*options, *GENERATOR, *FEW.get(name, []), "partition.size=40"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", sorted({*choices("strategy")} - CLASSES))
def test_a_regression_keeps_the_contract(name):
    check_strategy(name, ["task=diabetes", "model=mlp"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["fedreplay", "splitnn", "fedavgshare"])
def test_a_segmentation_keeps_the_contract(name, tmp_path):
    rng = np.random.default_rng(0)
    for number in range(8):
        for what, pixels in (("image", rng.integers(0, 256, (32, 32))), ("label", 255 * rng.integers(0, 2, (32, 32)))):
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / f"{what}_{number:02d}.png")
    options = ["task=isbi2012", f"task.data-dir={tmp_path}", "task.size=16", "model=unet", "model.width=2"]
    check_strategy(name, options)


def test_one_name_in_five_places():
    def stems(folder, pattern="*.py"):
        return {path.stem for path in (ROOT / folder).glob(pattern) if not path.stem.startswith("__")}

    names = set(choices("strategy"))
    assert stems("strategies") == names
    assert stems("clients") == names
    assert stems("conf/run", "*.toml") == names
    assert {stem.removeprefix("test_") for stem in stems("tests/strategies", "test_*.py")} == names
    cells = re.findall(r"^\| (\[`.*?) \| ([\w-]+)", (ROOT / "README.md").read_text(), re.M)
    rows = {name: movement for cell, movement in cells for name in re.findall(r"\[`(\w+)`\]", cell)}
    assert rows.keys() == names
    movements = {"one-shot": OneShot, "serial": Serial, "parallel": Parallel, "relay": Relay}
    assert [
        name for name, movement in rows.items() if not issubclass(load_strategy(name)[0], movements[movement])
    ] == []


@pytest.mark.parametrize(
    ("page", "before", "trait"),
    [
        ("masked", "only the mean: ", "summed"),
        ("sealed", "only hands things on: ", "relayed"),
        ("replay", "`replay=vqvae2` goes with ", "supports_replay"),
        ("replay", "`replay=statistics`, beside own features, in ", "supports_draws"),
    ],
)
def test_a_page_names_the_methods_with_a_trait(page, before, trait):
    text = " ".join((ROOT / "docs" / f"{page}.md").read_text().split())
    named = re.search(before + r"([^.]*)", text)[1]
    having = {name for name in choices("strategy") if getattr(load_strategy(name)[1].traits, trait)}
    assert set(re.findall(r"`(\w+)`", named)) == having
