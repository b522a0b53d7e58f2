"""FedStats beside slow twins: nearest class means of the union, whoever has which images."""

import numpy as np
import pytest
import torch
from harness import SHARDS, node_configs, run, write_shards
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_replay.config.compose import compose
from flwr_replay.config.hiding import Hiding
from flwr_replay.data.dealt import dealt, loaded
from flwr_replay.engines.simulate import Simulation, run_inline
from flwr_replay.errors import ConfigError, DivergedError, FlwrReplayError, WireError
from flwr_replay.files.tensors import read_tensors
from flwr_replay.forecast.forecast import forecast_page
from flwr_replay.learning.heads import discriminants, features_of, linear_head, nearest_means
from flwr_replay.learning.tasks import Regression
from flwr_replay.models.layers import as_input
from flwr_replay.models.zoo import backbone
from flwr_replay.payloads.fedstats import PRODUCTS, ClassSums, Summarise, pairs_of
from flwr_replay.privacy.secret import Stream
from flwr_replay.privacy.sums import WITH_LABEL, class_sums, labelled, noises, noisy, packed, unpacked
from flwr_replay.report.progress import Display
from flwr_replay.rng import derived_seed
from flwr_replay.server.answers import check_answer
from flwr_replay.wire.masked import blank_masked

JOB = ["task=digits", "model=gabor", "nodes=3", "device=cpu", "rounds=2", "strategy=fedstats"]


REGRESSION = ["task=diabetes", "partition=iid", "model=mlp", "model.width=12", "task.label-range=[50,300]"]
SHARED = ["masked=true", "dp=statistics", "privacy.noise=shared", "delta=1e-5"]


def head_after(folder, *options):
    _, folder = run_inline([*JOB, *options, f"runs_dir={folder}"], Display())
    model = read_tensors(folder / "models" / "global.safetensors")
    return model["head.fc.weight"], model["head.fc.bias"]


def union(*options):
    """Return features and labels of all institutions' training examples."""
    config = compose([*JOB, *options])
    dealing, data = dealt(config.task, config.partition, config.nodes, config.seed), loaded(config.task)
    owned = [dealing.examples(data, k).train for k in range(config.nodes)]
    x, y = (np.concatenate([getattr(own, name) for own in owned]) for name in "xy")
    model = backbone(config.model, config.task)(derived_seed(config.seed, "model"))
    return features_of(model, as_input(torch.from_numpy(x))).double().numpy(), y


@pytest.mark.parametrize("partition", [["partition=iid"], ["partition=ks", "ks=0.9"]])
def test_the_head_is_that_of_the_unions_class_means(tmp_path, partition):
    features, labels = union(*partition)
    weight, bias = head_after(tmp_path, *partition, "strategy.head=means")
    means = np.stack([features[labels == c].mean(0) for c in range(10)])
    slow = np.array([[np.square(f - mu).sum() for mu in means] for f in features[:300]]).argmin(1)
    assert ((features[:300] @ weight.T + bias).argmax(1) == slow).all()
    scale = weight[0, 0] / means[0, 0]
    np.testing.assert_allclose(weight, means * scale, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(bias, -np.square(means).sum(1) / 2 * scale, rtol=1e-4)


@pytest.mark.parametrize(
    "how", [["partition=iid"], ["partition=ks", "ks=0.9", "model.dim=60", "strategy.head=lda", "strategy.priors=noisy"]]
)
def test_discriminants_are_those_of_the_unions_covariance(tmp_path, how):
    """Beside the sum over all images of (f - μ)(f - μ)ᵀ, each of its own class."""
    partition = [*how, "partition.size=100"]
    features, labels = union(*partition)
    weight, bias = head_after(tmp_path, *partition)
    means = np.stack([features[labels == c].mean(0) for c in range(10)])
    within = sum(np.outer(f, f) for f in features - means[labels]) / len(features)
    within += np.eye(len(within)) * 0.3 * within.trace() / len(within)
    slow = np.linalg.solve(within, means.T).T
    np.testing.assert_allclose(weight, slow, rtol=1e-3, atol=1e-3 * np.abs(slow).max())
    priors = np.log(np.bincount(labels) / len(labels)) if "strategy.priors=noisy" in how else 0
    np.testing.assert_allclose(bias, priors - (slow * means).sum(1) / 2, rtol=1e-3)


def test_ridge_is_numpys_of_the_unions_classes(tmp_path):
    how = ["partition=ks", "ks=0.9", "partition.size=100"]
    f_NF, labels = union(*how)
    weight, bias = head_after(tmp_path, *how, "strategy.head=ridge")
    y_NC, centred = np.eye(10)[labels], f_NF - f_NF.mean(0)
    penalty = 0.01 * np.cov(f_NF.T, bias=True).trace() / f_NF.shape[1] * len(f_NF)
    slow = np.linalg.solve(centred.T @ centred + penalty * np.eye(len(centred.T)), centred.T @ (y_NC - y_NC.mean(0)))
    np.testing.assert_allclose(weight, slow.T, rtol=1e-3, atol=1e-3 * np.abs(slow).max())
    np.testing.assert_allclose(bias, y_NC.mean(0) - f_NF.mean(0) @ slow, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("hidden", [[], ["masked=true"], ["masked=true", "dp=statistics", "privacy.noise=shared"]])
def test_a_regression_has_numpys_ridge_of_the_union(tmp_path, hidden):
    """Labels outside the range count as its ends; with noise of ε = 10⁶, too."""
    noise = ["delta=1e-5", "target-epsilon=1e6"] if "dp=statistics" in hidden else []
    weight, bias = head_after(tmp_path, *REGRESSION, *hidden, *noise, "strategy.clip=1.6")
    f_NF, y_N = union(*REGRESSION)
    y_N = (y_N.clip(50, 300) - 175) / 125
    centred = f_NF - f_NF.mean(0)
    assert np.linalg.norm(f_NF, axis=1).max() < 1.6
    penalty = max(0.01 * np.cov(f_NF.T, bias=True).trace() / 12, 2.56e-6) * len(f_NF)
    slow = np.linalg.solve(centred.T @ centred + penalty * np.eye(12), centred.T @ (y_N - y_N.mean()))
    close = {"rtol": 0.1, "atol": 0.25} if noise else {"rtol": 1e-3, "atol": 1e-4}
    np.testing.assert_allclose(weight[0], slow, **close)
    np.testing.assert_allclose(bias, [y_N.mean() - slow @ f_NF.mean(0)], **close)


def test_it_is_asked_once_under_masks_too_with_the_same_result(tmp_path):
    plain = head_after(tmp_path / "plain")
    under_masks = head_after(tmp_path / "masked", "masked=true")
    for left, right in zip(plain, under_masks, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-3)


def test_products_are_each_pair_once_with_the_norm_of_all():
    f = torch.from_numpy(np.random.default_rng(0).normal(size=(9, 6)))
    whole = f.T @ f
    assert packed(whole).norm().item() == pytest.approx(whole.norm().item())
    np.testing.assert_allclose(unpacked(packed(whole).numpy(), 6), whole)
    noise = np.random.default_rng(1).normal(size=(200, 21))
    drawn = np.stack([unpacked(of, 6) for of in noise])
    assert (drawn == drawn.transpose(0, 2, 1)).all()
    assert np.square(drawn).mean(0)[0, 0] == pytest.approx(1, rel=0.3)
    assert np.square(drawn).mean() * 36 == pytest.approx(21, rel=0.05)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ([], True),
        (["strategy.head=means"], False),
        (["dp=statistics", "target-epsilon=8", "delta=1e-4"], True),  # a class mean's noise: 0.09 of the clip
        (["dp=statistics", "target-epsilon=4", "delta=1e-4"], False),  # 0.18
        (["dp=statistics", "target-epsilon=4", "delta=1e-4", "strategy.head=lda"], True),
    ],
)
def test_products_are_asked_for_where_the_noise_of_a_class_mean_is_small(tmp_path, caplog, options, asked):
    result, _ = run_inline([*JOB, *options, "rounds=1", f"runs_dir={tmp_path}"], Display())
    features, _ = union()
    assert (result["bytes"]["up"] > 3 * 4 * pairs_of(features.shape[1])) == asked
    messages = [record.getMessage() for record in caplog.records]
    assert any(line.startswith(f"head={'lda' if asked else 'means'}: each institution sends") for line in messages)


@pytest.mark.parametrize("script", ["failing", "losing"])  # who has lost an answer has made its sums for another head
def test_who_comes_late_is_asked_then_and_nobody_twice(tmp_path, script):
    write_shards(tmp_path, {"a": 30, "b": 20, "c": 10})
    job = [*SHARDS, "classes=3", "model=gabor", "strategy=fedstats", "device=cpu", "rounds=3"]
    job += ["dp=statistics", "delta=0.01", "privacy.sigma=0.1", "privacy.noise=seeded"] if script == "losing" else []
    whole = run(tmp_path, job, node_configs(tmp_path, tmp_path / "state"), name="whole")
    late = run(
        tmp_path, job, node_configs(tmp_path, tmp_path / "state"), name="late", **{script: [("summarise", "b", 1)]}
    )
    assert [(at.name, at.exchange) for at in late.grid.asked if at.stage == "summarise"] == [
        *(("a", 1), ("b", 1), ("c", 1)),
        ("b", 2),
    ]
    left, right = (read_tensors(ran.folder / "models" / "global.safetensors") for ran in (whole, late))
    for name, array in left.items():
        np.testing.assert_allclose(right[name], array, rtol=1e-5)


@settings(max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2, 12, 300]),
    st.sampled_from([1e-3, 1.0, 10.0]),
    st.sampled_from([0.0, 1e-6, 1.0, 1e3, 1e30, np.inf, np.nan]),
    st.sampled_from(["means", "lda", "ridge"]),
)
def test_no_patient_changes_the_sums_by_more_than_one(seed, images, clip, size, head):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(30 + images, 7)) * clip
    features[30:] = features[np.arange(images) % 30] * size if np.isfinite(size) else size
    labels, patients = rng.integers(0, 4, 30 + images), np.r_[rng.integers(0, 9, 30), np.full(images, 9)]

    def sums(n):
        f, y, of = (torch.from_numpy(of[:n]) for of in (features, labels, patients))
        if head == "ridge":
            f, y = labelled(f, Regression(1.5, 1.0, bounded=True).learned(y), clip), y * 0
        of_class, products = class_sums(f, y, of, 4, clip * (WITH_LABEL if head == "ridge" else 1), head != "means")
        return torch.cat([of_class.flatten(), packed(products)])

    change = torch.linalg.vector_norm(sums(30 + images) - sums(30))
    assert change <= 1
    if images > 1 or np.isfinite(size):
        assert change > 0  # at least the number of examples changes


def test_without_clipping_they_are_sums():
    rng = np.random.default_rng(0)
    features, labels = torch.from_numpy(rng.normal(size=(20, 5))), torch.from_numpy(rng.integers(0, 3, 20))
    of_number, of_sums, of_products = noises(10.0, products=True)
    sums, products = class_sums(features, labels, torch.arange(20), 3, 10.0, products=True)
    np.testing.assert_allclose(products * of_products, features.T @ features)
    np.testing.assert_allclose(sums[:, 0] * of_number, np.bincount(labels, minlength=3))
    np.testing.assert_allclose(sums[:, 1:] * of_sums, np.stack([features[labels == c].sum(0) for c in range(3)]))


def test_the_noise_is_that_which_was_charged():
    sums = torch.zeros(10, 2000, dtype=torch.float64)
    assert noisy(sums, 3.0, Stream(bytes(32))).std() == pytest.approx(3, rel=0.03)
    steps = noisy(sums, 3.0, Stream(bytes(32))) / 2.0**-19
    assert (steps == steps.round()).all()


def test_much_noise_does_not_enlarge_the_means():
    rng, (_, of_sums, _) = np.random.default_rng(0), noises(10.0, products=False)
    truth = rng.normal(size=(3, 1600))
    truth *= 9 / np.linalg.norm(truth, axis=1, keepdims=True)
    numbers = np.array([200.0, 400.0, 800.0])
    noisy = truth * numbers[:, None] + rng.normal(size=truth.shape) * of_sums * 5
    weight, bias = nearest_means(noisy / numbers[:, None], of_sums * 5 / numbers, least=1)
    scale = weight[2] @ truth[2] / (truth[2] @ truth[2])
    np.testing.assert_allclose(bias, -81 / 2 * scale, rtol=0.3)


def test_noise_in_means_does_not_lower_the_biases_of_discriminants():
    """To squares of about 0.25 it adds 0.08 on average."""
    rng, n, features, noise = np.random.default_rng(0), np.full(3, 4000.0), 200, 0.02
    means = rng.normal(size=(3, features)) * 0.035
    products = (means.T * n) @ means + n.sum() * np.eye(features)
    _, exact = discriminants(means, n, n * 0, products, 0.0, 1e-6)
    drawn = [means + rng.normal(size=means.shape) * noise for _ in range(50)]
    biases = [discriminants(mean, n, np.full(3, noise), products, 0.0, 1e-6)[1] for mean in drawn]
    np.testing.assert_allclose(np.mean(biases, axis=0), exact, rtol=0.08)


def test_noise_in_products_makes_no_variance_negative_and_no_weight_huge():
    rng, features = np.random.default_rng(0), 100
    products = unpacked(rng.normal(size=pairs_of(features)), features)  # nothing but noise
    means, n = rng.normal(size=(3, features)), np.full(3, 1.0)
    weight, _ = discriminants(means, n, n * 0, products, 1.0, 1e-6)
    assert np.linalg.norm(weight) < np.linalg.norm(means) / (0.25 * 200**0.5 / 3)
    weight, _ = discriminants(means, n, n * 0, np.zeros((features, features)), 0.0, 1e-6)
    np.testing.assert_allclose(weight, means * 1e6)


def test_products_of_too_many_features_are_refused_or_not_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("flwr_replay.strategies.fedstats.MOST_FEATURES", 100)
    with pytest.raises(ConfigError, match="products of at most 100 features; this model's head takes"):
        head_after(tmp_path, "strategy.head=lda")
    for left, right in zip(head_after(tmp_path, "rounds=1"), head_after(tmp_path, "head=means"), strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_class_that_nobody_has_is_never_named_and_said(tmp_path, caplog):
    weight, bias = head_after(tmp_path, "task.classes=12")
    assert "classes 10, 11: nobody has an example; they are hardly ever predicted: add examples" in caplog.text
    features, _ = union("task.classes=12")
    assert (features @ weight.T + bias).argmax(1).max() < 10


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["task=diabetes", "model=mlp"], r"has none: set task\.label-range=\[LOWEST,HIGHEST\]"),
        ([*REGRESSION, "strategy.head=lda"], "head is ridge regression; got head=lda: leave it out"),
        ([*REGRESSION, "task.label-range=[5]"], r"lowest and the highest label of a regression.*; got \[5.0\]"),
        ([*REGRESSION, "task.label-range=[9,5]"], r"the highest label of a regression.*; got \[9.0, 5.0\]"),
        (["task=isbi2012", "model=unet"], "is a segmentation: choose another task"),
        (["task=digits", "training.augment=flip"], "training.augment=none"),
        (["task=digits", "strategy.clip=0"], "strategy.clip lies in"),
        (["task=digits", "strategy.head=forest"], "strategy.head must be one of auto, means, lda, ridge"),
        ([*SHARED, "strategy.head=lda", "privacy.sigma=1e5"], "leaves no room for .* numbers: choose a larger epsilon"),
        (["task=digits", "dp=classifier"], "can have dp=statistics; got dp=classifier"),
        (["task=digits", "fraction=0.5"], "fraction is for methods"),
        (["task=digits", "dp=statistics", "privacy.target-epsilon=1e-3", "delta=0.5"], "delta may be at most"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, options, line):
    with pytest.raises(FlwrReplayError, match=line) as caught:
        head_after(tmp_path, *options)
    assert "\n" not in str(caught.value)


def test_a_model_without_a_linear_head_is_refused():
    with pytest.raises(ConfigError, match=r"the head must be a torch\.nn\.Linear with a bias"):
        linear_head(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU()))


@pytest.mark.parametrize(("epsilon", "much"), [("8", False), ("0.1", True)])
def test_how_large_the_noise_is_beside_the_sum_is_said_before_anything_leaves(tmp_path, caplog, epsilon, much):
    options = ["dp=statistics", "delta=1e-5", f"target-epsilon={epsilon}", "rounds=1"]
    head_after(tmp_path, *options)
    page = forecast_page(Simulation.of(compose([*JOB, *options])))
    assert "These data name no patients, so an epsilon is of one example." in page
    messages = [record.getMessage() for record in caplog.records]
    [at] = [i for i, line in enumerate(messages) if line.startswith("the noise of a sum has norm")]
    assert ("little can be learnt" in messages[at]) == much
    assert "1,315 examples add at most 1,315" in messages[at]
    assert messages[at] in page
    assert not any(line.startswith("round") for line in messages[:at])


@pytest.mark.parametrize("way", [[], ["strategy=cwt", "replay=statistics", "model.train=head"]])
def test_noise_that_hides_every_class_is_refused_before_anything_is_charged(tmp_path, way):
    with pytest.raises(ConfigError, match=r"of 10 classes, and each number has noise .*: choose a larger epsilon"):
        head_after(tmp_path, *way, "dp=statistics", "delta=1e-5", "target-epsilon=0.01", "rounds=1")
    assert not list(tmp_path.rglob("privacy.jsonl"))


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("products", [None, 5, 7, np.nan, np.inf, 1e7, "float64", "more"])
def test_products_that_cannot_be_are_refused_by_the_server(masked, products):
    head = {"fc.weight": np.zeros((2, 3), np.float32), "fc.bias": np.zeros(2, np.float32)}
    asked = Summarise(arrays=head, run="r", clip=1.0, products=6).encode()

    def refused(more):
        arrays = blank_masked({**head, **more}) if masked else {**head, **more}
        answer = ClassSums(arrays=arrays, num_examples=1, examples_seen=1, num_steps=0).encode()
        try:
            check_answer(answer, ClassSums, Summarise, asked, range(1, 2), Hiding.of(False, masked))
        except (WireError, DivergedError):
            return True
        return False

    right = {PRODUCTS: np.ones(6, np.float32)}
    assert not refused(right)
    if isinstance(products, float):
        wrong = {PRODUCTS: np.full(6, products, np.float32)}
        assert refused(wrong) == (not masked)  # of masked numbers nobody reads any
    elif products == "float64":
        assert refused({PRODUCTS: np.ones(6)}) == (not masked)
    elif products == "more":
        assert refused({**right, "others": np.ones(6, np.float32)})
    else:
        assert refused({} if products is None else {PRODUCTS: np.ones(products, np.float32)})
