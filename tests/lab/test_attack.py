"""The privacy lab on recorded runs: what it finds, what it refuses, and that the attacker never sees an original."""

import csv
import json
import re
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from attacked_runs import DIGITS, Recorded, attacked, without_digests
from harness import SHARDS, command, node_configs, run, write_shards

from flwr_replay.errors import DataError
from flwr_replay.files.atomic import read_json
from flwr_replay.lab.evidence import Evidence
from flwr_replay.lab.judge import OtherOriginals, originals_of
from flwr_replay.lab.registry import nothing_tried
from flwr_replay.lab.trials import OfActivations
from flwr_replay.memory import forget
from flwr_replay.state.store import DATA
from flwr_replay.terminal import installing
from flwr_replay.wire.recording import FOLDER

PIECES = "generator.piece-seconds=1e-9"  # a training takes a message for each step
RUNS = {
    "latents": ["strategy=fedreplay", "encoder=random", "partition.size=60", "model.width=16"],
    "gradient": ["strategy=fedsgd", "model=mlp", "partition.size=4", "partition.test=mirror"],
    "weights": ["strategy=fedavg", "model=mlp", "partition.size=4", "training.batch-size=4"],
    "activations": ["strategy=splitnn", "partition.size=32", "model.norm=batch"],
    "blocks": ["strategy=fedsgd", "partition.size=300", "model.norm=batch", "model.width=4"],
    "unlabelled": ["strategy=splitnn", "share-labels=false", "partition.size=32", "model.norm=group"],
    "codes": ["strategy=cwt", "replay=vqvae2", "partition.size=60", "generator.epochs=2", "split=test"],
    "prior": ["strategy=cwt", "replay=pixelcnn", "partition.size=60", "generator.epochs=2", "prior.epochs=2", PIECES],
    "gossip": ["strategy=avgpush", "dp=none", "model.width=4", "partition.size=8", "training.batch-size=8"],
    "raw": ["strategy=fedavgshare", "partition.size=60"],
    "noisy": [
        *("strategy=fedreplay", "encoder=random", "partition.size=120", "model.width=16"),
        *("dp=latents", "latent-clip=1", "latent-epsilon=20", "label-epsilon=1"),
    ],
    "control": ["strategy=scaffold", "partition.size=60", "model.width=4"],
    "shared": ["strategy=fedbn", "partition.size=60", "model.width=4", "model.norm=batch"],
    "private": ["strategy=fedavg", "dp=classifier", "model=mlp", "partition.size=60", "training.batch-size=8"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a run for each kind of numbers."""
    return Recorded(tmp_path_factory.mktemp("runs"), RUNS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("run", "field", "attack", "least"),
    [
        ("latents", "latents", "latent matching", 0.9),
        ("latents", "latents", "learned decoder", 0.5),
        ("gradient", "arrays", "gradient matching", 0.5),
        ("weights", "arrays", "gradient matching", 0.5),
        ("activations", "activations", "latent matching", 0.75),
        ("codes", "codes", "decoded codes", 0.02),
        ("raw", "images", "look at them", 1.0),
    ],
)
def test_images_are_found_and_judged(runs, monkeypatch, capsys, tmp_path, run, field, attack, least):
    code, results, _ = attacked(monkeypatch, capsys, runs / run, "--aux", "undealt", "--field", field)
    assert code == 0
    result = results[field, attack]
    assert result["not-judged"] == ""
    assert result["scores"]["identified"]["value"] >= least
    assert (runs / run / "attacks" / result["picture"]).read_bytes().startswith(b"\x89PNG")
    page = (runs / run / "attacks" / "report.html").read_text()
    assert result["sentence"].partition(":")[0] in page
    told = re.search(r'<p class="headline">(.*)</p>', page)[1]
    if least >= 0.5:  # codes of so short a training tell no more than guessing
        assert re.match(r"Of \d+ .* where guessing finds [\d.]+: whoever", told)
    if attack == "latent matching" and run == "latents":
        assert "images made from what institution-1 sent" in told
        pictures = {line["picture"] for line in results.values() if "picture" in line}
        assert page.count("<figure>") == len(pictures) + 1  # what each attack found, beside guessing
        assert page.partition("<h2>")[0].count("data:image/png;base64,") == min(12, result["scores"]["number"])
    assert "A failed attack proves nothing" in page
    assert "http" not in page.replace("http://www.w3.org/", "")
    assert command(monkeypatch, "report", str(runs / run / "attacks"), "--figures", str(tmp_path)) == 0
    for stem in (result["picture"].removesuffix(".png"), "institution-1-found"):
        assert (tmp_path / f"{stem}.svg").read_text().startswith("<?xml")
        assert (tmp_path / f"{stem}.pdf").read_bytes().startswith(b"%PDF")
    with open(tmp_path / "institution-1-found.csv", newline="") as file:
        (drawn,) = (row for row in csv.DictReader(file) if row["name"] == f"{result['stage']} {field}, {attack}")
    assert [float(drawn[end]) for end in ("value", "low", "high")] == [*result["scores"]["identified"].values()]
    assert f"scores,psnr,{result['scores']['psnr']}" in (tmp_path / f"{result['picture'][:-4]}.csv").read_text()


@pytest.mark.sampled(2, of="slow audits")
def test_labels_and_membership_beside_images(runs, monkeypatch, capsys):
    _, results, _ = attacked(monkeypatch, capsys, runs / "gradient", "--aux", "undealt")
    labels = results["arrays", "label counts"]["labels"]
    assert (labels["right"], labels["number"]) == (4, 4)
    assert labels["equal-counts"] < 4
    _, results, _ = attacked(monkeypatch, capsys, runs / "unlabelled", "--aux", "undealt")
    by_label = results["gradients", "labels at the cut"]["labels"]
    assert by_label["right"] > 0.9 * by_label["number"] > 20
    _, results, _ = attacked(monkeypatch, capsys, runs / "private", "--aux", "undealt")
    by_label = results["arrays", "loss threshold"]["membership"]
    assert by_label["members"] == by_label["non_members"] >= 20
    assert 0 <= by_label["auc"]["low"] <= by_label["auc"]["value"] <= by_label["auc"]["high"] <= 1


def test_what_lies_beside_a_model_or_lacks_hides_neither_members_nor_labels(runs, monkeypatch, capsys):
    _, results, _ = attacked(monkeypatch, capsys, runs / "control", "--aux", "undealt", "--attack", "loss threshold")
    assert results["arrays", "loss threshold"]["membership"]["members"] >= 20
    _, results, _ = attacked(monkeypatch, capsys, runs / "shared", "--aux", "undealt", "--attack", "label counts")
    assert results["arrays", "label counts"]["labels"]["number"] == 32


def test_a_prior_tells_of_members_and_drawn_labels_of_nobody(runs, monkeypatch, capsys):
    _, results, _ = attacked(monkeypatch, capsys, runs / "prior", "--attack", "prior likelihood")
    membership = results["arrays", "prior likelihood"]["membership"]
    assert membership["members"] == membership["non_members"] >= 20
    assert {result["attack"] for result in results.values() if result["field"] == "arrays"} == {"prior likelihood"}
    assert "nobody" in nothing_tried("labels", drawn=True)
    assert "as they are" in nothing_tried("labels", drawn=False)  # masks, numbers


@pytest.mark.sampled(2, of="slow audits")
def test_a_gossip_begins_with_weights_that_the_server_knows(runs, monkeypatch, capsys):
    """With eight examples in one batch the first answer is one step from the fresh weights of a seed that was sent."""
    _, results, _ = attacked(monkeypatch, capsys, runs / "gossip", "--aux", "undealt")
    result = results["arrays", "gradient matching"]
    assert result["not-judged"] == ""
    assert result["batch"] == 8
    assert result["settings"]["statistics"] == 0.1  # batch norm's running means came back, and help
    assert results["arrays", "label counts"]["labels"]["number"] == 8


def test_where_a_message_is_of_all_images_other_peoples_are_the_control(runs, monkeypatch, capsys):
    _, results, _ = attacked(monkeypatch, capsys, runs / "gradient", "--aux", "undealt")
    result = results["arrays", "gradient matching"]
    assert result["batch"] == 4
    assert 0 < result["control"]["identified"]["value"] <= 1  # the same reconstructions, assigned to four others
    assert "scored as if they were of other images" in result["sentence"]


def test_an_institution_is_not_attacked_with_its_own_images(runs, tmp_path, monkeypatch, capsys):
    shutil.copytree(runs / "latents", tmp_path / "run", ignore=shutil.ignore_patterns("attacks"))
    _, results, _ = attacked(monkeypatch, capsys, tmp_path / "run", "--aux", "institution-2", whom="institution-2")
    assert {result["auxiliary"] for result in results.values()} == {"none"}
    assert not {"nearest auxiliary image", "learned decoder"} & {result["attack"] for result in results.values()}
    _, others, _ = attacked(monkeypatch, capsys, tmp_path / "run", "--aux", "institution-2")
    result = others["latents", "learned decoder"]
    assert "60 images of institution-2 (which colludes)" in result["auxiliary"]
    assert result["nearest-image"]["psnr"] > result["mean-image"]["psnr"]


@pytest.mark.sampled(2, of="slow audits")
def test_what_cannot_be_computed_anew_accuses_nobody(tmp_path, monkeypatch, capsys):
    """Batches with replays, and one institution that trains on the examples of all, are no fault of the data."""
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    replay = ["strategy=splitnn", "replay=vqvae2", "generator.epochs=1", "partition.size=32", "model.norm=group"]
    for name, options, says in (
        ("replay", replay, "replayed images"),
        ("pooled", ["strategy=central", "partition.size=32"], "examples of all institutions"),
    ):
        command(monkeypatch, "run", *DIGITS, "rounds=1", *options, f"run_name={name}", "--runs-dir", str(tmp_path))
        _, results, _ = attacked(monkeypatch, capsys, tmp_path / name)
        reasons = [result["not-judged"] for result in results.values() if result.get("not-judged")]
        assert not any("originals must be" in reason for reason in reasons), reasons
        assert any(says in reason for reason in reasons), reasons


@pytest.mark.sampled(2, of="slow audits")
def test_replayed_codes_of_others_are_not_judged(runs, tmp_path, monkeypatch, capsys):
    shutil.copytree(runs / "codes", tmp_path / "run", ignore=shutil.ignore_patterns("attacks"))
    _, results, _ = attacked(monkeypatch, capsys, tmp_path / "run", "--aux", "undealt", whom="institution-2")
    assert 0 < results["codes", "decoded codes"]["scores"]["number"] <= 60 < 120
    labels = results["labels", "reading"]["labels"]
    assert labels["number"] == 60 >= labels["right"] > 30  # after two epochs some images have the same codes
    assert "membership" in results["arrays", "reconstruction error"]


def test_a_gradient_in_blocks_is_computed_anew(runs, monkeypatch, capsys):
    _, results, _ = attacked(monkeypatch, capsys, runs / "blocks", "--aux", "undealt")
    assert results["arrays", "label counts"]["labels"]["number"] == 300
    assert "300 images" in results["arrays", "none"]["not-judged"]


def test_local_dp_hides_images_and_labels(runs, monkeypatch, capsys):
    _, results, _ = attacked(monkeypatch, capsys, runs / "noisy", "--aux", "undealt")
    for attack in ("latent matching", "learned decoder"):
        assert results["latents", attack]["scores"]["identified"]["value"] < 0.2, attack
    labels = results["labels", "reading"]["labels"]
    assert 0 < labels["right"] < labels["number"] // 2


def test_others_images_are_not_behind_noise(runs, tmp_path):
    evidence = Evidence.of(without_digests(runs / "noisy", tmp_path), "institution-1", "latents")
    trial = OfActivations(evidence.exhibits[0], evidence)
    own = originals_of(evidence.config, "institution-1")
    assert trial.rows(own).tolist() == list(range(120))
    with pytest.raises(DataError, match="does not resemble these originals"):
        trial.rows(replace(own, x_NCHW=own.x_NCHW.roll(7, 0)))
    with pytest.raises(OtherOriginals, match="119 examples, the answer says 120"):
        trial.rows(replace(own, x_NCHW=own.x_NCHW[1:], y_N=own.y_N[1:]))


@pytest.mark.sampled(2, of="slow audits")
def test_secret_noise_cannot_be_computed_anew(runs, tmp_path, monkeypatch, capsys):
    run = without_digests(runs / "private", tmp_path)
    _, results, _ = attacked(monkeypatch, capsys, run, "--aux", "undealt", "--attack", "gradient matching")
    assert "secret noise" in results["arrays", "gradient matching"]["not-judged"]
    assert "scores" not in results["arrays", "gradient matching"]


@pytest.mark.sampled(2, of="slow audits")
def test_the_attacker_never_sees_an_original(runs, monkeypatch, capsys, tmp_path):
    """With originals of NaN all reconstructions are the same, and only the scores change."""
    from flwr_replay.lab import attack

    words = ["--aux", "undealt", "--field", "latents"]
    right, draw, drawn = attack.originals_of, attack.draw_grid, {}

    def watched(path, pictured):
        drawn.setdefault(path.name, []).append(pictured["reconstruction"])
        draw(path, pictured)

    def blind(*given):
        evidence = right(*given)
        evidence.x_NCHW.fill_(np.nan)
        return evidence

    monkeypatch.setattr(attack, "draw_grid", watched)
    if (earlier := runs / "latents" / "attacks").exists():
        earlier.rename(tmp_path / "earlier")
    attacked(monkeypatch, capsys, runs / "latents", *words)
    earlier.rename(tmp_path / "seeing")
    monkeypatch.setattr(attack, "originals_of", blind)
    _, results, _ = attacked(monkeypatch, capsys, runs / "latents", *words)
    assert len(drawn) == len(results) == 3
    for name, (seeing, unseeing) in drawn.items():
        assert torch.equal(seeing, unseeing), name
    for key, result in results.items():
        assert "could not be computed anew" in result["not-judged"], key


def test_other_originals_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    write_shards(tmp_path, {"all": 80})
    options = ["task=medmnist", f"task.data-dir={tmp_path / 'all.npz'}", "task.size=8", "classes=3", "nodes=2"]
    options += ["rounds=1", "partition=iid", "strategy=fedavgshare", "record=all", "run_name=run"]
    assert command(monkeypatch, "run", *options, "--runs-dir", str(tmp_path)) == 0
    forget()
    write_shards(tmp_path, {"another": 3, "all": 80})  # the same size, other images
    _, results, _ = attacked(monkeypatch, capsys, tmp_path / "run", "--field", "images")
    result = results["images", "look at them"]
    assert "originals must be the run's" in result["not-judged"]
    assert "scores" not in result
    assert "nobody judged them" in result["sentence"]
    assert not any("labels" in result or "membership" in result for result in results.values())


def test_other_data_of_the_same_number_are_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    write_shards(tmp_path, {"all": 80})
    task = [*SHARDS, "classes=3", "nodes=2", "rounds=1", "partition=iid", "record=all"]
    job = [*task, "strategy=fedavg", "model=mlp", "run_name=run", f"task.data-dir={tmp_path / 'all.npz'}"]
    assert command(monkeypatch, "run", *job, "--runs-dir", str(tmp_path)) == 0
    size = Evidence.of(tmp_path / "run", "institution-1").exhibits[0].answers[0].content.scalars["num-examples"]
    write_shards(tmp_path, {"another": 3, "others": int(size)})
    code, _, err = attacked(monkeypatch, capsys, tmp_path / "run", "--data", str(tmp_path / "others.npz"))
    assert (code, (tmp_path / "run" / "attacks").exists()) == (2, False)
    assert "originals must be the run's" in err


@pytest.mark.sampled(2, of="slow audits")
def test_an_interrupted_command_goes_on_and_other_options_are_refused(runs, monkeypatch, capsys):
    run = runs / "activations"
    attacked(monkeypatch, capsys, run, "--aux", "undealt")
    before = read_json(run / "attacks" / "attacks.json")["attacks"]
    with monkeypatch.context() as patch:
        patch.setattr("flwr_replay.attacks.latents.minimise", None)  # none is attacked again
        assert attacked(patch, capsys, run, "--aux", "undealt")[0] == 0
    assert read_json(run / "attacks" / "attacks.json")["attacks"] == before
    code, _, err = attacked(monkeypatch, capsys, run, "--aux", "none")
    assert (code, "attacks with other options" in err) == (2, True)
    longer = ("privacy", "attack", str(run), "--minutes", "0.002", "--institution", "institution-1", "--aux", "undealt")
    assert command(monkeypatch, *longer) == 0
    after = read_json(run / "attacks" / "attacks.json")["attacks"]
    assert {trial["minutes"] for trial in after} == {0.002}
    assert len(after) == len(before)


def test_a_run_that_went_on_is_attacked_anew(runs, tmp_path, monkeypatch, capsys):
    run = shutil.copytree(runs / "weights", tmp_path / "run", ignore=shutil.ignore_patterns("attacks"))
    words = ("--attack", "gradient matching")
    attacked(monkeypatch, capsys, run, *words)
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(runs / "home"))
    assert command(monkeypatch, "run", "--resume", str(run), "rounds=2") == 0
    attacked(monkeypatch, capsys, run, *words)
    report = read_json(run / "attacks" / "attacks.json")
    assert [attack["answers"] for attack in report["attacks"]] == [2]
    assert "2 rounds" in report["run"]["about"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--institution", "institution-9"], "did you mean institution-"),
        (["--field", "latent"], "did you mean latents"),
        (["--aux", "institution-7"], "--aux must be none, undealt, an institution"),
        (["--attack", "latent macthing"], "did you mean latent matching"),
        (["--attack", "gradient matchin"], "did you mean gradient matching?"),
        (["--minutes", "0"], "--minutes must be positive"),
        (["--run", "one"], "--run is for an institution's state"),
    ],
)
def test_wrong_words_are_refused(runs, monkeypatch, capsys, words, says):
    assert command(monkeypatch, "privacy", "attack", str(runs / "latents"), *words) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_an_attack_that_no_field_takes_is_refused(runs, tmp_path, monkeypatch, capsys):
    run = shutil.copytree(runs / "gradient", tmp_path / "run", ignore=shutil.ignore_patterns("attacks"))
    code, _, err = attacked(monkeypatch, capsys, run, "--attack", "learned decoder")
    assert (code, (run / "attacks").exists()) == (2, False)
    assert "no recorded field takes it" in err


def test_a_run_without_messages_says_how_to_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    options = [word for word in DIGITS if word != "record=all"]
    command(monkeypatch, "run", *options, "strategy=fedavg", "rounds=1", "run_name=plain", "--runs-dir", str(tmp_path))
    capsys.readouterr()
    assert command(monkeypatch, "privacy", "attack", str(tmp_path / "plain")) == 2
    assert "run again with record=all, as in a rehearsal" in capsys.readouterr().err
    assert not (tmp_path / "plain" / "attacks").exists()
    assert command(monkeypatch, "privacy", "attack", str(tmp_path)) == 2
    assert "config.yaml" in capsys.readouterr().err


def test_a_damaged_message_is_named(runs, monkeypatch, capsys):
    run = runs / "raw"
    file = next(iter(sorted((run / FOLDER).iterdir())))
    file.write_bytes((whole := file.read_bytes())[:-3])
    code = command(monkeypatch, "privacy", "attack", str(run))
    file.write_bytes(whole)
    assert code == 2
    assert file.name in capsys.readouterr().err


def test_messages_that_were_deleted_are_said_to_be_gone(runs, tmp_path, monkeypatch, capsys):
    run = shutil.copytree(runs / "raw", tmp_path / "run", ignore=shutil.ignore_patterns(FOLDER, "attacks"))
    assert command(monkeypatch, "privacy", "attack", str(run)) == 2
    assert "is gone, as after runs clean: run again with record=all" in " ".join(capsys.readouterr().err.split())


def test_without_the_library_of_scores_nothing_is_written(runs, tmp_path, monkeypatch, capsys):
    run = shutil.copytree(runs / "raw", tmp_path / "run", ignore=shutil.ignore_patterns("attacks"))
    monkeypatch.setitem(sys.modules, "torchmetrics.functional", None)
    assert command(monkeypatch, "privacy", "attack", str(run)) == 2
    assert installing("attacks") in capsys.readouterr().err
    assert not (run / "attacks").exists()


def test_an_institution_attacks_its_own_record(tmp_path, monkeypatch, capsys):
    write_shards(tmp_path, {"a": 40, "b": 30})
    nodes = node_configs(tmp_path, tmp_path / "state", "ab")
    nodes[0] |= {"record": "all"}
    task = [*SHARDS, "split=validation", "classes=3", "model.width=8", "rounds=1", "device=cpu"]
    run(tmp_path, [*task, "strategy=fedreplay", "encoder=random"], nodes, name="deployed")
    capsys.readouterr()
    own, data = tmp_path / "state" / "a", str(tmp_path / "a.npz")
    (digests,) = (tmp_path / "state").glob(f"*/runs/*/{DATA}")  # b records nothing
    evidence = Evidence.of(own)
    (own / "ledger.jsonl").rename(own / "ledger-0001.jsonl")  # as one that has grown large
    assert [exhibit.field for exhibit in Evidence.of(own).exhibits] == [exhibit.field for exhibit in evidence.exhibits]
    assert digests.parents[2] == own
    assert evidence.digests("a") == [originals_of(evidence.config, "a", data).digest]
    words = ["privacy", "attack", str(own), "--minutes", "0.001", "--field", "latents"]
    assert command(monkeypatch, *words, "--data", data) == 0
    report = read_json(own / "attacks" / "attacks.json")
    assert report["options"]["run"] == evidence.run  # so a later run's results are not taken for this one's
    (attack,) = report["attacks"]
    assert attack["institution"] == "a"
    assert attack["scores"]["identified"]["value"] > 0.7
    (own / "attacks").rename(tmp_path / "before")
    assert command(monkeypatch, *words) == 0
    (attack,) = read_json(own / "attacks" / "attacks.json")["attacks"]
    assert "give its own data with --data" in attack["not-judged"]


def test_json_and_tables(runs, monkeypatch, capsys):
    words = ("--aux", "undealt", "--minutes", "0.001", "--json")
    command(monkeypatch, "privacy", "attack", str(runs / "gradient"), *words)
    out = capsys.readouterr().out
    assert json.loads(out)["attacks"] if out.startswith("{") else "other options" in out
