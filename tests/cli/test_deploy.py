"""deploy init and doctor --clinic: what they write, what they refuse, and what they find."""

import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import timm
import torch
from deployed import HOSPITALS, STUDY
from harness import command
from safetensors.torch import save_file

from flwr_replay import processes
from flwr_replay.config.compose import compose
from flwr_replay.config.quoting import node_config
from flwr_replay.deploy import clinic
from flwr_replay.deploy.clinic import examine_clinic
from flwr_replay.deploy.deployment import host_of
from flwr_replay.engines.certificates import write_certificates
from flwr_replay.errors import ConfigError
from flwr_replay.forecast.officer import study_options
from flwr_replay.institution.policy import read_policy
from flwr_replay.memory import forget


def changed(written, file, old, new):
    """Return what the doctor says after a change to one of north's files, which is then taken back."""
    place = written / "north" / file
    before = place.read_bytes()
    place.write_bytes(re.sub(old, new, before))
    try:
        healthy, findings = examine_clinic(written / "north")
    finally:
        place.write_bytes(before)
    assert not healthy
    return [line for line in findings.splitlines() if line.startswith("NO")]


def test_all_is_there_for_its_owner_only_and_no_clinics_private_key(written):
    files = [file for file in written.rglob("*") if not file.is_symlink()]
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)
    keys = [file for file in files if file.is_file() and b"PRIVATE KEY" in file.read_bytes()]
    assert {file.relative_to(written).as_posix() for file in keys} == {
        "coordinator/certificates/server.key",
        "north/key",
    }
    assert (written / "north" / "key").stat().st_mode & 0o777 == 0o600
    readme = (written / "south" / "README.md").read_text()
    assert "differential privacy" not in readme
    assert "one in ten of the others validates" in readme
    policy = read_policy(written / "south" / "policy.yaml")
    assert policy.strategies == ("fedreplay",)
    assert set(policy.kinds) == {"statistic", "model", "per-sample"}
    for folder in ("coordinator", "north", "south"):
        texts = [file.read_text() for file in (written / folder).rglob("*.*") if file.suffix in (".md", ".sh", ".env")]
        assert not any("<<" in text.replace("<<END", "") or ">>" in text for text in texts)
        assert all("export FLWR_TELEMETRY_ENABLED=0" in text for text in texts if "FLWR_HOME=" in text)
    for file in written.rglob("*.sh"):
        subprocess.run(["sh", "-n", str(file)], check=True)


def test_a_proposed_policy_holds_the_server_to_the_noise_on_which_a_study_has_agreed(tmp_path, monkeypatch, capsys):
    noise = ["encoder=random", "dp=latents", "latent-clip=1", "latent-epsilon=50", "label-epsilon=5", "delta=1e-5"]
    words = ["--clinics", "north,south", "--address", "localhost:8000", "--out", str(tmp_path / "dep")]
    assert command(monkeypatch, "deploy", "init", *words, *STUDY, *noise[:-1]) == 2
    assert "agrees on a delta; got delta=0" in capsys.readouterr().err
    assert command(monkeypatch, "deploy", "init", *words, *STUDY, *noise) == 0
    written = tmp_path / "dep" / "north"
    ports = {re.search(r"PORT=(\d+)", file.read_text())[1] for file in (tmp_path / "dep").glob("*/clinic.env")}
    assert len(ports) == 2  # both clinics can work on one machine
    policy = read_policy(written / "policy.yaml")
    assert (policy.max_local_epsilon, policy.max_delta) == (55, 1e-5)
    sums = ["strategy=fedstats", *STUDY[1:-1], "dp=statistics", "privacy.target-epsilon=8", "delta=1e-5"]
    assert command(monkeypatch, "deploy", "init", *words[:-1], str(tmp_path / "sums"), *sums) == 0
    whole = read_policy(tmp_path / "sums" / "north" / "policy.yaml")
    assert (whole.max_epsilon, whole.max_total_epsilon, whole.max_delta) == (8, 16, 1e-5)
    assert policy.weights == (("extract", ("random",)),)
    assert "(dp=latents) with an ε at most 55, in one run" in (written / "README.md").read_text()
    runpy.run_path(str(HOSPITALS / "make_data.py"))["write_clinics"](tmp_path / "data")
    (written / "data").symlink_to(tmp_path / "data" / "clinic-a")
    monkeypatch.chdir(written)
    page = ["run", "--dry-run", "--study", "study", "--policy", "policy.yaml", "--clinics", "north"]
    plain = ["dp=none", "latent-clip=0", "latent-epsilon=0", "label-epsilon=0"]
    for changed, verdict in (([], "takes part"), (plain, "takes no part"), (["latent-epsilon=60"], "takes no part")):
        capsys.readouterr()
        command(monkeypatch, *page, "task.data-dir=data", *changed)
        captured = capsys.readouterr()
        assert verdict in captured.out + captured.err, changed
        assert ("the earlier one is replaced" in captured.out) == bool(changed)


def test_a_study_with_a_frozen_encoder_pins_it_and_every_clinic_has_a_copy(tmp_path, monkeypatch, capsys):
    for seed, name in enumerate(("agreed", "other")):
        torch.manual_seed(seed)
        save_file(timm.create_model("resnet18").state_dict(), tmp_path / f"{name}.safetensors")
    model = ["model=timm", "model.name=resnet18", "model.size=32", "model.train=head", "cut=features"]
    form = [word for word in STUDY if not word.startswith(("model", "width", "cut"))]
    words = ["--clinics", "north,south", "--address", "localhost:8000", "--out", str(tmp_path / "dep")]
    study = [*words, *form, *model, "model.weights=agreed.safetensors"]
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, "deploy", "init", *study) == 0
    north, at_server = tmp_path / "dep" / "north", tmp_path / "dep" / "coordinator"
    # the SuperLink works in another folder
    assert compose(study_options(at_server / "study")).model.weights == str(tmp_path / "agreed.safetensors")
    for readme in (north / "README.md", at_server / "README.md"):
        assert "`pip install '.[timm]'`; or `uv sync --extra timm`" in readme.read_text()
    [(stage, [agreed])] = read_policy(north / "policy.yaml").weights
    assert (stage, agreed[:7]) == ("extract", "sha256:")
    assert 'weights=\\"$PWD/weights.safetensors\\"' in (north / "start.sh").read_text()
    assert agreed in (north / "README.md").read_text()
    runpy.run_path(str(HOSPITALS / "make_data.py"))["write_clinics"](tmp_path / "data")
    (north / "data").symlink_to(tmp_path / "data" / "clinic-a")

    def finds():
        forget()
        return dict(line[4:].split(": ", 1) for line in examine_clinic(north)[1].splitlines() if ": " in line)

    assert "weights.safetensors: FileNotFoundError" in finds()["weights"]
    copy = north / "weights.safetensors"
    shutil.copy(tmp_path / "other.safetensors", copy)
    problems = finds()
    assert (
        f"SHA-256 {sha256(copy.read_bytes()).hexdigest()}; they fit, and what is frozen is sha256:"
        in problems["weights"]
    )
    assert f"take weights {agreed}; got sha256:" in problems["policy"]
    monkeypatch.chdir(north)
    page = [
        "run",
        "--dry-run",
        "--study",
        "study",
        "--policy",
        "policy.yaml",
        "--clinics",
        "north",
        "task.data-dir=data",
    ]
    assert command(monkeypatch, *page, f"model.weights={tmp_path / 'agreed.safetensors'}") == 0
    assert (
        "The network: resnet18, weights agreed.safetensors; images to 32 x 32"
        in Path("officer/officer.html").read_text()
    )


def test_the_doctor_finds_a_ready_clinic_sound(written, monkeypatch, capsys):
    assert command(monkeypatch, "doctor", "--clinic", str(written / "north")) == 0
    output = capsys.readouterr().out
    assert "67 examples to train on, 13 to validate on and 16 to test on" in output
    assert "NO" not in output
    assert command(monkeypatch, "doctor", "--clinic", str(written / "south")) == 1
    missing = [line for line in capsys.readouterr().out.splitlines() if line.startswith("NO")]
    assert [line.split(":")[0].split()[1] for line in missing] == ["data", "key"]
    assert command(monkeypatch, "doctor", "--clinic", str(written)) == 2


def test_the_doctor_names_what_is_wrong(written, tmp_path):
    (line,) = changed(written, "policy.yaml", rb"per-sample", b"synthetic")
    assert "policy.yaml refuses this study; policy lets fields of kind" in line
    (line,) = changed(written, "policy.yaml", rb"kinds", b"kind")
    assert "unknown key kind in line 5" in line
    (line,) = changed(written, "clinic.env", rb"flwr-replay=[^ ]+", b"flwr-replay=99")
    assert "and 99 at the coordinator: install it from where the coordinator says" in line
    (line,) = changed(written, "clinic.env", rb" flwr=[\d.]+", b" flwr=99")
    assert "pip install flwr==99" in line
    (line,) = changed(written, "clinic.env", rb"localhost:", b"127.0.0.2:")
    assert "nothing answers at 127.0.0.2" in line or "no certificate of this study for that address" in line
    (line,) = changed(written, "clinic.env", rb"DATA=data", b"DATA=nothing")
    assert "data" in line
    with pytest.raises(ConfigError, match="must have plain values"):
        changed(written, "clinic.env", rb"DATA=data", b"DATA=data$(touch run)")
    (line,) = changed(written, "north.pub", rb"AAAA", b"BAAA")
    assert "must be the public half of key" in line
    write_certificates(tmp_path, ["localhost"], 1)  # of another study
    (line,) = changed(written, "ca.crt", rb"(?s).*\Z", (tmp_path / "ca.crt").read_bytes())
    assert "no certificate of this study for that address" in line
    (written / "north" / "key").chmod(0o644)
    healthy, findings = examine_clinic(written / "north")
    (written / "north" / "key").chmod(0o600)
    assert not healthy
    assert "its mode is 644: chmod 600 key" in findings


def test_a_port_that_another_program_has_is_said(written):
    port = int(re.search(r"PORT=(\d+)", (written / "north" / "clinic.env").read_text())[1])
    with socket.create_server(("127.0.0.1", port)):
        findings = examine_clinic(written / "north")[1]
    assert f"NO  names: port {port} is in use here by another program: change PORT in clinic.env" in findings


def test_a_clientapp_whose_message_never_comes_is_named_with_its_process(written, tmp_path, monkeypatch):
    app, north = tmp_path / "flwr-clientapp", written / "north"
    app.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(clinic, "supernode", lambda folder: os.getpid())
    with subprocess.Popen([sys.executable, app]) as waiting:
        assert "ClientApp" not in examine_clinic(north)[1]
        monkeypatch.setattr(clinic, "AGE", -1)
        assert "NO  clientapps: a ClientApp still waits for the content of a message" in examine_clinic(north)[1]
        assert f"the next run ends process {waiting.pid}. If a run is live, leave it:" in examine_clinic(north)[1]
        monkeypatch.setattr(processes, "IDLE", 0)  # one that works
        assert "ClientApp" not in examine_clinic(north)[1]
        waiting.kill()


def test_a_key_is_never_made_twice(written):
    before = (written / "north" / "key").read_bytes()
    done = subprocess.run([written / "north" / "make-key.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert (written / "north" / "key").read_bytes() == before


def test_wrong_names_addresses_and_options_are_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    def refused(findings, *words):
        assert command(monkeypatch, "deploy", "init", *words, *STUDY, "--out", str(tmp_path / "dep")) == 2
        assert findings in capsys.readouterr().err
        assert os.listdir(tmp_path) == []

    for name in ("../x", "a b", "a;b", ".a", "a'b", "-a", "", "x" * 41, "ä"):
        refused("name", "--clinics", f"north,{name}")
    refused("different names", "--clinics", "north,North")
    refused("none of them coordinator", "--clinics", "Coordinator,b")
    for address in ("host", "host:0", "host:65536", "ho st:1", 'h";x:1', "300.1.1.1:80", "::1:80", "$(x):1", "a..b:1"):
        refused("HOST:PORT", "--clinics", "a,b", "--address", address)
    refused("deploy init sets nodes itself", "--clinics", "a,b", "nodes=3")
    refused("did you mean strategy", "--clinics", "a,b", "strategi=3")
    refused("writes no start scripts for code of your own", "--clinics", "a,b", "task=mypkg:load")
    monkeypatch.setattr(f"{__name__}.STUDY", [word for word in STUDY if not word.startswith("classes")])
    refused("got none: set task.classes", "--clinics", "a,b")
    (tmp_path / "dep").mkdir()
    words = ["--clinics", "a,b", "strategi=3", "--out", str(tmp_path / "dep")]
    assert command(monkeypatch, "deploy", "init", *words) == 2
    assert "must be new" in capsys.readouterr().err  # before the options are read, which takes seconds
    assert host_of("[::1]:80") == ("[::1]", 80)


@pytest.mark.parametrize("text", ["a\\b", 'a "b"', "it's", "a = b", "ö/ü", "x' y=1 z=1"])
def test_flower_reads_node_config_as_it_was_meant(text):
    from flwr.common.config import parse_config_args

    owned = {"name": "a", "data": text, "policy": "p"}
    assert parse_config_args([node_config(owned)]) == owned


@pytest.mark.parametrize("text", ["a'b\"", "a\nb", "a\x00"])
def test_what_flower_cannot_be_told_is_refused(text):
    with pytest.raises(ConfigError, match="one kind of quotes and no control characters"):
        node_config({"data": text})


@pytest.fixture(scope="module")
def sealed(tmp_path_factory):
    """The folders of a sealed study, with both clinics' keys made by their scripts and pinned."""
    place = tmp_path_factory.mktemp("sealed") / "dep"
    words = ["--clinics", "north,south", "--out", str(place), *STUDY[1:-1], "strategy=avgpush", "sealed=true"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        assert command(patch, "deploy", "init", *words) == 0
    for name in ("north", "south"):
        done = subprocess.run(
            [place / name / "make-key.sh"], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
        )
        lines.append(done.stdout.splitlines()[-1])
    for name in ("north", "south"):
        with open(place / name / "peers.txt", "a", encoding="utf-8") as file:
            file.write("\n".join(lines))
    return place


def line_on_seals(place):
    """Return the doctor's line on keys to seal with."""
    [line] = [line for line in examine_clinic(place)[1].splitlines() if line[4:].startswith("seal:")]
    return line


def test_a_sealed_study_has_keys_that_the_clinics_make_and_pin(sealed, monkeypatch, capsys):
    keys = [(sealed / name / "seal.key").read_text() for name in ("north", "south")]
    assert keys[0] != keys[1]
    assert not any((sealed / name / "seal.key").stat().st_mode & 0o077 for name in ("north", "south"))
    assert not any(key in file.read_text() for key in keys for file in (sealed / "coordinator").rglob("*.*"))
    assert read_policy(sealed / "north" / "policy.yaml").sealed
    assert "seal-peers" in (sealed / "north" / "start.sh").read_text()
    assert line_on_seals(sealed / "north").startswith("ok  seal: 2 pinned keys (north, south)")
    words = ["--key", str(sealed / "south" / "seal.key"), "--peers", str(sealed / "south" / "peers.txt")]
    assert command(monkeypatch, "deploy", "seal-key", "south", *words) == 0
    output = capsys.readouterr().out
    assert output.split()[-1] == line_on_seals(sealed / "north").split()[-1]  # the digests are compared by telephone
    assert not any(key in output for key in keys)
    assert command(monkeypatch, "deploy", "seal-key", "north", *words) == 2
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1  # its line alone, and no half of another
    assert "the pinned keys must have north's own" in captured.err


def test_the_doctor_finds_keys_that_are_missing_wrong_or_open(sealed):
    north = sealed / "north"
    for file, text, fault in (
        ("peers.txt", "", "the pinned keys must have north's own"),
        ("peers.txt", (north / "peers.txt").read_text().replace("south ", "north "), "each once; got"),
        ("seal.key", "0" * 63, "must hold a private key"),
    ):
        before = (north / file).read_text()
        (north / file).write_text(text)
        line = line_on_seals(north)
        (north / file).write_text(before)
        assert line.startswith("NO  seal:")
        assert fault in line
    (north / "seal.key").chmod(0o640)
    assert "only its owner may read seal.key" in line_on_seals(north)
    (north / "seal.key").chmod(0o600)
    (north / "seal.key").rename(north / "away")
    assert "is missing: flwr-replay deploy seal-key north" in line_on_seals(north)
    (north / "away").rename(north / "seal.key")


def test_a_masked_study_needs_three_clinics_and_their_keys(monkeypatch, tmp_path, capsys):
    words = [*STUDY[1:-1], "strategy=fedavg", "masked=true", "split=test", "--out", str(tmp_path / "dep")]
    assert command(monkeypatch, "deploy", "init", "--clinics", "north,south", *words) == 2
    assert "from the mean: add one, or set masked=false" in capsys.readouterr().err
    assert not (tmp_path / "dep").exists()
    assert command(monkeypatch, "deploy", "init", "--clinics", "north,south,west", *words) == 0
    for name in ("north", "south", "west"):
        clinic = tmp_path / "dep" / name
        assert read_policy(clinic / "policy.yaml").masked
        assert "seal-peers" in (clinic / "start.sh").read_text()
        assert "deploy seal-key" in (clinic / "make-key.sh").read_text()
        readme = (clinic / "README.md").read_text()
        assert "The run is masked" in readme
        assert "validates" not in readme
    assert line_on_seals(clinic).startswith("NO  seal: the study needs keys, and ")
