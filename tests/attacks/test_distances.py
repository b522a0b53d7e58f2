import pytest
import torch

from flwr_replay.attacks.distances import distances, nearest


@pytest.mark.parametrize("case", ["apart", "near", "the same", "all one", "nan", "infinite"])
def test_they_are_those_of_differences(case):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.rand(70, 1, 8, 8, generator=generator), torch.rand(90, 1, 8, 8, generator=generator)
    if case == "near":
        b[5] = a[3] + 1e-6
    elif case == "the same":
        b[5] = a[3]
    elif case == "all one":
        a, b = torch.ones_like(a), torch.ones_like(b)
    elif case in ("nan", "infinite"):
        b[5, 0, 0, 0] = float("nan" if case == "nan" else "inf")
    wanted = (a.double()[:, None] - b.double()).flatten(2).norm(dim=2)
    torch.testing.assert_close(distances(a, b), wanted, rtol=1e-9, atol=1e-12, equal_nan=True)


def test_copies_are_nearest_together():
    x = torch.rand(40, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    rows = nearest(distances(x + 0.1, torch.cat([x, x[:7]])))
    assert rows[:7, 40:].diagonal().all()
    assert rows.sum() == 47
