"""Packed codes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flwr_replay.errors import WireError
from flwr_replay.generators.codes import bits_per_code, pack_codes, unpack_codes


@st.composite
def codes_of_a_book(draw):
    size = draw(st.integers(2, 2**16))
    shape = draw(st.tuples(st.integers(0, 4), st.integers(0, 20)))
    return draw(arrays("int64", shape, elements=st.integers(0, size - 1))), size


def packed_slowly(codes, size):
    """A text of zeros and ones, cut into bytes."""
    width = len(f"{size - 1:b}")
    text = "".join(f"{code:0{width}b}" for code in codes)
    text += "0" * (-len(text) % 8)
    return [int(text[i : i + 8], 2) for i in range(0, len(text), 8)]


@settings(max_examples=60)
@given(codes_of_a_book())
def test_unpacking_undoes_packing_of_as_many_bits_as_needed(book):
    codes, size = book
    packed = pack_codes(codes, size)
    assert packed.dtype == np.uint8
    assert packed.shape == (len(codes), -(-codes.shape[1] * bits_per_code(size) // 8))
    assert packed.tolist() == [packed_slowly(row, size) for row in codes]
    assert np.array_equal(unpack_codes(packed, codes.shape[1], size), codes)


@given(st.integers(2, 2**16))
def test_bits_are_the_logarithm_rounded_up(size):
    assert 2 ** (bits_per_code(size) - 1) < size <= 2 ** bits_per_code(size)


def test_what_cannot_be_codes_is_refused():
    with pytest.raises(WireError, match=r"0 \.\. 127; got 0 to 128"):
        pack_codes(np.array([[0, 128]]), 128)
    with pytest.raises(WireError, match="got -1 to 0"):
        pack_codes(np.array([[0, -1]]), 128)
    packed = pack_codes(np.array([[6, 7, 5]]), 8)
    with pytest.raises(WireError, match=r"0 \.\. 5; got 5 to 7"):
        unpack_codes(packed, 3, 6)
    with pytest.raises(WireError, match="6 codes of 3 bits take 3 bytes an image; got uint8 of shape"):
        unpack_codes(packed, 6, 8)
    with pytest.raises(WireError, match="got int64"):
        unpack_codes(packed.astype(np.int64), 3, 8)
