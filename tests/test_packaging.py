"""The built wheel: it works in an environment of its own, and puts nothing but flwr_replay at the top."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from flwr.cli.app_cmd.publish import _collect_file_paths, _validate_files
from flwr.cli.config_utils import load_and_validate

from flwr_replay.engines.superlink import flower

ROOT = Path(__file__).resolve().parents[1]
MAPPED = ("strategies", "clients", "simulations", "conf")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(["uv", "build", "--quiet", "--wheel", "--out-dir", str(out), str(ROOT)], check=True)
    (built,) = out.glob("*.whl")
    return built


def test_every_source_file_is_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("flwr_replay", *MAPPED):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml", ".toml", ".md", ".typed") and "__pycache__" not in path.parts:
                inside = path.relative_to(ROOT).as_posix()
                assert (inside if folder == "flwr_replay" else f"flwr_replay/{inside}") in names


def test_the_hospitals_of_the_rehearsal_are_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in (ROOT / "docs" / "examples" / "hospitals").rglob("*") if path.is_file()]
    sources = [path.relative_to(ROOT / "docs").as_posix() for path in files if "__pycache__" not in path.parts]
    assert sources
    assert {f"flwr_replay/{source}" for source in sources} <= names


def test_only_flwr_replay_lands_at_the_top(wheel):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"flwr_replay"}


def test_the_containers_recipe_copies_all_that_the_wheel_is_made_of(wheel, tmp_path):
    recipe = (ROOT / "flwr_replay" / "templates" / "deployment" / "Containerfile.in").read_text()
    place = tmp_path / "src"
    place.mkdir()
    for words in [line.split()[1:] for line in recipe.splitlines() if line.startswith("COPY ")]:
        for source in words[:-1]:
            target = place / words[-1]
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, target)
    subprocess.run(["uv", "build", "--quiet", "--wheel", "--out-dir", str(tmp_path), str(place)], check=True)
    (built,) = tmp_path.glob("*.whl")
    assert set(zipfile.ZipFile(built).namelist()) == set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_runs_in_an_environment_of_its_own(wheel, tmp_path):
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, str(tmp_path / "env")], check=True)
    python = tmp_path / "env" / "bin" / "python"
    install = ["uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--python", str(python), str(wheel)]
    subprocess.run(install, check=True)
    # Its dependencies are gigabytes: they are borrowed from this environment. A plain path entry brings no .pth files
    # along, so that this checkout's editable install stays out of sight.
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    command = [str(tmp_path / "env" / "bin" / "flwr-replay"), "run", "model.width=4", "rounds=1", "encoder-epochs=1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fedreplay on digits: accuracy" in done.stdout
    where = [
        str(python),
        "-c",
        "from importlib.util import find_spec as m; print(m('flwr_replay.strategies.cwt').origin)",
    ]
    output = subprocess.run(where, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert str(site) in output


def test_versions_that_were_tested_satisfy_the_project(wheel):
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    for requirement in wanted:
        name = requirement.split(">")[0].split("[")[0].strip().lower()
        assert name in pinned, f"constraints.txt lacks {name}"


def test_flower_hub_would_take_the_files_and_the_bundle_has_the_apps(tmp_path):
    """By the checks of `flwr app publish` itself, on what is committed: number, sizes, names and encodings."""
    app = tmp_path / "flwr-replay"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(lambda name: (ROOT / name).is_file(), listed.splitlines()):
        (app / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, app / name)
    _validate_files(_collect_file_paths(app))
    project = load_and_validate(app / "pyproject.toml", check_module=False)[0]["project"]
    assert 0 < len(project["description"]) <= 200
    subprocess.run([flower("flwr"), "build", "--app", str(app)], cwd=tmp_path, check=True)
    (bundle,) = tmp_path.glob("*.fab")
    assert bundle.name.startswith(f"flwr-replay.flwr-replay.{project['version'].replace('.', '-')}.")
    inside = set(zipfile.ZipFile(bundle).namelist())
    sources = {name for name in listed.splitlines() if name.startswith((*MAPPED, "flwr_replay"))}
    code = {
        name for name in sources if name.endswith((".py", ".yaml")) and "/test_" not in name
    }  # Flower takes no tests
    assert {"flwr_replay/server_app.py", "flwr_replay/client_app.py", "conf/config.yaml"} <= code <= inside


def test_flower_installs_no_development_tools(tmp_path):
    """By the command of flwr's dependency_installer.py, before every run of an app."""
    words = [
        "uv",
        "sync",
        "--python",
        sys.executable,
        "--no-install-project",
        "--no-install-package",
        "flwr",
        "--inexact",
    ]
    place = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(tmp_path / "env")}
    done = subprocess.run(
        [*words, "--frozen", "--dry-run"], cwd=ROOT, env=place, capture_output=True, text=True, check=True
    )
    named = {line.split()[1].partition("==")[0] for line in done.stderr.splitlines() if line.startswith(" + ")}
    assert {"torch", "hydra-core"} <= named
    assert not {"pytest", "ruff", "mlflow-skinny", "onnx"} & named
