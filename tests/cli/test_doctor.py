"""doctor --deployment: what it finds in the coordinator's folder, in its run directories and at the SuperLink."""

import json
import os
import re
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from harness import command

from flwr_replay.deploy import coordinator, examining
from flwr_replay.deploy.clinic import examine_clinic
from flwr_replay.deploy.coordinator import examine_coordinator
from flwr_replay.engines.certificates import CA, SERVER, SERVER_KEY, write_certificates
from flwr_replay.engines.simulate import run_inline
from flwr_replay.engines.superlink import free_port
from flwr_replay.files.atomic import alone
from flwr_replay.report.progress import Display


def test_the_doctor_names_what_is_wrong_at_the_coordinator(written, tmp_path, monkeypatch, capsys):
    """Before any key has come, while something with the study's certificate answers, and then with another's key."""
    home = tmp_path / "coordinator"
    shutil.copytree(written / "coordinator", home)
    assert command(monkeypatch, "doctor", "--deployment", str(home)) == 1
    checks = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert "for localhost, 127.0.0.1" in checks["ok  certificates"]
    assert checks["NO  keys"].endswith("north, south: put the institution's file into keys/, then ./register.sh")
    assert "with the certificate of this study" in checks["ok  connection"]
    assert "run ./register.sh" in checks["NO  SuperNodes"]
    assert checks["ok  folder"] == "its scripts and its study are there"
    assert "0 finished" in checks["ok  run directories"]
    (home / "keys" / "north.registered").touch()
    shutil.copy(written / "north" / "north.pub", home / "keys" / "south.pub")
    write_certificates(tmp_path / "other", ["localhost"], 1)
    shutil.copy(tmp_path / "other" / SERVER_KEY, home / "certificates")
    (home / "runs" / "first").mkdir(parents=True)
    (home / "runs" / "first" / "config.yaml").touch()
    (home / "runs" / "first" / "run-id").write_text("20261126-000000-x")
    (home / "connect.sh").write_text(
        re.sub("address = .*", f'address = "localhost:{free_port()}"', (home / "connect.sh").read_text())
    )
    healthy, lines = examine_coordinator(home)
    checks = dict(line.split(": ", 1) for line in lines.splitlines())
    assert not healthy
    assert "must be the key of server.crt" in checks["NO  certificates"]
    assert checks["NO  keys"] == "not registered: south: run ./register.sh"
    assert "nothing answers at localhost" in checks["NO  connection"]
    assert checks["NO  runs"].endswith("by its config.toml; not so: run ./register.sh")
    assert checks["NO  run directories"].startswith("not finished: first: ./run.sh --run-config 'resume=")
    assert "first 17 B" in checks["ok  disk"]
    (home / "certificates" / CA).unlink()
    (line,) = [line for line in examine_coordinator(home)[1].splitlines() if line.startswith("NO  connection")]
    assert line.endswith(f"{home / 'certificates' / CA} must be a certificate, by which to know the server; it is none")
    for words in (["--deployment", str(written / "north")], ["--deployment", str(home), "--clinic", str(home)]):
        assert command(monkeypatch, "doctor", *words) == 2


def test_a_certificate_without_addresses_is_named(written, tmp_path):
    home, key, name = tmp_path / "coordinator", ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    shutil.copytree(written / "coordinator", home)
    began = datetime.now(UTC) - timedelta(hours=1)
    own = x509.CertificateBuilder(name, name, key.public_key(), 1, began, began + timedelta(days=99))
    own = own.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True).sign(key, SHA256())
    for file in (CA, SERVER):
        (home / "certificates" / file).write_bytes(own.public_bytes(Encoding.PEM))
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (home / "certificates" / SERVER_KEY).write_bytes(private)
    assert "server.crt must name the addresses of the server; it names none" in examine_coordinator(home)[1]


def test_the_doctor_names_a_serverapp_that_hangs_and_a_full_disk(written, tmp_path, monkeypatch):
    """While nothing answers, a live process holds the lock of a run directory; later a SuperLink has its run."""
    home = tmp_path / "coordinator"
    shutil.copytree(written / "coordinator", home)
    subprocess.run(["sh", "-c", ". ./connect.sh"], cwd=home, check=True)  # so that Flower knows the SuperLink
    run = home / "runs" / "first"
    run.mkdir(parents=True)
    options = {"timeout": 60, "rounds": 1, "strategy": {"name": "cwt"}, "task": {"name": "digits", "class_names": []}}
    (run / "config.yaml").write_text(json.dumps(options))
    (run / "run-id").write_text("20261126-000000-x")
    sent = {"round": 3, "direction": "down", "stage": "train", "kind": "model", "bytes": 9}
    sent |= {"field": "arrays", "protection": "none"}
    lines = [json.dumps({**sent, "institution": name}) for name in ("north", "south")]
    (run / "ledger.jsonl").write_text("\n".join([*lines, lines[0].replace("down", "up")]) + "\n")

    def finding_of(check):
        return dict(line.split(": ", 1) for line in examine_coordinator(home)[1].splitlines())[check]

    def lists(*live, nodes=()):
        runs = [{"status": status, "run-id": "1"} for status in live]
        answer = {"success": True, "runs": runs, "nodes": nodes}
        done = subprocess.CompletedProcess([], 0, json.dumps(answer))
        monkeypatch.setattr(coordinator, "answers", lambda address: bool(live))
        monkeypatch.setattr(coordinator.subprocess, "run", lambda *words, **options: done)

    lists()
    with alone(run):
        resume = f"./run.sh --run-config 'resume=\"{run}\"' goes on"
        assert "a ServerApp works on first, and the SuperLink has no live run" in (line := finding_of("NO  ServerApps"))
        assert line.endswith(f"end process {os.getpid()}, then {resume}")
        assert finding_of("ok  run directories") == "0 finished, one goes on"
        lists("running")
        assert finding_of("ok  ServerApps").endswith("after its last line; it waits for south")
        for file in (run / "ledger.jsonl", run / "config.yaml"):
            os.utime(file, (0, 0))
        assert "answers are waited for timeout=60 s (it waits for south): see `flwr log`" in finding_of(
            "NO  ServerApps"
        )
    for name, told in (
        ("north", "SuperNode 77 registered successfully.\n"),
        ("south", ""),
    ):  # the latter as it was once
        (home / "state" / f"{name}.registered").write_text(told)
    away = [{"node-id": "77", "status": "offline", "offline-at": "noon"}]
    lists("running", nodes=[*away, {"node-id": "78", "status": "registered", "offline-at": "N/A"}])
    assert finding_of("NO  SuperNodes").startswith(
        "0 of 2 SuperNodes are online (north offline since noon; 78 registered):"
    )
    assert finding_of("NO  run directories") == f"not finished: first: {resume} where it was"
    monkeypatch.setattr(examining.shutil, "disk_usage", lambda folder: SimpleNamespace(free=5e8))
    assert (
        "is nearly full, 500 MB are free: `flwr-replay runs clean` says what can go; the largest: first"
        in finding_of("NO  disk")
    )
    assert "is nearly full" in examine_clinic(written / "north")[1]


def test_a_run_directory_or_a_folder_that_is_damaged_is_named(written, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    home = tmp_path / "coordinator"
    shutil.copytree(written / "coordinator", home)
    options = ["strategy=local", "nodes=2", "rounds=1", "model=mlp", "model.width=4", "run_name=small"]
    _, run = run_inline([*options, f"runs_dir='{home / 'runs'}'"], Display())

    def finding_of(check):
        return dict(line.split(": ", 1) for line in examine_coordinator(home)[1].splitlines())[check]

    assert finding_of("ok  run directories") == "1 finished"
    (run / "result.json").write_text("")
    assert f"{run / 'result.json'} must be as it was written; it is damaged" in finding_of("NO  run directories")
    (run / "result.json").unlink()
    assert finding_of("NO  run directories").startswith("not finished: small: ./run.sh ")
    with open(run / "config.yaml", "a") as file:
        file.write("rounds: 99")
    assert f"{run / 'config.yaml'} must be as the run wrote it" in finding_of("NO  run directories")
    for file in ("run.sh", "study/pyproject.toml"):
        (home / file).unlink()
    assert finding_of("NO  folder").startswith("run.sh, study/pyproject.toml must lie in ")
    subprocess.run(["sh", "-c", ". ./connect.sh"], cwd=home, check=True)
    assert "must answer" in finding_of("NO  runs") or "is refused" in finding_of("NO  runs")
    (home / "state" / ".flower" / "config.toml").write_text('[superlink.superlink]\naddress = "nowhere')
    assert finding_of("NO  runs").endswith("not so: run ./register.sh")
