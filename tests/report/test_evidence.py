"""What a board and an egress reviewer can file of a run: figures of the ledger, and a word where there is nothing."""

import json
import shutil
from collections import Counter
from copy import deepcopy
from hashlib import sha256
from pathlib import Path

import pytest
from attacked_runs import Recorded, attacked
from harness import command, node_configs, run, write_shards
from sealed_runs import ABC, pinned_keys

import flwr_replay.report.evidence_page as page
from flwr_replay.report.evidence_page import CONTROLS, NOT_RUN, code_digest, write_evidence

TASK = ["task=medmnist", "task.size=8", "classes=3", "model=mlp", "model.width=6", "batch_size=8", "device=cpu"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run of three hospitals, one of which refuses."""
    folder = tmp_path_factory.mktemp("hospitals")
    write_shards(folder, {"a": 40, "b": 30, "c": 20})
    (folder / "policy.yaml").write_text("strategies: []\n")
    nodes = node_configs(folder, folder / "state", "abc")
    nodes[2] |= {"policy": str(folder / "policy.yaml")}
    options = [*TASK, "strategy=fedavg", "dp=classifier", "sigma=2", "delta=0.01", "rounds=2"]
    return run(folder, options, nodes)


def evidence_page(folder):
    html, data = write_evidence(folder, [], None)
    return html.read_text(), json.loads(data.read_text())


def test_it_has_what_the_ledger_the_accounts_and_the_failures_have(ran):
    html, evidence = evidence_page(ran.folder)
    left = Counter()
    for line in ran.ledger:
        if line["direction"] == "up":
            left[line["institution"], line["kind"]] += line["bytes"]
    sizes = {
        (name, kind): size for name, own in evidence["left"].items() for kind, size in own.items() if kind != "down"
    }
    assert sizes == left
    assert evidence["privacy"] == ran.result["privacy"]
    assert {absentee["institution"] for absentee in evidence["absent"]} == {"c"}
    assert "policy allows strategies none" in html
    assert evidence["versions"] == ran.result["versions"]
    assert "model: the server, as it is." in html
    for line in (NOT_RUN["attacks"], NOT_RUN["audit"], "signature"):
        assert line.replace("'", "&#39;") in html
    for name, digest in evidence["sha256"].items():
        if name.endswith((".yaml", ".json", ".safetensors")):
            assert sha256((ran.folder / name).read_bytes()).hexdigest() == digest
    assert any(name.endswith(".safetensors") for name in evidence["sha256"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["sealed=true", "strategy=cwt"], "not the server"),
        (["masked=true", "strategy=fedavg"], "a mean over institutions only"),
    ],
)
def test_hidden_weights_are_said_to_be(tmp_path, options, says):
    write_shards(tmp_path, {"a": 40, "b": 30, "c": 20})
    pinned_keys(tmp_path, ABC)
    own = {"seal-peers": str(tmp_path / "peers-abc.txt")}
    nodes = [node | own for node in node_configs(tmp_path, tmp_path / "state", "abc")]
    evidence = evidence_page(run(tmp_path, [*TASK, *options, "rounds=1", "nodes=3"], nodes).folder)[1]
    [line] = [line for line in evidence["seen"] if line.startswith("model") and "came down" not in line]
    assert says in line


def test_attacks_and_audits_that_were_run_are_quoted(tmp_path, monkeypatch, capsys):
    options = ["strategy=fedreplay", "encoder=random", "model=mlp", "model.width=8", "partition.size=64"]
    folder = Recorded(tmp_path, {"one": options}) / "one"
    code, results, _ = attacked(monkeypatch, capsys, folder)
    assert code == 0
    claim = {"epsilon": 2.0, "delta": 0.01, "untested": ["statistics"]}
    report = {"institution": "north", "kind": "images", "claim": claim, "canaries": 100, "refuted": True}
    (tmp_path / "audit.json").write_text(json.dumps(report))
    assert command(monkeypatch, "deploy", "evidence", str(folder), "--audit", str(tmp_path / "audit.json")) == 0
    html = (folder / "evidence.html").read_text()
    assert len(json.loads((folder / "evidence.json").read_text())["attacks"]) == len(results) > 0
    assert "north, 100 canaries (images): the account claims ε 2; REFUTED. Its sums were not tested." in html
    assert NOT_RUN["attacks"] not in html
    (tmp_path / "policy.yaml").write_text("min-count: 1000\n")
    floor = ("--audit", str(tmp_path / "audit.json"), "--policy", str(tmp_path / "policy.yaml"))
    (tmp_path / "audit.json").write_text(json.dumps(report | {"in": 3}))
    assert command(monkeypatch, "deploy", "evidence", str(folder), *floor) == 0
    quoted = json.loads((folder / "evidence.json").read_text())
    assert quoted["audit"] == report
    assert any("found the right one of its fewer than 1000 images" in line for line in quoted["attacks"])
    capsys.readouterr()
    (folder / "result.json").unlink()
    assert command(monkeypatch, "deploy", "evidence", str(folder)) == 2
    assert "has not finished: go on by" in (error := capsys.readouterr().err)
    assert "backup" not in error


SACROML = json.loads((Path(__file__).parent / "sacroml.json").read_text())  # of two repetitions on a digits model
[ATTACKED] = SACROML.values()
FIRST, SECOND = ATTACKED["attack_experiment_logger"]["attack_instance_logger"].values()


def with_sacroml(monkeypatch, folder, report, *words):
    """Write evidence with a report; return the exit status."""
    (folder / "report.json").write_text(report if isinstance(report, str) else json.dumps(report))
    return command(monkeypatch, "deploy", "evidence", str(folder), "--sacroml", str(folder / "report.json"), *words)


@pytest.mark.parametrize("place", ["", "state/a"])
def test_sacromls_report_is_shown_by_its_figures(ran, monkeypatch, capsys, place):
    folder = ran.root / place if place else ran.folder
    model = folder / "model.pt2"
    model.write_bytes(b"weights")
    if not place:
        assert command(monkeypatch, "export", str(folder), "--out", str(model)) == 0
    digest = sha256(model.read_bytes()).hexdigest()
    whole = deepcopy(SACROML)
    whole["<b>"] = {"metadata": ATTACKED["metadata"] | {"attack_name": "QMIA Attack"}, "status": "failed <b>"}
    for attack in whole.values():
        attack["metadata"] |= {"target_model": "<b>", "target_model_params": {"sha256": digest}}
    assert with_sacroml(monkeypatch, folder, whole, "--model", str(model)) == 0
    html, told = (folder / "evidence.html").read_text(), json.loads((folder / "evidence.json").read_text())
    mean = f"{(FIRST['AUC'] + SECOND['AUC']) / 2:.3f}"
    assert {"attack": "WorstCase attack", "figure": "AUC", "repetitions": 2, "mean": mean}.items() <= (
        told["sacroml"]["figures"][0].items()
    )
    assert [row["figure"] for row in told["sacroml"]["figures"]][-1] == "no figure that is told here"
    assert told["sha256"]["model.pt2, which leaves"] == digest
    assert f"is {digest} and is that of model.pt2" in html
    assert ("model.pt2 is this run&#39;s model, exported again" in html) == (place == "")
    assert ("exported again here, none has its bits" in html) == (place != "")
    assert f">{mean}<" in html
    assert "<b>" not in html
    assert NOT_RUN["sacroml"] not in html
    model.write_bytes(b"others")
    assert with_sacroml(monkeypatch, folder, whole, "--model", str(model)) == 2
    assert f"is of {digest}" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(("least", "told"), [(90, ["AUC"]), (91, ["no figure that is told here"])])
def test_under_a_floor_sacroml_has_an_auc_of_many_alone(ran, monkeypatch, least, told):
    """It judged 180 members and 180 others each time: of as many, no part and its rest are below 90 unless told."""
    (ran.folder / "policy.yaml").write_text(f"min-count: {least}\n")
    assert with_sacroml(monkeypatch, ran.folder, SACROML, "--policy", str(ran.folder / "policy.yaml")) == 0
    shown = json.loads((ran.folder / "evidence.json").read_text())["sacroml"]
    assert [row["figure"] for row in shown["figures"]] == told
    assert {len(row["mean"]) for row in shown["figures"]} == {4 * (told == ["AUC"])}
    html = (ran.folder / "evidence.html").read_text()
    assert "180" not in html[html.index("<h2>Attacks") : html.index("<h2>What ran")]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((), "{"),
        ((), "[]"),
        ((), "{}"),
        ((), '{"log_id": 1}'),
        (("metadata", "attack_name"), "<b>"),
        (("metadata", "attack_name"), ["WorstCase attack"]),
        (("metadata", "sacroml_version"), "2.0.1<b>"),
        (("metadata", "sacroml_version"), 2.0),
        (("attack_experiment_logger", "attack_instance_logger", "instance_1", "AUC"), "0.5"),
        (("attack_experiment_logger", "attack_instance_logger", "instance_1", "AUC"), 36),
        (("attack_experiment_logger", "attack_instance_logger", "instance_1", "TPR"), float("nan")),
        (("attack_experiment_logger", "attack_instance_logger", "instance_1", "n_pos_test_examples"), 10**400),
        (("attack_experiment_logger", "attack_instance_logger", "instance_1", "dof_risk"), {"of": 3}),
    ],
)
def test_what_is_no_report_of_sacromls_is_refused_in_one_line(ran, monkeypatch, capsys, path, value):
    whole = deepcopy(SACROML)
    [inner] = whole.values()
    for key in path[:-1]:
        inner = inner[key]
    if path:
        inner[path[-1]] = value
    (ran.folder / "evidence.json").unlink(missing_ok=True)
    assert with_sacroml(monkeypatch, ran.folder, whole if path else value) == 2
    assert capsys.readouterr().err.startswith("error: --sacroml takes ")
    assert not (ran.folder / "evidence.json").exists()


def test_code_has_one_digest_wherever_it_lies(tmp_path, monkeypatch):
    """As a wheel has it: the folders at the top lie in the package."""
    root, packed = Path(page.__file__).parents[2], tmp_path / "flwr_replay"
    here, skip = code_digest(), shutil.ignore_patterns("__pycache__")
    shutil.copytree(root / "flwr_replay", packed, ignore=skip)
    for name in ("strategies", "clients", "conf", "simulations"):
        shutil.copytree(root / name, packed / name, ignore=skip)
    monkeypatch.setattr(page, "__file__", str(packed / "report" / "evidence_page.py"))
    assert code_digest() == here
    (packed / "errors.py").write_text("")
    assert code_digest() != here


@pytest.mark.parametrize(("name", "kinds"), [("a", {"notice", "statistic", "model"}), ("c", {"notice"})])
def test_a_clinics_own_evidence_is_of_its_own_files(ran, name, kinds, monkeypatch):
    """Its ledger has what the server's has of it; of who refused only notices left."""
    state, left, seen = ran.root / "state" / name, Counter(), Counter()
    assert command(monkeypatch, "deploy", "evidence", str(state)) == 0
    evidence, html = json.loads((state / "evidence.json").read_text()), (state / "evidence.html").read_text()
    for row in evidence["left"]:
        left[row["stage"], row["field"]] += row["bytes"]
    for line in ran.ledger:
        if (line["institution"], line["direction"]) == (name, "up"):
            seen[line["stage"], line["field"]] += line["bytes"]
    assert left == seen
    assert {row["kind"] for row in evidence["left"]} == kinds
    [of_run] = {row["run"] for row in evidence["left"]}
    assert html.count(of_run) == html.count(f"In run {of_run}") + (of_run in evidence["runs"])  # not in every row
    assert html.count(f">In run {of_run}<") == 1
    assert "strategies: []" in html  # what lies beside the folder state
    assert "No floor for small cells" in html
    if name == "a":
        [own] = evidence["runs"].values()
        assert (own["method"], own["tests"], own["charges"]) == ("fedavg", 3, 2)
        assert any(row["protection"].startswith("(") for row in evidence["left"])


def test_a_control_that_is_none_says_so():
    assert {len(row) for row in CONTROLS} == {3}
    assert sum(here.startswith("none") for _, _, here in CONTROLS) > 8
