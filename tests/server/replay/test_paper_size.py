"""The paper's generator on images of 256 pixels learns, and its codes have the paper's shape."""

import pytest
import torch

from flwr_replay.config.compose import compose
from flwr_replay.generators.codes import pack_codes, unpack_codes
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.learning.training import torch_rng
from flwr_replay.models.layers import step


@pytest.fixture(scope="module")
def plan():
    return ReplayPlan.of(compose(["task=retina", "preset=paper", "replay=vqvae2", "task.size=256", "task.channels=3"]))


def test_the_preset_is_the_papers_generator(plan):
    options = {name: getattr(plan.generator, name) for name in ("codes", "dim", "width", "blocks", "codebook")}
    assert options == {"codes": 512, "dim": 64, "width": 128, "blocks": 2, "codebook": "ema"}
    assert (plan.channels, plan.size) == (3, 256)


def test_two_steps_and_a_round_trip(plan):
    torch.set_num_threads(1)
    model, draws = plan.fresh_generator(), torch_rng("paper")
    optimizer = torch.optim.Adam(model.parameters(), lr=plan.generator.lr)
    x = torch.rand(1, 3, 256, 256, generator=draws)
    losses = [step(model, optimizer, model.loss(x, draws)[0]) for _ in range(2)]
    assert torch.isfinite(torch.stack(losses)).all()
    codes = model.eval().encode(x)
    assert codes.shape == (1, 32 * 32 + 64 * 64)
    packed = pack_codes(codes.numpy(), 512)
    assert packed.shape == (1, 5120 * 9 // 8) == (1, plan.code_bytes(model))
    decoded = model.decode(torch.from_numpy(unpack_codes(packed, 5120, 512)))
    assert decoded.shape == x.shape
    assert 0 <= decoded.min() <= decoded.max() <= 1
    assert len(codes.unique()) > 1
