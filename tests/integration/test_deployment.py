"""A SuperLink and SuperNode processes: the weights of in process, honest ledgers, and refusals with their reason.

For a commit FedReplay or ProxyFL; all tests run both at the same time, since a deployed message mostly waits.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos_outer import processes_with
from chaos_runs import drawn_names, moments
from deployed import CLINICS, COORDINATOR, HOSPITALS, REFUSES, TASK, until
from harness import command
from safetensors.numpy import load_file

from flwr_replay.config.compose import compose
from flwr_replay.deploy.clinic import examine_clinic
from flwr_replay.deploy.coordinator import examine_coordinator
from flwr_replay.engines.simulate import FAILED, run_inline
from flwr_replay.engines.superlink import flower
from flwr_replay.files.atomic import in_use, read_json
from flwr_replay.files.lines import read_lines
from flwr_replay.models.zoo import encoder_digest
from flwr_replay.report.progress import LogDisplay
from flwr_replay.report.run_files import read_run_id

pytestmark = [pytest.mark.deployment, pytest.mark.xdist_group("deployment")]

JOBS = {
    "fedreplay": ("rounds=8", "encoder_epochs=1"),  # rounds at the server cost no messages
    "proxyfl": ("rounds=1", "model=mlp", "private_models=[lenet5]", "noise=seeded", "epsilon=50"),
}
RUNS = {name: JOBS[name] for name in drawn_names("deployment", JOBS, 1)}  # of a commit; of all both
BRIEF = ("evaluate_every=100", "split=test")  # each message of a test costs as much as one of a training
MOST = 600  # seconds for an exchange, on a busy machine
ENDS = 60  # seconds after its SuperLink, in which a ServerApp and `flwr run` have ended
AT_ONCE = 60  # seconds; without a reason Flower waits as long for a sign of life


@pytest.fixture(scope="module")
def outputs(deployment: Any) -> dict[str, str]:
    """Run all methods to their ends; what each `flwr run` said, by method."""

    def run(name: str) -> str:
        output: str = deployment.run(name, f"strategy={name}", *RUNS[name], *BRIEF, "lr=0.05")
        return output

    with ThreadPoolExecutor(len(RUNS)) as pool:
        return dict(zip(RUNS, pool.map(run, RUNS), strict=True))


@pytest.fixture(scope="module")
def simulated(deployment: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Run the same in this process, over one folder whose manifest names the sites."""
    home = tmp_path_factory.mktemp("simulated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLWR_REPLAY_HOME", str(home))
        folders = {}
        for name, options in RUNS.items():
            overrides = [*deployment.task, f"strategy={name}", *options, *BRIEF, "lr=0.05"]
            overrides += ["partition=natural", f"data_dir='{deployment.data}'", f"nodes={len(CLINICS)}"]
            _, folders[name] = run_inline([*overrides, f"runs_dir='{home}'", f"run_name={name}"], LogDisplay())
        yield folders


def test_the_doctor_knows_at_a_clinic_what_will_work(deployment: Any) -> None:
    for clinic in CLINICS:
        healthy, findings = deployment.checked[clinic]
        assert healthy, findings
        assert "with the certificate of this study" in findings
    healthy, findings = deployment.checked[REFUSES]
    assert not healthy
    (line,) = [line for line in findings.splitlines() if line.startswith("NO")]
    assert "policy.yaml refuses this study; policy lets fields of kind statistic leave" in line


def test_the_doctor_knows_a_clinics_own_supernode(deployment: Any, outputs: dict[str, str]) -> None:
    healthy, findings = examine_clinic(deployment.place / CLINICS[0])
    assert healthy, findings
    assert "its SuperNode runs, as process" in findings


@pytest.mark.parametrize("name", RUNS)
def test_weights_equal_the_simulation(
    name: str, deployment: Any, outputs: dict[str, str], simulated: dict[str, Path]
) -> None:
    deployed = _models(name, deployment.runs / name, deployment.state)
    kept = simulated[name].parent / "state" / "simulation"
    expected = _models(name, simulated[name], lambda clinic: kept / clinic)
    assert deployed.keys() == expected.keys()
    for key, array in expected.items():
        assert deployed[key].dtype == array.dtype
        np.testing.assert_allclose(deployed[key], array, rtol=1e-5, atol=1e-7, err_msg=key)


@pytest.mark.parametrize("name", RUNS)
def test_a_deployment_ends_with_a_page_and_the_whole_summary(
    name: str, deployment: Any, outputs: dict[str, str]
) -> None:
    result = read_json(deployment.runs / name / "result.json")
    page = (deployment.runs / name / "report.html").read_text(encoding="utf-8")
    assert "How labels differ is counted where all data lie in one place" in page
    accuracy = result["final"]["global"]["accuracy"]
    assert re.search(rf"At the end accuracy is {accuracy:.3f} over all [\d,]+ test examples", page)
    printed = " ".join(outputs[name].split())
    assert result["privacy-claim"] in printed
    for clinic in CLINICS:
        assert clinic in page
        assert f"{clinic}: {result['final']['institutions'][clinic]['accuracy']:.4f}" in printed


@pytest.mark.parametrize("clinic", CLINICS)
def test_own_ledger_equals_the_servers(clinic: str, deployment: Any, outputs: dict[str, str]) -> None:
    own = Counter(_what_left(row) for row in deployment.own_ledger(clinic))
    seen = [row for name in RUNS for row in deployment.server_ledger(name)]
    arrived = Counter(_what_left(row) for row in seen if row["institution"] == clinic and row["direction"] == "up")
    assert own == arrived
    kinds = {kind for _, _, kind, _ in own}
    sent = {"fedreplay": "per-sample", "proxyfl": "model"}
    assert kinds - {"model"} == {"notice", "statistic", *(sent[name] for name in RUNS)} - {"model"}
    assert "model" in kinds or [*RUNS] == ["fedreplay"]  # whose encoder one clinic has trained


@pytest.mark.skipif("fedreplay" not in RUNS, reason="the other job was drawn for this commit")
def test_an_institution_attacks_its_own_record(
    deployment: Any, outputs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clinic, run = CLINICS[0], read_run_id(deployment.runs / "fedreplay")
    own = deployment.state(clinic)
    words = ["privacy", "attack", str(own), "--run", run, "--data", str(deployment.data / clinic)]
    assert command(monkeypatch, *words, "--field", "latents", "--minutes", "0.02") == 0
    (attack,) = read_json(own / "attacks" / "attacks.json")["attacks"]
    assert (attack["institution"], attack["attack"], attack["not-judged"]) == (clinic, "latent matching", "")
    assert attack["scores"]["identified"]["value"] > 0.5
    assert (own / "attacks" / "report.html").exists()


@pytest.mark.parametrize("name", RUNS)
def test_a_forbidding_policy_is_reported_and_the_run_goes_on(
    name: str, deployment: Any, outputs: dict[str, str]
) -> None:
    field = {
        "fedreplay": "Latents.latents is per-sample",
        "proxyfl": "ReleasedProxy.arrays is model",
    }[name]
    refusals = [line for line in outputs[name].splitlines() if "takes no part" in line]
    assert len(refusals) == 1, "\n".join(refusals)
    assert f"policy lets fields of kind statistic leave; {field}" in refusals[0]
    assert {row["institution"] for row in deployment.server_ledger(name) if row["stage"] != "roll-call"} == set(CLINICS)


def test_nothing_but_its_refusals_leaves_a_forbidding_institution(deployment: Any, outputs: dict[str, str]) -> None:
    left = deployment.own_ledger(REFUSES)
    assert {row["kind"] for row in left} == {"notice"}
    assert Counter(row["field"] for row in left) == Counter(failure=len(RUNS), error=len(RUNS), name=len(RUNS))
    assert f"{REFUSES} takes no part" in "".join(outputs.values())


@pytest.mark.parametrize("clinic", [*CLINICS, REFUSES])
def test_a_nodes_log_says_which_policy_is_in_force(clinic: str, deployment: Any, outputs: dict[str, str]) -> None:
    policy = str(deployment.place / clinic / "policy.yaml")
    log = (deployment.logs_of / f"{clinic}.log").read_text()
    lines = [line for line in log.splitlines() if f"{clinic}: data " in line]
    assert lines
    assert all(line.endswith(policy) for line in lines)


def test_a_refusal_of_the_server_is_shown_by_flwr_run(deployment: Any, outputs: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").touch()  # an empty folder is nobody's
    began = time.monotonic()
    refused = deployment.begun("taken", "strategy=cwt", further=f'runs-dir="{tmp_path}"')
    lines = refused.communicate()[0].splitlines()
    assert refused.returncode == 1, "\n".join(lines)
    shown = [failed[1] for line in lines if (failed := FAILED.match(line))]
    assert len(shown) == 1, "\n".join(lines)
    assert "run-name must be new; " in shown[0]
    assert "Traceback" not in shown[0]
    assert time.monotonic() - began < AT_ONCE, "\n".join(lines)


def test_a_refused_option_of_an_own_app_is_one_line_and_the_doctor_sees_it_all(
    deployment: Any, outputs: dict[str, str]
) -> None:
    own = {**deployment.environment, "FLWR_HOME": str(deployment.coordinator / "state" / ".flower")}
    words = [
        flower("flwr"),
        "run",
        str(HOSPITALS.parent / "fedreplay"),
        "superlink",
        "--stream",
        "--run-config",
        "learning-rate=-1.0",
    ]
    refused = subprocess.run(words, env=own, capture_output=True, text=True, check=False)
    assert re.search(r"error: .*lr.*got -1", refused.stdout + refused.stderr), refused
    assert "Traceback" not in refused.stdout + refused.stderr

    stopped = deployment.runs / "interrupted"
    stopped.mkdir()
    (stopped / "config.yaml").touch()
    _, findings = examine_coordinator(deployment.coordinator)
    shutil.rmtree(stopped)
    lines = dict(line.split(": ", 1) for line in findings.splitlines())
    assert lines["ok  SuperNodes"] == "3 online", findings
    assert {"ok  certificates", "ok  keys", "ok  connection", "ok  disk"} <= {*lines}, findings
    assert re.match(r"the last run, \d+, failed", lines["NO  runs"]), findings
    assert f"{stopped / 'run-id'} must hold the run's id; got '': begin a new run" in findings


def test_what_each_run_leaves_is_apart_and_private_models_stay(deployment: Any, outputs: dict[str, str]) -> None:
    """Their weights and bytes are compared above."""
    for clinic in CLINICS:
        for name in RUNS:
            run = read_run_id(deployment.runs / name)
            folder = deployment.state(clinic) / "runs" / run
            assert (folder / "options.json").exists()
            account = folder / "privacy.jsonl"
            assert len(read_lines(account) if account.exists() else []) == (name == "proxyfl")
            own = Counter(_what_left(row) for row in deployment.own_ledger(clinic) if row["run"] == run)
            seen = [row for row in deployment.server_ledger(name) if row["institution"] == clinic]
            assert own == Counter(_what_left(row) for row in seen if row["direction"] == "up")
            assert not any("private" in row["field"] and "arrays" in row["field"] for row in seen)


@pytest.mark.sampled(1, of="deployments that end")
def test_another_encoder_is_refused_at_the_roll_call_by_both_hashes_and_who_has_none_says_so(
    deployment: Any, outputs: dict[str, str]
) -> None:
    """Clinic-a has the server's file, clinic-b another one, and clinic-c has not said where its own lies."""
    model = ("model=timm", "model.name=resnet18", "model.size=32", "model.train=head")
    plain = tuple(word for word in TASK if not word.startswith(("model", "width")))
    hashes = []
    for clinic in CLINICS:
        file = deployment.data.parent / f"{clinic}.safetensors"
        config = compose([*plain, *model, f"model.weights={file}"])
        hashes.append(encoder_digest(config.model, config.task))
    words = (*model, f"model.weights={deployment.data.parent / CLINICS[0]}.safetensors", "strategy=fedavg", "rounds=1")
    output = replace(deployment, task=plain).output_of("encoder", *words, *BRIEF, further='width=""')
    assert (deployment.runs / "encoder" / "result.json").exists(), output
    refused = {
        line.split(" takes no part")[0].split()[-1]: line for line in output.splitlines() if "takes no part" in line
    }
    assert {*refused} == {CLINICS[1], REFUSES}, output
    assert all(digest in refused[CLINICS[1]] for digest in hashes)
    assert "every institution has its own copy" in refused[REFUSES]
    sent = [row for row in deployment.server_ledger("encoder") if row["kind"] == "model"]
    assert {row["institution"] for row in sent} == {CLINICS[0]}
    assert max(row["bytes"] for row in sent) < 30_000  # a head of 512 x 10


@pytest.mark.sampled(1, of="deployments that end")
def test_whatever_is_killed_one_command_goes_on(deployment: Any, tmp_path: Path) -> None:
    """The last one, since it kills all that works for a run, at moments that are drawn.

    First the ServerApp, then the SuperLink, for every other commit with a SuperNode. ClientApps: tests/chaos/outer.py.
    """
    name, options = "killed", ("strategy=cwt", "rounds=2", *BRIEF, "lr=0.05")
    run, rng, pipe = deployment.runs / name, moments(name), subprocess.PIPE
    command = f"./run.sh {run}/resume.toml"
    goes_on = partial(subprocess.Popen, command, shell=True, cwd=deployment.coordinator, env=deployment.environment)

    def visited(visits: int) -> None:
        until(lambda: (run / "checkpoints" / f"{visits:06}.safetensors").exists(), MOST, deployment.logs)
        time.sleep(rng.uniform(0, 2))

    def answers() -> list[dict[str, Any]]:
        rows = deployment.server_ledger(name)
        return [row for row in rows if row["direction"] == "up" and row["kind"] == "model"]

    def made() -> Counter[int]:
        """Count the answers in each exchange up to the newest checkpoint."""
        newest = max(int(path.stem) for path in (run / "checkpoints").glob("*.safetensors"))
        return Counter(row["round"] for row in answers() if row["round"] <= newest)

    with deployment.begun(name, *options) as first:
        visited(2)
        for process in processes_with("flwr-serverapp", deployment.of_a_run()):
            process.kill()
        until(lambda: not in_use(run), ENDS, deployment.logs)
        before = made()
        with goes_on(stdout=pipe, stderr=subprocess.STDOUT, text=True) as second:
            visited(3)
            away = [rng.choice(CLINICS)] if rng.random() < 0.5 else []
            for place in (*away, COORDINATOR):
                deployment.kill(place)
            until(lambda: not deployment.of_a_run() and not in_use(run), ENDS, deployment.logs)
            before |= made()
            for streamed in (first, second):
                streamed.communicate(timeout=ENDS)
            assert (first.returncode, second.returncode) == (1, 1)
    _, findings = examine_coordinator(deployment.coordinator)
    lines = dict(line.split(": ", 1) for line in findings.splitlines())
    assert "nothing answers at 127.0.0.1" in lines["NO  connection"], findings
    assert "see the line connection" in lines["NO  runs"], findings
    assert lines["NO  run directories"] == f"not finished: {name}: {command} goes on where it was", findings
    deployment.start(COORDINATOR)
    for clinic in away:
        deployment.start(clinic, again=True)
    goes_on().wait(MOST)
    overrides = [*deployment.task, *options, "partition=natural", f"data_dir='{deployment.data}'"]
    _, undisturbed = run_inline([*overrides, f"nodes={len(CLINICS)}", f"runs_dir='{tmp_path}'"], LogDisplay())
    expected, resumed = (load_file(folder / "models" / "global.safetensors") for folder in (undisturbed, run))
    for key, array in expected.items():
        np.testing.assert_allclose(resumed[key], array, rtol=1e-5, atol=1e-7, err_msg=key)
    visits = [clinic for clinic, _ in groupby(row["institution"] for row in answers())]
    assert visits == [*CLINICS] * 2, answers()
    asked = Counter(row["round"] for row in answers())
    assert 3 <= len(before) <= len(asked)
    assert {at: asked[at] for at in before} == before  # what a checkpoint holds is not repeated


def _models(name: str, run: Path, state: Callable[[str], Path]) -> dict[str, Any]:
    """Return the weights that a run has left: the server's, or of ProxyFL the institutions' own."""
    if name != "proxyfl":
        return load_file(run / "models" / "global.safetensors")
    run_id = (run / "run-id").read_text().strip()
    files = [
        (c, key, state(c) / "runs" / run_id / f"{key}-000001.safetensors") for c in CLINICS for key in ("pair", "mixed")
    ]
    return {f"{c} {key} {name_in}": array for c, key, file in files for name_in, array in load_file(file).items()}


def _what_left(row: dict[str, Any]) -> tuple[str, str, str, int]:
    return row["stage"], row["field"], row["kind"], row["bytes"]
