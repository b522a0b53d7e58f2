"""From what a user typed to a configuration: near matches, short keys, and the way back."""

import re
import shlex
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_replay.config import compose as composing
from flwr_replay.config.catalogue import choices, conf_dir
from flwr_replay.config.compose import compose, compose_own, from_run_config, overrides_of, to_yaml
from flwr_replay.config.renamed import today, told
from flwr_replay.config.sections import spelled
from flwr_replay.errors import ConfigError
from flwr_replay.runs.options import resolve


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("strategy=fedreplya", "unknown strategy 'fedreplya': did you mean fedreplay"),
        ("task=fashion-mnist", "unknown task 'fashion-mnist': did you mean fashion_mnist"),
        ("model=resnet43", "did you mean resnet34"),
        ("stratgy=fedavg", "unknown option 'stratgy': did you mean strategy"),
        ("lattent-dtype=int8", "unknown option 'lattent-dtype': did you mean strategy.latent-dtype"),
        ("training.momemtum=0.5", "unknown option 'training.momemtum': did you mean training.momentum"),
        ("strategy.name=cwt", "unknown option 'strategy.name'"),
        ("privacy-loss=nearest", "privacy-loss is an option of generator=stylegan2; got generator=vqvae2"),
        ("p=0.3", "p is an option of partition=majority; got partition=ks"),
        (
            "alpha=0.1",
            "alpha is an option of strategy=fml, proxyfl and of partition=dirichlet; got strategy=fedreplay, "
            "partition=ks",
        ),
        (
            "local-epochs=2",
            "local-epochs is an option of strategy=ditto, fedavg, fedavgm, fedavgshare, fedbn, feder, fedprox, moon, "
            "scaffold; got",
        ),
        ("strategy=proxyfl private-shift=8", "by some of their 8 pixels; got 8: choose fewer"),
        (
            "strategy=proxyfl private-optimizer=adm",
            "must be one of '' (empty), sgd, adam; got 'adm': did you mean adam",
        ),
        ("latent-dtype=float61", "strategy.latent-dtype must be one of float32, float16, int8; got 'float61'"),
        ("encoder=institutions", "did you mean institution"),
        ("name=cwt", "unknown option 'name'"),
        ("task.load=mypkg:load", "unknown option 'task.load'"),
        ("size=3", "option 'size' is in several sections; write one of task.size, partition.size"),
        ("rounds=2.5", "rounds must be a whole number; got 2.5"),
        ("rounds=true", "rounds must be a whole number; got True"),
        ("rounds=[1,2]", "rounds must be a whole number; got [1, 2]"),
        ("lr=null", "training.lr must be a number; got None"),
        ("lr=.nan", "training.lr must be"),
        ("drop=1", "partition.drop must be true or false; got 1"),
        ("class-names=ab", "task.class-names must be a list; got 'ab'"),
        ("momentum=1", "training.momentum lies in [0, 1); got 1.0"),
        ("rounds", "an option is written key=value; got 'rounds'"),
        ("=3", "an option is written key=value; got '=3'"),
        ("rounds=[1", "the value of rounds must be a number, true, false, a word, or a list [a,b]; got '[1'"),
        ("rounds=1=2", "the value of rounds must be a number, true, false, a word, or a list [a,b]; got '1=2'"),
        ("run-name=ü", "got 'ü': quote any other text, \"run-name='…'\""),
        (
            "strategy=fedavg beta=0",
            "beta is an option of strategy=fml, proxyfl; for the other one write generator.beta",
        ),
        ("run-name=${oc.env:HOME}", "without ${...}; got one in 'run-name'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(override, says):
    with pytest.raises(ConfigError) as refused:
        compose(override.split())
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("prior=masked", "prior=maskgit", "prior=masked is called prior=maskgit now"),
        ("task.format=retina", "task.format=clinical", "task.format=retina is called task.format=clinical now"),
        ("generator.slice-steps=7", "generator.piece_steps=7", "slice-steps is called piece-steps now"),
        ("slice-seconds=7", "piece-seconds=7", "slice-seconds is called piece-seconds now"),
    ],
)
def test_an_old_name_goes_on_with_a_warning(caplog, old, new, says):
    for read in (today, told):
        read.cache_clear()
    job = ["task=retina", "strategy=cwt", "replay=buffer"]
    for _ in range(2):
        assert compose_own([*job, old], [*job, old]) == compose([*job, new])
    assert [line.message for line in caplog.records if "called" in line.message] == [
        f"{says}; the old name ends with 0.2.0"
    ]


ESCAPED = [
    "run_name=${oc.env:SECRET}",
    r"run_name=$\{oc.env\:SECRET\}",
    r"run-name=a$\{oc.env\:SECRET\}b",
    r"task.data_dir=$\{oc.env\:SECRET\}",
    r"class-names=[$\{oc.env\:SECRET\},b]",
    "class-names=['${oc.env:SECRET}',b]",
    r"device='\${oc.env:SECRET}'",
    r"device=\${oc.env:SECRET}",
    r"device=\\${oc.env:SECRET}",
    'device="${oc.env:SECRET}"',
    r"device=$\{oc.decode\:$\{oc.env\:SECRET\}\}",
    r"run_name={a:$\{oc.env\:SECRET\}}",
    r"rounds=$\{oc.env\:SECRET\}",
    r"model.weights=$\{model.name\}",
    r"model=$\{oc.env\:SECRET\}",
    r"preset=$\{oc.env\:SECRET\}",
    r"$\{oc.env\:SECRET\}=1",
    "runs_dir=str(oc)",
    "rounds=int(2)",
    "rounds=choice(1,2)",
    "class-names=glob(*)",
    "class-names=shuffle([a,b])",
    "rounds=1,2",
    "hydra.run.dir=/tmp",
    "hydra/launcher=basic",
    "hydra.searchpath=[/etc]",
    "+task=mnist",
    "++rounds=3",
    "~rounds=1",
    "task@task=mnist",
    "model=../task/mnist",
    "run_name=" + "[" * 5000 + "]" * 5000,
    "class-names=[" + ",".join("a" * 20_000) + "]",
]


@pytest.mark.sampled(1, "attack")
@pytest.mark.parametrize("given", ["typed", "overrides", "plain"])
@pytest.mark.parametrize("attack", ESCAPED, ids=lambda attack: attack[:40])
def test_what_a_server_sends_reads_nothing_of_the_institutions_machine(attack, given, monkeypatch):
    monkeypatch.setenv("SECRET", "what-nobody-may-know")
    key, _, value = attack.partition("=")
    run_config = {"task": "folder", **({"overrides": shlex.quote(attack)} if given == "overrides" else {key: value})}
    with pytest.raises(ConfigError) as refused:
        compose(["task=folder", attack]) if given == "typed" else from_run_config(run_config)
    assert "what-nobody-may-know" not in str(refused.value)
    assert len(str(refused.value)) < 2000
    assert "\n" not in str(refused.value)


def test_escapes_within_quotes_are_text():
    """Hydra unescapes nothing but quotes there; no name of a variable is looked up."""
    assert compose([r"run_name='$\{oc.env:HOME}'"]).run_name == r"$\{oc.env:HOME}"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("model.width=1000000", "model.width must be at most 4096; got 1000000"),
        ("task.size=100000", "task.size must be at most 8192; got 100000"),
        ("task.size=8192 task.channels=2", "must be at most 67,108,864; got 2 x 8192 x 8192"),
        ("task.channels=10000000", "task.channels must be at most 65536; got 10000000"),
        ("task.classes=1000000", "task.classes must be at most 4096; got 1000000"),
        ("task.mean=[nan] task.std=[1]", "task.mean and task.std must be finite numbers; got [nan] and [1.0]"),
        ("task.mean=[nan]", "task.mean and task.std must be finite numbers; got [nan] and []"),
        ("task.mean=[0.1] task.std=[inf]", "must be finite numbers; got [0.1] and [inf]"),
        ("batch-size=99999999999", "training.batch-size must be at most 1000000; got 99999999999"),
        ("rounds=99999999999", "rounds must be at most 1000000; got 99999999999"),
        ("nodes=99999999999", "nodes must be at most 10000; got 99999999999"),
        ("threads=500", "threads must be at most 256; got 500"),
        ("seed=9999999999999999999", "seed must be a number of fewer than 19 digits"),
        ("lr=1" + "0" * 400, "training.lr must be a number of fewer than 19 digits"),
        ("strategy=cwt replay=vqvae2 timeout=300", "piece-seconds must be below timeout, since a message must be"),
        ("timeout=inf", "timeout must be positive, in seconds, and at most a year; got inf"),
        ("wait=1e300", "wait must not be negative, in seconds, and at most a year; got 1e+300"),
        ("generator.width=100000", "generator.width must be at most 4096"),
        ("generator.dim=100000", "generator.dim must be at most 4096"),
        ("generator.blocks=1000", "generator.blocks must be at most 100"),
        ("generator.batch-size=99999999999", "generator.batch-size must be at most 1000000"),
        ("generator.epochs=99999999999", "generator.epochs must be at most 1000000"),
        ("prior.width=100000", "prior.width must be at most 4096"),
        ("prior.layers=100000", "prior.layers must be at most 100"),
        ("prior.bins=100000", "prior.bins must be at most 4096"),
        ("encoder-epochs=99999999999", "strategy.encoder-epochs must be at most 1000000"),
        ("upload-views=99999999999", "strategy.upload-views must be at most 1000"),
        ("strategy=fedavg local-epochs=99999999999", "strategy.local-epochs must be at most 1000000"),
        ("strategy=splitnn micro-batches=99999999999", "strategy.micro-batches must be at most 1000000"),
        ("strategy=proxyfl private-epochs=99999999999", "strategy.private-epochs must be at most 1000000"),
        (
            "strategy=cwt dp=classifier target-epsilon=1e-9",
            "or at least 0.001; below that, delta alone says what leaks",
        ),
        ("strategy=cwt dp=classifier epsilon=1e-9", "privacy.epsilon must be 0, for none, or at least 0.001"),
        ("run-name='a\x1bb'", "run-name must be on one line, without control characters"),
    ],
)
def test_numbers_have_bounds(options, says):
    with pytest.raises(ConfigError) as refused:
        compose(shlex.split(options, posix=False))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_hyphens_short_keys_and_sections_are_the_same_option():
    configs = [
        compose([f"{key}=5"])
        for key in ("strategy.encoder_epochs", "strategy.encoder-epochs", "encoder_epochs", "encoder-epochs")
    ]
    assert {config.strategy.encoder_epochs for config in configs} == {5}
    assert len(set(configs)) == 1
    assert compose(["evaluate-every=3"]).evaluate_every == 3


def test_a_later_override_wins_and_a_choice_may_come_last():
    assert compose(["rounds=3", "rounds=4"]).rounds == 4
    assert compose(["order=shuffled", "strategy=cwt"]).strategy.order == "shuffled"
    assert compose(["strategy=local", "strategy=cwt"]).strategy.name == "cwt"


@pytest.mark.parametrize(
    "pair",
    [
        ["rounds=1", "rounds=2"],
        ["lr=0.1", "training.lr=0.2"],
        ["batch_size=8", "training.batch-size=16"],
        ["strategy.local-epochs=1", "strategy=fedavg", "local_epochs=2"],
        ["task=digits", "task=mnist"],
        ["model=a:b", "model=cnn"],
    ],
)
def test_a_person_gives_an_option_one_value(pair, tmp_path):
    with pytest.raises(ConfigError, match=f"an option has one value; got '{pair[0]}' and '{pair[-1]}': remove one"):
        resolve(pair, str(tmp_path), "")


@pytest.mark.parametrize(
    ("words", "faults"),
    [
        ("strategy=fedstats dim=64", ["'dim=64' is generator.dim, for replay="]),
        ("preset=private nodes=9 dropouts=3", ["choose fewer dropouts"]),
        ("nodes=9 dropouts=3", ["are for noise=shared"]),
    ],
)
def test_what_is_wrong_is_said_once(words, faults, tmp_path):
    with pytest.raises(ConfigError) as refused:
        resolve(words.split(), str(tmp_path), "")
    assert [fault for fault, text in zip(faults, refused.value.args, strict=True) if fault in text] == faults


def test_the_same_value_twice_and_other_options_of_the_same_name_are_taken(tmp_path):
    words = ["rounds=2", "generator=vqvae2", "strategy=cwt", "replay=vqvae2", "width=4", "generator.width=8"]
    _, config = resolve([*words, "rounds=2"], str(tmp_path), "")
    assert (config.rounds, config.model.width, config.generator.width) == (2, 4, 8)
    assert resolve(["rounds=3", "lr=0.5"], str(tmp_path), "", ["strategy=cwt", "rounds=2"])[1].rounds == 3


@pytest.mark.parametrize(
    "text", ["rounds=1_0", "lr=0_1.5", "lr=1e-1_0", "class-names=[1_0,2]", "run-name=2024_01", "lr=1e-400", "lr=1e400"]
)
def test_a_number_is_the_one_that_is_written(text):
    key, _, value = text.partition("=")
    with pytest.raises(ConfigError, match=f"value of {key} must be a number, .*; got '{re.escape(value)}': quote any"):
        compose([text])


def test_words_may_look_much_like_numbers():
    for name in ("1_a", "a_1", "v1.2_3", "'1_0'", '"1e400"', r"'it\'s 1_0'", "_1", "1_"):
        assert compose([f"run-name={name}"]).run_name == name.strip("'\"").replace("\\", "")


def test_names_of_classes_are_texts_even_where_they_look_like_numbers():
    assert compose(["task=folder", "class-names=[0,1]"]).task.class_names == ("0", "1")


TEXTS = ("", "it's", 'say "no"', "back\\slash", "ends in \\", "\\\\", "\\' both", "a, b", "[x]", "{y: 1}", "a=b")
TEXTS += ("1e3", "007", "null", "true", "$x", "{rounds}", "#", "ü ß")


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=8).filter(
    lambda t: "${" not in t
)


def there_and_back(config, folder):
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    return compose(overrides_of(folder / "config.yaml"))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("strategy", choices("strategy"))
def test_a_written_configuration_composes_to_itself(strategy, tmp_path):
    overrides = ["task=folder", 'class-names=[well, "it\'s, ill"]', "model=resnet18", "partition=dirichlet"]
    overrides += ["lr=1e-05", "seed=7", "download=true", "device='cuda:1'"]
    config = compose([f"strategy={strategy}", *overrides])
    assert config.task.class_names == ("well", "it's, ill")
    assert there_and_back(config, tmp_path) == config
    assert config.run_name == ""


@pytest.mark.parametrize("words", [["model=lite0"], ["model=timm", "model.name=resnet18.a1_in1k", "model.train=head"]])
def test_a_library_is_chosen_and_the_architecture_is_an_option(words, tmp_path):
    config = compose(words)
    assert config.model.library == "timm"
    assert there_and_back(config, tmp_path) == config
    for wrong in ("model.library=timm", "model=cnn"):
        with pytest.raises(ConfigError, match=r"unknown option 'model\.(library|name)'"):
            compose(["model=timm", "model.name=resnet18", wrong])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("preset", "task"), [(path.parent.name, path.stem) for path in conf_dir().glob("preset/*/*.yaml")]
)
def test_so_does_that_of_every_preset(preset, task, tmp_path):
    """Options that a preset has for one method only must not come back from another preset's."""
    chosen = [] if task == "default" else ["task=mine:load" if task == "own" else f"task={task}"]
    methods = 0
    for strategy in ("proxyfl", "fml", "fedavg", "fedsgd", "fedstats"):  # presets have options of their own for these
        try:
            config = compose([f"preset={preset}", *chosen, f"strategy={strategy}"])
        except ConfigError:  # a method that does not fit the task
            continue
        assert there_and_back(config, tmp_path) == config
        methods += 1
    assert methods


@settings(max_examples=5)
@given(drawn=st.lists(WORDS, max_size=30))
def test_every_text_comes_back_as_it_was(drawn, tmp_path_factory):
    texts = tuple({spelled(text): text for text in (*drawn, *TEXTS)}.values())
    config = compose(["strategy=cwt", "task=folder"])
    config = replace(config, run_name=texts[-1], task=replace(config.task, classes=len(texts), class_names=texts))
    assert there_and_back(config, tmp_path_factory.getbasetemp()) == config


def test_what_is_planned_is_what_institutions_compose(tmp_path, monkeypatch):
    """A command line is composed here, its overrides again at every institution."""
    monkeypatch.chdir(tmp_path)
    files = ["task.data_dir=d", "task.channels=1", "task.classes=2", "topology=file", "topology_file='a b.npy'"]
    overrides, config = resolve(["strategy=avgpush", "task=folder", *files], "runs", "")
    assert compose(overrides) == config
    assert (config.nodes, config.strategy.topology_file) == (4, str(tmp_path / "a b.npy"))
    assert config.task.data_dir == str(tmp_path / "d")


def test_flowers_run_config_says_the_same():
    run_config = {"strategy": "cwt", "task": "", "nodes": 0, "seed": 3, "runs-dir": "", "lr": 0.5, "drop": True}
    run_config["overrides"] = "order=shuffled task.data_dir='/a b' rounds=2"
    words = ["strategy=cwt", "seed=3", "lr=0.5", "drop=true", "order=shuffled", "data-dir='/a b'", "rounds=2"]
    assert from_run_config(run_config) == compose(words)
    assert from_run_config({}) == compose([])


def test_a_zero_is_a_value_where_a_studys_file_need_not_give_one():
    sent = {"strategy": "proxyfl", "alpha": 0, "beta": 0, "momentum": 0, "nodes": 0, "rounds": 0, "seed": 0}
    config = from_run_config(sent)
    assert (config.strategy.alpha, config.strategy.beta, config.training.momentum) == (0, 0, 0)
    assert config.rounds == compose([]).rounds
    with pytest.raises(ConfigError, match="batch-size must be at least 1; got 0"):
        from_run_config({"batch-size": 0})


def test_overrides_win_over_plain_keys_and_must_be_words():
    assert from_run_config({"rounds": 5, "overrides": "rounds=2"}).rounds == 2
    with pytest.raises(ConfigError, match=r"overrides must be quoted as in a shell; got \"seed='1\""):
        from_run_config({"overrides": "seed='1"})


def test_the_same_choices_in_other_words_are_composed_once(monkeypatch):
    composed, words = [], ["strategy=cwt", "task=retina", "preset=quick"]
    monkeypatch.setattr(
        composing, "_hydra", lambda chosen, hydra=composing._hydra: composed.append(chosen) or hydra(chosen)
    )
    monkeypatch.setattr(composing, "_default", {})
    composing._unset.cache_clear()
    composing._compose.cache_clear()
    first = compose(words)
    spelled = [
        f"{group}={getattr(first, group).name}" for group in ("model", "partition", "replay", "generator", "prior")
    ]
    assert compose([*spelled, *reversed(words)]) == first
    assert len(composed) == 1
    own = compose([*words, "model=mlp"])  # not what stands without a choice
    assert (own.model.name, len(composed)) == ("mlp", 2)
    composing._unset.cache_clear()
    monkeypatch.setattr(composing, "_default", {})  # nothing is known, so nothing is left out
    assert compose(["rounds=10", *spelled, *words]) == compose(["rounds=10", *words])
    assert len(composed) == 4
