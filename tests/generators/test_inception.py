"""The Fréchet Inception distance: that of the same images is nothing, of others it is something; files are checked."""

import pytest
import torch
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

from flwr_replay.errors import ConfigError
from flwr_replay.generators import perceptual
from flwr_replay.generators.perceptual import InceptionDistance

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A file of the right form; its weights are fresh."""
    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.save({}, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureExtractorInceptionV3, "load_state_dict", lambda model, state: None)
        torch.manual_seed(0)
        model = FeatureExtractorInceptionV3("x", ["2048"], feature_extractor_weights_path=str(path))
    torch.save(model.state_dict(), path)
    return path


def test_the_same_images_are_nearer_than_others(weights, monkeypatch):
    monkeypatch.setattr(perceptual, "FEATURES", 64)  # an early layer's: the roots of 2048 x 2048 matrices take long
    x = torch.rand(6, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    distance = InceptionDistance(str(weights), x, CPU)
    same, other = distance.of((x * 255).round().byte()), distance.of(1 - x.round())
    assert same == pytest.approx(0, abs=0.05 * other)
    assert other > 0


def test_unusable_files_are_refused_in_one_line(weights, tmp_path):
    x = torch.zeros(2, 1, 28, 28)
    torch.save({"w": torch.zeros(2)}, tmp_path / "others.pth")
    (tmp_path / "text.pth").write_text("no weights")
    for file, says in (
        ("others.pth", "those of FID's Inception"),
        ("text.pth", "file of weights"),
        ("absent", "file of"),
    ):
        with pytest.raises(ConfigError, match=says) as caught:
            InceptionDistance(str(tmp_path / file), x, CPU)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="1 or 3 channels; got 2"):
        InceptionDistance(str(weights), torch.zeros(2, 2, 28, 28), CPU)
