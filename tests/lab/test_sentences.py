"""What the page of an attack says first."""

import pytest

from flwr_replay.lab.sentences import headline


@pytest.mark.parametrize(
    ("results", "told"),
    [
        ([], "more than guessing"),
        ([{"scores": {"number": 8, "nearer": 6, "by_chance": 4.0, "p": 0.2}}], "more than guessing"),
        ([{"scores": {"number": 8, "nearer": 8, "by_chance": 4.0, "p": 0.01}}], "8 are nearer to its patients'"),
        ([{"membership": {"auc": {"value": 0.6, "low": 0.49}}}], "more than guessing"),
        ([{"membership": {"auc": {"value": 0.81, "low": 0.7}}}], "the patient in 81% of pairs, where guessing does"),
        ([{"labels": {"right": 20, "number": 20, "equal-counts": 11}}], "where guessing finds 11"),
        ([{"labels": {"right": 20, "number": 20}}], "more than guessing"),  # of an earlier version
        ([{"alone": {"value": 1.0, "low": 0.4}, "number": 3, "among": 300}], "3 are found among 300, where guessing"),
        (
            [
                {"labels": {"right": 20, "number": 20, "always-one": 10}},
                {"scores": {"number": 20, "identified": {"value": 1.0, "low": 0.84}, "chance": 0.01}},
                {"scores": {"number": 20, "identified": {"value": 1.0, "low": 0.84}, "chance": 0.9}},
            ],
            "20 point to the right patient, where guessing finds 0.2:",
        ),
    ],
)
def test_the_headline_is_what_exceeds_guessing_most(results, told):
    assert told in headline([{"institution": "a", **result} for result in results])[0]
