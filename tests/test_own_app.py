"""Every strategy in a user's own Flower app, in the way that the table of docs/flower.md says."""

import logging
import re
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.superlink.grid import HttpGrid
from grid import Grid
from torch import nn

from flwr_replay.client_app import app_with
from flwr_replay.clients.proxyfl import ProxyFLClient
from flwr_replay.config.catalogue import choices
from flwr_replay.config.compose import compose
from flwr_replay.config.halves import load_client, load_strategy
from flwr_replay.config.privacy import PrivacyConfig
from flwr_replay.config.sections import ReplayConfig, TrainingConfig
from flwr_replay.engines.inline import InlineGrid
from flwr_replay.errors import ConfigError, RunError, WireError
from flwr_replay.files.atomic import home
from flwr_replay.generators.autoencoder import VQVAE2Config
from flwr_replay.generators.base import ImageForm
from flwr_replay.generators.pixelcnn import PixelCNNConfig
from flwr_replay.generators.synthesis import SynthesisPlan
from flwr_replay.institution.owner import Institution
from flwr_replay.movements.base import Settings
from flwr_replay.payloads.common import Train
from flwr_replay.privacy.plan import Passes, PrivacyPlan
from flwr_replay.report.progress import Display
from flwr_replay.runs.execute import execute
from flwr_replay.serve import serve, serving
from flwr_replay.server.answers import check_foreign
from flwr_replay.server.asking import failure_of
from flwr_replay.strategies.cwt import CWT
from flwr_replay.strategies.fedprox import FedProx
from flwr_replay.strategies.proxyfl import ProxyFL
from flwr_replay.tasks import Classification

DOCS = Path(__file__).parent.parent / "docs"
TABLE = re.findall(r"^\| ((?:`\w+`,? ?)+)\| ([^|]+?) \|", (DOCS / "flower.md").read_text(), re.M)
ROWS = {name: way for names, way in TABLE for name in re.findall(r"\w+", names)}
ANY, MOD, SERVE = "as it is", "with `serving`", "`serve`"
NODES = 2
TRAINING = TrainingConfig(lr=0.05, batch_size=64)
TASK = Classification(classes=10)
SYNTHESIS = SynthesisPlan(
    VQVAE2Config(name="vqvae2", width=4, lr=2e-3, lr_halving=0, epochs=1),
    PixelCNNConfig(name="pixelcnn", width=4, layers=1, epochs=1),
    ImageForm(channels=1, size=8, classes=10),
    ReplayConfig(images=16),
)
PRIVACY = PrivacyPlan(PrivacyConfig(dp="classifier"), (Passes("classifier", 2, 64),))
CUT = {"fedreplay": {"cut": "conv1"}, "splitnn": {"cut": "conv1"}}
DRAWS = ("feder", "syncentral")


@pytest.fixture
def own(monkeypatch, tmp_path):
    """The model, data and plain ClientApp of the example that changes nothing in them."""
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(DOCS / "examples" / "cwt"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield import_module("task"), import_module("client_app")
    torch.set_num_threads(threads)
    for name in ("task", "client_app"):
        sys.modules.pop(name)


def app_by(name, own, way):
    """Return a ClientApp of one of the three ways."""
    task, plain = own

    def make_client(context):
        number = context.node_config["partition-id"]
        owned = Institution.from_arrays(f"hospital-{number}", *task.load_data(number, 4))
        synthesis = SYNTHESIS if name in DRAWS else None
        return load_client(name)(owned, task.net, TASK, TRAINING, synthesis=synthesis)

    if way == SERVE:
        return serve(make_client)
    app = ClientApp(mods=[serving(make_client)] if way == MOD else [])
    app.train()(plain.train)
    app.evaluate()(plain.evaluate)
    return app


def strategy_of(name, own, **settings):
    kind, options = load_strategy(name)
    used = {"nodes": NODES, "model": own[0].net, "task": TASK, "training": TRAINING, "input_shape": (1, 8, 8)}
    used |= {"synthesis": SYNTHESIS} if name in DRAWS else {}
    return kind(options(**CUT.get(name, {})), Settings(**used | settings))


def start(strategy, own, app, **more):
    grid = Grid.simulated(app, {"local-epochs": 1}, NODES)
    first = ArrayRecord(own[0].net().state_dict())
    result = strategy.start(grid, first, num_rounds=2, train_config=ConfigRecord({"lr": 0.05}), **more)
    return result, grid


def test_the_table_has_every_strategy():
    assert set(ROWS) == set(choices("strategy"))
    assert set(ROWS.values()) == {ANY, MOD, SERVE}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", choices("strategy"))
def test_a_strategy_runs_as_the_table_says(name, own):
    way = ROWS[name]
    strategy = strategy_of(name, own, roll_call=way == SERVE)
    result, grid = start(strategy, own, app_by(name, own, way))
    assert strategy.recorder.failures == []
    assert set(result.evaluate_metrics_clientapp) == {1, 2}  # rounds, not exchanges
    assert way == SERVE or not grid.of("roll-call")
    assert not any(reply.has_error() for _, _, reply in grid.log)  # nothing that a node would log as an error
    names = [member.name for member in strategy.members]
    assert names == (["hospital-0", "hospital-1"] if way == SERVE else ["node-1", "node-2"])


@pytest.mark.parametrize("name", [name for name, way in ROWS.items() if way == SERVE])
def test_a_strategy_says_what_it_needs(name, own):
    with pytest.raises(ConfigError, match=r"needs \w+Client at every institution, app = serve\(make_client\)"):
        start(strategy_of(name, own), own, app_by(name, own, ANY))


@pytest.mark.parametrize("asked", [{"external": True}, {"forgetting": True}, {"privacy": PRIVACY}])
def test_what_a_plain_app_would_silently_leave_out_is_refused(asked, own):
    with pytest.raises(ConfigError, match="CWT needs CWTClient"):
        start(strategy_of("cwt", own, **asked), own, app_by("cwt", own, ANY))


def test_a_plain_app_among_those_of_proxyfl_is_left_out_with_the_reason(own):
    with pytest.raises(RunError, match="runs a ClientApp of its own, and ProxyFL needs ProxyFLClient"):
        start(strategy_of("proxyfl", own, roll_call=True), own, app_by("proxyfl", own, ANY))


def test_a_plain_app_takes_no_part_under_dp(own):
    with pytest.raises(RunError, match="runs a ClientApp of its own, and CWT needs CWTClient"):
        start(strategy_of("cwt", own, roll_call=True, privacy=PRIVACY), own, app_by("cwt", own, ANY))


@pytest.mark.parametrize("name", ["epsilon", "a\nb", "a/b", "", "x" * 81])
def test_a_foreign_metric_has_a_plain_name_and_none_of_ours(name):
    answer = RecordDict({"metrics": MetricRecord({"num-examples": 3, name: 0.5})})
    with pytest.raises(WireError, match="a metric's name has letters"):
        check_foreign(answer, RecordDict(), trained=False)


def test_the_server_cannot_test_a_model_that_it_has_not(own):
    app, own_test = app_by("local", own, SERVE), {"evaluate_fn": lambda number, arrays: None}
    with pytest.raises(ConfigError, match="evaluate_fn needs a global model; Local has none"):
        start(strategy_of("local", own, roll_call=True), own, app, **own_test)


def test_the_server_tests_by_rounds(own):
    asked = []
    start(
        strategy_of("cwt", own), own, app_by("cwt", own, ANY), evaluate_fn=lambda number, arrays: asked.append(number)
    )
    assert asked == [0, 1, 2]  # as Flower's strategies do


@pytest.mark.parametrize("name", ["fedavg", "cwt"])
def test_metrics_of_a_users_own_app_keep_their_names(name, own, caplog):
    caplog.set_level(logging.INFO, "flwr")
    plain, app = own[1], ClientApp()

    @app.train()
    def train(msg, context):
        reply = plain.train(msg, context)
        number = context.node_config["partition-id"]
        reply.content["metrics"]["train_acc"], reply.content["metrics"]["num-examples"] = float(number), 1 + 2 * number
        return reply

    app.evaluate()(plain.evaluate)
    result, _ = start(
        strategy_of(name, own), own, app, evaluate_fn=lambda number, arrays: MetricRecord({"kept": number})
    )
    assert set(result.train_metrics_clientapp[2]) == {"train_loss", "train_acc"}
    # FedAvg weighs by examples, 1 and 3; CWT's visits are two exchanges
    assert result.train_metrics_clientapp[2]["train_acc"] == {"fedavg": 0.75, "cwt": 0.5}[name]
    assert "round 2, evaluate_fn: kept 2" in caplog.text


def test_a_run_without_rounds_is_refused(own):
    grid = Grid.simulated(app_by("cwt", own, ANY), {"local-epochs": 1}, NODES)
    with pytest.raises(ConfigError, match="num_rounds must be at least 1; got 0"):
        strategy_of("cwt", own).start(grid, ArrayRecord(own[0].net().state_dict()), num_rounds=0)


def test_fedprox_says_once_what_an_app_must_add(own, caplog):
    caplog.set_level(logging.INFO, "flwr")
    start(strategy_of("fedprox", own), own, app_by("fedprox", own, ANY))
    assert sum("if it ignores proximal-mu" in record.message for record in caplog.records) == 1


def test_one_reason_of_several_nodes_is_said_once_and_all_reasons_at_the_end(own, caplog):
    app = ClientApp()

    @app.train()
    def train(message, context):
        number = context.node_config["partition-id"]
        raise ValueError("no memory" if number == 1 else "no such column")

    grid, first = Grid.simulated(app, {}, 4), ArrayRecord(own[0].net().state_dict())
    with pytest.raises(RunError) as ended:
        strategy_of("fedavg", own, nodes=4).start(grid, first, num_rounds=2)
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.rsplit(": ")[-1] for line in messages[:2]] == ["no such column", "no memory"]
    assert messages[2:] == ["in exchange 1 the reason of node-1 is also that of node-3, node-4"]
    assert str(ended.value).count("no such column") == str(ended.value).count("no memory") == 1


@pytest.mark.parametrize(
    ("mistaken", "message"),
    [
        (lambda: CWT(Settings(nodes=2)), r"CWT takes its options, .*got Settings as its options: give CWTConfig"),
        (lambda: CWT(fraction_evaluate=1.0), r"CWT takes options, settings= .*got fraction_evaluate: write CWT"),
        (lambda: ProxyFL(min_available_nodes=2), r"got min_available_nodes: write ProxyFL\(ProxyFLConfig"),
        (lambda: FedProx(0.01), r"got float as its options: give FedProxConfig"),
        (lambda: CWT(settings={"nodes": 2}), r"got settings=dict: give Settings"),
        (lambda: Settings(nodes="2"), r"nodes=…\) must be of type int; got '2' of type str"),
        (lambda: Settings(training={"lr": 1}), "must be of type TrainingConfig; got"),
        (lambda: Settings(node=2), r"Settings has no node=: did you mean nodes\?"),
        (lambda: Settings(model=nn.Sequential(nn.Flatten())), "what builds it: .*got a Sequential that is built"),
        (lambda: Settings(model=Net), "what builds it: .*got Net: write"),
        (lambda: Settings(model="Net"), "what builds it: .*got 'Net' of type str: write"),
        (lambda: ProxyFLClient(None, Net, TASK), r"what builds it: .*got Net: write .*return Net\("),
    ],
)
def test_a_mistaken_argument_is_refused_at_once(mistaken, message):
    with pytest.raises(ConfigError, match=message):
        mistaken()


class OfSeed(nn.Linear):
    """A network whose one argument is a seed."""

    def __init__(self, seed):
        super().__init__(seed, 1)


@pytest.mark.parametrize(
    ("model", "width"),
    [
        (lambda: nn.Linear(2, 1), 2),
        (lambda width=3: nn.Linear(width, 1), 3),
        (lambda n: nn.Linear(n, 1), 5),
        (OfSeed, 5),
    ],
)
def test_a_builder_is_given_a_seed_only_where_it_asks_for_one(model, width):
    assert Settings(model=model).model(5).in_features == width


class Net(nn.Module):
    """Of two sizes, which only its user knows."""

    def __init__(self, width, classes):
        super().__init__()


def test_training_that_differs_is_refused_before_anyone_trains(own):
    other = TrainingConfig(optimizer="adam", lr=0.05, batch_size=64)
    with pytest.raises(RunError, match=r"must have the same training; .*optimizer='sgd'.*: give the same"):
        start(strategy_of("fedavg", own, roll_call=True, training=other), own, app_by("fedavg", own, SERVE))


def test_proxies_without_noise_and_a_replaced_learning_rate_are_said_once(own, caplog):
    caplog.set_level(logging.INFO, "flwr")
    strategy = strategy_of("fml", own, roll_call=True)
    grid = Grid.simulated(app_by("fml", own, SERVE), {}, NODES)
    strategy.start(grid, ArrayRecord(own[0].net().state_dict()), num_rounds=1, train_config=ConfigRecord({"lr": 0.01}))
    for message in (
        "they are trained without noise, and have no epsilon",
        "lr=0.01 of train_config replaces training.lr=0.05",
    ):
        assert sum(message in record.message for record in caplog.records) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["proxyfl", "fml", "local"])
def test_where_private_models_are_is_said_once_and_they_load_as_the_page_shows(name, own, caplog):
    caplog.set_level(logging.INFO, "flwr")
    result, _ = start(strategy_of(name, own, roll_call=True), own, app_by(name, own, SERVE))
    (message,) = [record.message for record in caplog.records if "private models stay" in record.message]
    run, key = re.search(r"state/NAME/runs/(run-\w+)/(\w+)-…\.safetensors", message).groups()
    shown = re.search(r"(?s)```python\n(from safetensors.*?)```", (DOCS / "flower.md").read_text())[1]
    right = tested = 0
    for number in range(NODES):
        files = (home() / "state" / f"hospital-{number}" / "runs" / run).glob(f"{key}-[0-9]*.safetensors")
        names = {"file": max(files), "net": own[0].net}
        exec(shown if key == "pair" else shown.replace('"model."', '""'), names)
        x, y = own[0].load_data(number, 4)[1]
        right, tested = right + int((names["model"](x).argmax(1) == y).sum()), tested + len(y)
    assert right / tested == pytest.approx(result.evaluate_metrics_clientapp[2]["accuracy"])


def test_all_that_an_app_lacks_is_said_at_once():
    """A deployment of unsaid size, settings, and this package's client; and all arguments of a wrong type."""
    grid = HttpGrid("127.0.0.1:1", insecure=True, token="none")
    with pytest.raises(ConfigError) as raised:
        load_strategy("splitnn")[0]().start(grid, ArrayRecord())
    size, settings, client = raised.value.args
    assert size.startswith("a deployment must say how many")
    assert settings == "SplitNN lacks settings: give Settings(model=…, task=…, input_shape=…)"
    assert client.startswith("SplitNN needs SplitNNClient at every institution")
    with pytest.raises(ConfigError, match=r"nodes=…\) must be of type int.*; also: Settings\(task=…\) must be"):
        Settings(nodes="2", task="digits")


def test_a_deployment_says_how_many_institutions_it_has(own):
    """Flower's grid of a deployment, with nothing at the other end: refused before it is used."""
    grid = HttpGrid("127.0.0.1:1", insecure=True, token="none")
    with pytest.raises(ConfigError, match="a deployment must say how many institutions it waits for; got nodes=0"):
        strategy_of("cwt", own, nodes=0).start(grid, ArrayRecord())


def test_a_node_that_returns_keeps_its_name(own):
    def there(grid):
        return [2, 3] if grid.looks != 3 else [3]

    strategy = strategy_of("fedavg", own)
    grid = Grid.simulated(app_by("fedavg", own, ANY), {"local-epochs": 1}, NODES)
    grid.there = there
    strategy.start(grid, ArrayRecord(own[0].net().state_dict()), num_rounds=3, train_config=ConfigRecord({"lr": 0.05}))
    assert {member.name: member.node_id for member in strategy.members.known} == {"node-1": 2, "node-2": 3}


@pytest.mark.parametrize("name", [name for name, way in ROWS.items() if way == MOD])
def test_a_plain_app_is_told_to_add_the_mod(name, own):
    with pytest.raises(RunError) as end:
        start(strategy_of(name, own), own, app_by(name, own, ANY))
    assert (message := str(end.value)).count("serving(") == 1
    assert re.search(r"node-2: a ClientApp of your own needs ClientApp\(mods=\[serving\(", message)  # first, and once


@pytest.mark.parametrize(
    ("where", "advised"), [("<module 'client_app' from '/first/client_app.py'>", True), ("None", False)]
)
def test_modules_of_another_app_are_said_with_what_to_do(where, advised, own):
    """Ray's nodes import them from the folder in which the SuperLink was started."""
    raised = f"Traceback\nAttributeError: Can't get attribute 'make_client' on {where}"
    grid = Grid.simulated(app_by("cwt", own, ANY), {"local-epochs": 1}, NODES)
    grid.before = lambda grid, message: Message(Error(0, raised), reply_to=message)
    with pytest.raises(RunError) as end:
        strategy_of("cwt", own).start(grid, ArrayRecord(own[0].net().state_dict()), num_rounds=1)
    assert f"Can't get attribute 'make_client' on {where}" in str(end.value)
    assert ("start it in a folder without apps" in str(end.value)) == advised


def test_this_packages_app_says_it_too_and_writes_nothing(tmp_path):
    config = compose(["task=digits", f"runs_dir={tmp_path / 'runs'}"])
    with pytest.raises(ConfigError, match="a deployment must say how many institutions"):
        execute(HttpGrid("127.0.0.1:1", insecure=True, token="none"), config, Display())
    assert not (tmp_path / "runs").exists()


class Reporting(NumPyClient):
    """Reports what a record of metrics can hold, and what it cannot."""

    def evaluate(self, parameters, config):
        held = {"acc": np.float32(0.5), "hits": np.int64(7), "ok": np.bool_(True), "auc": np.array(0.25), "yes": True}
        held |= {"by class": (1, 0.5), "counts": np.array([1, 2]), "tensor": torch.tensor(2.0), "huge": 1e300}
        return np.float32(1.5), np.int64(9), held | {"note": "fine", "none": None, "deep": {"a": 1}, 3: 1.0, "i": 2**63}


def test_metrics_that_records_cannot_hold_are_left_out_and_the_others_arrive(caplog):
    grid = InlineGrid(serve(lambda context: Reporting()), {}, [{}])
    asked = RecordDict({"arrays": ArrayRecord([np.zeros(2)]), "config": ConfigRecord({})})
    reply = grid.answer(Message(asked, 2, "evaluate"))
    assert dict(reply.content["metrics"]) == {
        **{"num-examples": 9, "loss": 1.5, "acc": 0.5, "hits": 7, "ok": 1, "auc": 0.25, "yes": 1},
        **{"by class": [1.0, 0.5], "counts": [1, 2], "tensor": 2.0, "huge": 1e300},
    }
    left_out = [line.getMessage() for line in caplog.records if "left out" in line.getMessage()]
    assert [re.search(r"; (\S+) is a ", line)[1] for line in left_out] == ["'note'", "'none'", "'deep'", "3", "'i'"]


@pytest.mark.parametrize("ours", [True, False])
def test_an_app_with_own_data_answers_no_training_beside_the_masks(own, ours):
    """A hostile server asks for plain weights, as FedAvg does, or as any Flower app understands it."""
    options, asked = "preset=private task=folder channels=1 task.size=8 classes=10", []
    grid = InlineGrid.simulated(app_with(asked.append), {"overrides": options}, 4)
    weights = own[0].net().state_dict()
    content = RecordDict({"arrays": ArrayRecord(weights), "config": ConfigRecord({"lr": 0.1})})
    if ours:
        content = Train(arrays={name: of.numpy() for name, of in weights.items()}, run="r", lr=0.1).encode()
    reply = grid.answer(Message(content, next(iter(grid.get_node_ids())), "train"))
    assert "refused" in failure_of(reply).failure
    assert not asked
