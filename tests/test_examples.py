"""The examples of docs/examples run: in process all of them, one also on Flower's Ray simulation."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.config import flatten_dict
from sklearn import datasets

from flwr_replay.config.compose import from_run_config
from flwr_replay.engines.inline import InlineGrid
from flwr_replay.engines.superlink import streamed, superlink
from flwr_replay.institution.policy import LIMITS, Policy, read_policy
from flwr_replay.serve import ProximalApp, serve, serving

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
OWN = ("cwt", "fedreplay", "numpy_client", "replay", "proxyfl", "quickstart")
MODULES = ("task", "client_app", "server_app")
NODES = 4
QUICKSTART = EXAMPLES / "quickstart"
DIGITS = cache(datasets.load_digits)  # an app reads them for every message
SWAPS = (  # strategy, the most lines that it takes, and the least accuracy; none is Flower's FedAvg
    *(("", 0, 0.7), ("fedavg", 3, 0.7), ("fedprox", 3, 0.7), ("cwt", 3, 0.7)),
    *(("fedreplay", 15, 0.7), ("fedstats", 20, 0.5), ("proxyfl", 20, 0.3), ("fedsgd", 15, 0.6)),
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Keep torch from fighting with other tests over the cores; the models are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextmanager
def example(
    name: str, monkeypatch: pytest.MonkeyPatch, working_directory: Path, within: Path = EXAMPLES
) -> Iterator[dict[str, Any]]:
    """Import one example as `flwr run` does: its folder leads the path, files go to the working directory."""
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(working_directory / "home"))
    monkeypatch.setattr(datasets, "load_digits", DIGITS)
    monkeypatch.chdir(working_directory)
    with monkeypatch.context() as path:
        path.syspath_prepend(str(within / name))
        try:
            yield {module: importlib.import_module(module) for module in MODULES}
        finally:
            for module in (*MODULES, "plan"):
                sys.modules.pop(module, None)


def run_config(folder: Path) -> dict[str, Any]:
    config = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"].get("config", {})
    return dict(flatten_dict(config))


def run_in_process(name: str, app: dict[str, Any]) -> dict[str, torch.Tensor]:
    start(name, app)
    final: dict[str, torch.Tensor] = torch.load("final_model.pt", weights_only=True)
    return final


def start(name: str, app: dict[str, Any], within: Path = EXAMPLES) -> None:
    config = run_config(within / name)
    grid = InlineGrid.simulated(app["client_app"].app, config, NODES)
    app["server_app"].app(grid, Context(1, 1, {}, RecordDict(), config))


def accuracy(task: Any, weights: dict[str, torch.Tensor]) -> float:
    model = task.net()
    model.load_state_dict(weights)
    return sum(task.test(model, task.load_data(k, NODES)[1])[1] for k in range(NODES)) / NODES


@pytest.mark.parametrize("names", [("cwt", "numpy_client"), ("fedreplay",), ("replay",)])
def test_runs_in_process_and_learns(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A numpy client ends with the weights of a ClientApp."""
    finals = []
    for name in names:
        with example(name, monkeypatch, tmp_path) as app:
            finals.append(run_in_process(name, app))
            assert list(finals[-1]) == list(app["task"].net().state_dict())
            assert accuracy(app["task"], finals[-1]) > 0.6
    for key, value in finals[0].items():
        assert all(torch.equal(value, other[key]) for other in finals), key


def test_proxyfl_runs_in_process_and_its_private_models_learn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with example("proxyfl", monkeypatch, tmp_path) as app:
        start("proxyfl", app)
    output = capsys.readouterr().out
    assert float(re.findall(r"private models (0\.\d+)", output)[-1]) > 0.6
    assert len(set(re.findall(r"^(institution-\d): epsilon \d", output, re.M))) == NODES


@pytest.mark.parametrize(("strategy", "most", "least"), SWAPS)
def test_a_strategy_in_the_quickstart_takes_few_lines_runs_and_learns(
    strategy: str, most: int, least: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any
) -> None:
    shutil.copytree(QUICKSTART, tmp_path / "quickstart", ignore=shutil.ignore_patterns("__pycache__"))
    if strategy:
        swap = QUICKSTART / "swaps" / f"{strategy}.diff"
        subprocess.run(["git", "apply", str(swap)], cwd=tmp_path / "quickstart", check=True)
        assert len(re.findall(r"(?m)^\+(?!\+\+ ).*\S", swap.read_text())) <= most
    torch.manual_seed(0)
    with example("quickstart", monkeypatch, tmp_path, tmp_path) as app:
        start("quickstart", app, tmp_path)
    output = capfd.readouterr().out
    assert float(re.findall(r"(?<!-)(?<!have )accuracy['\":]*:? (\d\.\d+)", output)[-1]) > least


def test_every_swap_is_tried() -> None:
    assert {file.stem for file in (QUICKSTART / "swaps").iterdir()} == {
        strategy for strategy, _, _ in SWAPS if strategy
    }


def test_the_page_shows_the_example_with_data_loaders() -> None:
    shown = re.search(r"(?s)```python\n(def institution.*?)```", (EXAMPLES.parent / "flower.md").read_text())
    assert shown
    added = re.findall(r"(?m)^[+ ](.*)", (QUICKSTART / "swaps" / "proxyfl.diff").read_text())
    assert shown[1] in "\n".join(added)


def with_mod(make_client: Any) -> ClientApp:
    app = ClientApp(mods=[serving(make_client)])
    app.train()(lambda message, context: message)
    return app


@pytest.mark.parametrize("wrapped", [serve, with_mod])
def test_a_function_that_returns_no_client_is_told_to(wrapped: Any) -> None:
    asked = RecordDict({"config": ConfigRecord({"stage": "unmask"})})
    reply = InlineGrid(wrapped(lambda context: None), {}, [{}]).answer(Message(asked, 2, "train"))
    assert "Client; got NoneType: return one" in reply.error.reason


def test_a_proximal_app_takes_the_steps_of_the_loss_with_the_term() -> None:
    mu, lr, start = 0.5, 0.1, torch.tensor([3.0, -2.0])
    app, ends = ProximalApp(), list[torch.Tensor]()

    def descend(penalty: float, closure: bool = False) -> None:
        theta = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.SGD([theta], lr=lr, momentum=0.9, weight_decay=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = theta.pow(4).sum() + penalty / 2 * (theta - start).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step(float if closure else None)
        ends.append(theta.detach())

    @app.train()
    def train(message: Message, context: Context) -> Message:
        descend(0.0, "closure" in message.content["config"])
        return Message(RecordDict(), reply_to=message)

    def ask(**config: float) -> Message:
        return InlineGrid(app, {}, [{}]).answer(Message(RecordDict({"config": ConfigRecord(config)}), 2, "train"))

    ask(**{"proximal-mu": mu})
    descend(mu)
    assert torch.allclose(ends[0], ends[1], rtol=1e-5)
    ask()
    descend(0.0)
    assert torch.equal(ends[2], ends[3])  # nothing is left of the first message
    assert not torch.allclose(ends[0], ends[2], rtol=1e-2)
    assert "leave it out" in ask(**{"proximal-mu": mu, "closure": 1}).error.reason


@pytest.mark.parametrize("name", OWN)
def test_flower_finds_all_that_an_example_lists(name: str) -> None:
    """Flower installs what an app lists; this package is on no index, and brings all that the examples import."""
    project = tomllib.loads((EXAMPLES / name / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == []


@pytest.mark.sampled(1, of="Ray")
def test_runs_on_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """How a refused option is shown: tests/integration/test_deployment.py."""
    name = "fedreplay"
    with example(name, monkeypatch, tmp_path) as app:
        (tmp_path / "link").mkdir()
        with superlink(tmp_path / "link") as link:
            one_actor = f"client-resources-num-cpus={os.cpu_count()}"
            options = ["--federation-config", f"num-supernodes={NODES} {one_actor}"]
            options += ["--run-config", "num-server-rounds=1"]
            output = "".join(streamed(link, EXAMPLES / name, *options))
            assert (tmp_path / "final_model.pt").exists(), output  # the server's working directory is the SuperLink's
        assert accuracy(app["task"], torch.load("final_model.pt", weights_only=True)) > 0.6
    assert "Traceback" not in output


def test_all_examples_have_the_same_task() -> None:
    """The user's part is one text, so that only the marked lines differ."""
    assert len({(EXAMPLES / name / "task.py").read_text() for name in OWN if name != "quickstart"}) == 1
    assert (EXAMPLES / "cwt" / "server_app.py").read_text() == (EXAMPLES / "numpy_client" / "server_app.py").read_text()


def test_the_study_for_hospitals_composes() -> None:
    config = from_run_config(run_config(EXAMPLES / "hospitals" / "study"))
    assert (config.strategy.name, config.task.format, config.task.size, config.nodes) == ("fedreplay", "folder", 8, 3)


def test_the_policy_for_hospitals_explains_every_key() -> None:
    policy = (EXAMPLES / "hospitals" / "policy.yaml").read_text()
    keys = re.findall(r"^(?:# )?([a-z-]+): ", policy, re.M)
    assert sorted(keys) == sorted(field.name.replace("_", "-") for field in fields(Policy))


def test_the_policy_for_hospitals_is_read() -> None:
    policy = read_policy(EXAMPLES / "hospitals" / "policy.yaml")
    assert policy == Policy(
        strategies=("fedreplay", "cwt"),
        kinds=("model", "statistic", "per-sample"),
        max_upload_mb=64,
        metrics="counted",
        max_evaluations=500,
        limits=tuple({**LIMITS, "epochs": 200, "views": 4}.items()),
    )
