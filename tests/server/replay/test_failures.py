"""Institutions that fail, come late or lose what they keep: nobody trains without replay unnoticed."""

import shutil
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from grid import first_times, nth
from harness import json_lines, node_configs, same, write_shards
from replay_runs import FEW, JOB, SIZES, run
from safetensors.numpy import load_file

from flwr_replay.config.compose import compose
from flwr_replay.config.own_code import VARIABLE
from flwr_replay.errors import RunError
from flwr_replay.institution.replay import GenerativeStages
from flwr_replay.payloads.replay import TrainedPrior
from flwr_replay.report.summary import summary
from flwr_replay.runs.execute import settings_of
from flwr_replay.server.members import Member
from flwr_replay.strategies.cwt import CWT as CWTStrategy
from flwr_replay.wire.records import opened
from flwr_replay.wire.weights import to_arrays

CWT, FEDAVG = ["strategy=cwt", *FEW], ["strategy=fedavg", *FEW, "rounds=2"]


@pytest.fixture(scope="module")
def without_b(folder):
    nodes = node_configs(folder, folder / "state", names="ca")
    return cache(lambda kind: run(folder, *CWT, f"replay={kind}", nodes=nodes))


@pytest.fixture(scope="module")
def without_failures(folder):
    return cache(lambda kind: run(folder, *CWT, f"replay={kind}"))


def kept_codes(ran, name, what="codes-00"):
    return load_file(sorted(ran.state(name).glob(f"{what}-*"))[-1])


def received(ran, name):
    """Return for how many examples an institution keeps codes."""
    sources = {path.name[: len("codes-00")] for path in ran.state(name).glob("codes-*")}
    return sum(len(kept_codes(ran, name, source)["labels"]) for source in sources)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "stage", "left"),
    [
        ("vqvae2", "train-generator", "codes"),
        ("vqvae2", "encode-images", "codes"),
        ("vqvae2", "keep-codes", "codes"),
        ("pixelcnn", "train-prior", "source"),
    ],
)
def test_who_fails_the_generators_visit_is_left_out_and_the_others_go_on(folder, without_b, kind, stage, left):
    ran = run(folder, *CWT, f"replay={kind}", "replay.missing=say", failing=[(stage, "b")])
    assert not (ran.folder / "replay" / "generator-001.safetensors").exists()
    for what in ("generator", left):
        assert same(ran.visit(what, 2), without_b(kind).visit(what, 1))
    assert ran.result["failures"][0] == {"round": 1, "institution": "b", "reason": "error 2: made to fail"}
    assert {failure["institution"] for failure in ran.result["failures"]} == {"b"}
    assert ran.result["replay-lacks"] == {"b": "is not replayed"}
    skew = {"ks": 0.0, "tv": 0.0, "dropped": 0}
    first, *_ = summary({**ran.result, "skew": skew}, ran.folder).splitlines()
    assert first.endswith(", replay is incomplete: b is not replayed")
    assert ran.grid.who("train") == ["a", "b", "c"]
    if stage != "keep-codes":  # it replays what the others have
        what = "codes-00" if kind == "vqvae2" else "codes-01"
        assert same(kept_codes(ran, "b", what), kept_codes(ran, "c", what))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["vqvae2", "pixelcnn"])
def test_a_generator_that_nobody_can_train_ends_the_run_until_somebody_can(folder, without_failures, kind):
    options, name = [*CWT, f"replay={kind}"], f"nobody-{kind}"
    failing = [("train-generator", name) for name in SIZES]
    with pytest.raises(RunError, match=r"no institution could train the generator; a, b, c: .*made to fail: resume"):
        run(folder, *options, name=name, failing=failing)
    with pytest.raises(RunError, match="no institution could train the generator"):
        run(folder, *options, resume=str(folder / "runs" / name), failing=failing)
    ran = run(folder, *options, resume=str(folder / "runs" / name))
    assert same(ran.weights, without_failures(kind).weights)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("vqvae2", "train-generator"),
        ("vqvae2", "encode-images"),
        ("vqvae2", "keep-codes"),
        ("vqvae2", "keep-decoder"),
        ("pixelcnn", "train-prior"),
        ("pixelcnn", "keep-prior"),
    ],
)
def test_what_fails_once_is_made_again_before_the_last_round(folder, kind, stage):
    ran = run(folder, *FEDAVG, f"replay={kind}", failing=first_times((stage, "b")))
    assert [failure["round"] for failure in ran.result["failures"]] == [1]
    assert ran.result["replay-lacks"] == {}
    for name in SIZES:
        assert received(ran, name) == sum(SIZES.values())
    visits = ran.grid.who("train-generator")
    assert sorted(set(visits)) == list(SIZES)
    assert visits[-1] == "b" or stage.startswith("keep-")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["vqvae2", "pixelcnn"])
def test_visits_that_are_lost_in_the_only_round_are_made_again_at_once(folder, kind):
    lost = [("train-generator", "b"), ("train-generator", "c")]
    ran = run(folder, *CWT, f"replay={kind}", failing=first_times(*lost))
    visits = ran.grid.who("train-generator")
    assert visits == ["a", "b", "c", "b", "c"]
    assert [received(ran, name) for name in SIZES] == [sum(SIZES.values())] * 3
    assert ran.result["replay-lacks"] == {}


@pytest.mark.sampled(2, of="slow replay")
def test_a_last_pass_that_one_misses_is_made_again(folder):
    options = [*FEDAVG, "replay=vqvae2", "replay.codes=last-pass"]
    whole = run(folder, *options)
    ran = run(folder, *options, failing=nth(("encode-images", "b", 2)))
    assert [failure["round"] for failure in ran.result["failures"]] == [1]
    assert len(ran.visit("codes", 2)["labels"]) == sum(SIZES.values())  # of the visits; replayed in the first round
    assert same(ran.visit("codes", 3), whole.visit("codes", 3))
    assert received(ran, "b") == sum(SIZES.values())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("stage", "lacks"), [("train-generator", "is not replayed"), ("keep-decoder", "has received no replays")]
)
def test_what_is_missing_for_the_last_round_stops_the_run_which_can_go_on(folder, stage, lacks):
    options, name = [*FEDAVG, "replay=vqvae2"], f"stopped-{stage}"
    failing = [(stage, "b")]
    with pytest.raises(RunError, match=f"needs all that is replayed; b {lacks} .*made to fail.*: resume the run"):
        run(folder, *options, name=name, failing=failing)
    stopped = folder / "runs" / name
    assert {row["round"] for row in json_lines(stopped / "timings.jsonl")} == {0, 1}
    with pytest.raises(RunError, match=f"b {lacks}"):
        run(folder, *options, resume=str(stopped), failing=failing)
    shutil.copytree(stopped, folder / "runs" / f"{name}-copy")
    ran = run(folder, *options, resume=str(stopped))
    assert ran.result["replay-lacks"] == {}
    assert received(ran, "b") == sum(SIZES.values())
    finished = run(
        folder, *options, "replay.missing=say", resume=str(folder / "runs" / f"{name}-copy"), failing=failing
    )
    assert finished.result["replay-lacks"] == {"b": lacks}


def join_late(grid):
    """Let c join after the first round's training."""
    return None if grid.who("train") else [node for node in grid.contexts if grid.name_of(node) != "c"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "brought"),
    [
        ("vqvae2", ["keep-codes", "train-generator", "encode-images", "keep-decoder", "keep-codes"]),
        ("pixelcnn", ["keep-prior", "keep-prior", "train-generator", "train-prior", "keep-prior"]),
    ],
)
def test_who_comes_late_is_visited_and_receives_what_there_is_before_it_trains(folder, kind, brought):
    ran = run(folder, *FEDAVG, f"replay={kind}", there=join_late)
    assert [at.stage for at in ran.grid.asked if at.name == "c"] == ["roll-call", *brought, "train", "evaluate"]
    held = {name: sorted(path.name[:8] for path in ran.state(name).glob("codes-*")) for name in "ac"}
    assert {*held["a"]} == {*held["c"]}
    for what in {*held["c"], "decoder-00"}:
        assert same(kept_codes(ran, "c", what), kept_codes(ran, "a", what))
    assert received(ran, "c") == received(ran, "a") == sum(SIZES.values())
    assert not ran.result["failures"]
    assert ran.result["replay-lacks"] == {}


def lose_state_files(folder, lost):
    """Let files of a's state directory vanish before it is visited for the second time."""

    def before(grid, message):
        if grid.asked[-1][:2] == ("train", "a") and grid.times("train", "a") == 2:
            gone = list(folder.glob(f"state/a/runs/*/{lost}"))
            assert gone
            for path in gone:
                path.unlink()

    return before


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "lost", "have"), [("vqvae2", "codes-*", 0), ("pixelcnn", "codes-02*", 103)])
def test_codes_that_are_lost_are_missed(tmp_path, kind, lost, have):
    write_shards(tmp_path, SIZES)
    options = [*CWT, "rounds=2", f"replay={kind}"]
    ran = run(tmp_path, *options, before=lose_state_files(tmp_path, lost))
    [failure] = ran.result["failures"]
    assert (failure["institution"], failure["round"]) == ("a", 4)
    assert failure["reason"] == (
        f"an institution replays the 108 examples that it has received; it has codes and decoder of {have}: "
        "restore the state directory, or begin a new run"
    )
    assert ran.result["final"]["institutions"].keys() == set(SIZES)


def test_a_decoder_that_is_lost_is_missed(tmp_path):
    write_shards(tmp_path, SIZES)
    options = [*CWT, "rounds=2", "replay=vqvae2"]
    ran = run(tmp_path, *options, before=lose_state_files(tmp_path, "decoder-*"))
    [failure] = ran.result["failures"]
    assert failure["institution"] == "a"
    assert "decoder" in failure["reason"]
    assert "restore the state directory" in failure["reason"]


def test_codes_that_the_server_does_not_know_to_be_kept_are_not_replayed(tmp_path, monkeypatch):
    """As after a kill, when the disk is full at the second attempt; or when only the answer was lost."""
    write_shards(tmp_path, SIZES)
    monkeypatch.delenv(VARIABLE, raising=False)  # with own code this file would be a user's
    honest, full = GenerativeStages.keep_prior, [RunError("the disk is full")]

    def keep_prior(self, request):
        kept = honest(self, request)
        if (self.institution.name, request.source) == ("a", 1) and full:
            raise full.pop()
        return kept

    monkeypatch.setattr(GenerativeStages, "keep_prior", keep_prior)
    ran = run(tmp_path, *FEDAVG, "replay=pixelcnn")
    [failure] = ran.result["failures"]
    assert failure["institution"] == "a"
    assert failure["reason"].startswith("RunError")
    assert received(ran, "a") == received(ran, "c") == sum(SIZES.values())
    assert ran.result["replay-lacks"] == {}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda arrays, counts: None, ""),
        (lambda arrays, counts: arrays.popitem(), "draws no codes"),
        (lambda arrays, counts: [array.fill(3e38) for array in arrays.values()], "draws no codes"),
        (lambda arrays, counts: arrays.update({"decoder.out.weight": np.zeros(1, np.float32)}), "draws no codes"),
        (lambda arrays, counts: counts.append(1), "kinds of label"),
        (lambda arrays, counts: counts.__setitem__(0, 9), "must count its 12 examples"),
    ],
    ids=["whole", "lacking", "huge", "with others", "another kind", "too many"],
)
def test_a_prior_is_tried_before_anybody_is_given_it(change, says):
    config = compose([*JOB, *CWT, "replay=pixelcnn"])
    replay = CWTStrategy(config.strategy, settings_of(config)).replay
    fresh = to_arrays(replay.replay_plan.fresh_prior(replay.model))
    arrays, counts = {f"prior.{name}": array.copy() for name, array in fresh.items()}, [4, 4, 4]
    change(arrays, counts)
    counted = {"num_examples": 12, "examples_seen": 12, "steps": 1, "steps_left": 0}
    reported = TrainedPrior(arrays=arrays, label_counts=counts, **counted)
    fault = replay.fault_of_prior(Member("a", 1, 12), reported)
    assert says in fault
    assert bool(fault) == bool(says)


def test_a_generator_is_tried_before_anybody_is_given_it(folder, monkeypatch):
    def huge(self, request):
        answer = train(self, request)
        spoilt = {name: np.full_like(array, 9e5) for name, array in opened(answer.arrays).items()}
        return replace(answer, arrays=spoilt) if self.institution.name == "b" else answer

    train = GenerativeStages.train_generator
    monkeypatch.setattr(GenerativeStages, "train_generator", huge)
    ran = run(folder, *CWT, "replay=vqvae2", "replay.missing=say")
    failure, *again = ran.result["failures"]
    assert again == [failure, {**failure, "round": 2}, {**failure, "round": 3}]
    assert failure["institution"] == "b"
    assert failure["reason"] == "sent a generator under which an image's loss is not finite"
