"""Seeds derived from purposes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_replay.rng import derived_rng, derived_seed

KEYS = st.lists(st.integers() | st.text(max_size=8), max_size=4)


@given(KEYS, KEYS)
def test_seeds_are_63_bit_and_tell_purposes_apart(a: list[int | str], b: list[int | str]) -> None:
    assert 0 <= derived_seed(*a) < 2**63
    assert (derived_seed(*a) == derived_seed(*b)) == (a == b)


def test_keys_are_not_joined() -> None:
    assert len({derived_seed("a", "b"), derived_seed("ab"), derived_seed("a,b"), derived_seed("b", "a")}) == 4


def test_numpy_integers_count_as_integers_and_other_types_are_refused() -> None:
    assert derived_seed(np.int64(3), "x") == derived_seed(3, "x")
    with pytest.raises(TypeError, match=r"1\.5"):
        derived_seed(1.5)


def test_same_in_another_process_whatever_its_hash_seed() -> None:
    code = "from flwr_replay.rng import derived_seed; print(derived_seed(7, 'partition', 'test'))"
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "5"}
    )
    # A literal as well: resuming a run on another machine or version must find the same partition.
    assert int(child.stdout) == derived_seed(7, "partition", "test") == 8573825141271325969


def test_generators_repeat() -> None:
    assert derived_rng(1, "a").integers(2**60) == derived_rng(1, "a").integers(2**60)
    assert derived_rng(1, "a").integers(2**60) != derived_rng(2, "a").integers(2**60)
