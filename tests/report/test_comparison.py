"""What a comparison says under its table."""

from flwr_replay.report.notes import notes


def test_the_agreement_of_models_is_shown_by_seed():
    agreement = [{"standard-deviation": spread} for spread in ({"a": 0.1, "b": 0.2}, {}, {"a": 0.0, "b": 0.01})]
    base = {"versions": {}, "privacy": {}}
    cells = [
        {"label": "standard", "seed": seed, "result": {**base, "agreement": one}} for seed, one in enumerate(agreement)
    ]
    lines = notes({"seeds": [0, 1, 2], "cells": [*cells, {"label": "cwt", "seed": 0, "result": base}]})
    (line,) = [line for line in lines if "standard deviation of balanced" in line]
    assert line.startswith("standard: ")
    assert line.endswith("by seed: 0.150, –, 0.005")
