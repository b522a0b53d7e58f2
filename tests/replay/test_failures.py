"""Institutions that fail, come late or lose what they keep: nobody trains without replay unnoticed."""

from dataclasses import replace

import numpy as np
import pytest
from hospitals import node_configs, write_shards
from replay.runs import FEW, JOB, SIZES, B, Watched, run, same
from safetensors.numpy import load_file

from flwr_replay.compose import compose
from flwr_replay.errors import RunError
from flwr_replay.movements.members import Member
from flwr_replay.payloads.replay import TrainedPrior
from flwr_replay.replay.institution import GenerativeStages
from flwr_replay.server_app import settings_of
from flwr_replay.strategies.cwt import CWT as CWTStrategy
from flwr_replay.training import to_arrays
from flwr_replay.wire import opened

CWT, FEDAVG = ["strategy=cwt", *FEW], ["strategy=fedavg", *FEW, "rounds=2"]


@pytest.fixture(scope="module")
def without_b(folder):
    nodes = node_configs(folder, folder / "state", names="ca")
    return {kind: run(folder, *CWT, f"replay={kind}", nodes=nodes) for kind in ("vqvae2", "pixelcnn")}


def kept(ran, name, what="codes-00"):
    return load_file(sorted(ran.state(name).glob(f"{what}-*"))[-1])


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
    ran = run(folder, *CWT, f"replay={kind}", failing=[(stage, "b")])
    assert not (ran.folder / "replay" / "generator-001.safetensors").exists()
    for what in ("generator", left):
        assert same(ran.visit(what, 2), without_b[kind].visit(what, 1))
    assert ran.result["failures"][0] == {"round": 1, "institution": "b", "reason": "error 2: made to fail"}
    assert {failure["institution"] for failure in ran.result["failures"]} == {"b"}
    assert [name for at, name in ran.grid.asked if at == "train"] == ["a", "b", "c"]
    if stage != "keep-codes":  # it replays what the others have
        what = "codes-00" if kind == "vqvae2" else "codes-01"
        assert same(kept(ran, "b", what), kept(ran, "c", what))


def test_a_generator_that_nobody_can_train_ends_the_run(folder):
    with pytest.raises(RunError, match=r"no institution could train the generator; a, b, c: .*made to fail"):
        run(folder, *CWT, "replay=vqvae2", failing=[("train-generator", name) for name in SIZES])


@pytest.mark.parametrize(
    ("kind", "brought"), [("vqvae2", ["keep-decoder", "keep-codes"]), ("pixelcnn", ["keep-prior", "keep-prior"])]
)
def test_who_comes_late_receives_what_there_is_before_it_trains(folder, kind, brought):
    ran = run(folder, *FEDAVG, f"replay={kind}", late="c")
    assert [stage for stage, name in ran.grid.asked if name == "c"] == ["roll-call", *brought, "train", "evaluate"]
    found = sorted(path.name[:8] for path in ran.state("c").glob("codes-*"))
    assert found == (["codes-00"] if kind == "vqvae2" else ["codes-00", "codes-01"])
    for what in (*found, "decoder-00"):
        assert same(kept(ran, "c", what), kept(ran, "a", what))
    assert sum(len(kept(ran, "c", what)["labels"]) for what in found) == SIZES["a"] + SIZES["b"]
    in_generator = 4 * B + 2 * 2 * B + (0 if kind == "vqvae2" else SIZES["a"] + SIZES["b"])
    assert ran.result["examples-seen"] == in_generator + 2 * (4 + 2) * 2 * B + (SIZES["c"] + B)
    assert not ran.result["failures"]


class Losing(Watched):
    """Before the second visit to an institution, files of its state directory vanish."""

    lost = ""

    def before(self, stage, name):
        if (stage, name) == ("train", "a") and self.asked.count((stage, name)) == 2:
            gone = list(self.state.glob(f"a/runs/*/{self.lost}"))
            assert gone
            for path in gone:
                path.unlink()


@pytest.mark.parametrize(("kind", "lost", "have"), [("vqvae2", "codes-*", 0), ("pixelcnn", "codes-02*", 103)])
def test_codes_that_are_lost_are_missed(tmp_path, kind, lost, have):
    write_shards(tmp_path, SIZES)
    options = [*CWT, "rounds=2", f"replay={kind}"]
    ran = run(tmp_path, *options, grid_type=Losing, lost=lost, state=tmp_path / "state")
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
    ran = run(tmp_path, *options, grid_type=Losing, lost="decoder-*", state=tmp_path / "state")
    [failure] = ran.result["failures"]
    assert failure["institution"] == "a"
    assert "decoder" in failure["reason"]
    assert "restore the state directory" in failure["reason"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda arrays, counts: None, ""),
        (lambda arrays, counts: arrays.popitem(), "draws no codes"),
        (lambda arrays, counts: [array.fill(3e38) for array in arrays.values()], "draws no codes"),
        (lambda arrays, counts: counts.append(1), "kinds of label"),
        (lambda arrays, counts: counts.__setitem__(0, 9), "must count its 12 examples"),
    ],
    ids=["whole", "lacking", "huge", "another kind", "too many"],
)
def test_a_prior_is_tried_before_anybody_is_given_it(change, says):
    config = compose([*JOB, *CWT, "replay=pixelcnn"])
    replay = CWTStrategy(config.strategy, settings_of(config)).replay
    fresh = to_arrays(replay.replaying.fresh_prior(replay.model))
    arrays, counts = {f"prior.{name}": array.copy() for name, array in fresh.items()}, [4, 4, 4]
    change(arrays, counts)
    told = TrainedPrior(arrays=arrays, num_examples=12, examples_seen=12, label_counts=counts)
    fault = replay.fault_of_prior(Member("a", 1, 12), told)
    assert says in fault
    assert bool(fault) == bool(says)


def test_a_generator_is_tried_before_anybody_is_given_it(folder, monkeypatch):
    def huge(self, request):
        answer = train(self, request)
        spoilt = {name: np.full_like(array, 3e38) for name, array in opened(answer.arrays).items()}
        return replace(answer, arrays=spoilt) if self.institution.name == "b" else answer

    train = GenerativeStages.train_generator
    monkeypatch.setattr(GenerativeStages, "train_generator", huge)
    ran = run(folder, *CWT, "replay=vqvae2")
    [failure] = ran.result["failures"]
    assert failure["institution"] == "b"
    assert failure["reason"] == "sent a generator under which an image's loss is not finite"
