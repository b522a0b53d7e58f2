"""A run that breaks off while its generator is trained ends with the bits of an uninterrupted one."""

from functools import cache

import pytest
from grid import first_times
from harness import same
from replay_runs import FEW, TASK, broken, run

from flwr_replay.config.compose import compose
from flwr_replay.files.tensors import read_tensors
from flwr_replay.runs.execute import settings_of
from flwr_replay.strategies.cwt import CWT

BREAKS = {
    "vqvae2": [("encode-images", "b"), ("keep-decoder", "c")],
    "pixelcnn": [("train-prior", "b"), ("keep-prior", "c")],
}
JOB = ["strategy=cwt", *FEW]


@pytest.fixture(scope="module")
def uninterrupted(folder):
    return cache(lambda kind: run(folder, *JOB, f"replay={kind}"))


def check(whole, resumed):
    assert same(whole.weights, resumed.weights)
    assert whole.result["examples-seen"] == resumed.result["examples-seen"]
    assert whole.result["final"] == resumed.result["final"]
    kept = sorted(path.name for path in (whole.folder / "replay").iterdir())
    assert kept == sorted(path.name for path in (resumed.folder / "replay").iterdir())
    for name in kept:
        assert same(*(read_tensors(ran.folder / "replay" / name) for ran in (whole, resumed))), name
    reported = [ran.folder / "generator.jsonl" for ran in (whole, resumed)]
    assert reported[0].read_bytes() == reported[1].read_bytes()
    assert not resumed.result["failures"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", BREAKS)
@pytest.mark.parametrize("visits", [1, 3])
def test_after_some_of_the_generators_visits(folder, uninterrupted, kind, visits):
    resumed = broken(folder, *JOB, f"replay={kind}", stop_after=visits, typed=visits == 1)
    check(uninterrupted(kind), resumed)
    assert resumed.grid.who("train-generator") == list("abc"[visits:])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "at"), [(kind, at) for kind, breaks in BREAKS.items() for at in breaks])
def test_with_an_answer_on_its_way(folder, uninterrupted, kind, at):
    check(uninterrupted(kind), broken(folder, *JOB, f"replay={kind}", breaking=[at]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", BREAKS)
def test_where_every_message_meets_a_new_process(folder, uninterrupted, kind):
    """As in a deployment: nothing but the disk is left."""
    check(uninterrupted(kind), run(folder, *JOB, f"replay={kind}", forgetful=True))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("codes", "where"), [("stale", {"breaking": [("encode-images", "c")]}), ("last-pass", {"stop_after": 3})]
)
def test_with_codes_encoded_otherwise(folder, codes, where):
    options = [*JOB, "replay=vqvae2", f"replay.codes={codes}"]
    check(run(folder, *options), broken(folder, *options, **where))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", BREAKS)
def test_with_a_visit_that_is_made_again(folder, kind):
    options, lost = ["strategy=fedavg", *FEW, "rounds=2", f"replay={kind}"], [("train-generator", "b")]
    whole = run(folder, *options, failing=first_times(*lost))
    for visits in (2, 4):  # b's first, b's second
        resumed = broken(folder, *options, failing=first_times(*lost), stop_after=visits + (visits > 3))
        assert same(whole.weights, resumed.weights)
        kept = [sorted(path.name for path in (ran.folder / "replay").iterdir()) for ran in (whole, resumed)]
        assert kept[0] == kept[1]
        assert len(resumed.result["failures"]) == 1


def test_from_a_checkpoint_of_an_older_version():
    config = compose([*TASK, *JOB, "replay=vqvae2"])
    replay = CWT(config.strategy, settings_of(config)).replay
    kept = {"itinerary": ["a", "b"], "visits": 2, "trained": [0, 1], "codes_at": 1, "rows": 9, "counts": []}
    replay.restore({**kept, "complete": True})
    assert kept.items() <= replay.state().items()
    assert replay.visited == ["a", "b"]
    assert callable(replay.complete)
