"""What an institution keeps: listed with bytes; what a run has left can go, and its evidence cannot."""

import json
import os
import shutil
import socket
import subprocess
from contextlib import chdir

from flwr_replay import run
from flwr_replay.engines.superlink import free_port

TINY = {"task": "digits", "nodes": 2, "partition.size": 60, "model": "mlp", "model.width": 4, "device": "cpu"}
NOISY = {"strategy": "local", "dp": "classifier", "privacy.noise": "seeded", "epsilon": 50, "delta": 1e-3}


def test_what_a_run_has_left_can_go_but_for_its_evidence(tmp_path, flwr_replay):
    home, runs = tmp_path / "home", tmp_path / "runs"
    ran = [run(TINY | NOISY, rounds=1, run_name=name, runs_dir=runs) for name in ("first", "second")]
    first, second = ((job.folder / "run-id").read_text().strip() for job in ran)
    own = home / "state" / "simulation" / "institution-1"
    code, out, err = flwr_replay("deploy", "state", str(own))
    assert code == 0, err
    lines = out.splitlines()
    assert [line for line in lines if not line.startswith(" ")][:-3] == [first, second]
    assert lines[-3] == "decoded images and features, made again when they are missing: 0 B"
    assert lines[-2].startswith("ledger: ")
    assert lines[-2].endswith("segments: 1; recorded messages: 0 B")
    assert lines[-1] == "all runs together, 2 of them with an epsilon: epsilon inf and delta 0.002"  # seeded
    kept = [own / "ledger.jsonl", *(own / "runs" / first / name for name in ("privacy.jsonl", "options.json"))]
    before = [file.read_bytes() for file in kept]
    models = list((own / "runs" / first).rglob("*.safetensors"))
    assert models
    code, out, err = flwr_replay("deploy", "state", str(own), "--remove", first, "--yes")
    assert code == 0, err
    assert f"{first}\n  " in out
    assert ", removed; last written 0:00:0" in out
    assert not any(file.exists() for file in models)
    assert [file.read_bytes() for file in kept] == before
    assert list((own / "runs" / second).rglob("*.safetensors"))
    models[0].write_bytes(b"late")  # by a message that was under way
    assert "4 B can go" in flwr_replay("deploy", "state", str(own))[1]
    for name, message in (("../..", "must be a run that"), (first[:-1], "did you mean")):
        code, _, err = flwr_replay("deploy", "state", str(own), "--remove", second, "--remove", name, "--yes")
        assert code == 2
        assert message in " ".join(err.split())
    assert list((own / "runs" / second).rglob("*.safetensors"))
    code, _, err = flwr_replay("deploy", "state", str(tmp_path))
    assert code == 2
    assert "has runs/ and ledger.jsonl" in " ".join(err.split())


def test_a_run_does_not_go_on_where_its_state_was_removed(tmp_path, flwr_replay):
    home, runs = tmp_path / "home", tmp_path / "runs"
    ran = run(TINY, strategy="local", rounds=1, run_name="first", runs_dir=runs)
    for name in ("institution-1", "institution-2"):
        own = home / "state" / "simulation" / name
        words = ["--remove", (ran.folder / "run-id").read_text().strip(), "--yes"]
        assert flwr_replay("deploy", "state", str(own), *words)[0] == 0
    code, _, err = flwr_replay("run", "--resume", str(ran.folder), "rounds=2")
    assert code == 2
    assert "has removed what it kept of run" in " ".join(err.split())


def test_features_go_by_the_same_command_also_those_of_simulations(tmp_path, flwr_replay):
    home = tmp_path / "home"
    run(TINY | {"model": "cnn", "model.train": "head"}, strategy="fedavg", rounds=1, runs_dir=tmp_path / "runs")
    kept = sorted(file.name for file in (home / "decoded").iterdir())
    assert len(kept) == 2
    own = home / "state" / "simulation" / "institution-1"
    (own / "decoded").mkdir()
    for name in kept:
        (own / "decoded" / name).write_bytes((home / "decoded" / name).read_bytes())
    (first,) = (folder.name for folder in (own / "runs").iterdir())
    for place in (own, home):
        before = sorted(file for file in place.rglob("*") if file.parent != place / "decoded")
        code, out, err = flwr_replay("deploy", "state", str(place), "--remove", "decoded", "--yes")
        assert code == 0, err
        assert "decoded images and features, made again when they are missing: 0 B" in out
        assert (first in out) == (place == own)
        assert not list((place / "decoded").iterdir())
        assert sorted(file for file in place.rglob("*") if file.parent != place / "decoded") == before
    code, _, err = flwr_replay("deploy", "state", str(home), "--remove", first, "--yes")
    assert code == 2
    assert "must be a run that" in " ".join(err.split())


def test_all_goes_by_one_command_and_nothing_else(tmp_path, flwr_replay):
    home, outside = tmp_path / "home", tmp_path / "outside"
    run(TINY | {"model": "cnn", "model.train": "head"}, strategy="local", rounds=1, runs_dir=home / "runs")
    states = home / "state" / "simulation"
    clinic = tmp_path / "clinic"
    shutil.copytree(states / "institution-1", clinic / "state" / "north")
    outside.mkdir()
    (outside / "image.png").write_bytes(b"a patient's")
    for file in (clinic / "clinic.env", clinic / "policy.yaml", clinic / "key", clinic / "seal.key", outside / "key"):
        file.write_text("NAME=north\nADDRESS=a:1\nVERSIONS=''\n")
    (clinic / "state" / ".flower").mkdir()
    (clinic / "state" / ".flower" / "config.toml").write_text("")
    shutil.copytree(clinic / "state" / ".flower", clinic / "flower")  # as an older version has it
    (clinic / "supernode.pid").touch()
    (states / "mine" / "runs").mkdir(parents=True)
    for link in (clinic / "data", next((clinic / "state" / "north" / "runs").iterdir()) / "linked"):
        link.symlink_to(outside)
    project = tmp_path / "project"  # a run's folder and decoded images make none a state
    for name in ("runs", "decoded"):
        (project / name).mkdir(parents=True)
    for place, strange, says in (
        (home, states / "mine.txt", "mine.txt is not flwr-replay's"),
        (home, home / "decoded" / "mine.txt", "mine.txt is not flwr-replay's"),
        (home / "state", states / "institution-3", "institution-3 is one"),
        (clinic, clinic / "state" / "north" / "spent", "spent is one"),
        (clinic, clinic / "state" / "mine.txt", "mine.txt is not flwr-replay's"),
        (home, states / "mine" / "runs" / "mine.txt", "mine.txt is not flwr-replay's"),
        (outside, outside / "clinic.env", "outside has not"),
        (project, project / "mine.txt", "project has not"),
        (outside, outside / "mine.txt", "outside has not"),
    ):
        if strange.suffix:
            strange.write_text("mine")
        else:
            shutil.rmtree(strange, ignore_errors=True)
            strange.symlink_to(outside)
        before = sorted(tmp_path.rglob("*"))
        code, _, err = flwr_replay("deploy", "remove", str(place), "receipt", "--yes")
        assert code == 2
        assert says in " ".join(err.split())
        assert sorted(tmp_path.rglob("*")) == before
        strange.unlink()
    (clinic / "state" / "supernode.pid").write_text(f"{os.getpid()}\n")
    (tmp_path / "linked").symlink_to(clinic / "state")
    with chdir(clinic):  # as start.sh has it
        for place in (clinic, clinic / "state" / "north", tmp_path / "linked" / "north"):
            code, _, err = flwr_replay("deploy", "remove", str(place), str(tmp_path / "receipt"), "--yes")
            assert code == 2
            assert f"process {os.getpid()} does: stop it" in " ".join(err.split())
    shutil.copytree(home / "state", tmp_path / "copy")
    for name in ("ledger.jsonl", "ledger.begun"):  # of one that has refused all
        (tmp_path / "refused").mkdir(exist_ok=True)
        shutil.copy(states / "institution-1" / name, tmp_path / "refused")
    for place, receipt, left in (
        (tmp_path / "refused", tmp_path / "of-refused", []),
        (clinic, clinic / "gone", ["clinic.env", "data", "gone", "policy.yaml"]),
        (states, tmp_path / "of-states", []),
        (home, home / "gone", ["gone", "runs"]),
    ):
        shutil.copytree(tmp_path / "copy", home / "state", dirs_exist_ok=True)
        models = [file for file in place.rglob("*.safetensors") if not file.is_relative_to(home / "runs")]
        ledgers = {file.relative_to(place): file.read_bytes() for file in place.rglob("ledger.jsonl")}
        ledgers = {name: content for name, content in ledgers.items() if name.parts[0] != "runs"}
        assert bool(models) == (place.name != "refused")
        assert ledgers
        code, out, err = flwr_replay("deploy", "remove", str(place), str(receipt), "--yes", "--json")
        assert code == 0, err
        assert json.loads(out)["left"] == left
        told = json.loads((receipt / "receipt.json").read_text())
        assert {name: (receipt / name).read_bytes() for name in ledgers} == ledgers
        assert not any(file.exists() for file in models)
        assert {file.relative_to(place).as_posix() for file in models} <= {*told["removed"]}
        assert not {*told["kept"]} & {*told["removed"]}
        assert ("key" in told["removed"]) == (place == clinic)
        assert not [name for name in told["kept"] if "linked" in name]
    assert sorted(file.name for file in outside.iterdir()) == ["image.png", "key"]
    assert list((home / "runs").rglob("result.json"))


def test_the_coordinators_folder_goes_as_a_clinics(tmp_path, flwr_replay):
    port, receipt = free_port(), tmp_path / "receipt"
    words = ("--clinics", "north,south", "--address", f"127.0.0.1:{port}", "--out", "dep", "task.size=8", "classes=2")
    assert flwr_replay("deploy", "init", *words)[0] == 0
    folder = tmp_path / "dep" / "coordinator"
    ran = run(TINY, strategy="fedavg", rounds=1, record="all", run_name="first", runs_dir=folder / "runs").folder
    (folder / "state").mkdir(exist_ok=True)
    for name in ("superlink.db", "north.registered"):
        (folder / "state" / name).write_text("Flower's")
    (folder / "flower").mkdir()  # here, and of superlink.db, as an older version has it
    for name in ("flower/config.toml", "superlink.db", "superlink.db-wal"):
        (folder / name).write_text("Flower's")
    (tmp_path / "elsewhere").mkdir()

    def refused(says):
        before = sorted(folder.rglob("*"))
        code, _, err = flwr_replay("deploy", "remove", str(folder), str(receipt), "--yes")
        assert (code, sorted(folder.rglob("*"))) == (2, before)
        assert says in " ".join(err.split())

    with socket.create_server(("127.0.0.1", port)):
        refused(f"the SuperLink at 127.0.0.1:{port} does: stop it")
    unreachable = ("sh", "-c", "read line # flower-superlink")
    with subprocess.Popen(unreachable, stdin=subprocess.PIPE, cwd=folder) as superlink:
        refused(f"the SuperLink, process {superlink.pid}, does: stop it")
        superlink.communicate()
    for strange in (folder / "keys" / "mine.txt", folder / "runs" / "mine.csv"):
        strange.write_text("mine")
        refused(f"{strange} is not flwr-replay's: move it away")
        strange.unlink()
    (folder / "runs" / "anothers").mkdir()
    (folder / "runs" / "anothers" / "config.yaml").write_text("model: mine")
    refused("anothers is not flwr-replay's: move it away")
    shutil.rmtree(folder / "runs" / "anothers")
    (folder / "runs" / "linked").symlink_to(tmp_path / "elsewhere")
    refused("linked is one")
    (folder / "runs" / "linked").unlink()
    shows = {name: (ran / name).read_bytes() for name in ("ledger.jsonl", "config.yaml", "result.json", "run-id")}
    stays = sorted({path.name for path in folder.iterdir()} - {"certificates", "keys", "state", "runs"})
    stays = [name for name in stays if not name.startswith(("superlink.db", "flower"))]
    code, out, err = flwr_replay("deploy", "remove", str(folder), str(receipt), "--yes", "--json")
    assert (code, json.loads(out)["left"]) == (0, stays), err
    assert sorted(path.name for path in folder.iterdir()) == stays
    told = json.loads((receipt / "receipt.json").read_text())
    assert {name: (receipt / "runs" / "first" / name).read_bytes() for name in shows} == shows
    removed = ("certificates/server.key", "state/superlink.db", "superlink.db-wal", "flower/config.toml")
    assert {*removed, "runs/first/models/global.safetensors"} <= {*told["removed"]}
    assert told["left"] == stays
    kept = {file.suffix for file in receipt.rglob("*") if file.is_file()}
    assert kept <= {".json", ".jsonl", ".yaml", ""}  # no model, message or page
