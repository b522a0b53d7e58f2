"""What is said of an attack: first on its page, and in evidence under a policy's floor for small cells."""

import re

import pytest

from flwr_replay.lab.sentences import headline, sentence


@pytest.mark.parametrize(
    ("results", "told"),
    [
        ([], "Nothing was judged"),
        ([{"attack": "log ratio", "not-judged": "the data name patients"}], "Nothing was judged"),
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


SENT = {"institution": "a", "field": "arrays", "stage": "fit", "bytes": 9000, "messages": 1, "originals": "digest"}
TRIED = {"auxiliary": "none", "seconds": 2.0, "note": "", "picture": "p.png", "batch": 1}
AUC = {"value": 0.6, "low": 0.5, "high": 0.7}


def result_of(what, number, of):
    """Return an attack's result of which `number` of `of` images is the count."""
    share = {"value": number / of, "low": 0.0, "high": 1.0}
    told = {
        "loss threshold": {"membership": {"auc": AUC, "members": of, "tpr_at_1_percent": share}, "images": of},
        "reconstruction error": {  # all images but so few have others of their label
            "membership": {"auc": AUC, "members": 60 - min(number, of - number), "tpr_at_1_percent": {"value": 0.5}},
            "images": 60,
        },
        "log ratio": {
            "membership": {"auc": AUC, "members": 60, "tpr_at_1_percent": {"value": 0.5}},
            "images": 60,
            "allowed": {"auc": 0.7, "tpr_at_1_percent": 0.02},
            "stated": {"epsilon": 1.0},
            "shown": number / 10,
            "noise": 1.0,
        },
        "alone in a class": {"alone": share, "number": of, "among": 1000},
        "reading": {"labels": {"right": number, "number": of, "always-one": number}},
        "label counts": {"labels": {"right": of // 2 + number % 7, "number": of, "equal-counts": of - number}},
        "membership": {"not-judged": f"there are {number} training images; it needs {of}"},
        "none": {"not-judged": f"the judge has {number} examples"},
        "gradient matching": {
            **TRIED,
            "scores": {"number": of, "identified": share, "chance": 1 / 60, "psnr": 9.0},
            "control": {"number": of, "identified": share},
        },
        "learned decoder": {
            **TRIED,
            "auxiliary": f"{number} images of b",
            "note": f"{number} were guessed.",
            "scores": {"number": 60, "identified": {"value": 0.5}, "chance": 1 / of, "psnr": 9.0},
        },
        "label matching": {
            **TRIED,
            "secret": True,
            "images": of,
            "scores": {
                **{"number": of, "nearer": number, "own": of - number, "psnr": 9.0},
                **{"by_chance": of / 2, "by_chance_95": of, "p": 1 / (1 + number)},
            },
        },
    }
    return SENT | {"attack": what, **told[what]}


EVERY = (
    *(
        "loss threshold",
        "reconstruction error",
        "log ratio",
        "alone in a class",
        "reading",
        "label counts",
        "membership",
        "none",
    ),
    *("gradient matching", "learned decoder", "label matching"),
)


@pytest.mark.parametrize("what", EVERY)
@pytest.mark.parametrize(("of", "numbers"), [(60, (1, 3, 9)), (60, (51, 55, 59)), (12, (2, 4, 11))])
def test_under_a_floor_nobody_tells_small_counts_apart(what, of, numbers):
    """Neither these, nor all but these, nor a rate of few."""
    results = [result_of(what, number, of) for number in numbers]
    assert len({sentence(result) for result in results}) == 3
    assert len({sentence(result, 10) for result in results}) == 1


def test_under_a_floor_large_counts_are_told():
    assert "It finds 20 of 60 members" in sentence(result_of("loss threshold", 20, 60), 10)
    assert "It finds 1 of 3 members" in sentence(result_of("loss threshold", 1, 3))
    assert "It finds an untold number of fewer than 10 members" in sentence(result_of("loss threshold", 1, 3), 10)
    assert "fewer than 10 of 60 are right" in sentence(result_of("reading", 0, 60), 10)
    assert "in more than 50 of 60 tries" in sentence(result_of("gradient matching", 60, 60), 10)
    assert not re.search(r"\b3\b", sentence(result_of("alone in a class", 1, 3), 10))
