"""Who sends which share to whom, and what becomes of it: mixing matrices and PushSum."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flwr_replay.errors import RunError, WireError
from flwr_replay.learning.pushsum import mixed, parcel
from flwr_replay.movements.topology import TOPOLOGIES, mixing_matrix, receivers

NAMED = [name for name in TOPOLOGIES if name != "file"]
PERMUTATIONS = ["exponential", "ring", "random", "none"]
AVERAGING = ["exponential-half", "ring-half", "random-half", "complete"]


def communicate(thetas, ws, p):
    """Let every institution send its parcels and mix what arrives, senders by index."""
    arrived, kept = [[] for _ in ws], []
    for k, (theta, w) in enumerate(zip(thetas, ws, strict=True)):
        shares, own = receivers(p, k)
        kept.append(own)
        for to, share in shares.items():
            arrived[to].append(parcel(theta, w, share))
    pairs = [mixed(*state) for state in zip(thetas, ws, kept, arrived, strict=True)]
    return [theta for theta, _ in pairs], [w for _, w in pairs]


def models(institutions, dtype="float64"):
    rng = np.random.default_rng(institutions)
    return [{"weight": rng.normal(size=(2, 3)).astype(dtype)} for _ in range(institutions)]


def stacked(thetas):
    return np.stack([theta["weight"] for theta in thetas])


@st.composite
def stochastic(draw, largest=5):
    """Draw matrices of shape (T, K, K) whose columns sum to one; everyone keeps a little, so that w does not vanish."""
    size, turns = draw(st.integers(1, largest)), draw(st.integers(1, 3))
    shares = draw(arrays("float64", (turns, size, size), elements=st.floats(0, 1))) + 0.25 * np.eye(size)
    return shares / shares.sum(1, keepdims=True)


# --- the matrices -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMED)
def test_columns_sum_to_one_and_no_row_is_empty(name):
    for size in range(1, 18):
        for t in range(21):
            p = mixing_matrix(name, size, t, seed=3)
            assert p.shape == (size, size)
            assert p.dtype == np.float64
            assert (p >= 0).all()
            np.testing.assert_allclose(p.sum(0), 1, rtol=0, atol=1e-15)
            np.testing.assert_allclose(p.sum(1), 1, rtol=0, atol=1e-15, err_msg="w would leave 1")


@pytest.mark.parametrize("name", PERMUTATIONS)
def test_permutations_send_everything_to_one_other(name):
    for size in range(2, 18):
        for t in range(21):
            p = mixing_matrix(name, size, t)
            assert set(p.ravel()) == {0.0, 1.0}
            assert (p.sum(0) == 1).all()
            assert (p.sum(1) == 1).all()
            assert p.trace() == (size if name == "none" else 0), "nobody sends to itself"


def test_the_exponential_graph_is_the_one_of_fig_2():
    for size in range(2, 18):
        hops = [receivers(mixing_matrix("exponential", size, t), 0)[0] for t in range(10)]
        # section 4.1: 2^0, 2^1, ..., 2^floor(log2(K - 1)) places on, periodically
        distances = [2**i for i in range(int(np.floor(np.log2(size - 1))) + 1)]
        assert hops == [{distances[t % len(distances)]: 1.0} for t in range(10)]
        p, last = mixing_matrix("exponential", size, 1), size - 1
        assert receivers(p, last)[0] == {(last + distances[1 % len(distances)]) % size: 1.0}


def test_no_exponential_hop_leads_back_for_any_number_of_institutions():
    for size in range(2, 3000):
        period = int(np.ceil(np.log2(size)))
        assert all(2**i % size for i in range(period))
    for size in (2, 3, 63, 64, 65, 1000):
        assert all(mixing_matrix("exponential", size, t).trace() == 0 for t in range(12))


@pytest.mark.parametrize("first", [0, 1, 5])
def test_the_exponential_graph_reaches_everybody_after_log2_k_rounds_and_not_before(first):
    for size in range(2, 18):
        knows = np.eye(size)
        for i in range(int(np.ceil(np.log2(size)))):
            assert not knows.all(), "not before"
            p = mixing_matrix("exponential", size, first + i)
            knows = knows + p @ knows  # what it was reported, and what its private model remembers
        assert knows.all()


def test_half_keeps_half_and_sends_half_along_the_same_edge():
    for name in ("exponential", "ring", "random"):
        for size, t in ((2, 0), (5, 1), (8, 2)):
            whole, half = mixing_matrix(name, size, t, 7), mixing_matrix(f"{name}-half", size, t, 7)
            for k in range(size):
                (to,) = receivers(whole, k)[0]
                assert receivers(half, k) == ({to: 0.5}, 0.5)
                assert receivers(whole, k) == ({to: 1.0}, 0.0)


def test_the_ring_complete_and_none_are_what_they_are_called():
    assert [receivers(mixing_matrix("ring", 3, t), 2) for t in (0, 5)] == [({0: 1.0}, 0.0)] * 2
    assert receivers(mixing_matrix("complete", 4, 1), 1) == ({0: 0.25, 2: 0.25, 3: 0.25}, 0.25)
    assert receivers(mixing_matrix("none", 3, 1), 1) == ({}, 1.0)


def test_random_cycles_are_single_cycles_through_all():
    for size in range(2, 18):
        for t in range(21):
            p, k, seen = mixing_matrix("random", size, t, seed=1), 0, []
            for _ in range(size):
                seen.append(k)
                (k,) = receivers(p, k)[0]
            assert k == 0
            assert sorted(seen) == list(range(size))


def test_random_cycles_repeat_for_equal_seeds_and_differ_between_rounds_and_seeds():
    def drawn(seed, rounds):
        return [mixing_matrix("random", 17, t, seed).tobytes() for t in rounds]

    once = drawn(4, range(20))
    assert once == drawn(4, range(20))[:20]
    assert once[::-1] == drawn(4, range(19, -1, -1)), "a round's cycle does not depend on the rounds before it"
    assert len({*once, *drawn(5, range(20))}) == 40


def test_random_cycles_are_uniform():
    cycles = [mixing_matrix("random", 4, t).tobytes() for t in range(600)]
    counts = [cycles.count(cycle) for cycle in set(cycles)]
    assert len(counts) == 6, "(K - 1)! cycles"
    assert 60 < min(counts) <= max(counts) < 140, "100 each, standard deviation 9"


@pytest.mark.parametrize("name", NAMED)
def test_one_institution_exchanges_nothing(name):
    for t in range(4):
        assert mixing_matrix(name, 1, t).tolist() == [[1.0]]
        assert receivers(mixing_matrix(name, 1, t), 0) == ({}, 1.0)


@settings(max_examples=30)
@given(stochastic())
def test_receivers_are_the_senders_column(matrices):
    for p in matrices:
        again = np.zeros_like(p)
        for k in range(len(p)):
            shares, again[k, k] = receivers(p, k)
            assert list(shares) == sorted(shares)
            assert k not in shares
            assert all(share > 0 for share in shares.values())
            for to, share in shares.items():
                again[to, k] = share
        assert (again == p).all()


# --- mixing -----------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(stochastic(), st.data())
def test_weighted_sums_are_conserved_and_the_next_round_sends_p_theta_w(matrices, data):
    size = len(matrices[0])
    theta = data.draw(arrays("float64", (size, 2), elements=st.floats(-100, 100)))
    thetas, ws = [{"weight": row} for row in theta], [1.0] * size
    z, w = theta.copy(), np.ones(size)  # the slow twin: PushSum on whole matrices, never de-biased in between
    for t in range(8):
        p = mixing_matrix("file", size, t, matrices=matrices)
        thetas, ws = communicate(thetas, ws, p)
        z, w = p @ z, p @ w
        np.testing.assert_allclose(ws, w, rtol=1e-12)
        np.testing.assert_allclose(stacked(thetas), z / w[:, None], rtol=1e-9, atol=1e-9)
        assert sum(ws) == pytest.approx(size, abs=1e-12)
        np.testing.assert_allclose(np.array(ws) @ stacked(thetas), theta.sum(0), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", PERMUTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_permutations_swap_models_bit_for_bit(name, dtype):
    thetas, ws = models(6, dtype), [1.0] * 6
    thetas[0]["weight"][0, 0] = -0.0
    before = sorted(theta["weight"].tobytes() for theta in thetas)
    for t in range(7):
        thetas, ws = communicate(thetas, ws, mixing_matrix(name, 6, t))
        assert ws == [1.0] * 6
        assert sorted(theta["weight"].tobytes() for theta in thetas) == before
        assert {theta["weight"].dtype for theta in thetas} == {np.dtype(dtype)}


@pytest.mark.parametrize("name", AVERAGING)
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_with_shares_kept_everyone_comes_to_the_mean(name, size):
    thetas, ws = models(size), [1.0] * size
    mean = stacked(thetas).mean(0)
    for t in range(1 if name == "complete" else 300):
        thetas, ws = communicate(thetas, ws, mixing_matrix(name, size, t))
    np.testing.assert_allclose(stacked(thetas), np.broadcast_to(mean, (size, 2, 3)), atol=1e-9)


def test_half_the_exponential_graph_averages_powers_of_two_in_log2_k_rounds():
    thetas, ws = models(8), [1.0] * 8
    mean = stacked(thetas).mean(0)
    for t in range(3):
        assert np.abs(stacked(thetas) - mean).max() > 0.1
        thetas, ws = communicate(thetas, ws, mixing_matrix("exponential-half", 8, t))
    np.testing.assert_allclose(stacked(thetas), np.broadcast_to(mean, (8, 2, 3)), atol=1e-15)


@pytest.mark.parametrize("name", PERMUTATIONS)
def test_permutations_never_come_to_the_mean(name):
    thetas, ws = models(5), [1.0] * 5
    mean = stacked(thetas).mean(0)
    spread = np.abs(stacked(thetas) - mean).max()
    for t in range(300):
        thetas, ws = communicate(thetas, ws, mixing_matrix(name, 5, t))
    assert np.abs(stacked(thetas) - mean).max() == spread


def test_weights_undo_the_bias_of_an_uneven_matrix():
    uneven = np.array([[[0.9, 0.5, 0.0], [0.0, 0.5, 0.3], [0.1, 0.0, 0.7]]])
    thetas, ws = models(3), [1.0] * 3
    mean = stacked(thetas).mean(0)
    for t in range(200):
        thetas, ws = communicate(thetas, ws, mixing_matrix("file", 3, t, matrices=uneven))
    assert max(ws) > 2 * min(ws), "the limit is far from uniform"
    np.testing.assert_allclose(stacked(thetas), np.broadcast_to(mean, (3, 2, 3)), atol=1e-12)


def test_members_may_change_and_the_sum_over_those_present_is_conserved():
    thetas, ws = models(5), [1.0, 0.5, 2.0, 1.2, 0.3]
    for t, size in enumerate((5, 3, 4)):
        thetas, ws = thetas[:size], ws[:size]
        while len(ws) < size:  # a newcomer
            thetas, ws = [*thetas, models(1)[0]], [*ws, 1.0]
        before = np.tensordot(ws, stacked(thetas), 1)
        thetas, ws = communicate(thetas, ws, mixing_matrix("exponential-half", size, t))
        np.testing.assert_allclose(np.tensordot(ws, stacked(thetas), 1), before, atol=1e-12)


def test_floats_are_mixed_in_float64_and_integers_stay_the_own():
    theta = {"weight": np.full(3, 1 / 3, "float32"), "scalar": np.array(2.0, "float16"), "seen": np.array(7)}
    other = {"weight": np.full(3, 2 / 3, "float32"), "scalar": np.array(4.0, "float16"), "seen": np.array(9)}
    kept = {name: array.copy() for name, array in theta.items()}
    sent, weight = parcel(other, 2.0, 0.25)
    assert weight == 0.5
    assert sent["seen"] == 9
    assert sent["weight"].tolist() == (np.full(3, 2 / 3, "float32") * np.float32(0.5)).tolist()
    result, w = mixed(theta, 1.0, 0.5, [(sent, weight)])
    assert w == 1.0
    assert {name: (array.dtype, array.shape) for name, array in result.items()} == {
        "weight": (np.dtype("float32"), (3,)),
        "scalar": (np.dtype("float16"), ()),
        "seen": (np.dtype("int64"), ()),
    }
    assert all(type(array) is np.ndarray for array in [*result.values(), *sent.values()])
    assert result["weight"].tolist() == [np.float32(0.5)] * 3
    assert result["scalar"] == 3
    assert result["seen"] == 7
    for array in result.values():
        array[...] = 0
    assert all((theta[name] == kept[name]).all() for name in kept), "inputs are read-only"
    assert other["seen"] == 9


@pytest.mark.parametrize("kept", [0.0, 1.0])
def test_many_small_parcels_add_up_in_float64(kept):
    arrays = {"weight": np.ones(1, "float32")}
    tiny = [({"weight": np.full(1, 1e-8, "float32")}, 1e-8)] * 1000
    result, w = mixed(arrays, 1.0, kept, [(arrays, 1.0), *tiny][int(kept) :])
    assert w == pytest.approx(1 + 1e-5, rel=1e-12)
    assert result["weight"][0] == 1, "in float32 the sum would stay 1 and the quotient fall below it"


def test_a_parcel_that_does_not_fit_is_refused():
    theta = {"weight": np.ones((2, 3))}
    for weight in (-1e-9, float("nan"), float("inf")):
        with pytest.raises(WireError, match="finite and not negative; got"):
            mixed(theta, 1.0, 0.5, [(theta, weight)])
    with pytest.raises(WireError, match=r"'weight' has shape \(3,\) in the parcel and \(2, 3\) here"):
        mixed(theta, 1.0, 0.5, [({"weight": np.ones(3)}, 0.5)])  # would broadcast
    with pytest.raises(WireError, match=r"'bias' has shape \(1,\) in the parcel and None here"):
        mixed(theta, 1.0, 0.5, [(theta | {"bias": np.ones(1)}, 0.5)])


def test_an_institution_left_without_any_share_is_reported_so():
    with pytest.raises(RunError, match=r"0 kept and 0 parcels it is 0: choose a topology .* such as exponential-half"):
        mixed({"weight": np.ones(1)}, 1.0, 0.0, [])


def test_a_weight_that_vanishes_is_refused_before_float32_loses_the_model():
    leaking = np.array([[[0.5, 0.0, 0.0], [0.5, 0.0, 0.0], [0.0, 1.0, 1.0]]])  # the first never gets anything back
    first = models(3, "float32")
    thetas, ws = first, [1.0] * 3
    p = mixing_matrix("file", 3, 0, matrices=leaking)
    for _ in range(39):
        thetas, ws = communicate(thetas, ws, p)
        for k in (0, 1):  # the second has what the first sent a round ago
            np.testing.assert_allclose(thetas[k]["weight"], first[0]["weight"], rtol=1e-6)
    with pytest.raises(RunError, match=r"must not vanish; with 0\.5 kept and 0 parcels it is 9\.09\d*e-13"):
        communicate(thetas, ws, p)


def test_a_parcel_whose_weight_was_rounded_to_zero_changes_nothing():
    theta = {"weight": np.array([1.5, -2.0], "float32")}
    sent, weight = parcel({"weight": np.array([3.0, 4.0], "float32")}, 0.1, 5e-324)
    assert weight == 0
    result, w = mixed(theta, 0.7, 0.5, [(sent, weight)])
    assert w == 0.35
    assert result["weight"].tolist() == [1.5, -2.0]
