"""Places in groups: nobody's depends on who else is there."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from flwr_replay.privacy.places import at_places, drawn_places


def places_of(draws, size):
    """Return the place of each example, and all that was dealt."""
    places = drawn_places(len(draws), size, SimpleNamespace(uniform=lambda n: draws))
    stands = (places == torch.arange(len(draws))[:, None, None]).nonzero()
    assert stands[:, 0].tolist() == list(range(len(draws)))  # once each
    return stands[:, 2], places


@given(st.integers(0, 2**32 - 1), st.integers(2, 80), st.integers(1, 40))
def test_an_example_less_moves_nobody_to_another_place(seed, examples, size):
    draws = torch.rand(examples, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gone = seed % examples
    place_N, places = places_of(draws, size)
    rest_N, _ = places_of(torch.cat([draws[:gone], draws[gone + 1 :]]), size)
    assert torch.equal(rest_N, torch.cat([place_N[:gone], place_N[gone + 1 :]]))
    assert (places >= 0).any(1).all()  # no group is empty
    rows = torch.arange(1, examples + 1)
    assert all(torch.equal(at_places(rows, place_B), place_B + 1) for place_B in places)
