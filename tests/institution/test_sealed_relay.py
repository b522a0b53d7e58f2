"""Sealed runs: the same bits as unsealed ones, with a server that has nothing to read."""

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Error, Message
from harness import broken, command, json_lines, same
from peers import NAMES, hospitals, run
from safetensors.numpy import load_file
from sealed_runs import SEALED, all_sealed, parcels_in, pinned_keys, seal_of

from flwr_replay.check import check_strategy
from flwr_replay.config.compose import compose
from flwr_replay.config.hiding import Hiding
from flwr_replay.errors import ConfigError, RunError
from flwr_replay.files.atomic import read_json
from flwr_replay.finished.trained import load_model
from flwr_replay.lab.evidence import Evidence
from flwr_replay.movements.base import Settings
from flwr_replay.runs.execute import Job
from flwr_replay.strategies.cwt import CWT
from flwr_replay.wire.records import opened

GOSSIP = ["topology=exponential-half", "rounds=3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    hospitals(folder)
    pinned_keys(folder)
    return folder


def sealed(folder, *options, **script):
    return run(folder, *options, SEALED, own=pinned_keys(folder), **script)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [
        ["strategy=avgpush"],
        ["strategy=avgpush", "evaluate-before-mixing=true", "topology=complete"],
        ["strategy=proxyfl", "dp=none", "private-models=[mlp]"],
        ["strategy=proxyfl", "dp=none", "proxy-optimizer=travels", "training.optimizer=adam"],
    ],
)
def test_sealed_gossip_ends_with_the_same_bits(folder, options):
    plain, ran = run(folder, *GOSSIP, *options), sealed(folder, *GOSSIP, *options)
    assert not ran.result["failures"]
    assert ran.result["final"] == plain.result["final"]
    for name in NAMES:
        assert same(ran.model(name, 3)[0], plain.model(name, 3)[0])
        assert ran.model(name, 3)[1] == plain.model(name, 3)[1]
    assert all_sealed(ran.grid)
    assert not all_sealed(plain.grid)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [["order=shuffled", "strategy.optimizer-state=keep"], ["forgetting=true"]])
def test_sealed_cwt_ends_with_the_same_model_at_every_institution(folder, options):
    plain, ran = run(folder, "strategy=cwt", *options), sealed(folder, "strategy=cwt", *options)
    assert ran.result["final"] == plain.result["final"]
    assert all_sealed(ran.grid)
    theirs = load_file(plain.folder / "models" / "global.safetensors")
    for name in NAMES:
        assert same(load_file(sorted(ran.state(name).glob("tested-*.safetensors"))[-1]), theirs)
    assert not list((ran.folder / "models").glob("*"))
    assert "sealed" in ran.result["best-model"]["none"]


def test_the_servers_files_hold_no_weights(folder):
    """Its checkpoints and its mailbox hold what a resumed run needs, sealed."""
    waits = {"failing": [("deliver", "b", at) for at in (1, 2)]}
    for stage, options, script in (("train", ["strategy=cwt"], {}), ("push", ["strategy=avgpush", *GOSSIP], waits)):
        ran = sealed(folder, *options, "rounds=2", **script)
        files = [*ran.folder.rglob("*.safetensors")]
        sent = [opened(trained(ran, name, stage)) for name in NAMES]
        assert {file.parent.name for file in files} >= ({"mailbox"} if waits is script else {"checkpoints"})
        for file in files:
            arrays = load_file(file)
            assert all(array.dtype == np.uint8 for array in arrays.values())
            assert not any(a.tobytes() in file.read_bytes() for model in sent for a in model.values() if a.size > 9)


def trained(ran, name, stage):
    """Open what an institution has sent first."""
    [(_, array)] = parcels_in([ran.grid.of(stage, name)[0][1]])
    return seal_of(ran.root, name).open(array).arrays


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at", [("push", "c", 2), ("deliver", "a", 2), ("deliver", "d", 3)])
def test_a_sealed_run_that_breaks_off_ends_with_the_same_bits(folder, at):
    whole = run(folder, "strategy=avgpush", *GOSSIP)
    resumed = broken(sealed, folder, "strategy=avgpush", *GOSSIP, breaking=[at])
    assert not resumed.result["failures"]
    for name in NAMES:
        assert same(whole.model(name, 3)[0], resumed.model(name, 3)[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "script",
    [
        {"losing": [("deliver", "b", 1)]},
        {"failing": [("deliver", "b", at) for at in (1, 2)]},
        {"failing": [("deliver", "b", 1)], "away": [("b", at) for at in range(2, 5)]},  # its parcels go back
    ],
)
def test_parcels_that_wait_or_go_back_are_mixed_as_in_an_unsealed_run(folder, script):
    options = ["strategy=avgpush", *GOSSIP, "rounds=5"]
    plain, ran = run(folder, *options, **script), sealed(folder, *options, **script)
    assert [failure["reason"] for failure in ran.result["failures"]] == [
        failure["reason"] for failure in plain.result["failures"]
    ]
    for name in "acd":
        assert same(ran.model(name, 5)[0], plain.model(name, 5)[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lost", [[("train", "b", 2)], [("train", "b", 2), ("train", "c", 3), ("train", "d", 4)]])
def test_lost_visits_of_a_sealed_cwt_do_no_more_than_in_an_unsealed_one(folder, lost):
    plain, ran = (run(folder, "strategy=cwt", losing=lost), sealed(folder, "strategy=cwt", losing=lost))
    assert len(ran.result["failures"]) == len(lost)
    assert ran.result["final"] == plain.result["final"]


@pytest.mark.parametrize("method", ["avgpush", "cwt"])
def test_who_answers_first_with_pins_of_its_own_has_nobody_refused_who_comes_back(folder, method):
    """The nodes of b, c and d had been killed a moment before: at first only a answers."""

    def before(grid, message):
        at = grid.asked[-1]
        if at.stage == "roll-call" and at.name != "a" and grid.times(*at[:2]) == 1:
            return Message(Error(5, "its node has gone"), reply_to=message)

    def after(grid, message, reply):
        if grid.asked[-1][:2] == ("roll-call", "a"):
            reply.content["config"]["pins"] = "f" * 64
        return reply

    ran = sealed(folder, f"strategy={method}", "nodes=4", "wait=1", before=before, after=after)
    assert sorted(ran.result["final"]["institutions"]) == ["b", "c", "d"]
    assert "a has ffff" in ran.result["failures"][-1]["reason"]


def test_both_ledgers_say_so(folder):
    ran = sealed(folder, "strategy=avgpush", *GOSSIP)
    for entries in (ran.ledger, *(ran.own_ledger(name) for name in NAMES)):
        models = [entry for entry in entries if entry["kind"] == "model" and entry["bytes"] > 100]
        assert models
        assert {entry["protection"] for entry in models} == {"sealed"}
        assert "none" in {entry["protection"] for entry in entries if entry["field"] == "train-loss"}
    [call] = {str(asked.content["config"]["sealed"]) for asked, _ in ran.grid.of("roll-call")}
    pins = {reply.content["config"]["pins"] for _, reply in ran.grid.of("roll-call")}
    assert (call, pins) == ("all", {seal_of(folder, "a").digest})


def test_under_dp_the_ledger_has_the_epsilon_too(folder):
    ran = sealed(folder, "strategy=avgpush", *GOSSIP, "dp=classifier", "sigma=2", "delta=0.01")
    protections = {e["protection"] for e in ran.ledger if e["direction"] == "up" and e["kind"] == "model"}
    assert all(protection.startswith("(") and protection.endswith("-DP, sealed") for protection in protections)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("job", ["proxyfl", "cwt order=shuffled", "feder generator.width=4"])
def test_a_sealed_run_keeps_the_contract(job, monkeypatch, tmp_path):
    """In a simulation, whose keys are made in the state directories; the forecast is the ledger."""
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    name, *options = job.split()
    small = ["partition.size=60", *(["generator.epochs=1"] if name == "feder" else [])]
    check_strategy(name, [SEALED, *options, *small])
    keys = list(tmp_path.glob("state/simulation/*/seal.key"))
    assert len(keys) == 3
    assert {file.stat().st_mode & 0o777 for file in keys} == {0o600}
    assert all(former.read_text() != later.read_text() for former, later in pairwise(keys))


@pytest.mark.sampled(2, of="slow replay")
def test_sealed_buffers_reach_who_trains_on_them(monkeypatch, tmp_path):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    job = ["strategy=feder", "task=digits", "nodes=2", "rounds=2", "partition.size=60", "--runs-dir", str(tmp_path)]
    for name, option in (("plain", "sealed=false"), ("sealed", SEALED)):
        assert not command(
            monkeypatch, "run", *job, "generator.epochs=1", "generator.width=4", option, f"run_name={name}"
        )
    plain, ran = (tmp_path / name for name in ("plain", "sealed"))
    synthetic = [
        [e for e in json_lines(folder / "ledger.jsonl") if e["kind"] == "synthetic"] for folder in (plain, ran)
    ]
    assert [{e["protection"] for e in entries} for entries in synthetic] == [{"none"}, {"sealed"}]
    assert {e["stage"] for e in synthetic[1]} == {"draw-buffer", "keep-buffer"}
    assert read_json(plain / "result.json")["final"] == read_json(ran / "result.json")["final"]


@pytest.mark.sampled(2, of="slow replay")
def test_models_that_stay_end_with_the_same_bits(folder):
    options = ["strategy=feder", "mode=buffer-only", "generator.epochs=1", "generator.width=4"]
    plain, ran = run(folder, *options), sealed(folder, *options)
    assert not ran.result["failures"]
    assert ran.result["final"] == plain.result["final"]
    for name in NAMES:
        own, theirs = (load_file(sorted(of.state(name).glob("model-*.safetensors"))[-1]) for of in (ran, plain))
        assert same(own, theirs)
    assert all_sealed(ran.grid)


def test_recorded_parcels_are_not_attacked(folder):
    ran = sealed(folder, "strategy=avgpush", "rounds=1", "record=all")
    with pytest.raises(RunError, match="are sealed: run again with sealed=false"):
        Evidence.of(ran.folder)
    assert list((ran.folder / "messages").iterdir())


def test_a_simulated_institutions_model_of_a_sealed_cwt_can_be_used(monkeypatch, tmp_path):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    job = ["strategy=cwt", "task=digits", "nodes=2", "rounds=1", "partition.size=60", "--runs-dir", str(tmp_path)]
    for name, option in (("plain", "sealed=false"), ("sealed", SEALED)):
        assert not command(monkeypatch, "run", *job, option, f"run_name={name}")
    with pytest.raises(RunError, match="no global model"):
        load_model(tmp_path / "sealed")
    theirs = load_model(tmp_path / "plain").state_dict()
    for name in ("institution-1", "institution-2"):
        own = load_model(tmp_path / "sealed", name).state_dict()
        assert all((own[key] == value).all() for key, value in theirs.items())


def test_the_command_of_the_page_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    page = (Path(__file__).parents[2] / "docs" / "sealed.md").read_text()
    [line] = re.findall(r"```sh\n(flwr-replay .*)\n```", page)
    assert not command(monkeypatch, *line.split()[1:], "--runs-dir", str(tmp_path))
    assert "Of these the server sees sizes only" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["strategy=fedavg"], "methods whose server only hands on what institutions send"),
        (["strategy=cwt", "replay=vqvae2"], "got replay=vqvae2: leave replay out"),
        (["strategy=cwt", "model.weights=w.safetensors"], "leave model.weights out"),
        (["strategy=feder", "agreement=true"], "agreement compares models that the server hands to all"),
    ],
)
def test_what_needs_a_server_that_reads_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Job.of(compose([*options, SEALED]))


def test_a_sealed_run_is_not_evaluated_at_the_server():
    strategy = CWT(settings=Settings(nodes=4, roll_call=True, hiding=Hiding.SEALED))
    with pytest.raises(ConfigError, match="evaluate_fn needs weights that the server can read"):
        strategy.evaluations.refuse(lambda number, arrays: None)


def test_several_processes_have_the_same_bits(monkeypatch, tmp_path, forks):
    """They make the keys of a simulation at the same time."""
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    job = ["strategy=avgpush", "task=digits", "nodes=3", "rounds=1", "partition.size=60", SEALED]
    for workers in ("1", "2"):
        words = ["--workers", workers, "--runs-dir", str(tmp_path), f"run_name=with-{workers}"]
        assert not command(monkeypatch, "run", *job, *words)
    single, two = (read_json(tmp_path / f"with-{workers}" / "result.json") for workers in (1, 2))
    assert not two["failures"]
    assert single["final"] == two["final"]
