"""The recipe for containers that deploy init writes, as text; tests/integration/test_container.py runs its commands."""

import os
import re
import shutil
import subprocess

import pytest
import timm
import torch
import yaml
from deployed import STUDY
from harness import command
from safetensors.torch import save_file

from flwr_replay.deploy.coordinator import examine_coordinator


def test_the_recipe_for_containers_gives_no_more_than_the_scripts_need(written):
    for folder, service, script in (("coordinator", "superlink", "superlink.sh"), ("north", "supernode", "start.sh")):
        place = written / folder
        recipe, text = (place / "Containerfile").read_text(), (place / "compose.yaml").read_text()
        ((name, container),) = yaml.safe_load(text)["services"].items()
        assert (name, container["command"]) == (service, [f"./{script}"])
        assert os.access(place / script, os.X_OK)
        assert container["read_only"] is True
        assert container["cap_drop"] == ["ALL"]
        assert container["security_opt"] == ["no-new-privileges:true"]
        assert not {"privileged", "cap_add", "devices", "network_mode", "pid", "environment"} & set(container)
        user, image = container["user"], container["image"]
        assert int(user.split(":")[0]) > 0
        assert f"\nUSER {user}\n" in recipe
        assert f"chown -R {user} ." in text
        assert f"-t {image} ." in recipe  # what is built is what starts, and nothing of that name is ever fetched
        assert container["pull_policy"] == "never"
        assert recipe.rstrip().endswith(f"WORKDIR {container['working_dir']}")
        mounts = {mount["target"]: mount for mount in container["volumes"]}
        assert {target for target, mount in mounts.items() if not mount.get("read_only")} == {
            "/deployment/state",
            *(["/deployment/runs"] if folder == "coordinator" else []),
        }
        assert mounts[container["working_dir"]]["source"] == "."  # with keys and policy
        sources = {mount["source"] for mount in mounts.values()}
        assert all((place / source).is_dir() for source in sources)
        own = {"./data"} if folder == "north" else set()  # not yet linked in south
        unlinked = place if folder == "coordinator" else written / "south"
        assert {source for source in sources if not (unlinked / source).exists()} == own
        assert container["tmpfs"] == ["/tmp"]
        assert "HOME=/tmp " in recipe
        assert ("/data" in mounts) == ("FLWR_REPLAY_DATA=/data" in recipe) == (folder == "north")
        port = re.search(r"--port (\d+) ", (place / script).read_text())
        assert container.get("ports", []) == ([f"{port[1]}:{port[1]}"] if port else [])
        assert recipe.count("-c constraints.txt") == recipe.count("pip install") == 2


def test_the_coordinators_container_knows_its_own_name_and_the_files_of_the_study(tmp_path, monkeypatch):
    weights = tmp_path / "net $1.safetensors"
    torch.manual_seed(0)
    save_file(timm.create_model("resnet18").state_dict(), weights)
    model = ["model=timm", "model.name=resnet18", "model.size=32", "model.train=head", "cut=features"]
    form = [word for word in STUDY if not word.startswith(("model", "width", "cut"))]
    for address, known in (("hub.example.org:8443", ["hub.example.org:127.0.0.1"]), ("10.0.0.1:8000", None)):
        out = tmp_path / address
        words = ["--clinics", "on,1", "--address", address, "--out", str(out), f"model.weights='{weights}'"]
        assert command(monkeypatch, "deploy", "init", *words, *form, *model) == 0
        (container,) = yaml.safe_load((out / "coordinator" / "compose.yaml").read_text())["services"].values()
        assert container.get("extra_hosts") == known
        escaped = str(weights).replace("$", "$$")
        assert {"type": "bind", "source": escaped, "target": escaped, "read_only": True} in container["volumes"]
        assert "ARG PACKAGE='.[timm]'\n" in (out / "on" / "Containerfile").read_text()
        assert list(yaml.safe_load((out / "on" / "compose.yaml").read_text())["services"]) == ["supernode"]
        assert str(weights) not in (out / "on" / "compose.yaml").read_text()


FLWR = """#!/bin/sh
case "$1 $2" in
  "supernode register") echo "SuperNode 77 registered successfully." ;;
  "run study") echo '"run-id": "7"'; printf '%s\\n' "$@" > words ;;
  list*) echo '"status": "finished:completed"' ;;
esac
"""  # as Flower's program answers


def test_a_folder_of_an_older_version_goes_on_with_its_files(written, tmp_path):
    home, programs = tmp_path / "coordinator", tmp_path / "programs"
    shutil.copytree(written / "coordinator", home)
    programs.mkdir()
    (programs / "flower-superlink").write_text('#!/bin/sh\necho "$@"\n')
    (programs / "flwr").write_text(FLWR)
    for program in programs.iterdir():
        program.chmod(0o700)
    environment = {**os.environ, "PATH": os.pathsep.join([str(programs), os.environ["PATH"]])}

    def says(script, *words):
        words = [home / script, *words]
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path).stdout

    assert "--database state/superlink.db " in says("superlink.sh")
    (home / "superlink.db").touch()
    assert "--database superlink.db " in says("superlink.sh")
    for name in ("north", "south"):
        (home / "keys" / f"{name}.pub").touch()
    (home / "keys" / "north.registered").touch()
    assert says("register.sh") == "north: registered before\nsouth: registered\n"
    assert [file.name for file in (home / "state").glob("*.registered")] == ["south.registered"]
    assert (home / "state" / "south.registered").read_text() == "SuperNode 77 registered successfully.\n"
    assert "ok  keys: north, south are registered" in examine_coordinator(home)[1]
    resume = home / "runs" / "first" / "resume.toml"
    resume.parent.mkdir(parents=True)
    own = "runs/first/resume.toml"
    for given in (f"coordinator/{own}", own, str(resume)):  # as seen from here, or from there
        with pytest.raises(subprocess.CalledProcessError) as failed:
            says("run.sh", given)
        assert failed.value.stderr == f"a run goes on by its resume.toml; there is no {given}\n"
        resume.touch()
        says("run.sh", given)
        assert (home / (home / "words").read_text().splitlines()[-1]).samefile(resume)
        resume.unlink()
