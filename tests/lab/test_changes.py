"""Changes of weights: parts of a network, later messages of a gossip, and pictures behind the noise of DP-SGD."""

import shutil
from dataclasses import replace

import pytest
import torch
from attacked_runs import Recorded, attacked, without_digests
from harness import same

from flwr_replay.attacks.attacker import Attacker, Auxiliary
from flwr_replay.errors import DataError
from flwr_replay.files.tensors import read_tensors
from flwr_replay.institution.owner import Institution
from flwr_replay.institution.peer import unpack_state
from flwr_replay.lab.evidence import Evidence, begun_with
from flwr_replay.lab.judge import originals_of
from flwr_replay.lab.registry import trial_of as trial_on
from flwr_replay.report.run_files import read_run_id
from flwr_replay.state.store import DATA, StateStore
from flwr_replay.wire.recording import FOLDER
from flwr_replay.wire.weights import parted

FEW = ["model=mlp", "partition.size=8", "training.batch-size=8"]
GOSSIP = ["rounds=2", "topology=exponential-half", "dp=none", *FEW]
RUNS = {
    "encoder": ["strategy=fedreplay", "encoder-epochs=2", "model=mlp", "partition.size=9", "training.batch-size=4"],
    "balanced": ["strategy=fedavg", "batches=balanced", "model=mlp", "partition.size=9", "training.batch-size=4"],
    "half": ["strategy=splitnn", "rounds=2", "model=mlp", "partition.size=9", "training.batch-size=4"],
    "unlabelled": ["strategy=splitnn", "share-labels=false", "model.norm=batch", *FEW[1:]],
    "push": ["strategy=avgpush", "optimizer-state=reset", *GOSSIP],
    "proxy": ["strategy=proxyfl", "beta=0.5", *GOSSIP],
    "unsure": ["strategy=proxyfl", "beta=0.5", "dp=none", "rounds=1", "model=mlp", "partition.size=20", *FEW[2:]],
    "private": ["strategy=fedavg", "dp=classifier", "model=mlp", "partition.size=20", "training.batch-size=8"],
    "updates": ["strategy=fedavg", "dp=update", "privacy.sigma=0.1", *FEW],
    "proxies": ["strategy=fml", "dp=update", "privacy.sigma=0.1", *FEW],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a run for each kind of change."""
    return Recorded(tmp_path_factory.mktemp("runs"), RUNS)


def trial_of(run, institution="institution-1"):
    """Return the trial of the weights that an institution sent back."""
    evidence = Evidence.of(run, institution, "arrays")
    return trial_on(evidence.exhibits[-1], evidence)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("run", "last", "whom", "number"),
    [
        ("encoder", False, "institution-1", 8),  # of nine, one is held out
        ("half", False, "institution-2", 8),
        ("half", True, "institution-1", 8),
        ("unlabelled", False, "institution-1", 8),
        ("push", True, "institution-2", 8),
    ],
)
def test_what_came_back_is_computed_anew_from_the_originals_and_from_no_others(runs, tmp_path, run, last, whom, number):
    trial = trial_of(without_digests(runs / run, tmp_path), whom)
    trial = trial.last() if last else trial
    own = originals_of(trial.evidence.config, whom)
    rows = trial.rows(own)
    assert len(set(rows.tolist())) == number == trial.mixed
    other = replace(own, x_NCHW=own.x_NCHW.roll(1, 0))  # the right images, with other labels
    with pytest.raises(DataError, match="originals must be the run's"):
        trial.rows(other)


def test_balanced_batches_are_drawn_anew_with_their_repetitions(runs, tmp_path):
    trial = trial_of(without_digests(runs / "balanced", tmp_path))
    own = originals_of(trial.evidence.config, "institution-1")
    assert len(trial.rows(own)) == trial.mixed == 8
    with pytest.raises(DataError, match="originals must be the run's"):
        trial.rows(replace(own, x_NCHW=own.x_NCHW.roll(1, 0)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("run", "seen"), [("encoder", "encode"), ("half", "leave"), ("proxy", "train-proxy")])
def test_images_are_found_in_a_part_and_in_a_later_message(runs, monkeypatch, capsys, run, seen):
    _, results, _ = attacked(monkeypatch, capsys, runs / run, "--aux", "undealt", "--field", "arrays")
    names = ["gradient matching"] + ["gradient matching, last message"] * (run != "encoder")
    for name in names:
        result = results["arrays", name]
        assert (result["stage"], result["not-judged"]) == (seen, "")
        assert result["scores"]["psnr"] > result["control"]["psnr"] + 2, name
    note = {"encoder": "labels that the institution has sent in other messages", "half": "", "proxy": "cross entropy"}
    assert note[run] in results["arrays", "gradient matching"]["sentence"]


@pytest.mark.parametrize("run", ["push", "proxy"])
def test_the_server_computes_the_weights_with_which_a_later_training_begins(runs, run):
    run_id = read_run_id(runs / run)
    for institution in ("institution-1", "institution-2"):
        trial = trial_of(runs / run, institution).last()
        state = runs / "home" / "state" / "simulation" / institution / "runs" / run_id
        kept = read_tensors(state / f"mixed-{trial.request.scalars['committed']:06d}.safetensors")
        assert same(trial.begun, parted(unpack_state(kept)[0])[0])
        assert not same(trial.begun, begun_with(trial.exhibit.answers[0], trial.evidence))


@pytest.mark.parametrize("run", ["updates", "proxies"])
def test_noisy_updates_are_not_taken_for_weights(runs, monkeypatch, capsys, run):
    _, results, _ = attacked(monkeypatch, capsys, runs / run)
    assert "clipped as a whole" in results["arrays", "none"]["not-judged"]


def test_a_digest_of_the_data_is_the_judges_under_noise(runs, tmp_path, monkeypatch, capsys):
    _, results, _ = attacked(monkeypatch, capsys, runs / "private", "--attack", "gradient matching")
    result = results["arrays", "gradient matching"]
    assert 8 <= result["scores"]["own"] <= result["images"] == 20
    assert result["scores"]["number"] == 16
    assert 5 < result["scores"]["by_chance"] < 11
    assert result["secret"]
    assert "only the institution knows" in result["sentence"]
    run = shutil.copytree(runs / "private", tmp_path / "run", ignore=shutil.ignore_patterns("attacks"))
    file = run / FOLDER / "institution-1.sha256"
    assert file.stat().st_mode & 0o77 == 0
    file.write_text("0" * 64 + "\n")
    _, results, _ = attacked(monkeypatch, capsys, run, "--attack", "gradient matching")
    assert "digest" in results["arrays", "gradient matching"]["not-judged"]
    assert "scores" not in results["arrays", "gradient matching"]


def test_what_the_judge_cannot_compute_is_compared_too(runs, monkeypatch, capsys):
    """Which of 20 images are in the batch depends on what the private model adds to the proxy's loss."""
    _, results, _ = attacked(monkeypatch, capsys, runs / "unsure", "--attack", "gradient matching")
    result = results["arrays", "gradient matching"]
    assert not result["secret"]
    assert result["scores"]["own"] >= 8
    assert "the judge could not compute" in result["sentence"]


def test_data_that_change_during_a_run_prove_nothing(tmp_path, runs):
    run = shutil.copytree(runs / "private", tmp_path / "run", ignore=shutil.ignore_patterns("attacks"))
    trial = trial_of(run)
    own = originals_of(trial.evidence.config, "institution-1")
    assert trial.rows(own) is None
    for digest in ("1" * 64, own.digest):
        (run / FOLDER / "institution-1.sha256").write_text(f"{digest}\n{'0' * 64}\n")
        with pytest.raises(DataError, match=("digest" if digest != own.digest else "secret noise")):
            trial.rows(own)


def test_an_institution_notes_its_data_once_and_again_where_they_have_changed(tmp_path):
    notes_made = []
    for x in (torch.zeros(3, 1, 2, 2), torch.zeros(3, 1, 2, 2), torch.ones(3, 1, 2, 2)):
        own = Institution.from_arrays("a", (x, torch.arange(3)))
        own.state_root = tmp_path
        StateStore(own).note_data("run")
        file = own.state / "runs" / "run" / DATA
        notes_made.append(file.read_text().split())
    assert file.stat().st_mode & 0o77 == 0
    assert [len(lines) for lines in notes_made] == [1, 1, 2]
    other = Institution.from_arrays("a", (x, torch.tensor([0, 2, 1]))).data.train.digest  # other labels
    assert len({*notes_made[2], other}) == 3


def test_labels_are_guessed_by_what_was_sent_else_by_the_attackers_own_else_equally():
    auxiliary = Auxiliary("four images", torch.rand(4, 1, 8, 8), torch.tensor([2, 2, 2, 0]))
    mine, nobody = (Attacker((1, 8, 8), known, 0) for known in (auxiliary, None))
    told = mine.likely_labels(3, 4, torch.tensor([1, 1, 1, 1, 0, 0, 0, 0]))
    assert told[0].tolist() == [0, 0, 1, 1]
    assert mine.likely_labels(3, 4, None)[0].tolist() == [0, 2, 2, 2]
    assert nobody.likely_labels(3, 6, None)[0].tolist() == [0, 0, 1, 1, 2, 2]
