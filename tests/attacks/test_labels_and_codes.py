"""Labels from gradients at the cut; images from codes."""

import torch
from torch.nn import functional as F

from flwr_replay.attacks.gradients import labels_at_cut
from flwr_replay.attacks.latents import decoded
from flwr_replay.config.model import ModelConfig
from flwr_replay.config.sections import TaskConfig
from flwr_replay.generators.autoencoder import VQVAE2Config, build_generator
from flwr_replay.generators.codes import pack_codes
from flwr_replay.models import build, split_before_head

TASK = TaskConfig(name="digits", format="digits", channels=1, size=8, classes=10)


def losses(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, y, reduction="none")


def test_labels_that_stayed_follow_from_the_gradients_at_the_head() -> None:
    draws = torch.Generator().manual_seed(0)
    x, y = torch.rand(64, 1, 8, 8, generator=draws), torch.randint(10, (64,), generator=draws)
    encoder, middle, head = split_before_head(build(ModelConfig(name="mlp", width=32), TASK, 0), "hidden1")
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
    known = {name: value.clone() for name, value in head.state_dict().items()}  # when the visit begins
    sent, back = [], []
    for x_B, y_B in zip(x.split(16), y.split(16), strict=True):
        s_B = middle(encoder(x_B)).detach().requires_grad_()
        F.cross_entropy(head(s_B), y_B).backward()
        optimizer.step()
        sent.append(s_B.detach())
        back.append(s_B.grad)
    head.load_state_dict(known)
    assert torch.equal(labels_at_cut(head, torch.cat(sent), torch.cat(back), losses, 10), y)
    shuffled = torch.cat(back)[torch.randperm(64, generator=draws)]  # control: other patients' gradients
    assert (labels_at_cut(head, torch.cat(sent), shuffled, losses, 10) == y).float().mean() < 0.4


def test_codes_are_decoded_as_receivers_do() -> None:
    sender = build_generator(VQVAE2Config(name="vqvae2", width=8, dim=4, codes=16), 1, 8, seed=0).eval()
    receiver = build_generator(VQVAE2Config(name="vqvae2", width=8, dim=4, codes=16), 1, 8, seed=1).eval()
    receiver.load_decoder(sender.decoder_state_dict())
    codes = sender.encode(torch.rand(300, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(decoded(receiver, pack_codes(codes.numpy(), 16)), sender.decode(codes))
