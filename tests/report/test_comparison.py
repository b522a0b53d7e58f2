"""What a comparison says under its table."""

import pytest

from flwr_replay.report.texts import notes, verdicts


def test_the_agreement_of_models_is_shown_by_seed():
    agreement = [{"standard-deviation": spread} for spread in ({"a": 0.1, "b": 0.2}, {}, {"a": 0.0, "b": 0.01})]
    base = {"versions": {}, "privacy": {}}
    cells = [
        {"label": "standard", "seed": seed, "result": {**base, "agreement": spread}}
        for seed, spread in enumerate(agreement)
    ]
    cells.append({"label": "cwt", "seed": 0, "result": base})
    lines = notes({"seeds": [0, 1, 2], "strategies": {}, "higher-is-better": True, "cells": cells})
    (line,) = [line for line in lines if "standard deviation of balanced" in line]
    assert line.startswith("standard: ")
    assert line.endswith("by seed: 0.150, –, 0.005")


@pytest.mark.parametrize("higher", [True, False])
def test_the_verdict_names_differences_whose_interval_excludes_0(higher):
    intervals = {"a": [0.1, 0.2], "b": [-0.3, -0.1], "c": [-0.1, 0.2], "reference": None}
    rows = {
        label: {"against": "reference", "difference": interval and {"interval": interval}}
        for label, interval in intervals.items()
    }
    report = {"seeds": [0, 1, 2], "against": "reference", "strategies": rows, "higher-is-better": higher}
    [line] = verdicts(report)
    better, worse = ("a", "b") if higher else ("b", "a")
    verdict = f"better: {better}; worse: {worse}; not shown to differ: c"
    how = "by 95 % intervals (2 degrees of freedom, not corrected for 3 comparisons)"
    assert line == f"compared with reference {how}: {verdict}"
    assert not verdicts({"seeds": [0], "strategies": {"a": {"difference": None}}, "higher-is-better": higher})


def test_what_holds_for_all_methods_is_said_once():
    judged = "Rounds are judged by validation examples; test examples are used at the end only."
    notes_given = [judged, f"local is own models. {judged}", f"an older run's note {judged}"]
    cells = [
        {"label": f"{at}", "seed": 0, "result": {"versions": {}, "privacy": {}, "metrics-note": note}}
        for at, note in enumerate(notes_given)
    ]
    lines = notes({"seeds": [0], "strategies": {}, "higher-is-better": True, "cells": cells})
    notes_shown = [line for line in lines if "judged" in line or "own models" in line or "older" in line]
    assert notes_shown == [judged, "local is own models.", "an older run's note"]
