"""Whoever reads a run directory reads this run's own files as it wrote them, or says in one line which is not so."""

import json
import shutil
from dataclasses import replace
from hashlib import sha256

import pytest
from harness import older

from flwr_replay import run
from flwr_replay.api import Run
from flwr_replay.config.compose import compose, overrides_of
from flwr_replay.errors import FlwrReplayError, RunError
from flwr_replay.files.atomic import write_json
from flwr_replay.files.tensors import OF_RUN
from flwr_replay.finished.export import card
from flwr_replay.finished.trained import load_model
from flwr_replay.lab.evidence import Evidence
from flwr_replay.report.pages import write_page
from flwr_replay.report.run_files import mark_of, read_result
from flwr_replay.report.summary import summary
from flwr_replay.runs.listing import listed, same_bits, watch
from flwr_replay.runs.options import resolve
from flwr_replay.runs.tracking import Tracking

JOB = {"task": "digits", "task.size": 8, "nodes": 2, "rounds": 2, "model": "mlp", "model.width": 4, "device": "cpu"}
WAYS = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "a list": lambda data: b"[]",
    "a number": lambda data: b"7\n",
    "null": lambda data: b"null\n",
    "no keys": lambda data: b"{}\n",
    "deep": lambda data: b"[" * 3_000,
    "not UTF-8": lambda data: b'{"round": "\xff\xfe"}\n',
    "NaN": lambda data: b'{"round": NaN, "institutions": NaN, "value": NaN}\n',
    "huge": lambda data: b'{"round": 1' + b"0" * 5000 + b"}\n",
    "numbers as text": lambda data: data.replace(b": 1", b': "1"').replace(b": 0", b': "0"'),
    "keys renamed": lambda data: data.replace(b'"institution', b'"x').replace(b"name", b"x"),
    "binary": lambda data: bytes(range(256)),
    "flipped": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :],
    "a folder": None,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a folder with two equal runs of another seed, which are small and finished."""
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("runs")
        patch.setenv("FLWR_REPLAY_HOME", str(place / "home"))
        for seed, name in enumerate(("one", "other")):
            run(JOB, strategy="fedavg", seed=seed, run_name=name, runs_dir=place / "runs", record="up")
        yield place / "runs"


@pytest.fixture
def copied_run(runs, tmp_path):
    return shutil.copytree(runs / "one", tmp_path / "one")


READERS = {
    "list": lambda folder: (listing := listed(folder)) and (listing.state, listing.metric),
    "show": lambda folder: summary(read_result(folder), folder),
    "report": write_page,
    "plot": lambda folder: Run(folder, read_result(folder)).metrics["metric"],
    "compare": lambda folder: same_bits([folder, folder]),
    "watch": lambda folder: list(watch(folder, wait=False)),
    "attack": Evidence.of,
    "resume": lambda folder: resolve([], "", str(folder)),
    "predict": load_model,
    "predict --best": lambda folder: load_model(folder, best=True),
    "card": lambda folder: card(folder, load_model(folder), "", best=True),
}
READ_BY = {  # of each small file, who reads it
    "confusion.json": ["show", "report"],
    "config.yaml": ["list", "show", "report", "predict", "resume"],
    "result.json": ["list", "show", "report", "plot", "compare", "watch", "predict", "card"],
    "run-id": ["list", "resume"],
    "SHA256SUMS": ["list", "show"],
    "members.jsonl": ["report"],
    "ledger.jsonl": ["report", "attack"],
    "metrics.jsonl": ["plot", "compare", "watch", "report"],
    "timings.jsonl": ["watch"],
}


def refusal_of(reader, folder):
    """Return why a reader refuses a run, as the command line prints it in one line; empty: it does not."""
    try:
        READERS[reader](folder)
    except FlwrReplayError as error:
        return str(error)
    return ""


def each_way(path):
    """Damage a file in each way in turn; put it right in the end."""
    sound = path.read_bytes()
    for way, change in WAYS.items():
        if change:
            path.write_bytes(change(sound))
        else:
            path.unlink()
            path.mkdir()
        yield way, change is None or change(sound) != sound
    path.rmdir()
    path.write_bytes(sound)


@pytest.mark.sampled(4, "version")
@pytest.mark.parametrize("version", ["this", "older"])
@pytest.mark.parametrize("name", READ_BY)
def test_damage_to_a_small_file_is_one_line_to_who_reads_it(copied_run, version, name):
    if version == "older":
        if name == "SHA256SUMS":
            return  # it has none
        older(copied_run)
    assert not any(refusal_of(reader, copied_run) for reader in READ_BY[name])
    for way, differs in each_way(copied_run / name):
        lines = [refusal_of(reader, copied_run) for reader in READ_BY[name]]  # other errors than lines end the test
        told = [*filter(None, lines)] or "not as the run left it" in (copied_run / "report.html").read_text()
        assert told or not differs or version == "older", way
    assert not any(refusal_of(reader, copied_run) for reader in READ_BY[name])


# --- files of another run ---------------------------------------------------------------------------------------------


def test_reordered_class_names_do_not_invert_predictions(copied_run):
    path = copied_run / "config.yaml"
    path.write_text(path.read_text().replace("- '0'\n  - '1'", "- '1'\n  - '0'").replace("seed: 0", "seed: 1"))
    for reader in READERS:
        assert "config.yaml must be as the run wrote it" in refusal_of(reader, copied_run), reader
    sums = copied_run / "SHA256SUMS"  # with sums to match, the other files still name the run's options
    sums.write_text(
        "".join(
            f"{sha256((copied_run / name).read_bytes()).hexdigest()}  {name}\n" for name in ("config.yaml", "run-id")
        )
    )
    for reader in READERS:
        assert reader == "resume" or "names it with other options" in refusal_of(reader, copied_run), reader
    sums.unlink()
    assert "SHA256SUMS must be a file" in refusal_of("predict", copied_run)


FOREIGN = {
    "result.json": ["list", "show", "report", "plot", "watch", "predict", "card"],
    "confusion.json": ["show", "report"],
    "models/global.safetensors": ["predict", "card", "compare"],
    "best/*.safetensors": ["predict --best"],
    "metrics.jsonl": ["plot", "watch", "compare", "card"],
    "timings.jsonl": ["watch"],
    "members.jsonl": ["report"],
    "ledger.jsonl": ["report", "attack"],
    "run-id": list(READERS),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FOREIGN)
def test_another_run_s_file_is_not_taken_for_this_run_s(runs, copied_run, name):
    (own,), (other,) = copied_run.glob(name), (runs / "other").glob(name)
    shutil.copy(other, own)
    for reader in FOREIGN[name]:
        assert own.name in (line := refusal_of(reader, copied_run)) or "run-id" in line, (reader, line)


def test_another_run_s_message_is_not_taken_for_this_run_s(runs, copied_run):
    own, other = (sorted((folder / "messages").glob("*.safetensors")) for folder in (copied_run, runs / "other"))
    shutil.copy(other[-1], own[-1])
    assert f"{own[-1]} must be of the run" in refusal_of("attack", copied_run)


def test_another_run_s_files_are_not_taken_on_where_a_run_goes_on(runs, copied_run, caplog):
    (copied_run / "result.json").unlink()
    assert "result.json" in refusal_of("predict", copied_run)
    name = sorted(path.name for path in (copied_run / "checkpoints").iterdir())[-1]
    shutil.copy(runs / "other" / "checkpoints" / name, copied_run / "checkpoints" / name)
    assert f"{name} must be of the run" in refusal_of("watch", copied_run)
    config = compose(overrides_of(copied_run / "config.yaml"))
    write_json(copied_run / "tracking.json", {"tracker": "tensorboard", "run": "x", "exchange": 9, OF_RUN: "other 0"})
    Tracking(replace(config, tracking="tensorboard"), copied_run).tell([(1, {}, {})], 1, {})
    assert "tracking.json must be of the run" in caplog.text


def test_a_changed_line_is_noticed_on_the_page_and_by_who_watches_a_run_that_goes_on(copied_run):
    path = copied_run / "metrics.jsonl"
    row = path.read_text().splitlines()[0]
    path.write_text(path.read_text().replace(row, json.dumps({**json.loads(row), "value": 0.987})))
    assert "not as the run left it" in write_page(copied_run).read_text()
    (copied_run / "result.json").unlink()
    assert "metrics.jsonl must begin with" in refusal_of("watch", copied_run)


def test_a_private_model_is_of_its_folder_s_run(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    for seed, name in enumerate(("one", "other")):
        run(JOB, strategy="local", seed=seed, run_name=name, runs_dir=tmp_path / "runs", rounds=1)
    state = tmp_path / "state" / "simulation" / "institution-1"
    own, other = (
        state / "runs" / (tmp_path / "runs" / name / "run-id").read_text().strip() for name in ("one", "other")
    )
    load = {
        "run": lambda: load_model(tmp_path / "runs" / "one", "institution-1"),
        "state": lambda: load_model(state, run=own.name),
    }
    assert {key: work().classes for key, work in load.items()}
    file = sorted(own.glob("model-*.safetensors"))[-1]
    sound = file.read_bytes()
    shutil.copy(other / file.name, file)
    for work in load.values():
        with pytest.raises(RunError, match=r"must be of its folder's run"):
            work()
    file.write_bytes(sound)
    options = own / "options.json"
    options.write_text(options.read_text().replace('"seed": 0', '"seed": 2'))
    with pytest.raises(RunError, match=r"must be of its folder's run and options\.json"):
        load["state"]()
    options.write_text("[]")
    with pytest.raises(RunError, match=r"options\.json must be as it was written"):
        load["state"]()


def test_a_run_of_an_older_version_is_read_with_a_warning(copied_run, caplog):
    older(copied_run)
    assert not any(refusal_of(reader, copied_run) for reader in READERS)
    assert "is of an older version" in caplog.text
    assert mark_of(copied_run) == ""
