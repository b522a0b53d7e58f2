"""What a comparison says under its table."""

import pytest

from flwr_replay.report.comparison import cells_of, summarise
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


def test_a_run_in_which_not_everybody_was_tested_does_not_count():
    """Its metrics are of others' examples than those it would be compared with; its epsilon counts."""

    def cell(seed, accuracy, untested):
        own = {name: {"accuracy": accuracy} for name in "ab" if name not in untested}
        final = {"global": {"accuracy": accuracy}, "institutions": own}
        costs = {"bytes": {"up": 1, "down": 1}, "examples-seen": 1, "wall-seconds": 1.0, "nodes": 2}
        account = {"epsilon": 1.0 + seed, "delta": 1e-5, "proven": True, "dp": "proxy"}
        base = {"versions": {}, "privacy": {"a": account}, "privacy-claim": "", "noise": {}}
        result = {**base, **costs, "final": final, "untested": untested}
        return {"label": "cwt", "strategy": "cwt", "options": [], "seed": seed, "result": result}

    cells = [cell(0, 0.5, []), cell(1, 1.0, ["b"])]
    rows = summarise(cells, ["cwt"], "cwt", "accuracy", True)
    row = rows["cwt"]
    assert (row["values"], row["mean"], row["worst-institution"], row["epsilon"].epsilon) == ({0: 0.5}, 0.5, 0.5, 2)
    report = {"seeds": [0, 1], "strategies": rows, "higher-is-better": True, "cells": cells, "metric": "accuracy"}
    report["against"] = "cwt"
    assert cells_of(report)[1][0][0] == "cwt (1 of 2 left out)"
    assert "cwt seed 1 is left out: not every institution was tested" in notes(report)
