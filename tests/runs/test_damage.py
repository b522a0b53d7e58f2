"""Damage to what a run and its institutions have on the disk: the same bits all the same, or one line with the file.

Runs are broken off and damaged, each kind of file in each way, and resumed as the command line does.
"""

import logging
import shutil
from contextlib import suppress
from functools import cache

import pytest
from harness import Stopping, older
from replay_runs import GENERATOR
from safetensors.numpy import load_file

from flwr_replay.engines.simulate import run_inline
from flwr_replay.errors import FlwrReplayError
from flwr_replay.files.atomic import home
from flwr_replay.report.progress import Display
from flwr_replay.runs.options import resolve

SMALL = ["model=mlp", "model.width=4", "nodes=2", "partition.size=100", "device=cpu"]
PRIVATE = ["privacy.dp=classifier", "privacy.noise=seeded", "privacy.sigma=2"]
JOBS = {
    "fedreplay": [*SMALL, "strategy=fedreplay", "encoder-epochs=1", "rounds=4", "forgetting=true", "latent-dtype=int8"],
    "cwt": [*SMALL, *GENERATOR, "strategy=cwt", "replay=vqvae2", "rounds=1", "generator.epochs=1", "task.size=8"],
    "fedavg": [*SMALL, *PRIVATE, "strategy=fedavg", "rounds=4", "strategy.optimizer_state=keep"],
}
STOP = {"fedreplay": 4, "cwt": 3, "fedavg": 3}  # checkpoints
WAYS = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "a flipped bit": lambda data: flipped(data, len(data) * 4 // 5),
    "other JSON": lambda data: b'{"rounds": "many", "filled": -1}\n',
    "binary": lambda data: bytes(range(256)),
    "folder": None,
}
AT_THE_SERVER = [
    *(("fedreplay", f"{name}.jsonl") for name in ("ledger", "metrics", "timings", "forgetting")),
    *(("fedreplay", name) for name in ("config.yaml", "run-id", "SHA256SUMS", "environment.json", "checkpoints/*3.*")),
    *(
        ("fedreplay", f"latents/institution-1/{name}")
        for name in ("upload.json", "latents.npy", "labels.npy", "scales.npy")
    ),
    *(("cwt", name) for name in ("generator.jsonl", "replay/generator-*0.*", "replay/codes-*1.*")),
    *(("fedavg", f"{name}.jsonl") for name in ("privacy", "members")),
]
AT_AN_INSTITUTION = ["privacy.jsonl", "options.json", "ledger.jsonl", "optimizer-*3.safetensors"]


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def damage(path, way):
    data = path.read_bytes()
    if WAYS[way] is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(WAYS[way](data))


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """Return what breaks a job off, and runs it whole, once: its folder, and the final weights and metrics."""
    place = tmp_path_factory.mktemp("damage")

    @cache
    def both(name):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FLWR_REPLAY_HOME", str(place / name))
            options = [*JOBS[name], f"runs_dir={place}/{name}/runs"]
            whole, folder = run_inline([*options, "run_name=whole"], Display())
            with suppress(KeyboardInterrupt):
                run_inline([*options, "run_name=broken"], Stopping(STOP[name]))
                raise AssertionError("the run must break off")
        return place / name, (weights(folder), whole["final"])

    return both


def weights(folder):
    return {name: array.tobytes() for name, array in load_file(folder / "models" / "global.safetensors").items()}


@pytest.fixture
def resume(broken, tmp_path, monkeypatch, caplog):
    """Copy a broken run and its institutions, and let a test damage a file and resume."""

    def resumed(job, damaged):
        place, whole = broken(job)
        shutil.copytree(place, tmp_path / job)
        monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / job))
        folder = tmp_path / job / "runs" / "broken"
        path = damaged(folder)
        try:
            result, _ = run_inline(resolve([], "", str(folder))[0], Display())
        except FlwrReplayError as error:
            return path, str(error)
        if reported := [failure["reason"] for failure in result["failures"]]:
            return path, reported[0]
        assert (weights(folder), result["final"]) == whole
        return path, ""

    with caplog.at_level(logging.INFO, "flwr"):
        yield resumed
    assert not [record for record in caplog.records if record.exc_info], "a fault of the user's needs no traceback"


def check(path, reported):
    assert not reported or (path.name in reported and "\n" not in reported), reported


@pytest.mark.sampled(1, "way")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("job", "name"), AT_THE_SERVER)
def test_damage_at_the_server(resume, job, name, way):
    def damaged(folder):
        [path] = folder.glob(name)
        damage(path, way)
        return path.parent if path.suffix == ".npy" else path

    check(*resume(job, damaged))


def test_a_flipped_bit_of_kept_latents_is_noticed(resume):
    """None of its kind: a file without a form, of which nothing but its checksum tells."""
    [latents] = (name for _, name in AT_THE_SERVER if name.endswith("latents.npy"))
    test_damage_at_the_server(resume, "fedreplay", latents, "a flipped bit")


@pytest.mark.sampled(1, "way")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", AT_AN_INSTITUTION)
def test_damage_at_an_institution(resume, name, way):
    def damaged(folder):
        files = (home() / "state" / "simulation" / "institution-1").rglob(name)
        run = (folder / "run-id").read_text().strip()
        [path] = [path for path in files if run in str(path) or name == "ledger.jsonl"]
        damage(path, way)
        return (
            path.parent if (name, way != "folder") == ("options.json", True) else path
        )  # of which the server is reported

    check(*resume("fedavg", damaged))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
def test_both_checkpoints_damaged_are_reported_and_nothing_begins_anew(resume, way):
    def damaged(folder):
        for path in (folder / "checkpoints").iterdir():
            damage(path, way)
        return folder / "checkpoints"

    path, reported = resume("fedreplay", damaged)
    assert f"{path} has no complete one" in reported


def test_checkpoints_that_are_gone_are_reported(resume):
    def damaged(folder):
        shutil.rmtree(folder / "checkpoints")
        return folder / "checkpoints"

    path, reported = resume("fedreplay", damaged)
    assert f"{path} must hold the run's last two" in reported


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_result_is_the_run_s_own(broken, tmp_path, monkeypatch, way):
    place, whole = broken("fedreplay")
    shutil.copytree(place, tmp_path / "home")
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "runs" / "whole"
    damage(folder / "result.json", way)
    with pytest.raises(FlwrReplayError, match=r"result\.json must be"):
        run_inline(resolve([], "", str(folder))[0], Display())
    shutil.rmtree(folder / "result.json") if way == "folder" else (folder / "result.json").unlink()
    assert run_inline(resolve([], "", str(folder))[0], Display())[0]["final"] == whole[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [way for way, change in WAYS.items() if change])
def test_a_damaged_model_of_the_best_round_is_reported_and_the_run_goes_on(broken, tmp_path, monkeypatch, caplog, way):
    place, whole = broken("fedavg")
    shutil.copytree(place, tmp_path / "home")
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "runs" / "broken"
    paths = [*(folder / "best").iterdir()]
    for path in paths:
        damage(path, way)
    with caplog.at_level(logging.INFO, "flwr"):
        result, _ = run_inline(resolve([], "", str(folder))[0], Display())
    assert (weights(folder), result["final"]) == whole
    lines = [line for line in caplog.messages if "goes on without the best round's model" in line]
    assert any(str(path) in line for path in paths for line in lines)
    kept = result["best-model"]["file"]
    assert (kept == "") == ("damaged or removed" in result["best-model"]["none"])
    assert not kept or load_file(folder / kept)


def test_another_seed_in_the_configuration_is_reported(resume):
    def damaged(folder):
        path = folder / "config.yaml"
        path.write_text(path.read_text().replace("seed: 0", "seed: 1"))
        return path

    path, reported = resume("fedreplay", damaged)
    assert f"{path} must be as the run wrote it" in reported


def test_runs_of_older_versions_go_on(resume):
    def damaged(folder):
        older(folder)
        return folder

    assert resume("fedreplay", damaged)[1] == ""
