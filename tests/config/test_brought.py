"""Strategies of other packages: found by entry point, imported where allowed; and what `flwr-replay new` writes."""

import os
import re
import runpy
import shutil
import sys
import tomllib
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from harness import command, forked, node_configs, run, write_shards

from flwr_replay.check import check_attack, check_partition, check_strategy
from flwr_replay.config import catalogue, halves
from flwr_replay.config import compose as composing
from flwr_replay.config.compose import compose, compose_own
from flwr_replay.config.own_code import OWN, VARIABLE, allow
from flwr_replay.config.sources import fields_of
from flwr_replay.errors import ConfigError, RefusedError
from flwr_replay.files.atomic import read_json
from flwr_replay.forecast.described import described
from flwr_replay.institution.node import _institution
from flwr_replay.lab.registry import Only
from flwr_replay.memory import forget
from flwr_replay.studies.compare import planned
from flwr_replay.wire.payload import REQUESTS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extend.md").read_text()
WRITTEN = dict(re.findall(r"^flwr-replay new (\w+) (\w+)$", PAGE, re.M))  # kinds and names
MINE, CODE = WRITTEN["strategy"], f"{WRITTEN['strategy']}:{WRITTEN['strategy']}"
POINTS = catalogue.POINTS
SMALL = ["task=medmnist", "task.size=8", "classes=3", "device=cpu"]
OUTSIDE = runpy.run_path(str(ROOT / "docs" / "examples" / "methods" / "outside.py"))
WALKED = [f"my{method}" for method in OUTSIDE["METHODS"]]
RUN = f"strategy={MINE} task=digits rounds=2"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a folder in which the page's commands have written one of each."""
    folder = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        assert {command(patch, "new", *arguments, "--into", str(folder)) for arguments in WRITTEN.items()} == {0}
    point = tomllib.loads((folder / MINE / "pyproject.toml").read_text())["project"]["entry-points"][POINTS["strategy"]]
    ((name, package),) = point.items()
    distribution(folder, MINE, f"{name} = {package}")
    return folder


def distribution(folder, name, point, **functions):
    """Lay down what an installed distribution has beside its code: a strategy, and functions by group."""
    info = folder / f"{name}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    points = {"strategy": point, **functions}
    (info / "entry_points.txt").write_text("".join(f"[{POINTS[group]}]\n{line}\n" for group, line in points.items()))


@pytest.fixture
def path(monkeypatch, tmp_path):
    """Return what puts folders on the path, as if their distributions were installed; nobody has allowed any."""
    caches = [catalogue.brought, catalogue.own_options, halves.load_strategy, halves.load_client]
    caches += [composing._compose, composing._unset, composing._hydra]

    def clear():
        for cache in caches:
            cache.cache_clear()
        forget()
        for module in [
            module for module in sys.modules if module.partition(".")[0] in (MINE, "broken", "taken", *WALKED)
        ]:
            del sys.modules[module]

    def put(*folders):
        monkeypatch.setattr(sys, "path", [*map(str, folders), *sys.path])
        clear()

    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    yield put
    monkeypatch.undo()
    clear()


@pytest.fixture
def installed_strategy(path, written):
    """Install the written strategy."""
    path(written, written / MINE / "src")


def package(folder, name, code="", conf="", point=""):
    """Install a package with a strategy of this name in a folder."""
    (folder / name / "conf" / "strategy").mkdir(parents=True)
    (folder / name / "__init__.py").touch()
    (folder / name / "strategy.py").write_text(code)
    if conf:
        (folder / name / "conf" / "strategy" / f"{conf}.yaml").write_text(f"name: {conf}\nspeed: 1  # of it\n")
    distribution(folder, name, point or f"{name} = {name}")


def test_what_is_written_passes_its_own_tests(path, written):
    kinds = ("strategy", "app", "study", "partition", "attack")
    project, app, study, *further = (written / WRITTEN[kind] for kind in kinds)
    path(written, project / "src", app, study, *further, ROOT)
    words = ["-q", "-p", "no:cacheprovider", *map(str, (project, app, study, *further))]

    def tested():
        os.chdir(study)
        with open(written / "said", "w") as log, redirect_stdout(log):
            pytest.main(words)

    os.waitpid(forked(tested), 0)
    assert "6 passed" in (output := (written / "said").read_text()), output


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", WALKED)
def test_a_method_that_the_page_walks_through_keeps_the_contract_outside(path, tmp_path, name):
    OUTSIDE["write"](tmp_path / "mymethods")
    project = tomllib.loads((tmp_path / "mymethods" / "pyproject.toml").read_text())["project"]
    points = project["entry-points"][POINTS["strategy"]]
    assert sorted(points) == sorted(WALKED)
    assert all(method in PAGE for method in OUTSIDE["METHODS"])
    distribution(tmp_path, "mymethods", f"{name} = {points[name]}")
    path(tmp_path, tmp_path / "mymethods")
    check_strategy(name, ["partition.size=40"])


def test_the_written_app_is_the_example():
    for name in ("task.py", "server_app.py", "client_app.py"):
        template = ROOT / "flwr_replay" / "templates" / "app" / name
        assert template.read_text() == (ROOT / "docs" / "examples" / "cwt" / name).read_text()


def test_the_written_studys_options_fit_its_data(written, monkeypatch):
    folder = written / WRITTEN["study"]
    (line,) = re.findall(
        r"^flwr-replay compare fedavg,cwt,local (.*) seeds=5$", (folder / "README.md").read_text(), re.M
    )
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(VARIABLE, "")
    assert [
        command(monkeypatch, "run", "--dry-run", f"strategy={method}", *line.split()) for method in ("cwt", "local")
    ] == [
        0,
        0,
    ]


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("strategy", "Fed-mine", "small letters and digits"),
        ("strategy", "class", "small letters and digits"),
        ("strategy", "fedavg", "a strategy fedavg already"),
        ("strategy", "numpy", "is called numpy already"),
        ("study", "json", "is called json already"),
        ("app", WRITTEN["app"], "must be new"),
    ],
)
def test_a_wrong_name_is_one_line_and_nothing_is_written(written, kind, name, message, monkeypatch, capsys):
    before = set(written.rglob("*"))
    assert command(monkeypatch, "new", kind, name, "--into", str(written)) == 2
    assert re.fullmatch(f"error: .*{message}.*\n", capsys.readouterr().err)
    assert set(written.rglob("*")) == before


def test_it_is_listed_without_being_imported(installed_strategy):
    assert MINE in catalogue.choices("strategy")
    with pytest.raises(ConfigError, match=f"bound is an option of strategy={MINE}; got strategy=fedavg"):
        compose(["strategy=fedavg", "bound=3"])
    assert MINE not in sys.modules


def test_the_pages_commands_run(installed_strategy, tmp_path, monkeypatch, capsys):
    assert f"flwr-replay run {RUN}\n" in PAGE
    assert command(monkeypatch, "run", *RUN.split(), "--runs-dir", str(tmp_path)) == 0
    assert command(monkeypatch, "options", f"strategy={MINE}") == 0
    output = capsys.readouterr().out
    assert f"{MINE} on digits: accuracy" in output
    (folder,) = tmp_path.glob(f"*-{MINE}-*")
    assert read_json(folder / "environment.json")["versions"][MINE] == "0.1.0"
    assert "strategy.bound  (number)\n    how far an institution may move the model" in output


@pytest.fixture
def functions(path, tmp_path):
    """Install a package with the page's own model, data, partition and attack; return the options of a run with all."""
    code = (tmp_path / "taken.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.S)))
    assert code
    points = {group: f"my{group} = taken:{OWN.get(group, group)}" for group in POINTS if group != "strategy"}
    distribution(tmp_path, "taken", "", **points)
    path(tmp_path)
    rng = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", rng.integers(0, 255, (300, 8, 8), np.uint8))
    np.save(tmp_path / "y.npy", rng.integers(0, 3, 300))
    data = [f"task.data-dir={tmp_path}", "task.size=8", "task.channels=1", "task.classes=3"]
    return [*(f"{group}=my{group}" for group in OWN), *data, "strategy=fedavg", "nodes=2", "rounds=1", "device=cpu"]


def test_functions_of_a_package_have_names(functions, monkeypatch, capsys, tmp_path):
    assert {f"my{group}" for group in OWN} <= {name for group in OWN for name in catalogue.choices(group)}
    assert command(monkeypatch, "options", "model") == 0
    assert "model=mymodel" in capsys.readouterr().out
    write_shards(tmp_path, {"a": 9})
    (owned,) = node_configs(tmp_path, tmp_path / "state", "a")
    refused = "taken:build, which has not been allowed here"
    with pytest.raises(RefusedError, match=refused):  # a server's words
        _institution((("overrides", " ".join(SMALL)), ("model", "mymodel")), tuple(sorted(owned.items())))
    assert "taken" not in sys.modules
    private = ["strategy=fml", "private-models=[mymodel]"]
    with pytest.raises(RefusedError, match=refused):
        _institution((("overrides", " ".join([*SMALL, *private])),), tuple(sorted(owned.items())))
    pair = {**owned, "private-model": "mymodel"}
    with pytest.raises(RefusedError, match=refused):
        _institution((("overrides", " ".join(SMALL)), ("strategy", "fml")), tuple(sorted(pair.items())))
    pair |= {"own-code": "taken:build"}
    _, config = _institution((("overrides", " ".join([*SMALL, *private])),), tuple(sorted(pair.items())))
    assert config.own_code == ("taken:build",)
    assert set(compose_own(functions).own_code) == {f"taken:{name}" for name in OWN.values()}
    assert command(monkeypatch, "run", *functions, "--runs-dir", str(tmp_path)) == 0, capsys.readouterr().err
    fml = ["dp=none", *private, *(option for option in functions if not option.startswith(("model=", "strategy=")))]
    assert command(monkeypatch, "run", "model=mlp", *fml, "--runs-dir", str(tmp_path)) == 0, capsys.readouterr().err
    check_partition("mypartition")
    check_attack("myattack")
    with pytest.raises(ConfigError, match="did you mean myattack"):
        Only(attack="myatack")


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ("cnn = taken:build", "model cnn is of taken and flwr-replay: uninstall one"),
        ("Mine = taken:build", "the package taken brings model 'Mine'.* in lower case"),
        ("../cnn = taken:build", "brings model '../cnn'.* in lower case"),
        ("mine = taken", "brings model 'mine' = 'taken'; .* a function, as mypkg.nets:build: correct or uninstall it"),
    ],
)
def test_a_wrong_function_of_a_package_is_one_line_and_others_work(path, tmp_path, point, message):
    distribution(tmp_path, "taken", "", model=point)
    path(tmp_path)
    with pytest.raises(ConfigError, match=message):
        compose_own([f"model={point.partition(' ')[0]}"])
    assert described()["model"].options
    assert compose_own(["model=mlp"]).model.name == "mlp"


def test_a_presets_options_hold(installed_strategy, written):
    presets = written / MINE / "src" / MINE / "conf" / "preset" / "careful"
    presets.mkdir(parents=True)
    (presets / "default.yaml").write_text("# @package _global_\nrounds: 7\n")
    try:
        assert compose_own([f"strategy={MINE}", "preset=careful"]).rounds == 7
        assert compose(["strategy=fedavg", "preset=careful"]).rounds == 7
    finally:
        shutil.rmtree(presets.parent)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: broken\nspeed: 1\nspeed: 1:30\n", r"options of .*broken\.yaml, line 3: .* line 2 already"),
        ("name: fedavg", r"strategy=broken must be what .*broken\.yaml has as name; got fedavg"),
        ("", "got None"),
    ],
)
def test_a_packages_own_file_is_of_its_name_and_gives_no_key_twice(path, tmp_path, text, message):
    package(tmp_path, "broken", conf="broken")
    (tmp_path / "broken" / "conf" / "strategy" / "broken.yaml").write_text(text)
    path(tmp_path)
    with pytest.raises(ConfigError, match=message):
        compose_own(["strategy=broken"])


def institution(folder, **node):
    write_shards(folder, {"a": 9})
    (owned,) = node_configs(folder, folder / "state", "a")
    given = (("overrides", " ".join(SMALL)), ("strategy", MINE))
    return _institution(given, tuple(sorted({**owned, **node}.items())))


@pytest.mark.parametrize("allowed", ["", MINE, f"{MINE}:other", f"{MINE}.client:{MINE}"])
def test_an_institution_imports_no_strategy_that_it_has_not_allowed(installed_strategy, tmp_path, allowed, monkeypatch):
    monkeypatch.setenv(VARIABLE, CODE)  # a deployed node does not heed it
    with pytest.raises(RefusedError, match=f'{CODE}, which has not been allowed here.*own-code="{CODE}"'):
        institution(tmp_path, **{"own-code": allowed})
    assert MINE not in sys.modules


def test_an_institution_takes_the_strategy_that_it_allows(installed_strategy, tmp_path):
    _, config = institution(tmp_path, **{"own-code": CODE})
    assert config.own_code == (CODE,)
    assert halves.load_client(MINE).__module__ == f"{MINE}.client"


def test_whoever_does_not_allow_it_is_left_out_and_the_run_goes_on(installed_strategy, tmp_path):
    allow(catalogue.code_of(MINE))
    write_shards(tmp_path, dict.fromkeys("abc", 20))
    nodes = [{**node, "own-code": CODE if node["name"] != "b" else ""} for node in node_configs(tmp_path, tmp_path)]
    ran = run(tmp_path, [f"strategy={MINE}", "nodes=3", "rounds=1", "model=mlp", "model.width=4", *SMALL], nodes)
    (failure,) = ran.result["failures"]
    assert f"{CODE}, which has not been allowed here" in failure["reason"]
    assert {line["institution"] for line in ran.ledger if line["stage"] == "train-fedmine"} == {"a", "c"}


def test_a_process_that_was_given_others_words_imports_none(installed_strategy):
    with pytest.raises(RefusedError, match=f"export {VARIABLE}='{CODE}'"):
        compose([f"strategy={MINE}"])
    assert MINE not in sys.modules


@pytest.mark.parametrize("how", ["officer", "sweep"])
def test_whoever_types_its_name_allows_it(how, installed_strategy, tmp_path, monkeypatch, capsys):
    (policy := tmp_path / "policy.yaml").write_text(f"strategies: [{MINE}]\n")
    job = ["task=digits", "nodes=3", "rounds=1", "model=mlp", "model.width=4", "device=cpu"]
    if how == "officer":
        words = ["--dry-run", "--policy", str(policy), "--out", str(tmp_path), f"strategy={MINE}"]
        assert command(monkeypatch, "run", *words, *job) == 0, capsys.readouterr().err
    else:
        assert len(planned([MINE], ["training.lr=0.1|0.3", *job], "", tmp_path).labels) == 2


def test_a_name_of_two_packages_is_refused(path, written, tmp_path):
    package(tmp_path, "broken", conf=MINE, point=f"{MINE} = broken")
    package(tmp_path, "taken", conf="fedavg", point="fedavg = taken")
    path(tmp_path, written, written / MINE / "src")
    for name, owners in ((MINE, f"broken and {MINE}"), ("fedavg", "taken and flwr-replay")):
        with pytest.raises(ConfigError, match=f"{name} is of {owners}: uninstall one"):
            compose_own([f"strategy={name}"])
    assert compose(["strategy=cwt"]).strategy.name == "cwt"


@pytest.mark.parametrize(
    ("code", "conf", "point", "message"),
    [
        ("1 / 0", "broken", "", "strategy=broken.* of the package broken cannot be imported: .*ZeroDivisionError"),
        ("from flwr_replay.strategies.fedavg import FedAvg as Broken, FedAvgConfig", "broken", "", "write name = 'b"),
        ("raise GeneratorExit", "broken", "", "of the package broken cannot be imported: .*GeneratorExit"),
        ("import nonesuch", "broken", "", "of the package broken cannot be imported: .*No module named 'nonesuch'"),
        ("x = 1", "broken", "", "of the package broken must have a class of the strategy's name"),
        ("", "", "", "of the package broken has no conf/strategy/broken.yaml in broken"),
        ("", "broken", "broken = nonesuch.inner", "of the package broken has no conf/strategy/broken.yaml"),
        ("", "Broken", "Broken = broken", "the package broken brings strategy 'Broken'.* in lower case"),
    ],
)
def test_a_broken_package_is_one_line_and_others_work(path, tmp_path, code, conf, point, message):
    package(tmp_path, "broken", code, conf, point)
    path(tmp_path)
    name = conf or "broken"
    with pytest.raises(ConfigError, match=message) as error:
        compose_own([f"strategy={name}"])
    assert "\n" not in str(error.value)
    known = described()
    assert "broken" not in sys.modules or conf == "broken"
    if "has no conf" in message or "brings" in message:  # whoever lists methods imports none
        assert re.search(message, known[f"strategy={name}"].title)
    assert known["strategy=fedavg"].options
    with pytest.raises(ConfigError, match="unknown option 'speedy'"):
        compose(["speedy=1"])


def test_its_options_are_read_where_its_class_comes_from(path, tmp_path):
    names = ("far", "near", "twin")
    for name in names:
        own = f"class {name}Config({name}Config):\n    more: int = 2  # of its own\n" if name == "twin" else ""
        package(tmp_path, name, f"from {'far' if name == 'far' else ''}.base import {name}Config\n{own}")
        (tmp_path / name / "base.py").write_text(f"class {name}Config:\n    speed: int = 1  # of it\n")
    path(tmp_path)
    assert [list(fields_of(f"{name}.strategy", f"{name}Config")) for name in names] == [
        ["speed"],
        ["speed"],
        ["speed", "more"],
    ]
    assert not {*names} & {*sys.modules}


def test_what_is_installed_without_a_name_is_told_by_its_value(path, tmp_path):
    for name in ("taken", "other"):
        distribution(tmp_path, name, "", model="mine = taken:build")
        (tmp_path / f"{name}-0.1.0.dist-info" / "METADATA").unlink()
    path(tmp_path)
    with pytest.raises(ConfigError, match="model mine is of taken:build and taken:build: uninstall one"):
        compose_own(["model=mine"])


def test_a_stage_of_another_payload_is_refused(path, tmp_path):
    code = """
from flwr_replay.payloads.common import Train, Trained
class Own(Train, stage="train", answer=Trained): pass
"""
    package(tmp_path, "broken", code, "broken")
    path(tmp_path)
    with pytest.raises(ConfigError, match=r"broken\.strategy declares 'train' of flwr_replay\.payloads\.common"):
        compose_own(["strategy=broken"])
    assert REQUESTS["train"].__module__ == "flwr_replay.payloads.common"
