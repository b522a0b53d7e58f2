"""What `outer.py` must notice of a run that was struck: each of these is a finding."""

import json
from random import Random

import pytest
from chaos_outer import Struck, verdict_on
from chaos_runs import jobs, undisturbed_run

from flwr_replay.files.atomic import read_json

LATER = "institution-3", "no answer"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return undisturbed_run(tmp_path_factory.mktemp("judged") / "once", jobs()["fedavg dp=classifier"])[0]


class Engine:
    """Looks at a run's copy, of which nothing is left but its files."""

    def __init__(self, place, may_fail=()):
        self.states, self.may_fail = place.states, lambda struck: {*may_fail}
        self.left, self.places = lambda: [], lambda folder: [folder]


def verdict(undisturbed, folder, spoilt=lambda place: None, may_fail=()):
    place = undisturbed.copy(folder)
    spoilt(place)
    return verdict_on(Engine(place, may_fail), undisturbed, Struck(place.run, Random(0), 1, 0))


def results(place, **values):
    (place.run / "result.json").write_text(json.dumps(place.result | values))


def failing(place):
    results(place, failures=[{"round": 1, "institution": LATER[0], "reason": LATER[1]}])


def forgetful(place):
    ledger = place.states()["institution-2"] / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(line for line in lines if '"stage": "train"' not in line))


def cheap(place):
    run_id = (place.run / "run-id").read_text().strip()
    account = place.states()["institution-1"] / "runs" / run_id / "privacy.jsonl"
    account.write_text(2 * account.read_text())  # what was repeated was charged again
    stated = read_json(place.run / "result.json")["privacy"]
    stated["institution-1"]["epsilon"] = 1.0  # of seeded noise none is stated
    results(place, privacy=stated)


def test_what_is_as_undisturbed_is_no_finding(undisturbed, tmp_path):
    assert verdict(undisturbed, tmp_path / "same") == "same bits; resumed 0 times"
    assert "no answer" in verdict(undisturbed, tmp_path / "away", failing, may_fail=LATER[:1])


@pytest.mark.parametrize(
    ("spoilt", "message"), [(failing, "failed"), (forgetful, "has no line of"), (cheap, "state less than undisturbed")]
)
def test_a_finding_is_noticed(undisturbed, tmp_path, spoilt, message):
    with pytest.raises(AssertionError, match=message):
        verdict(undisturbed, tmp_path / "spoilt", spoilt)
