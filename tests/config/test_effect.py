"""Options that a person types and that would change nothing: refused where no method of several needs them."""

from functools import reduce

import pytest

from flwr_replay.config.catalogue import choices, own_options
from flwr_replay.config.compose import SECTIONS, compose
from flwr_replay.config.effect import USES
from flwr_replay.errors import ConfigError
from flwr_replay.runs.options import resolve
from flwr_replay.studies.compare import planned

IMAGES = "replay=buffer, strategy=feder or syncentral; got replay=none: leave it out"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("replay.codes=stale", "'replay.codes=stale' is for replay=vqvae2; got replay=none: leave it out"),
        ("strategy=cwt replay=pixelcnn codes=stale", "is replay.codes, for replay=vqvae2; got replay=pixelcnn"),
        ("task.unit=mm", "'task.unit=mm' is for task.kind=regression; got task.kind=classification: leave it out"),
        ("strategy=fedstats dim=64", f"is generator.dim, for replay=vqvae2 or pixelcnn, {IMAGES}"),
        ("strategy=fedavg prior.width=8", f"is for replay=pixelcnn, {IMAGES}"),
        ("strategy=fedavg generator.checkpoint=x", f"is for {IMAGES}"),
        ("strategy=cwt replay=vqvae2 generator.piece-steps=9", "got replay=vqvae2: leave it out"),
        ("task.data-dir=x", "is for tasks that read files; got task=digits: leave it out"),
        ("strategy=fedstats lr=0.1", "is training.lr, for methods that take steps; got strategy=fedstats: leave"),
        ("strategy=fedstats batches=balanced", "own_batches in their Traits; got strategy=fedstats: leave it out"),
        ("strategy=cwt optimizer=adam momentum=0.5", "for training.optimizer=sgd; got training.optimizer=adam"),
        ("strategy=cwt sigma=3", "is privacy.sigma, for privacy.dp other than none; got privacy.dp=none: leave"),
        ("preset=private nodes=3 sigma=3", "for a run without target-epsilon; got privacy.target-epsilon=8.0"),
        ("strategy=cwt dp=classifier prior-clip=2", "for privacy.dp=prior; got privacy.dp=classifier: leave it out"),
        ("record-mb=5", "'record-mb=5' is for record other than none; got record=none: leave it out"),
        ("strategy=proxyfl holdout=0.2", "for strategy.listen=pool; got strategy.listen=loss: leave it out"),
        ("strategy=fedreplay encoder=random patience=2", "for strategy.encoder=institution; got strategy.encoder=ran"),
        ("strategy=feder durations=[1,2]", "for strategy.order=queue; got strategy.order=cycle: leave it out"),
    ],
)
def test_an_option_without_an_effect_is_refused(words, fault, tmp_path):
    with pytest.raises(ConfigError) as refused:
        resolve(words.split(), str(tmp_path), "")
    assert fault in str(refused.value)
    compose(words.split())  # an institution takes a server's word: nothing follows from it


@pytest.mark.parametrize(
    "words",
    [
        "strategy=cwt replay=vqvae2 replay.codes=stale",
        "strategy=feder nodes=4 replay.images=9 prior.width=8 generator.piece-steps=9",
        "strategy=cwt replay=buffer replay.images=9 generator.epochs=2",
        "strategy=fedstats model=gabor model.train=head head=mlp lr=0.1",
        "strategy=proxyfl optimizer=adam private-optimizer=sgd momentum=0.5 sigma=1",
        "strategy=cwt dp=classifier target-epsilon=3 noise=seeded delta=1e-5 privacy.clip=2",
        "strategy=fedavg task=diabetes task.unit=points",
    ],
)
def test_an_option_with_an_effect_is_taken(words, tmp_path):
    resolve(words.split(), str(tmp_path), "")


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    with pytest.raises(ConfigError) as refused:
        resolve(["strategy=cwt", "record-mb=5", "replay.codes=stale"], str(tmp_path), "")
    assert len(refused.value.args) == 2


def test_what_one_of_several_methods_needs_is_taken(tmp_path):
    words = ["task=digits", "nodes=2", "rounds=1", "seeds=0,", "lr=0.1"]
    planned(["fedstats", "fedavg"], words, "", tmp_path)
    with pytest.raises(ConfigError, match=r"is training\.lr, for methods that take steps; got strategy=fedstats"):
        planned(["a := fedstats:head=means", "fedstats"], words, "", tmp_path)
    with pytest.raises(ConfigError, match=r"an option has one value; got 'lr=0.1' and 'training.lr=0.2': remove one"):
        planned(["fedstats", "fedavg"], [*words, "training.lr=0.2"], "", tmp_path)


def test_every_use_is_of_options_that_there_are():
    run, groups = compose([]), [*SECTIONS, "strategy"]
    known = {f"{group}.{name}" for group in groups for choice in choices(group) for name in own_options(group, choice)}
    known |= {f"{name}.{option}" for name in ("training", "privacy") for option in vars(getattr(run, name))}
    known |= {*SECTIONS, *vars(run)}
    for options, where, *_ in USES:
        assert set(options.split()) <= known
        for place in where.split():
            if place not in known:
                reduce(getattr, place.removesuffix(".name").split("."), run)
