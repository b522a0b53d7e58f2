"""What a preset says is what its paper says; the user's own options win."""

from itertools import cycle

import pytest

from flwr_replay.config import compose as composing
from flwr_replay.config.catalogue import choices, conf_dir
from flwr_replay.config.compose import compose
from flwr_replay.config.strict_yaml import read_yaml
from flwr_replay.runs import options

KALRA = ["avgpush", "fedavg", "local", "central"]


def paper(task, strategy, *options):
    return compose([f"task={task}", f"strategy={strategy}", "preset=paper", *options])


@pytest.mark.parametrize(
    ("task", "rounds", "p", "size", "proxy", "private"),
    [
        ("mnist", 300, 0.8, 1000, "mlp", "lenet5_unpadded"),
        ("fashion_mnist", 300, 0.8, 1000, "mlp", "lenet5_unpadded"),
        ("cifar10", 200, 0.3, 3000, "cnn1", "cnn2"),
    ],
)
def test_proxyfl_has_the_numbers_of_section_4_1(task, rounds, p, size, proxy, private):
    config = paper(task, "proxyfl")
    assert (config.rounds, config.nodes, config.model.name) == (rounds, 8, proxy)
    assert (config.partition.name, config.partition.p, config.partition.size) == ("majority", p, size)
    training, privacy, strategy = config.training, config.privacy, config.strategy
    assert (training.optimizer, training.lr, training.weight_decay, training.batch_size) == ("adam", 1e-3, 1e-4, 250)
    assert (privacy.dp, privacy.sigma, privacy.clip, privacy.delta) == ("proxy", 1.0, 1.0, 1e-5)
    assert (strategy.private_models, strategy.alpha, strategy.beta) == ((private,), 0.5, 0.5)
    assert (strategy.topology, strategy.optimizer_state) == ("exponential", "keep")
    assert paper(task, "fml").strategy.private_models == (private,)


@pytest.mark.parametrize("task", ["mnist", "fashion_mnist", "cifar10", "histopathology"])
@pytest.mark.parametrize("strategy", KALRA)
def test_baselines_train_as_privately_as_proxies(task, strategy):
    config, proxyfl = paper(task, strategy), paper(task, "proxyfl")
    assert config.privacy.dp == "classifier"
    assert (config.training, config.model.name, config.rounds) == (proxyfl.training, proxyfl.model.name, proxyfl.rounds)
    assert (config.privacy.sigma, config.privacy.clip) == (proxyfl.privacy.sigma, proxyfl.privacy.clip)
    assert config.strategy.optimizer_state == "keep"


def test_the_users_own_options_win():
    config = paper("mnist", "fedavg", "dp=none", "optimizer-state=reset")
    assert (config.privacy.dp, config.strategy.optimizer_state) == ("none", "reset")
    assert paper("mnist", "proxyfl", "private-models=[mlp]").strategy.private_models == ("mlp",)


def test_slides_fedavg_exchanges_the_larger_model():
    fedavg, proxyfl = (paper("histopathology", strategy) for strategy in ("fedavg", "proxyfl"))
    assert (fedavg.model.width, proxyfl.model.width) == (512, 256)


def test_a_preset_over_another_keeps_what_it_does_not_change():
    strategy = compose(["task=histopathology", "strategy=proxyfl", "preset=sound"]).strategy
    assert (strategy.private_models, strategy.private_shift) == (("deepset",), 0)
    assert (strategy.alpha, strategy.beta, strategy.listen, strategy.topology) == (0.0, 0.0, "pool", "complete")


@pytest.mark.parametrize("strategy", KALRA)
def test_sound_baselines_have_the_same_epsilon(strategy):
    config, proxyfl = (
        compose(["task=mnist", f"strategy={method}", "preset=sound"]) for method in (strategy, "proxyfl")
    )
    assert (config.training, config.strategy.optimizer_state) == (proxyfl.training, "keep")
    assert getattr(config.strategy, "topology", "complete") == proxyfl.strategy.topology
    assert (config.privacy.dp, config.privacy.target_epsilon, config.training.optimizer) == ("classifier", 8.0, "sgd")


@pytest.mark.parametrize(
    ("task", "mean", "std"),
    [
        ("mnist", (0.1307,), (0.3081,)),
        ("fashion_mnist", (0.2860,), (0.3530,)),
        ("cifar10", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        ("digits", (), ()),
    ],
)
def test_the_sound_preset_standardises_by_public_constants(task, mean, std):
    config, default = (compose([f"task={name}", "strategy=proxyfl", "preset=sound"]) for name in (task, "digits"))
    assert (config.task.mean, config.task.std) == (mean, std)
    assert (config.strategy, config.training, config.privacy) == (default.strategy, default.training, default.privacy)


@pytest.mark.parametrize(
    ("words", "installed", "chosen"),
    [
        ("", True, ("fedsgd", "gabor", 0, 30)),
        ("rounds=1", True, ("fedstats", "gabor", 0, 1)),
        ("rounds=1 strategy=fedsgd", True, ("fedsgd", "gabor", 0, 1)),
        ("task=cifar10", True, ("fedsgd", "tf_efficientnet_lite0", 96, 30)),
        ("task=cifar10", False, ("fedsgd", "gabor", 0, 30)),
        ("task=cifar10 model=gabor", True, ("fedsgd", "gabor", 0, 30)),
        ("task=tuberculosis rounds=1 nodes=3", True, ("fedstats", "tf_efficientnet_lite0", 0, 1)),
        ("task=mnist", True, ("fedsgd", "gabor", 0, 30)),
    ],
)
def test_the_private_preset_chooses_an_encoder_and_a_method(words, installed, chosen, monkeypatch):
    """What is installed decides once: the encoder is written down for institutions, whatever they have."""
    monkeypatch.setattr(options, "find_spec", lambda name: installed or None)
    overrides, config = options.resolve(["preset=private", *words.split()], "runs", "")
    model = config.model
    assert (config.strategy.name, model.name, getattr(model, "size", 0), config.rounds) == chosen
    assert compose(overrides).model == model
    assert (config.privacy.noise, config.masked) == ("shared", True)


@pytest.mark.parametrize(
    ("task", "sizes", "batch", "augment"),
    [("tuberculosis", (8, 32), 32, "flip"), ("isic", (), 64, "flip,rot90")],
)
def test_feders_preset_is_section_iv_b(task, sizes, batch, augment):
    config = paper(task, "feder")
    training, gan = config.training, config.generator
    assert (training.optimizer, training.lr, training.batch_size, training.batch_sizes) == ("adam", 1e-4, batch, sizes)
    assert (training.augment, config.rounds, config.strategy.local_epochs, config.strategy.buffer) == (
        augment,
        100,
        100,
        512,
    )
    assert (config.task.size, config.task.balanced, config.model.name, config.partition.name) == (
        *(256, True, "resnet18", "natural"),
    )
    assert (gan.name, gan.lr, gan.batch_size, gan.steps, gan.privacy_steps) == (
        "stylegan2",
        0.0025,
        32,
        800_000,
        150_000,
    )
    assert (gan.latents, gan.mapping, gan.mapping_rate, gan.ada_images) == (512, 8, 0.01, 500_000)
    assert paper(task, "cwt").training == training


def test_a_choice_that_no_preset_touches_is_its_file_as_hydra_reads_it():
    """Each is in two of these; `_hydra` composes all groups at once."""
    presets = [f"preset={path.parent.name}/{path.stem}" for path in sorted(conf_dir().glob("preset/*/default.yaml"))]
    for strategy, replay, prior, preset in zip(
        choices("strategy"), cycle(choices("replay")), cycle(choices("prior")), cycle(presets), strict=False
    ):
        chosen = (preset, f"prior={prior}", f"replay={replay}", f"strategy={strategy}")
        assert dict(composing._unset(chosen)) == composing._hydra(chosen)
    touched = {key for file in conf_dir().glob("preset/*/*.yaml") for key in read_yaml(file, "a preset")}
    assert not touched & {*composing.APART}
