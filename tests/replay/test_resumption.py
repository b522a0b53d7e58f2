"""A run that breaks off while its generator is trained ends with the bits of an uninterrupted one."""

import pytest
from replay.runs import FEW, broken, run, same

BREAKS = {
    "vqvae2": [("encode-images", "b"), ("keep-decoder", "c")],
    "pixelcnn": [("train-prior", "b"), ("keep-prior", "c")],
}
JOB = ["strategy=cwt", *FEW]


@pytest.fixture(scope="module")
def uninterrupted(folder):
    return {kind: run(folder, *JOB, f"replay={kind}") for kind in BREAKS}


def check(whole, resumed):
    assert same(whole.weights, resumed.weights)
    assert whole.result["examples-seen"] == resumed.result["examples-seen"]
    assert whole.result["final"] == resumed.result["final"]
    kept = sorted(path.name for path in (whole.folder / "replay").iterdir())
    assert kept == sorted(path.name for path in (resumed.folder / "replay").iterdir())
    for name in kept:
        assert (whole.folder / "replay" / name).read_bytes() == (resumed.folder / "replay" / name).read_bytes(), name
    told = [ran.folder / "generator.jsonl" for ran in (whole, resumed)]
    assert told[0].read_bytes() == told[1].read_bytes()
    assert not resumed.result["failures"]


@pytest.mark.parametrize("kind", BREAKS)
@pytest.mark.parametrize("visits", [1, 3])
def test_after_some_of_the_generators_visits(folder, uninterrupted, kind, visits):
    resumed = broken(folder, *JOB, f"replay={kind}", stop_after=visits, typed=visits == 1)
    check(uninterrupted[kind], resumed)
    assert [name for stage, name in resumed.grid.asked if stage == "train-generator"] == list("abc"[visits:])


@pytest.mark.parametrize(("kind", "at"), [(kind, at) for kind, breaks in BREAKS.items() for at in breaks])
def test_with_an_answer_on_its_way(folder, uninterrupted, kind, at):
    check(uninterrupted[kind], broken(folder, *JOB, f"replay={kind}", breaking=at))


@pytest.mark.parametrize(
    ("codes", "where"), [("stale", {"breaking": ("encode-images", "c")}), ("last-pass", {"stop_after": 3})]
)
def test_with_codes_encoded_otherwise(folder, codes, where):
    options = [*JOB, "replay=vqvae2", f"replay.codes={codes}"]
    check(run(folder, *options), broken(folder, *options, **where))
