"""Groups of always as many rows, in which nobody's place depends on who else is there.

A row's place in a group, and how many rows a group has, may decide the last bits of what a model computes of it. A
hostile server's weights can make these as large as the whole. Were places dealt in order, one example less would move
all that come after it, and change all that they add. So each example draws its place for itself, in secret. Whether
another example is there then changes nothing about the places, and so nothing about the bits, of all others. Rows that
nobody has drawn are zeros.
"""

import math

import torch
from torch import Tensor

from flwr_replay.privacy.secret import Stream

__all__ = ["NOBODY", "at_places", "drawn_places", "places_for"]

LEAST, MOST, VALUES = 16, 256, 2**16  # places in a group, and numbers of all its rows
NOBODY = -1


def places_for(rows: Tensor) -> int:
    """Return how many places a group has. Of few, fewer stay empty; of many, small rows pass a model faster."""
    return max(LEAST, min(MOST, VALUES // math.prod(rows.shape[1:])))


def drawn_places(examples: int, size: int, stream: Stream) -> Tensor:
    """Return which example stands at each place of each group, (groups, size), int64; -1: nobody."""
    place_N = (stream.uniform(examples) * size).long()
    order_N = torch.argsort(place_N, stable=True)
    count_B = torch.bincount(place_N, minlength=size)
    first_B = count_B.cumsum(0) - count_B
    group_N = torch.arange(examples) - first_B[place_N[order_N]]
    places = torch.full((int(count_B.max()), size), NOBODY)
    places[group_N, place_N[order_N]] = order_N
    return places


def at_places(rows: Tensor, place_B: Tensor) -> Tensor:
    """Return a group: the rows at these places, zeros where nobody is."""
    place_B = place_B.to(rows.device)
    group = rows.index_select(0, place_B.clamp(min=0))
    group[place_B == NOBODY] = 0
    return group
