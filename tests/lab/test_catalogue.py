"""Every array that any method sends says what its numbers are, and every such number has an attack or a sentence."""

from dataclasses import dataclass
from typing import get_args

import pytest

from flwr_replay.attacks import catalogue
from flwr_replay.attacks.catalogue import ATTACKS
from flwr_replay.config.catalogue import choices
from flwr_replay.config.halves import load_client, load_strategy
from flwr_replay.lab.registry import TRIALS, UNTRIED
from flwr_replay.payloads.common import Trained
from flwr_replay.wire.fields import RECORD_OF, Meaning, model, per_sample, synthetic
from flwr_replay.wire.payload import REQUESTS, Request
from flwr_replay.wire.records import Weights

ALL = get_args(Meaning)


def arrays_without_an_attack():
    """Walk the payloads of all stages, both ways."""
    gaps = []
    for request in list(REQUESTS.values()):
        for payload in (request, request.answer):
            for name, field in payload.declared().items():
                if RECORD_OF[field.kind] == "arrays" and field.means not in ALL:
                    gaps.append(f"{payload.__name__}.{name}")
    return sorted(set(gaps))


def test_every_meaning_has_attacks_or_a_sentence():
    assert {meaning for attack in ATTACKS.values() for meaning in attack.takes} | {*UNTRIED} == {*ALL}
    assert all(attack.name == name and attack.source and attack.takes for name, attack in ATTACKS.items())
    declared = [attack for attack in vars(catalogue).values() if isinstance(attack, catalogue.Attack)]
    assert sorted(attack.name for attack in declared) == sorted(ATTACKS)
    assert {*TRIALS} == {means for attack in ATTACKS.values() if attack.gives == "images" for means in attack.takes}


def test_all_payloads_of_all_strategies():
    for name in choices("strategy"):
        load_strategy(name), load_client(name)
    assert len(REQUESTS) > 20
    assert arrays_without_an_attack() == []


def test_a_third_partys_payload_too():
    with pytest.raises(TypeError, match="means"):
        per_sample("N")
    with pytest.raises(TypeError, match="means"):
        synthetic("N")

    @dataclass(frozen=True, kw_only=True)
    class Odd(Trained):
        arrays: Weights = model(means="feelings")  # noqa: RUF009

    try:

        @dataclass(frozen=True, kw_only=True)
        class Ask(Request, stage="odd", answer=Odd):
            arrays: Weights = model()  # noqa: RUF009

        assert arrays_without_an_attack() == ["Odd.arrays"]
    finally:
        REQUESTS.pop("odd")
