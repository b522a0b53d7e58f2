"""Attacks on what an institution's policy and its own directory promise, by a server that sends what it likes."""

import threading

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from harness import SHARDS, write_shards
from hostile_server import HostileServer, metrics, refusal, weights

from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError, DataError, PrivacyError
from flwr_replay.files.tensors import digest, write_tensors
from flwr_replay.generators import autoencoder, priors, sizes, stylegan2
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.institution import guard
from flwr_replay.institution.node import _deployed
from flwr_replay.institution.policy import read_policy
from flwr_replay.memory import forget
from flwr_replay.models import zoo
from flwr_replay.payloads.common import RollCall, Train
from flwr_replay.payloads.fedavgshare import Give
from flwr_replay.payloads.fedreplay import Encode, Extract
from flwr_replay.payloads.replay import EncodeImages, KeepCodes, KeepPrior, TrainGenerator
from flwr_replay.payloads.synthetic import TrainPiece
from flwr_replay.rng import derived_seed
from flwr_replay.state.store import StateStore
from flwr_replay.wire.payload import REQUESTS
from flwr_replay.wire.weights import to_arrays

TASK = [*SHARDS, "classes=3", "model=mlp", "model.width=6", "batch_size=16", "device=cpu"]
REPLAY = ["replay=vqvae2", "generator.width=4", "generator.codes=8", "generator.dim=4", "generator.epochs=1"]
CUT = {"cut": "hidden1", "latent_dtype": "float32", "first": 0, "chunk_bytes": 10**6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    write_shards(folder, {"a": 40})
    return folder


# --- which weights may turn images into what leaves -------------------------------------------------------------------


def encoder_of(arrays):
    return {name: array for name, array in arrays.items() if name.startswith("hidden1")}


def test_an_encoder_that_hands_images_on_is_refused_where_weights_are_pinned(folder):
    """With identity weights latents are the images: kind per-sample is then as much as per-sample-raw."""
    options = [*TASK, "model.width=64", "strategy=fedreplay", "encoder=random", "seed=3"]
    anyone = HostileServer(folder, *options)
    crafted = {name: np.zeros_like(array) for name, array in encoder_of(anyone.weights).items()}
    [matrix] = [name for name, array in crafted.items() if array.ndim == 2]
    crafted[matrix] = np.eye(64, dtype=np.float32)
    crafted_latents = weights(anyone.send(Extract(arrays=crafted, run="anyone", views=1, **CUT)))["latents"]
    with np.load(folder / "a.npz") as file:
        np.testing.assert_allclose(
            crafted_latents, file["train_images"].reshape(40, 64) / 255, atol=1e-6
        )  # the attack works

    pinned = HostileServer(folder, *options, policy=f"weights: {{extract: [random, sha256:{'0' * 64}]}}")
    assert "policy lets stage extract take weights random" in refusal(
        pinned.send(Extract(arrays=crafted, run="pinned", views=1, **CUT))
    )
    fresh = HostileServer(folder, *options)
    random = encoder_of(to_arrays(build(fresh.config)(derived_seed(3, "model"))))
    assert "latents" in weights(pinned.send(Extract(arrays=random, run="pinned", views=1, **CUT)))


def build(config):
    from flwr_replay.models.zoo import backbone

    return backbone(config.model, config.task)


def test_weights_are_pinned_by_the_digest_that_the_command_prints(folder, tmp_path, capsys):
    from flwr_replay.cli.main import app

    options = [*TASK, "strategy=fedreplay", "encoder=random"]
    arrays = encoder_of(HostileServer(folder, *options).weights)
    write_tensors(tmp_path / "encoder.safetensors", arrays)
    app(["privacy", "digest", str(tmp_path / "encoder.safetensors")], standalone_mode=False)
    reported = capsys.readouterr().out.strip()
    assert reported == digest(arrays)
    server = HostileServer(folder, *options, policy=f"weights: {{extract: ['{reported}']}}")
    assert "latents" in weights(server.send(Extract(arrays=arrays, run="digest", views=1, **CUT)))
    other = {name: array + 1 for name, array in arrays.items()}
    assert refusal(server.send(Extract(arrays=other, run="digest", views=1, **CUT)))


def test_a_generator_is_pinned_likewise(folder):
    server = HostileServer(
        folder, *TASK, *REPLAY, "strategy=cwt", policy="weights: {encode-images: [random], keep-decoder: []}"
    )
    from flwr_replay.generators.plan import ReplayPlan

    fresh = to_arrays(ReplayPlan.of(server.config).fresh_generator())
    crafted = {name: array + 1 for name, array in fresh.items()}
    assert "encode-images" in refusal(server.send(EncodeImages(arrays=crafted, run="codes", replayed=0)))
    assert "codes" in weights(server.send(EncodeImages(arrays=fresh, run="codes", replayed=0)))


def test_pinned_weights_come_without_another_way_to_change_images(folder):
    """Two means, one on either side of every ReLU, undid a pinned encoder."""
    options = [*TASK, "strategy=fedreplay", "encoder=random", "task.mean=[-1000.0]", "task.std=[1.0]"]
    server = HostileServer(folder, *options, policy="weights: {extract: [random]}")
    ask = Extract(arrays=encoder_of(server.weights), run="mean", views=1, **CUT)
    assert "task.mean and task.std would change" in refusal(server.send(ask))


def test_limits_of_what_a_run_does_not_have_do_not_matter(folder):
    server = HostileServer(folder, *TASK, "strategy=cwt", policy="limits: {epochs: 2}")  # generator.epochs is 6
    assert not refusal(server.send(Train(arrays=server.weights, run="unused", lr=0.1)))


@pytest.mark.parametrize("lr", [float("nan"), float("inf")], ids=str)
def test_instructions_are_numbers(folder, lr):
    server = HostileServer(folder, *TASK, "strategy=cwt")
    assert "Train.lr must be float, finite" in refusal(server.send(Train(arrays=server.weights, run="lr", lr=lr)))


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (lambda w: Train(arrays=w, run="l", lr=0.1, local_epochs=10**9), "local-epochs from 0 to 1e+06"),
        (lambda w: Train(arrays=w, run="l", lr=0.1, local_epochs=-1), "local-epochs from 0 to 1e+06"),
        (lambda w: Extract(arrays=encoder_of(w), run="l", views=10**6, **CUT), "views from 0 to 1000"),
        (lambda w: KeepPrior(arrays=w, run="l", source=0, label_counts=[10**12, 0, 0]), "label-counts from 0 to 1e+07"),
        (lambda w: KeepPrior(arrays=w, run="l", source=10**9, label_counts=[1, 0, 0]), "source from 0 to 10000"),
        (lambda w: RollCall(strategy="cwt", run="l", exchange=-1), "server-round from 0 to 1e+09"),
    ],
    ids=["epochs", "negative", "views", "counts", "source", "round"],
)
def test_a_server_cannot_ask_for_work_without_end(folder, request_, says):
    server = HostileServer(folder, *TASK, *REPLAY, "strategy=cwt")
    assert says in refusal(server.send(request_(server.weights)))


@pytest.mark.parametrize("option", ["model.width=200", "threads=9", "generator.epochs=51"])
def test_a_policy_lowers_the_limits_of_a_configuration(folder, option):
    policy = "limits: {width: 100, threads: 8, epochs: 50}"
    server = HostileServer(folder, *TASK, *REPLAY, "strategy=cwt", policy=policy)
    assert not refusal(server.send(RollCall(strategy="cwt", run="limits")))
    server = HostileServer(folder, *TASK, *REPLAY, "strategy=cwt", option, policy=policy)
    assert "policy lets a server ask for" in refusal(server.send(RollCall(strategy="cwt", run="limits2")))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("limits: {epoch: 1}", "did you mean epochs"),
        ("limits: {epochs: many}", "must be a number"),
        ("limits: 3", "must hold names"),
        ("weights: [random]", "must hold names"),
        ("weights: {extract: random}", "must be a list"),
        ("weights: {extrct: [random]}", "did you mean extract"),
        ("weights: {extract: [randm]}", "must be random or sha256"),
        ("metrics: some", "must be none, counted, exact"),
        ("max-delta: -1", "not below 0"),
        ("max-evaluations: yes", "yes is read in more than one way"),
        ("max-evaluations: many", "must be a number"),
    ],
)
def test_a_faulty_policy_allows_nothing(tmp_path, text, says):
    (tmp_path / "policy.yaml").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_policy(tmp_path / "policy.yaml")


# --- names that the server gives --------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["privacy.key", "ledger.jsonl", "runs", "identity.key"])
def test_a_run_has_no_name_of_the_institutions_own_files(folder, run):
    """It made a folder in the place of the key, and the institution never worked again."""
    options = [*TASK, "strategy=cwt", "dp=classifier"]
    server = HostileServer(folder, *options)
    assert not refusal(server.send(Train(arrays=server.weights, run=run, lr=0.1)))
    assert not refusal(server.send(Train(arrays=server.weights, run=f"after {run}", lr=0.1)))


@pytest.mark.parametrize("run", ["", ".", "..", "../b", "a/b", "a\\b", "x" * 161, "a\n"])
def test_a_run_leads_nowhere_else(folder, run):
    server = HostileServer(folder, *TASK, "strategy=cwt")
    before = sorted(path for path in folder.rglob("*") if path.is_dir())
    assert refusal(server.send(Train(arrays=server.weights, run=run, lr=0.1)))
    assert sorted(path for path in folder.rglob("*") if path.is_dir()) == before


def test_of_two_first_messages_one_binds_the_run(tmp_path):
    reported = []

    def first(bound):
        try:
            StateStore(type("Owner", (), {"state": tmp_path, "durable": True})()).bind("r", bound)
            reported.append(bound)
        except PrivacyError:
            reported.append("refused")

    for _ in range(20):
        reported.clear()
        threads = [threading.Thread(target=first, args=(f'{{"dp": "{i}"}}',)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(kind == "refused" for kind in reported) == [False] + [True] * 7
        assert (tmp_path / "runs" / "r" / "options.json").read_text() in reported
        (tmp_path / "runs" / "r" / "options.json").unlink()
        forget()


# --- what a check reads, and what is obeyed ---------------------------------------------------------------------------


def test_instructions_in_the_wrong_record_are_not_obeyed(folder):
    """A ConfigRecord called metrics was read by the client and not by the guard: raw examples left unasked."""
    server = HostileServer(folder, *TASK, "strategy=fedavgshare", policy="kinds: [model, statistic]\nmetrics: none")
    give = Give(run="wrong", share=0.05).encode()
    moved = RecordDict({"metrics": ConfigRecord(dict(give["config"]))})
    for content in (moved, RecordDict({"config": MetricRecord({"a": 1})}), RecordDict({"arrays": ConfigRecord({})})):
        reply = server.send_content(content)
        assert "must be of type" in refusal(reply)
        assert not weights(reply)


def test_an_instruction_that_is_there_twice_is_refused(folder):
    """The guard looked at one, and the client obeyed the other."""
    server = HostileServer(folder, *TASK, "strategy=fedavg", "local_epochs=500", policy="limits: {epochs: 1000}")
    content = Train(arrays=server.weights, run="twice", lr=0.1, local_epochs=500).encode()
    content["metrics"] = MetricRecord({"local-epochs": 1})
    assert "does not declare 'local-epochs' in metrics" in refusal(server.send_content(content))


def test_a_server_asks_for_no_more_than_its_run_says(folder):
    server = HostileServer(folder, *TASK, "strategy=fedavgshare", "share=0.05")
    assert "strategy.share is 0.05, it asks for 1.0" in refusal(server.send(Give(run="share", share=1.0)))
    assert len(weights(server.send(Give(run="share", share=0.05)))["labels"]) == 2


def test_losses_of_training_leave_only_where_exact_metrics_do(folder):
    options = [*TASK, "strategy=fedreplay", "encoder=institution", "encoder_epochs=1", "patience=1"]
    reported = {}
    for metrics_ in ("exact", "counted", "none"):
        server = HostileServer(folder, *options, policy=f"metrics: {metrics_}")
        ask = Encode(arrays=server.weights, run=f"loss {metrics_}", cut="hidden1", lr=0.1, max_epochs=1, patience=1)
        reported[metrics_] = {name for name in metrics(server.send(ask)) if name.endswith("loss")}
    assert reported == {"exact": {"train-loss", "validation-loss"}, "counted": set(), "none": set()}


def test_replays_without_codes_are_refused(folder):
    """What there was no code for was memory that nobody had written, and went into a private training as public."""
    server = HostileServer(folder, *TASK, *REPLAY, "strategy=cwt")
    reply = server.send(KeepCodes(run="heap", codes=np.zeros((1, 2), np.uint8), labels=np.zeros(200, np.int64)))
    assert "got 1 codes and 200 labels" in refusal(reply)


def test_a_name_without_end_makes_no_ledger_without_end(folder):
    server = HostileServer(folder, *TASK, "strategy=cwt")
    size = (server.state / "ledger.jsonl").stat().st_size if (server.state / "ledger.jsonl").exists() else 0
    server.send_content(RecordDict({"config": ConfigRecord({"stage": "s" * 10**6, "run": "r" * 10**6})}))
    assert (server.state / "ledger.jsonl").stat().st_size < size + 5000


@pytest.mark.parametrize("server_round", ["x", 1.5, True, [1]], ids=str)
def test_what_is_refused_is_written_down_whatever_the_round_is(folder, server_round):
    server = HostileServer(folder, *TASK, "strategy=cwt")
    server.send(RollCall(strategy="cwt", run="rounds"))
    before = len(server.ledger)
    server.send_content(
        RecordDict({"config": ConfigRecord({"stage": "train", "run": "r", "server-round": server_round})})
    )
    assert len(server.ledger) > before


def test_a_server_does_not_choose_by_a_column_whom_an_institution_trains_on(tmp_path):
    server_of = {}
    for column in ("site", "room"):
        deployed = _deployed(
            compose(["task=folder", "classes=2", "task.channels=1", f"task.site_column={column}"]),
            {"name": "a", "data": str(tmp_path)},
        )
        with pytest.raises(DataError) as error:
            deployed.read()
        server_of[column] = str(error.value)
    assert server_of["site"] == server_of["room"]


# --- what a message makes an institution build ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "policy", "message", "own"),
    [
        (
            ["strategy=avgpush", "model.width=4096"],
            "max-upload-mb: 64",
            "at most 64 MB leave in one message; the model",
            {},
        ),
        (
            ["strategy=cwt", "model.width=4096"],
            "max-upload-mb: 64",
            "at most 64 MB leave in one message; the model",
            {},
        ),
        (["strategy=proxyfl", "model.width=4096"], "", "must fit into the institution's memory", {}),
        (
            ["strategy=proxyfl", "strategy.private_models=[cnn2]", "task.size=1024"],
            "",
            "trained; private-models=cnn2 of this run",
            {},
        ),
        (
            ["strategy=proxyfl", "task.size=1024"],
            "",
            "trained; private-models=cnn2 of this run",
            {"private_model": "cnn2"},
        ),
    ],
)
def test_a_model_is_not_built_before_its_size_is_known_to_fit(folder, monkeypatch, options, policy, message, own):
    server = HostileServer(folder, *TASK, *options, policy=policy, **own)
    monkeypatch.setattr(zoo, "seeded", None)  # whoever builds one fails otherwise
    monkeypatch.setattr(guard, "_available", lambda second: 10**8 if not policy else 10**12)
    stages = [stage for stage in ("train", "release", "evaluate") if stage in REQUESTS]
    for form in ("", "0" * 16):
        call = RollCall(strategy="x", run="x", stages=stages, form=form)
        assert message in refusal(server.send(call))


@pytest.mark.parametrize("model", ["mlp", "cnn", "gabor", "deepset", "lenet5"])
def test_the_bytes_of_a_model_are_known_without_it(model):
    config = compose(["task=mnist", f"model={model}"])
    built = to_arrays(zoo.build(config.model, config.task, 0))
    assert zoo.bytes_of(config.model, config.task) == sum(array.nbytes for array in built.values())


@pytest.mark.parametrize(
    "options",
    [
        ["strategy=fedavg", "replay=vqvae2", "generator.width=1024"],
        ["strategy=fedavg", "replay=pixelcnn", "prior.width=1024"],
        ["strategy=feder", "generator=stylegan2", "generator.width=1024", "generator.max_width=1024"],
        ["strategy=feder", "generator=vqvae2", "generator.codes=65536", "generator.dim=1024"],
    ],
)
def test_a_generator_is_not_built_before_its_size_is_known_to_fit(folder, monkeypatch, options):
    server = HostileServer(folder, *TASK, *options)
    monkeypatch.setattr(guard, "_available", lambda second: 5 * 10**7)
    for module in (autoencoder, stylegan2, priors):
        monkeypatch.setattr(module, "seeded", None)  # whoever builds one fails otherwise
    asked = TrainGenerator(run="x", replayed=0) if "strategy=fedavg" in options else TrainPiece(run="x")
    for request in (RollCall(strategy="x", run="x"), asked):
        assert "generator and prior of this run has" in refusal(server.send(request))


@pytest.mark.parametrize("prior", ["pixelcnn", "maskgit"])
def test_the_bytes_of_a_generator_and_a_prior_are_known_without_them(prior):
    config = compose(["task=mnist", "strategy=fedavg", "replay=pixelcnn", f"prior={prior}"])
    plan = ReplayPlan.of(config)
    coder = plan.fresh_generator()
    built = [*to_arrays(coder).values(), *to_arrays(plan.fresh_prior(coder)).values()]
    assert sizes.bytes_of(config) == sum(array.nbytes for array in built)
