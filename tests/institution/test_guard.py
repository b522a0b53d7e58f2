"""The institution's last word: refusals before data are read, and its own ledger of what left."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from grid import Grid

from flwr_replay.check.strategy import WatchedGrid
from flwr_replay.client_app import app, make_client
from flwr_replay.clients.cwt import CWTClient
from flwr_replay.config.compose import compose
from flwr_replay.engines.inline import InlineGrid
from flwr_replay.errors import ConfigError, DataError, RefusedError
from flwr_replay.institution import node as owned
from flwr_replay.institution.guard import guard
from flwr_replay.institution.owner import Institution
from flwr_replay.institution.policy import read_policy
from flwr_replay.models.zoo import backbone
from flwr_replay.payloads.common import RollCall, Train
from flwr_replay.payloads.fedreplay import Encode, Extract
from flwr_replay.report.progress import Display
from flwr_replay.runs.execute import execute
from flwr_replay.serve import serve
from flwr_replay.wire.records import array_record, config_in, opened
from flwr_replay.wire.weights import to_arrays

JOB = ["task=digits", "partition=iid", "partition.size=64", "model=mlp", "model.width=8", "rounds=2", "device=cpu"]
CONFIG = compose(JOB)
BUILD = backbone(CONFIG.model, CONFIG.task)
ARRAYS = array_record(to_arrays(BUILD(0)))
MODEL_MB = ARRAYS.count_bytes() / 1e6

VISIT = Train(arrays=ARRAYS, run="r", lr=0.1)
ENCODE = Encode(arrays=ARRAYS, run="r", cut="hidden1", lr=0.1, max_epochs=1, patience=1)
ENCODER = {name: array for name, array in opened(ARRAYS).items() if name.startswith("hidden1")}
EXTRACT = Extract(arrays=ENCODER, run="r", cut="hidden1", latent_dtype="int8", first=0, chunk_bytes=9999, views=1)


def ledger(state, name="institution-1"):
    path = state / name / "ledger.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def size(content):
    return sum(record.count_bytes() for record in content.values())


def fail_if_read():
    raise AssertionError("the data were read")


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """Send one request to an institution with a policy; its data must not be read unless `read` reads them."""

    def send(request, policy="", strategy="fedreplay", read=fail_if_read, served=app):
        (tmp_path / "policy.yaml").write_text(policy)
        rules = read_policy(tmp_path / "policy.yaml" if policy else None)
        institution = Institution(
            name="a", read=read, read_pooled=read, device=torch.device("cpu"), policy=rules, state_root=tmp_path
        )
        own = ["latent_dtype=int8", "patience=1", "encoder_epochs=1"] if strategy == "fedreplay" else []
        config = compose([*JOB, f"strategy={strategy}", *own])
        monkeypatch.setattr(owned, "_institution", lambda run_config, node: (institution, config))
        grid = InlineGrid.simulated(served, {}, 1)
        content, kind = (
            (request, "train") if isinstance(request, RecordDict) else (request.encode(), request.message_type)
        )
        return next(iter(grid.send_and_receive([Message(content, 2, kind)])))

    return send


def failure_shown(reply):
    return config_in(reply.content)["failure"]


@pytest.mark.parametrize(
    ("policy", "request_", "says"),
    [
        ("strategies: [fedreplay]", VISIT, "the server runs 'cwt'"),
        ("strategies: []", EXTRACT, "allows strategies none"),
        ("kinds: [per-sample]", RollCall(strategy="cwt", run="r"), "Present.num_examples is statistic"),
        ("kinds: [statistic]", VISIT, "Trained.arrays is model"),
        ("kinds: [statistic]", ENCODE, "Encoder.arrays is model"),
        ("kinds: [model, statistic]", EXTRACT, "Latents.latents is per-sample"),
        ("kinds: [model, statistic]", RollCall(strategy="fedreplay", run="r", stages=["extract"]), "Latents.latents"),
        ("max-epsilon: 8", VISIT, "no differential privacy"),
        ("max-epsilon: 8", RollCall(strategy="cwt", run="r"), "epsilon <= 8"),
        ("recording: false", RollCall(strategy="cwt", run="r", record="up"), "the server says record=up"),
        (f"max-upload-mb: {MODEL_MB * 0.99}", VISIT, "the model has"),
        ("max-upload-mb: 0.0001", ENCODE, "the encoder has"),
    ],
)
def test_the_policy_refuses_before_any_data_are_read(ask, tmp_path, policy, request_, says):
    strategy = "fedreplay" if isinstance(request_, (Encode, Extract)) else "cwt"
    assert failure_shown(ask(request_, strategy=strategy)) == "the data were read"  # as they are without the policy
    reply = ask(request_, policy, strategy)
    assert failure_shown(reply).startswith("policy")
    assert says in failure_shown(reply)
    assert config_in(reply.content)["error"] == "RefusedError"
    assert list(reply.content) == ["config"]
    assert {entry["kind"] for entry in ledger(tmp_path, "a")} == {"notice"}


def digits():
    return owned.loaded(CONFIG.task)


def test_an_encoder_is_weighed_without_the_layers_that_stay(ask):
    assert "arrays" in ask(ENCODE, f"max-upload-mb: {MODEL_MB * 0.99}", read=digits).content


def test_an_upload_that_grew_too_large_does_not_leave(ask):
    reply = ask(EXTRACT, "max-upload-mb: 0.005", read=digits)
    assert "at most 0.005 MB" in failure_shown(reply)
    assert "arrays" not in reply.content


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("strategy: [cwt]", "did you mean strategies"),
        ("kinds: [modle]", "did you mean model"),
        ("kinds: [model\nstrategies: {", "readable YAML"),
        ("- model", "must hold keys"),
        ("[]", "must hold keys"),
        ("false", "must hold keys"),
        ("kinds: model", "must be a list"),
        ("strategies: [no]", "line 1: no is read in more than one way"),
        ("strategies:", "must be a list of names"),
        ("recording: maybe", "must be true or false"),
        ("max-epsilon: eight", "must be a number"),
        ("max-epsilon: true", "must be a number"),
        ("max-upload-mb: .nan", "line 1: .nan is read in more than one way"),
        ("max-upload-mb: 1:30", "line 1: 1:30 is read in more than one way"),
        ("max-epsilon: 1e999", "line 1: 1e999 is too large or too small for a number"),
        ("max-epsilon: " + "9" * 400, "must be a number, finite"),
        ("kinds: [model]\nkinds: [model, per-sample]", "line 2: the key 'kinds' stands in line 1 already"),
        ("kinds: [model]\nmax-delta: 2", "policy.yaml must be a probability"),
        ("max-evaluations: 1.5", "policy.yaml must be a whole number"),
        ("max-evaluations: true", "must be a number"),
        ("strategies: [fedfoo]", "unknown name 'fedfoo' under strategies in line 1 of the policy file"),
        ("strategies: [Cwt]", "did you mean cwt"),
        ("max-upload-mb: ٣", "must be a number"),
        ("limits: {epochs: 2, epochs: 200}", "the key 'epochs' stands in line 1 already"),
        ("", "limits; got none in"),  # as a full disk leaves it
        ("# nothing", "limits; got none in"),
        ("max-upload-mb: -1", "not below 0"),
        (b"kinds: [\xff]", "readable YAML"),
        (None, "there is no"),
    ],
)
def test_a_faulty_policy_file_allows_nothing(tmp_path, text, says):
    path = tmp_path / "policy.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=says) as refused:
        read_policy(path)
    assert "\n" not in str(refused.value)
    grid = InlineGrid.simulated(app, {"overrides": shlex.join(JOB)}, 1, policy=str(path), state=str(tmp_path))
    assert says in failure_shown(next(iter(grid.send_and_receive([Message(VISIT.encode(), 2, "train")]))))


class Watch:
    """Compares what an institution has written to its ledger with its reply, when the reply comes back."""

    watched = 0

    def written(self, grid, message):
        node = grid.contexts[message.metadata.dst_node_id].node_config
        return ledger(Path(node["state"]), grid.asked[-1].name)

    def before(self, grid, message):
        self.earlier = len(self.written(grid, message))

    def after(self, grid, message, reply):
        written = self.written(grid, message)[self.earlier :]
        assert sum(entry["bytes"] for entry in written) == size(reply.content)
        left = {"arrays" if key in ARRAYS else key for record in reply.content.values() for key in record}
        assert {entry["field"] for entry in written} == left
        self.watched += 1


def run(tmp_path, *options, served=app, grid_type=Grid, policies=("", "", ""), **script):
    overrides = [*JOB, f"nodes={len(policies)}", *options, f"runs_dir={tmp_path / 'runs'}"]
    nodes = []
    for k, policy in enumerate(policies):
        (tmp_path / f"{k}.yaml").write_text(policy)
        node = {"partition-id": k, "num-partitions": len(policies), "state": str(tmp_path / "state")}
        nodes.append({**node, "policy": str(tmp_path / f"{k}.yaml")} if policy else node)
    grid = grid_type(served, {"overrides": shlex.join(overrides)}, nodes)
    vars(grid).update(script)
    return execute(grid, compose(overrides), Display())[0], grid


@pytest.mark.parametrize("strategy", ["cwt", "local", "fedreplay"])
def test_the_own_ledger_has_the_bytes_of_each_reply_before_it_returns(tmp_path, strategy):
    options = (
        ["strategy=fedreplay", "cut=hidden1", "chunk_mb=0.005"] if strategy == "fedreplay" else [f"strategy={strategy}"]
    )
    watch, policies = Watch(), ("", "kinds: [statistic]", "")
    result, _ = run(tmp_path, *options, before=watch.before, after=watch.after, policies=policies)
    assert watch.watched >= 9
    assert bool(result["failures"]) == (strategy != "local")  # Local sends statistics only


def test_nothing_leaves_when_the_ledger_cannot_be_written(tmp_path):
    (tmp_path / "state").write_text("a file where the folder should be")
    grid = InlineGrid.simulated(app, {"overrides": shlex.join(JOB)}, 1, state=str(tmp_path / "state"))
    reply = next(iter(grid.send_and_receive([Message(VISIT.encode(), 2, "train")])))
    assert list(reply.content) == ["config"]  # only a notice
    assert "state directory must be a folder" in failure_shown(reply)
    owned_by = {"name": "a", "data": str(tmp_path), "state": str(tmp_path / "state")}
    deployed = InlineGrid(app, {"overrides": "strategy=cwt task=folder device=cpu"}, [owned_by])
    reply = next(iter(deployed.send_and_receive([Message(VISIT.encode(), 2, "train")])))
    assert failure_shown(reply) == "RunError; the institution's own log says more"


def test_a_refusal_is_shown_and_the_others_go_on(tmp_path):
    result, _ = run(tmp_path, "strategy=fedavg", policies=("", "strategies: [fedreplay]", ""))
    assert {(failure["institution"], failure["reason"].split(";")[0]) for failure in result["failures"]} == {
        ("institution-2", "policy allows strategies fedreplay")
    }
    assert sorted(result["final"]["institutions"]) == ["institution-1", "institution-3"]


def test_a_run_that_everyone_refuses_ends_with_the_reason(tmp_path):
    all_three = "institution-1, institution-2, institution-3"
    with pytest.raises(RefusedError, match=rf"{all_three}: [^;]*of kind statistic leave; Trained\.arrays is [^;]*$"):
        run(tmp_path, "strategy=fedavg", policies=["kinds: [statistic]"] * 3)


def test_the_servers_ledger_has_the_bytes_of_refusals_too(tmp_path):
    result, grid = run(
        tmp_path, "strategy=fedavg", "run_name=x", grid_type=WatchedGrid, policies=("", "strategies: []", "")
    )
    lines = (tmp_path / "runs" / "x" / "ledger.jsonl").read_text().splitlines()
    assert (
        sum(json.loads(line)["bytes"] for line in lines)
        == grid.sent
        == sum(result["bytes"][way] for way in ("up", "down"))
    )


def test_the_server_cannot_make_a_deployed_institution_download(tmp_path):
    node = {"name": "a", "data": str(tmp_path), "state": str(tmp_path)}
    grid = InlineGrid(app, {"overrides": "strategy=cwt task=mnist download=true"}, [node])
    institution, config = owned.institution_of(grid.contexts[2])
    assert config.task.download
    with pytest.raises(DataError, match=r"task\.download"):
        institution.read()


def failing(error):
    """Serve clients of which the second one raises in training."""

    class Failing(CWTClient):
        def train(self, visit):
            if self.institution.name == "institution-2":
                raise error
            return super().train(visit)

    return serve(lambda context: _as(Failing, context), mods=[guard])


def _as(kind, context):
    institution, config = owned.institution_of(context)
    made = make_client(context)
    return kind(institution, made.fresh, made.task, config.training, config.seed)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DataError("the image\n  is torn"), "the image is torn"),
        (DataError(), "DataError"),
        (ValueError("first line\nsecond line"), "first line second line"),
    ],
)
def test_an_institution_that_fails_is_reported_in_one_line(tmp_path, error, reason):
    result, _ = run(tmp_path, "strategy=cwt", served=failing(error))
    assert {(failure["institution"], failure["reason"]) for failure in result["failures"]} == {
        ("institution-2", reason)
    }
    assert len(result["final"]["institutions"]) == 3


class Leaky(NumPyClient):
    """A user's own client that sends more than a visit may bring."""

    def fit(self, parameters, config):
        return parameters, 64, {"examples-seen": 64, "num-steps": 2, "train-loss": 0.5, "oldest-patient": 97}


def leaky_payload(context):
    class Other(CWTClient):
        def train(self, visit):
            return VISIT

    return _as(Other, context)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda context: Leaky(), "does not declare 'oldest-patient'"),
        (leaky_payload, "declares the answer Trained; got Train"),
    ],
)
def test_a_client_that_answers_what_was_not_declared_is_refused(ask, tmp_path, make, says):
    reply = ask(VISIT, strategy="cwt", read=digits, served=serve(make, mods=[guard]))
    assert says in failure_shown(reply)
    assert list(reply.content) == ["config"]
    assert {entry["kind"] for entry in ledger(tmp_path, "a")} == {"notice"}


def test_kinds_bind_an_app_whose_messages_are_not_declared(ask):
    foreign = ClientApp(mods=[guard])

    @foreign.train()
    def train(message, context):
        content = RecordDict({"arrays": ArrayRecord([np.zeros(2)]), "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=message)

    undeclared = RecordDict({"arrays": ArrayRecord([np.zeros(2)])})
    assert "arrays" in ask(undeclared, "kinds: [model, statistic]", served=foreign).content
    assert "arrays is model" in failure_shown(ask(undeclared, "kinds: [statistic]", served=foreign))


def test_a_deployed_institution_tells_rules_and_keeps_paths_and_values_to_itself(tmp_path):
    def reply(**node):
        owned_by = {"name": "a", "data": str(tmp_path / "jane-doe"), "state": str(tmp_path), **node}
        grid = InlineGrid(app, {"overrides": "strategy=cwt task=folder device=cpu"}, [owned_by])
        return failure_shown(next(iter(grid.send_and_receive([Message(VISIT.encode(), 2, "train")]))))

    assert reply() == "DataError; the institution's own log says more"
    (tmp_path / "policy.yaml").write_text("strategies: []")
    assert reply(policy=str(tmp_path / "policy.yaml")).startswith(
        "policy allows strategies none; the server runs 'cwt'"
    )
    (tmp_path / "faulty.yaml").write_text("stratgies: []")
    assert reply(policy=str(tmp_path / "faulty.yaml")) == "ConfigError; the institution's own log says more"
