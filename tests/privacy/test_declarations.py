"""A third party's strategy is known by what it declares, whatever its options are called; the rest is refused."""

import importlib
import json
import shutil
import sys

import pytest
from harness import write_shards
from hostile_server import HostileServer, refusal, weights

from flwr_replay.check import check_strategy
from flwr_replay.config import catalogue
from flwr_replay.config import compose as composing
from flwr_replay.config.compose import compose
from flwr_replay.engines.simulate import Simulation, simulate
from flwr_replay.errors import ConfigError
from flwr_replay.forecast.forecast import forecast
from flwr_replay.payloads.common import Train
from flwr_replay.privacy.accounting import rounded_up
from flwr_replay.privacy.plan import Passes, PrivacyPlan
from flwr_replay.report.progress import Display

STRATEGY = '''"""Sweeping.

Idea: averages after some sweeps.
Travels: weights.
"""

from dataclasses import dataclass
from typing import ClassVar

from flwr_replay.config import StrategyConfig, Traits
from flwr_replay.movements.parallel import Parallel, weighted_mean
from flwr_replay.payloads.common import Train
from flwr_replay.wire.records import opened


@dataclass(frozen=True, kw_only=True)
class {Name}Config{base}:
    name = "{name}"
    traits = Traits(dp_mechanisms=("classifier",))
    sweeps: int = 3
{declared}

class {Name}(Parallel):
    config_type = {Name}Config

    def train_request(self, exchange, arrays):
        run = self.settings.run
        return Train(exchange=exchange, arrays=arrays, run=run, lr=0.1, local_epochs=self.config.sweeps)

    def combine(self, answers):
        return weighted_mean([opened(answer.arrays) for answer in answers], [answer.num_examples for answer in answers])
'''
CLIENT = '''"""The institution's half."""

from flwr_replay.institution.client import InstitutionClient


class {Name}Client(InstitutionClient):
    def train(self, visit):
        data, learner = self.training_data(), self.learner(visit)
        for _ in range(visit.local_epochs):
            for x_B, y_B in learner.batches(data, self.shuffle(visit.exchange)):
                learner.step(x_B, y_B)
        return self.trained(visit, learner, len(data))
'''
DECLARED = """
    def dp_passes(self, rounds):
        return {"classifier": %s}
"""
DP = ["task=digits", "model=mlp", "nodes=3", "partition=iid", "rounds=2", "device=cpu", "dp=classifier"]
GROUP = ["dp=classifier", "model.norm=group", "noise=seeded"]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return what installs a strategy of somebody else's under a name: in the packages' paths, and in conf/."""
    conf = tmp_path / "conf"
    shutil.copytree(catalogue.conf_dir(), conf)
    for module in (catalogue, composing):
        monkeypatch.setattr(module, "conf_dir", lambda: conf)
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    modules = []

    def installed(name, passes="", base="(StrategyConfig)", change=("", "")):
        words = {"name": name, "Name": name.capitalize(), "base": base, "declared": DECLARED % passes if passes else ""}
        (conf / "strategy" / f"{name}.yaml").write_text(f"name: {name}\nsweeps: 3\n")
        for half, text in (("strategies", STRATEGY), ("clients", CLIENT)):
            (tmp_path / half).mkdir(exist_ok=True)
            (tmp_path / half / f"{name}.py").write_text(text.format(**words).replace(*change))
            package = importlib.import_module(f"flwr_replay.{half}")
            monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / half)])
            modules.append(f"flwr_replay.{half}.{name}")
        return f"strategy={name}"

    yield installed
    for module in modules:
        sys.modules.pop(module, None)


@pytest.mark.sampled(2, of="slow learning")
def test_passes_under_another_name_are_planned_charged_and_forecast(install, tmp_path):
    overrides = [install("sweeping", "rounds * self.sweeps"), *DP, "target-epsilon=2", f"runs_dir={tmp_path}/runs"]
    run = Simulation.of(compose(overrides))
    plan, examples = run.job.settings.privacy, len(run.partition.train[0])
    twin, once = (PrivacyPlan.of(compose(["strategy=fedavg", *overrides[1:], f"local_epochs={e}"])) for e in (3, 1))
    assert plan.passes == twin.passes == (Passes("classifier", 6, 32),)
    assert plan.cost("classifier", examples, 6) == twin.cost("classifier", examples, 6)  # sigma among them
    assert plan.cost("classifier", examples, 6).sigma > once.cost("classifier", examples, 6).sigma

    expected = {line.institution: line.protection for line in forecast(run) if line.protection.endswith("-DP")}
    result, folder = simulate(run, overrides, Display())
    for name, own in zip(run.partition.names, run.partition.train, strict=True):
        account = tmp_path / "home" / "state" / "simulation" / name / "runs" / (folder / "run-id").read_text().strip()
        charges = [json.loads(line) for line in (account / "privacy.jsonl").read_text().splitlines()]
        assert sum(charge["steps"] for charge in charges) == 2 * 3 * (len(own) // 32)
        stated = result["privacy"][name]
        assert stated["proven"] is True
        assert stated["epsilon"] == pytest.approx(plan.planned(len(own))[0])
        assert 1.9 < stated["epsilon"] <= 2
        assert expected[name] == f"({rounded_up(stated['epsilon'])}, {rounded_up(stated['delta'], 2)})-DP"


def test_it_keeps_the_contract(install):
    install("keeping", "rounds * self.sweeps")
    check_strategy("keeping")


def test_passes_that_are_not_those_that_are_made_break_the_contract(install):
    install("lying", "rounds")
    with pytest.raises(AssertionError, match=r"dp_passes must be .*; 2 of classifier are .* steps, .* was charged for"):
        check_strategy("lying")


PLAIN = """learner.optimizer.zero_grad()
                self.task.loss(learner.model(x_B), y_B).backward()
                learner.optimizer.step()
"""


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("plain", ("learner.step(x_B, y_B)\n", PLAIN)),
        ("partly", ("learner.step(x_B, y_B)\n", "learner.step(x_B, y_B)\n                break\n")),
    ],
)
def test_a_method_that_does_not_take_the_steps_it_was_charged_for_breaks_the_contract(install, name, change):
    install(name, "rounds * self.sweeps", change=change)
    with pytest.raises(
        AssertionError, match=r"takes every step that was charged .*; of classifier \d+ of \d+ were not"
    ):
        check_strategy(name)


MEAN = "return weighted_mean("
KEEPING = """self.before = getattr(self, "before", 0.0) + 0.01  # outside state and restore
        return {name: array + array.dtype.type(self.before) for name, array in self.mean(answers).items()}

    def mean(self, answers):
        return weighted_mean("""
DECLARATION = "    sweeps: int = 3\n"


@pytest.mark.parametrize(
    ("name", "change", "rule"),
    [
        ("half", ("rounds * self.sweeps", "rounds * 1.5"), "dp_passes must be whole numbers"),
        ("typo", ('{"classifier": rounds', '{"clasifier": rounds'), "dp_passes must have names among .*'clasifier'"),
        ("untyped", ("Traits(dp", "Traits(pooled='no', dp"), "pooled must be a bool; got 'no'"),
        (
            "apart",
            (DECLARATION, DECLARATION + "    pooled = True\n"),
            r"ApartConfig states pooled .*Traits\(pooled=True\)",
        ),
        ("late", ("    config_type", "    mixes = True\n    config_type"), r"Late states mixes .*Traits\(mixes=True\)"),
        ("keep", (DECLARATION, DECLARATION + "    classifiers = 'keep'\n"), "classifiers must be one of .*'keep'"),
        ("sure", (DECLARATION, DECLARATION + "    unproven = True\n"), "unproven must be a sentence or None"),
        ("filed", (DECLARATION, DECLARATION + "    files = ('nothing',)\n"), "files must have names among sweeps"),
        ("unset", (DECLARATION, DECLARATION + "    more: int = 1\n"), "must have the options of the config; .*'more'"),
        ("text", ('("classifier",)', '("classifier")'), "dp_mechanisms must be a tuple"),
        ("named", ('name = "named"', 'name = "other"'), "must have the strategy's name"),
        ("quiet", ("Travels: ", "Sends: "), "must have its Idea: and what Travels:"),
        (
            "mindful",
            (MEAN, KEEPING),
            r"a resumed run .*; \S+\.weight differs: what a server keeps needs state and rest",
        ),
    ],
)
def test_a_wrong_declaration_or_undeclared_state_breaks_the_contract(install, name, change, rule):
    install(name, "rounds * self.sweeps", change=change)
    with pytest.raises(AssertionError, match=rule):
        check_strategy(name)


@pytest.mark.parametrize(
    ("name", "rule"), [("fedavgg", "did you mean fedavg"), ("nobody", "has a file strategies/nobody.py")]
)
def test_a_name_without_a_strategy_is_one_line(name, rule):
    with pytest.raises(AssertionError, match=rule):
        check_strategy(name)


@pytest.mark.parametrize(("name", "passes"), [("silent", ""), ("idle", "0")])
def test_a_mechanism_without_passes_is_refused_in_one_line(install, tmp_path, name, passes):
    overrides = [install(name, passes), *DP]
    with pytest.raises(
        ConfigError, match=rf"strategy={name} with these options can have dp=none; got classifier:"
    ) as refused:
        Simulation.of(compose(overrides))
    assert "\n" not in str(refused.value)
    with pytest.raises(AssertionError, match=r"must have every mechanism .*; missing: classifier"):
        check_strategy(name)
    assert Simulation.of(compose([*overrides[:-1], "dp=none"])).job.settings.privacy is None


def test_an_institution_refuses_it_too(install, tmp_path):
    write_shards(tmp_path, {"a": 40})
    task = ["task=medmnist", "task.size=8", "classes=3", "model=mlp", "model.width=6", "device=cpu", "dp=classifier"]
    server = HostileServer(tmp_path, install("mute"), *task)
    reply = server.send(Train(arrays=server.weights, run="undeclared", lr=0.1))
    assert refusal(reply) == "ConfigError; the institution's own log says more"
    assert not weights(reply)
    assert not server.charges("undeclared")


def test_options_that_declare_nothing_are_refused_in_one_line(install):
    with pytest.raises(ConfigError, match=r"let StrangeConfig in .*strange\.py extend .*StrategyConfig") as refused:
        compose([install("strange", base="")])
    assert "\n" not in str(refused.value)
