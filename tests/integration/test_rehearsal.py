"""A rehearsal deploys on this machine, runs, shows and stops everything, also after Ctrl-C."""

import csv
import json
import os
import runpy
import signal
import time

import psutil
import pytest
from deployed import HOSPITALS
from forks import Command
from PIL import Image

from flwr_replay.cli.main import app
from flwr_replay.errors import ConfigError, DataError, RunError
from flwr_replay.files.atomic import read_json
from flwr_replay.files.lines import read_lines

ENDED = {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}  # exit codes


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Two clinics' images in one folder, with a column `site`."""
    root = tmp_path_factory.mktemp("play") / "data"
    runpy.run_path(str(HOSPITALS / "make_data.py"))["write_clinics"](root)
    manifest = root / "manifest.csv"
    manifest.write_text("\n".join(row for row in manifest.read_text().splitlines() if not row.startswith("clinic-c")))
    return root


def started(place, play, *options):
    words = ["rehearse", str(play), "strategy=cwt", "width=4", "device=cpu", "--out", str(place), *options]
    return Command(words, play, own_session=True)


def left_over(place):
    """Return the processes that still work in a rehearsal's folder."""
    left = []
    for process in psutil.process_iter(["cmdline"]):
        if process.pid != os.getpid() and any(str(place) in word for word in process.info["cmdline"] or []):
            left.append(process.info["cmdline"])
    return left


@pytest.mark.sampled(1, of="deployments that end")
def test_a_rehearsal_runs_shows_and_stops(play, tmp_path):
    """Sealed, with TLS and keys, with a policy for each, in a folder whose name needs quoting."""
    place, policies = tmp_path / 'the "reh"', tmp_path / "policies"
    policies.mkdir()
    (policies / "clinic-a.yaml").write_text("strategies: [cwt]\nsealed: true\n")
    (policies / "clinic-b.yaml").write_text("kinds: [model, statistic]\n")
    process = started(
        *(place, play, "rounds=1", "split=test", "sealed=true"),
        *("--tls", "--record", "--json", "--policy", str(policies)),
    )
    output = process.rest()
    assert process.returncode == 0, output
    result = read_json(place / "runs" / "rehearsal" / "result.json")
    assert set(result["final"]["institutions"]) == {"clinic-a", "clinic-b"}
    told = json.loads(output[output.rindex("\n{\n") :])
    assert (told["run"], told["result"]["final"]) == (str(place / "runs" / "rehearsal"), result["final"])
    assert f"cwt on folder: accuracy {result['final']['global']['accuracy']:.4f}" in output
    assert output.count("cwt on folder: accuracy") == 1
    assert "--- the end of" not in output
    assert "\x1b[" not in output
    for clinic, number in (("clinic-a", 96), ("clinic-b", 80)):
        with open(place / "data" / clinic / "manifest.csv", newline="") as file:
            assert len(list(csv.DictReader(file))) == number
        assert (place / "state" / clinic / "ledger.jsonl").exists()
        assert len(list((place / "state" / clinic / "messages").iterdir())) > 2
        log = (place / "logs" / f"{clinic}.log").read_text()
        assert f"policy {policies / clinic}.yaml" in log
        assert "insecure" not in log.lower()
    models = [entry for entry in read_lines(place / "runs" / "rehearsal" / "ledger.jsonl") if entry["kind"] == "model"]
    assert {entry["protection"] for entry in models if entry["bytes"]} == {"sealed"}
    assert (place / "runs" / "rehearsal" / "report.html").exists()
    assert not (place / "flower").exists()
    assert left_over(place) == []


@pytest.mark.sampled(1, of="deployments that end")
@pytest.mark.parametrize("sent", ENDED)
def test_ctrl_c_or_a_kill_stops_all_of_it(play, tmp_path, sent):
    place = tmp_path / "reh"
    process = started(place, play, "rounds=500")
    for line in process.output:
        if "logstream" in line:
            (os.killpg if sent == signal.SIGINT else os.kill)(process.pid, sent)
            break
    process.rest()
    assert process.returncode == ENDED[sent]
    for _ in range(30 * (sent == signal.SIGKILL)):  # the watchdog ends them then
        if not left_over(place):
            break
        time.sleep(1)
    assert left_over(place) == []


def test_what_cannot_be_rehearsed_is_refused_before_anything_is_written(play, tmp_path):
    def refused(error, message, *words):
        with pytest.raises(error, match=message):
            app(["rehearse", str(play), "--out", str(tmp_path / "reh"), *words], standalone_mode=False)
        assert not (tmp_path / "reh").exists()

    refused(ConfigError, "a rehearsal sets nodes itself", "nodes=3")
    refused(DataError, r"labels of task=folder must lie in 0\.\.1; got .*set task.classes", "task.classes=2")
    refused(ConfigError, "must be 0, or the manifest's 2 sites; got 5", "--institutions", "5")
    refused(ConfigError, "--policy must be a file", "--policy", "none.yaml")
    refused(ConfigError, "did you mean fedavg", "strategy=fedav")
    with pytest.raises(DataError, match="must be a folder"):
        app(["rehearse", str(tmp_path / "nothing")], standalone_mode=False)
    with pytest.raises(RunError, match="must be new"):
        app(["rehearse", str(play), "--out", str(tmp_path)], standalone_mode=False)


def test_a_folder_without_sites_is_dealt_at_random_and_colours_are_seen(tmp_path):
    from flwr_replay.data.folder import folder_rows, form_of
    from flwr_replay.deploy.rehearsal import _names

    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for n in range(5):
            Image.new("RGB", (6, 6), (n, 2 * n, 9)).save(tmp_path / label / f"{n}.png")
    rows = folder_rows(tmp_path)
    names = _names(rows, 3)
    assert sorted(map(names.count, set(names))) == [3, 3, 4]
    assert form_of(rows) == {"size": 6, "channels": 3, "classes": 2, "class_names": ["cat", "dog"]}
    with pytest.raises(ConfigError, match="from 2 to the number of images, 10; got 11"):
        _names(rows, 11)
