"""What a server can ask of sums of frozen features, and what it can hand out as draws: nothing but what a run says."""

from functools import partial

import numpy as np
import pytest
import torch
from harness import SHARDS, write_shards
from hostile_server import HostileServer, refusal, weights

from flwr_replay.config.compose import compose
from flwr_replay.config.sections import ReplayConfig
from flwr_replay.engines.simulate import Simulation, run_inline
from flwr_replay.errors import BudgetError, FlwrReplayError
from flwr_replay.files.tensors import digest
from flwr_replay.forecast.forecast import expected, forecast_page
from flwr_replay.learning.draws import Draws
from flwr_replay.models.zoo import backbone, encoder_digest
from flwr_replay.payloads.common import RollCall, Train
from flwr_replay.payloads.fedreplay import Encode, Extract
from flwr_replay.payloads.fedstats import PRODUCTS, SUMS, KeepDraws, Summarise, pairs_of
from flwr_replay.payloads.mutual import TrainProxy
from flwr_replay.privacy.accounting import epsilon, rounded_up
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.privacy.sums import SHARE
from flwr_replay.report.progress import Display
from flwr_replay.rng import derived_seed
from flwr_replay.server.sums import Moments
from flwr_replay.wire.ledger import ledger_lines
from flwr_replay.wire.masked import blank_masked
from flwr_replay.wire.records import opened
from flwr_replay.wire.weights import to_arrays

F = 9 * 7 * 7
FROZEN = [*SHARDS, "classes=3", "model=gabor", "model.train=head", "device=cpu"]
CWT, DRAWN = ["strategy=cwt", "replay=statistics"], ["strategy=fedreplay", "latents=drawn"]
PAIR, BOTH = ["strategy=proxyfl", "replay=statistics", "beta=0"], "dp=statistics+proxy"
UPLOAD = {"run": "r", "arrays": {}, "cut": "", "latent_dtype": "float32", "first": 0, "chunk_bytes": 10**6}
RIGHT = {"clip": 10.0, "products": pairs_of(F), "sums": 3 * (1 + F)}


def sums_of(features):
    return {SUMS: np.zeros(10 * (1 + features), np.float32), PRODUCTS: np.zeros(pairs_of(features), np.float32)}


@pytest.fixture
def run_server(tmp_path):
    """Return what sends requests to a hospital in a run with these options."""
    write_shards(tmp_path, {"a": 40})

    def started(*options):
        return HostileServer(tmp_path, *FROZEN, *options)

    return started


def summarise(arrays=None, **changed):
    return Summarise(run="r", exchange=1, arrays=arrays or {}, **{**RIGHT, **changed})


@pytest.mark.parametrize(
    "options",
    [CWT, [*PAIR, "dp=none"], DRAWN, ["strategy=fedstats", "head=mlp"]],
    ids=["cwt", "proxyfl", "fedreplay", "fedstats"],
)
def test_nothing_leaves_but_one_sum_of_what_the_frozen_encoder_makes(run_server, options):
    server = run_server(*options)
    reply = server.send(summarise())
    assert not refusal(reply)
    assert {name: array.shape for name, array in weights(reply).items()} == {
        SUMS: (3 * (1 + F),),
        PRODUCTS: (pairs_of(F),),
    }
    for changed in ({"sums": 3 * F}, {"sums": 7}, {"products": 5}, {"clip": 1e30}, {"sums": 2 * (1 + F)}):
        assert refusal(server.send(summarise(**changed)))
    wrong = {"head.fc.weight": np.ones((3, F), np.float32), "head.fc.bias": np.zeros(3, np.float32)}
    told = weights(server.send(summarise(wrong)))  # another head changes nothing
    np.testing.assert_array_equal(told[SUMS], weights(reply)[SUMS])


@pytest.mark.parametrize(
    ("options", "request_"),
    [
        (["strategy=cwt"], summarise()),
        (["strategy=fedavg"], summarise(sums=0)),
        (CWT, summarise(sums=0)),
        (["strategy=proxyfl"], summarise()),
        (["strategy=proxyfl"], KeepDraws(run="r", arrays={"means": np.zeros((3, F), np.float32)})),
        (["strategy=fedstats", "head=lda"], summarise()),
        (["strategy=fedreplay"], summarise()),
        (DRAWN, summarise(sums=0)),
        (DRAWN, Extract(**UPLOAD, views=0)),
        (DRAWN, Extract(**UPLOAD, views=1)),
        (DRAWN, Encode(run="r", arrays={}, cut="", lr=0.1, max_epochs=0, patience=1)),
        (DRAWN, Encode(run="r", arrays={}, cut="", lr=0.1, max_epochs=1, patience=1)),
        (["strategy=cwt"], KeepDraws(run="r", arrays={"means": np.zeros((3, F), np.float32)})),
    ],
)
def test_what_a_runs_options_do_not_say_is_refused(run_server, options, request_):
    reply = run_server(*options).send(request_)
    assert refusal(reply)
    assert not weights(reply)


@pytest.mark.parametrize("options", [[*CWT, "dp=statistics"], [*PAIR, BOTH]], ids=["cwt", "proxyfl"])
def test_under_dp_sums_are_made_once(run_server, options):
    server = run_server(*options, "privacy.sigma=1", "delta=0.001")
    first, again = (weights(server.send(summarise(**{}))) for _ in range(2))
    for name, array in first.items():
        np.testing.assert_array_equal(again[name], array)
    assert "makes its sums once in a run" in refusal(server.send(summarise(products=0)))
    assert [charge["steps"] for charge in server.charges("r")] == [1, 0]


@pytest.mark.parametrize(
    "masked", [[], ["masked=true", "dp=statistics", "noise=shared", "privacy.sigma=5", "delta=1e-4"]]
)
@pytest.mark.parametrize(
    "options", [CWT, PAIR, DRAWN, ["strategy=fedstats", "head=mlp"]], ids=["cwt", "proxyfl", "drawn", "mlp"]
)
def test_the_forecast_has_the_sums_and_no_weights_beside_them(options, masked):
    if masked and options in (CWT, PAIR):
        masked = ["dp=statistics", "privacy.sigma=5", "delta=1e-4"]
    elif options == PAIR:
        masked = ["dp=none"]
    frozen = ["task=digits", "model=gabor", "model.train=head", "nodes=3", *options, *masked]
    _, exchanges = expected(Simulation.of(compose(frozen)))
    answers = [opened(of.answer.arrays) for of in exchanges if isinstance(of.request, Summarise)]
    assert len(answers) == 3
    hidden = "masked=true" in masked
    assert all(set(arrays) == set(blank_masked(of) if hidden else of) for arrays in answers for of in [sums_of(F)])


# --- which encoder makes what is summed -------------------------------------------------------------------------------

DP = ["dp=statistics", "privacy.sigma=1", "delta=0.001"]


def pinning(folder, allowed, *options, also=""):
    """Return a server whose hospital uploads or sums what these weights make, and no other."""
    write_shards(folder, {"a": 40})
    policy = f"weights: {{summarise: [{allowed}], extract: [{allowed}]}}{also}"
    return HostileServer(folder, *SHARDS, *options, "device=cpu", policy=policy)


def refused(server, request_):
    """Send a request that must be refused in a line, and cost nothing; return the line."""
    reply = server.send(request_)
    assert refusal(reply)
    assert "\n" not in refusal(reply)
    assert not weights(reply)
    assert not server.charges("r")
    return refusal(reply)


@pytest.mark.parametrize(
    "options", [CWT, PAIR, DRAWN, ["strategy=fedstats"]], ids=["cwt", "proxyfl", "fedreplay", "fedstats"]
)
def test_a_policy_pins_the_frozen_encoder_of_sums(tmp_path, options):
    run = [*FROZEN[len(SHARDS) :], *options, *DP]
    config = compose([*FROZEN, *options])
    own = encoder_digest(config.model, config.task)
    server = pinning(tmp_path, own, *run)
    request_ = summarise(server.weights, sums=0) if options == ["strategy=fedstats"] else summarise()
    assert f"lets stage summarise take weights sha256:{'0' * 64}; got {own}" in refused(
        pinning(tmp_path, f"sha256:{'0' * 64}", *run), request_
    )
    called = RollCall(strategy=server.config.strategy.name, run="r", stages=["summarise", "evaluate"])
    assert "lets stage summarise" in refused(pinning(tmp_path, "", *run), called)  # before anybody is asked for sums
    assert "clip from 0 to 9" in refused(pinning(tmp_path, own, *run, also="\nlimits: {clip: 9}"), request_)
    assert "products from 0 to 0" in refused(pinning(tmp_path, own, *run, also="\nlimits: {products: 0}"), request_)
    assert "task.mean and task.std would change" in refused(
        pinning(tmp_path, own, *run, "task.mean=[-9.0]", "task.std=[1.0]"), request_
    )
    assert not refusal(server.send(request_))
    assert [charge["steps"] for charge in server.charges("r")] == [1]


def test_a_policy_pins_an_encoder_that_travels_but_not_the_head(tmp_path):
    stats = ["classes=3", "model=mlp", "model.width=64", "strategy=fedstats", "head=means", *DP]
    server = pinning(tmp_path, "random", *stats, "seed=3")
    arrays = to_arrays(backbone(server.config.model, server.config.task)(derived_seed(3, "model")))
    matrix = next(name for name, array in arrays.items() if array.shape == (64, 64))
    shown = {**arrays, matrix: np.eye(64, dtype=np.float32)}  # sums of images, as they are
    about = {"clip": 10.0, "products": 0, "sums": 0}
    for crafted in (shown, {}, {**arrays, "head.other": arrays[matrix]}, {matrix: arrays[matrix]}):
        refused(server, summarise(crafted, **about))
    other = {name: array + 1 if name.startswith("head") else array for name, array in arrays.items()}
    assert not refusal(server.send(summarise(other, **about)))


@pytest.mark.parametrize("allowed", ["random", digest({})], ids=["random", "nothing's digest"])
@pytest.mark.parametrize(
    ("options", "request_"),
    [
        (["strategy=fedstats", "head=means", *DP], summarise(products=0, sums=0)),
        (["strategy=fedreplay", "encoder=random", "cut=energies"], Extract(**{**UPLOAD, "cut": "energies"}, views=1)),
    ],
    ids=["summarise", "extract"],
)
def test_an_encoder_without_weights_is_pinned_only_if_it_is_frozen(tmp_path, options, request_, allowed):
    server = pinning(tmp_path, allowed, "classes=3", "model=gabor", *options)
    assert "got no weights: freeze the encoder, model.train=head" in refused(server, request_)


def test_a_policy_that_pins_a_frozen_encoder_pins_what_lies_above_it_too(tmp_path):
    run = ["classes=3", "model=gabor", "model.hidden=8", "model.train=from:hidden", "strategy=fedstats", *DP]
    config = compose([*SHARDS, *run])
    server = pinning(tmp_path, encoder_digest(config.model, config.task), *run)
    about = {"clip": 10.0, "products": pairs_of(8), "sums": 0}
    assert "got sha256" in refused(server, summarise(server.weights, **about))
    own = {name: array for name, array in server.weights.items() if not name.startswith("head")}
    both = f"{encoder_digest(config.model, config.task)}, {digest(own)}"
    assert not refusal(pinning(tmp_path, both, *run).send(summarise(server.weights, **about)))


@pytest.mark.parametrize(
    ("train", "line"),
    [("head", "got sha256"), ("all", "model.dim do beside them"), ("from:projection", "ConfigError")],
)
def test_a_policy_that_pins_a_frozen_encoder_pins_how_its_features_are_projected(tmp_path, train, line):
    config = compose([*SHARDS, "classes=3", "model=gabor", "model.train=head"])
    run = ["classes=3", "model=gabor", "model.dim=40", f"model.train={train}", "strategy=fedstats", *DP]
    server = pinning(tmp_path, encoder_digest(config.model, config.task), *run)
    head = {"head.fc.weight": np.zeros((3, 40), np.float32), "head.fc.bias": np.zeros(3, np.float32)}
    assert line in refused(server, summarise(head, clip=10.0, products=pairs_of(40), sums=0))


def gaussians(**changed):
    means, factor = np.zeros((3, F), np.float32), np.eye(F, dtype=np.float32)
    return {"means": means, "factor": factor, "counts": np.array([5, 0, 2]), **changed}


WRONG = {
    "none": {"means": np.zeros(0, np.float32)},
    "other features": {"means": np.zeros((3, 4), np.float32), "factor": np.eye(4, dtype=np.float32)},
    "other classes": {"means": np.zeros((4, F), np.float32), "counts": np.array([5, 0, 2, 1])},
    "no number": {"means": np.full((3, F), np.nan, np.float32)},
    "endless": {"factor": np.full((F, F), np.inf, np.float32)},
    "too long": {"means": np.full((3, F), 11, np.float32)},
    "too wide": {"factor": np.eye(F, dtype=np.float32) * 11},
    "not square": {"factor": np.zeros((F, 3), np.float32)},
    "negative": {"counts": np.array([5, -1, 2])},
    "too many": {"counts": np.array([2**62, 2**62, 2**62])},
    "no counts": {"counts": np.array([1.0, 2.0, 3.0])},
    "nothing to draw": {"counts": np.zeros(3, np.int64)},
}


PROXY = {"alpha": 0.5, "beta": 0.0, "init_seed": 1, "committed": 0, "private_seed": 1, "private_optimizer": "sgd"}
PROXY |= {"private_lr": 0.1, "private_epochs": 0, "private_batch_size": 32, "private_shift": 0}
LEARNERS = {  # options, what is trained under DP, the request, and more of what it says
    "cwt": (CWT, "classifier", Train, {}),
    "proxyfl": (PAIR, "proxy", TrainProxy, PROXY),
}


@pytest.mark.parametrize("method", LEARNERS)
@pytest.mark.parametrize("changed", WRONG.values(), ids=WRONG)
def test_draws_from_a_stranger_are_checked(run_server, changed, method):
    options, learner, asked, also = LEARNERS[method]
    server = run_server(*options, f"dp=statistics+{learner}", "privacy.sigma=1", "delta=0.001")
    also = also or {"arrays": server.weights}
    assert refusal(server.send(KeepDraws(run="r", exchange=1, arrays=gaussians(**changed))))
    train = partial(asked, run="r", exchange=1, lr=0.1, **also)
    assert "draws as many features as it was told, 7" in refused(server, train(replayed=7))
    for counts in ([5, 0, 3], [5, 0, 2]):  # the last count is right
        assert not refusal(server.send(KeepDraws(run="r", exchange=1, arrays=gaussians(counts=np.array(counts)))))
    for other in (8, 0, None):
        refused(server, train(replayed=other))
    assert not refusal(server.send(train(replayed=7)))
    assert [charge["mechanism"] for charge in server.charges("r")] == [learner]


@pytest.mark.parametrize("batch", [10, 40])  # 40: all examples in every step
def test_whatever_is_drawn_no_proxy_changes_a_bit(run_server, batch):
    """Draws are before the own examples in a batch; θ sees nothing of them, nor of φ, which learns from them."""
    server, proxies = (
        run_server(*PAIR, BOTH, "privacy.sigma=1", "delta=0.001", "noise=seeded", f"batch_size={batch}"),
        [],
    )
    for run, mean in (("r", 0), ("s", 9)):
        drawn = gaussians(means=np.full((3, F), mean, np.float32))
        assert not refusal(server.send(KeepDraws(run=run, exchange=1, arrays=drawn)))
        proxies.append(weights(server.send(TrainProxy(run=run, exchange=1, lr=0.1, replayed=7, **PROXY))))
    without, with_draws = proxies
    assert without
    for name, array in without.items():
        np.testing.assert_array_equal(array, with_draws[name])


def test_one_epsilon_covers_sums_and_proxies_beforehand_and_in_the_end(tmp_path):
    frozen = ["task=digits", "model=gabor", "model.train=head", "nodes=3", "partition.size=90", "device=cpu"]
    words = [*frozen, *PAIR, BOTH, "target_epsilon=4", "delta=0.001", "batch_size=45", "rounds=2"]
    result, folder = run_inline([*words, f"runs_dir={tmp_path}"], Display())
    plan, page = PrivacyPlan.of(compose(words)), forecast_page(Simulation.of(compose(words)))
    protections = {line["protection"] for line in ledger_lines(folder) if line["field"] == "arrays"}
    for text in (page, result["privacy-claim"]):
        assert "Only what the noisy sums and training the proxy at an institution reveal together" in text
    assert "of its statistics and proxy, against whoever reads these, the server too" in page
    for account in result["privacy"].values():
        total, delta = account["epsilon"], account["delta"]
        sums, proxies = (epsilon([plan.cost(*about)], delta) for about in (("statistics", 90, 1), ("proxy", 90, 2)))
        assert max(sums, proxies) < total < sums + proxies
        assert plan.planned(90) == pytest.approx((total, delta), rel=1e-3)
        shown = f"({rounded_up(total)}, {rounded_up(delta, 2)})-DP"
        assert shown in protections
        assert shown in page


def test_a_budget_for_sums_or_a_pass_of_proxies_but_not_for_both_is_refused_before_either():
    words = [*FROZEN, *PAIR, BOTH, "batch_size=10", "sigma=2", "delta=0.001"]
    plan = PrivacyPlan.of(compose(words))
    limit = 1.05 * max(epsilon([plan.cost(name, 40, 1)], 0.001) for name in plan.mechanisms)
    with pytest.raises(BudgetError, match="the first pass of statistics and proxy alone makes"):
        PrivacyPlan.of(compose([*words, f"epsilon={limit}"])).check_first_passes(40)
    PrivacyPlan.of(compose([*words, f"epsilon={2 * limit}"])).check_first_passes(40)


def test_draws_have_the_means_and_the_covariance_of_the_sums():
    rng = np.random.default_rng(0)
    f, y = torch.from_numpy(rng.normal(size=(4000, 5)) @ rng.normal(size=(5, 5))), rng.integers(0, 2, 4000)
    f[y == 1] += 1
    share = ((1 - SHARE**2) / 2) ** 0.5
    table = np.stack([np.r_[(y == c).sum() * SHARE, f[y == c].sum(0) * share / 100] for c in (0, 1)])
    products = (f.T @ f).numpy()[np.triu_indices(5)] * np.where(np.equal(*np.triu_indices(5)), 1, 2**0.5)
    by = Moments.of(table, products * share / 100**2, 100.0, 0.0)
    draws = Draws.of(by.gaussians(100.0), 100.0, ReplayConfig(), 0)
    assert len(draws) == 4000
    x, labels = draws.take(torch.arange(4000).repeat(5))
    assert x.shape == (20000, 5, 1, 1)
    within = np.cov(torch.cat([f[y == c] - f[y == c].mean(0) for c in (0, 1)]).T, bias=True)
    for c in (0, 1):
        own = x[labels == c].flatten(1)
        np.testing.assert_allclose(own.mean(0), f[y == c].mean(0), atol=0.15)
        wanted = within + 0.3 * np.trace(within) / 5 * np.eye(5)
        np.testing.assert_allclose(np.cov(own.T), wanted, atol=0.1 * np.abs(wanted).max())
    near = Draws.of(by.gaussians(0.5), 0.5, ReplayConfig(), 0)
    assert torch.linalg.vector_norm(near.take(torch.arange(4000))[0].flatten(1), dim=1).max() <= 0.5 * 1.0001


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["strategy=fedstats", "head=mlp"], "lies above a frozen encoder.*: set model.train=head"),
        (["strategy=fedreplay", "latents=drawn"], "lies above a frozen encoder"),
        (
            ["strategy=fedreplay", "latents=drawn", "model.train=head", "upload_views=2"],
            "views shifts images that are sent",
        ),
        (
            ["strategy=fedreplay", "latents=drawn", "model.train=head", "dp=encoder", "delta=1e-4"],
            "can have dp=statistics; got encoder",
        ),
        (["strategy=fedreplay", "masked=true", "model.train=head"], "that of strategy=fedreplay does not"),
        (["strategy=cwt", "replay=statistics"], "got task.kind=classification and model.train=all: "),
        (
            ["strategy=cwt", "replay=statistics", "model=cnn", "model.train=head"],
            r"at this cut an image has the shape \(32, 2, 2",
        ),
        (["strategy=fedavg", "replay=statistics", "model.train=head", "training.augment=flip"], "augment changes the"),
        (
            ["strategy=fedprox", "replay=statistics", "model.train=head"],
            "is for strategy=cwt, fedavg, fedavgm, fml, proxyfl; got fedprox",
        ),
        (["strategy=fedavg", "replay=statistics", "model.train=head", "dp=classifier", "delta=1e-4"], "has no epsilon"),
        ([*PAIR, "model.train=head", "delta=1e-4"], r"would leave without noise; .*: choose dp=statistics\+proxy"),
        ([*PAIR, "model.train=head", "dp=none", "private-models=[mlp]"], "no private-models or private-shift"),
        ([*PAIR, "model.train=head", "dp=none", "sealed=true"], "leave replay out"),
        (
            ["strategy=proxyfl", "replay=vqvae2", "dp=none"],
            "replay is for serial and parallel methods; got strategy=proxyfl",
        ),
        (["strategy=cwt", "model.train=head", "dp=statistics", "delta=1e-4"], "can have dp=classifier; got statistics"),
    ],
)
def test_a_mistake_is_one_line(options, line, tmp_path):
    with pytest.raises(FlwrReplayError, match=line) as caught:
        run_inline(["task=digits", "model=gabor", "nodes=3", "device=cpu", *options, f"runs_dir={tmp_path}"], Display())
    assert "\n" not in str(caught.value)
