"""The secret key, and the streams that derive from it."""

import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from flwr_replay.config.compose import compose
from flwr_replay.errors import PrivacyError
from flwr_replay.institution.budget import PrivacyBudget
from flwr_replay.institution.owner import Institution
from flwr_replay.payloads.replay import TrainPrior
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.privacy.secret import KEY, Stream, noise_stream, secret_key
from flwr_replay.state.store import StateStore


def test_the_key_is_made_once_for_its_owner_only(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(secret_key, [tmp_path] * 8))
    assert keys == {(tmp_path / KEY).read_bytes()}
    assert len(*keys) == 32
    assert (tmp_path / KEY).stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir() if "tmp" in file.name] == []


def test_two_institutions_have_two_keys(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert secret_key(tmp_path / "a") != secret_key(tmp_path / "b")


def test_a_key_that_others_read_or_that_is_damaged_is_refused(tmp_path):
    secret_key(tmp_path)
    (tmp_path / KEY).chmod(0o640)
    with pytest.raises(PrivacyError, match=r"chmod 600") as caught:
        secret_key(tmp_path)
    assert str(tmp_path) not in str(caught.value)  # the server may be reported
    (tmp_path / KEY).chmod(0o600)
    (tmp_path / KEY).write_bytes(b"short")
    with pytest.raises(PrivacyError, match=r"32 bytes; it holds 5"):
        secret_key(tmp_path)


REQUEST = TrainPrior(run="run", exchange=1, arrays={})


@pytest.fixture
def budget(tmp_path):
    """Return the budget of an institution that trains a generator and a prior under DP, with secret noise."""
    plan = PrivacyPlan.of(
        compose(["strategy=cwt", "replay=pixelcnn", "privacy.dp=generator+prior", "generator.codebook=gradient"])
    )
    data = np.zeros((99, 1, 8, 8), np.uint8), np.zeros(99, np.int64)
    institution = replace(Institution.from_arrays("a", data), state_root=tmp_path)
    return PrivacyBudget(plan, institution, StateStore(institution), 0)


@pytest.mark.parametrize("spend", ["begin", "noisy_counts"])
def test_a_key_that_cannot_be_read_costs_nothing(tmp_path, budget, spend):
    (budget.institution.state / KEY).mkdir()
    with pytest.raises(PrivacyError, match="could not be read; Is a directory") as caught:
        budget.begin("prior", 1, REQUEST) if spend == "begin" else budget.noisy_counts(torch.ones(3), REQUEST)
    assert str(tmp_path) not in str(caught.value)
    assert budget.account("run").spent == []


def test_label_counts_have_the_noise_that_they_are_charged_for(budget):
    noise = budget.noisy_counts(torch.full((20_000,), 1000.0), REQUEST) - 1000
    [cost] = budget.account("run").spent
    assert float(noise.double().std()) == pytest.approx(cost.sigma, rel=0.03)
    assert abs(float(noise.double().mean())) < 0.05 * cost.sigma


def test_a_secret_stream_never_comes_again(tmp_path):
    """Neither in another run with the seed, nor where the same step is repeated after a crash, key and all."""
    purpose = (0, "institution-1", "generator", 1)
    first, again = (noise_stream("secret", tmp_path, *purpose).uniform(1000) for _ in range(2))
    assert (first == again).sum() == 0
    assert (first == noise_stream("seeded", tmp_path, *purpose).uniform(1000)).sum() == 0


def test_a_seeded_stream_depends_on_its_purpose_alone(tmp_path):
    streams = [noise_stream("seeded", tmp_path, 0, "a", at).uniform(9).tolist() for at in (1, 1, 2)]
    assert streams[0] == streams[1] != streams[2]
    assert list(tmp_path.iterdir()) == []


def test_a_stream_is_aes_in_counter_mode():
    key = bytes(range(32))
    block = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    words = [word for i in range(50) for word in struct.unpack("<2Q", block.update(i.to_bytes(16, "big")))]
    stream = Stream(key)
    drawn = torch.cat([stream.uniform(n) for n in (7, 0, 1, 92)])
    assert drawn.tolist() == [((word >> 12) + 0.5) / 2**52 for word in words]


def test_normal_numbers_are_normal():
    drawn = Stream(bytes(32)).normal(torch.Size([2, 49_999]))
    assert drawn.shape == (2, 49_999)
    assert drawn.dtype == torch.float64
    assert stats.kstest(drawn.flatten().numpy(), "norm").pvalue > 0.01
    assert abs(float(torch.corrcoef(drawn)[0, 1])) < 0.02
    assert Stream(bytes(32)).normal(torch.Size([0])).shape == (0,)
