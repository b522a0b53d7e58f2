"""Keys of masks in shares: which sums a server can read by them, whatever it tells to whom, and who lies."""

import itertools
import secrets

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sealed_runs import SMALL

from flwr_replay.ciphers import masking, recovery
from flwr_replay.ciphers.recovery import SECRET, points_of, shares_under, strip
from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError

SHARED = [*SMALL, "masked=true", "noise=shared", "delta=0.001", "strategy=fedsgd", "dp=gradient", "privacy.sigma=2"]


def composed(nodes, helping, missing):
    return compose([*SHARED, f"nodes={nodes}", f"colluders={helping}", f"dropouts={missing}"])


def read_by(survivors_of, cohort, needed):
    """Return whose own keys a server reads, and which pairs', if these honest institutions tell, and the others help.

    `survivors_of` are by honest institution whom the server said to have answered; `needed` honest shares are enough.
    """
    told = [*survivors_of.values()]
    own = {u for u in cohort if sum(u in of for of in told) >= needed}
    pairs = {(u, v) for u in cohort for v in cohort if sum(u in of and v not in of for of in told) >= needed}
    return own, pairs | {(v, u) for u, v in pairs}


@given(st.integers(3, 24), st.data())
def test_whatever_it_tells_to_whom_a_server_reads_one_sum_of_enough(nodes, data):
    """The rule of the options is what the proof needs: neither it nor those who help read another sum, or a smaller."""
    helping, missing = data.draw(st.integers(0, nodes // 3)), data.draw(st.integers(1, 4))
    try:
        composed(nodes, helping, missing)
    except ConfigError:
        return
    n = data.draw(st.integers(nodes - missing, nodes))
    cohort, honest, least = range(n), range(n - helping), nodes - missing
    victims = data.draw(st.lists(st.sampled_from(honest), min_size=1, max_size=2 * missing, unique=True))
    left_out = {w: data.draw(st.permutations([v for v in victims if v != w]))[: n - least] for w in honest}
    own, pairs = read_by({w: {*cohort} - {*left_out[w]} for w in honest}, cohort, least - helping)
    read = own & {*honest}
    assert not any((u, v) in pairs for u, v in itertools.combinations(sorted(read), 2))
    if all((u, v) in pairs for u in read for v in {*honest} - read):
        assert not read or len(read) >= least - helping


def test_without_the_rule_a_server_would_read_a_smaller_sum():
    """Eight institutions, two of whom help, two may be missing: three are left out, though nobody leaves out three."""
    left_out = {1: {2, 3}, 2: {1, 3}, 3: {1, 2}, 4: {1, 2}, 5: {1, 3}, 6: {2, 3}}
    own, pairs = read_by({w: {*range(1, 9)} - of for w, of in left_out.items()}, range(1, 9), 8 - 2 - 2)
    assert own == {4, 5, 6, 7, 8}
    assert all((u, v) in pairs for u in (4, 5, 6) for v in (1, 2, 3))
    with pytest.raises(ConfigError, match=r"if nodes - colluders > d \(d \+ 1\); got nodes=8"):
        composed(8, 2, 2)


# --- shares -----------------------------------------------------------------------------------------------------------


@given(st.integers(3, 12), st.data())
def test_enough_shares_give_every_secret_and_one_less_gives_none(n, data):
    spare = data.draw(st.integers(1, n - 2))
    who = data.draw(st.permutations(range(n)))[: n - spare]
    names = [f"{i:02d}" for i in range(n)]
    keys = [[secrets.token_bytes(SECRET) for _ in names] for _ in names]  # of u's shares, with w
    pair = {frozenset((u, v)): secrets.token_bytes(SECRET) for u in range(n) for v in range(u)}
    own = [secrets.token_bytes(SECRET) for _ in names]
    failed = data.draw(st.integers(0, spare))
    survivors = [i for i in range(n) if i not in [*range(failed)]]
    who = [w for w in who if w in survivors] + [w for w in survivors if w not in who]
    total, points = {"x": np.zeros(3, np.uint64)}, {}
    for u in survivors:
        of = [own[u] if v == u else pair[frozenset((u, v))] for v in range(n)]
        points[names[u]] = points_of(of, [shares_under(key, n) for key in keys[u]], spare)
        signed = total["x"].view(np.int64)
        masking.mask(own[u], {"x": signed}, adds=True)
        for v in range(n):
            if v != u:
                masking.mask(pair[frozenset((u, v))], {"x": signed}, adds=u < v)
    assert total["x"].any()

    def told(w):
        order = [(u, j) for u in survivors for j in (u, *range(failed))]
        return b"".join(shares_under(keys[u][w], n)[j].to_bytes(SECRET) for u, j in order)

    shares = {names[w]: told(w) for w in who[: n - spare]}
    right = {"x": total["x"].copy()}
    strip(right, names, points, shares)
    assert not right["x"].any()
    name = min(shares)
    wrong = {"x": total["x"].copy()}
    strip(wrong, names, points, shares | {name: bytes([shares[name][0] ^ 1]) + shares[name][1:]})
    assert wrong["x"].all()

    def opens(told_by, left_out):
        read = {"x": total["x"].copy()}
        strip(read, names, points, {name: of for name, of in told_by.items() if name != left_out})
        return not read["x"].any()

    def lies(name, by):
        changed = (int.from_bytes(everybody[name][:SECRET]) + by) % recovery.PRIME
        return {name: changed.to_bytes(SECRET) + everybody[name][SECRET:]}

    everybody = {names[w]: told(w) for w in survivors}
    *_, last, spare_one = tellers = sorted(everybody)[: n - spare + 1]
    if len(tellers) > n - spare:
        assert [name for name in everybody if opens(everybody | lies(tellers[0], 1), name)] == [tellers[0]]
        places = [names.index(name) + 1 for name in tellers[1:]]  # two who lie can have the first one named
        row = recovery._coefficients([*places, *range(n + 1, n + spare + 2)], 0)[: len(places)]
        other = -row[-2] * pow(row[-1], -1, recovery.PRIME)
        both = everybody | lies(last, 1) | lies(spare_one, other)
        assert [opens(both, name) for name in ("", tellers[0])] == [False, True]
