"""Pictures stay with the institution that they show; a simulation, where all are here, gathers them."""

import pytest
import torch
from harness import write_shards
from PIL import Image
from replay_runs import FEW, GENERATOR, PRIOR, SIZES, run

from flwr_replay.engines.simulate import run_inline
from flwr_replay.generators.pictures import draw_grid
from flwr_replay.report.progress import Display

TILE = 3 * 8 + 3  # larger, and a border
WIDTH = 12 * TILE + 3


def sizes(folder):
    return {path.name: Image.open(path).size for path in folder.glob("*.png")}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["vqvae2", "pixelcnn"])
def test_a_simulation_gathers_everybodys_pictures(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    task = ["task=digits", "partition=iid", "partition.size=20", "model.width=4", "nodes=2", "device=cpu"]
    networks = [*FEW, *GENERATOR, *PRIOR, "generator.epochs=3"]
    options = ["strategy=cwt", f"replay={kind}", *networks, *task, f"runs_dir={tmp_path}"]
    _, folder = run_inline(options, Display())
    first, second = {"real-reconstruction": 2}, {"real-reconstruction-replay": 3}
    stages = ["generator", "codes"] if kind == "vqvae2" else ["generator"]
    for name, rows in (("institution-1", first), ("institution-2", second)):
        expected = {f"{stage}-000001-{row}.png": (WIDTH, n * TILE + 3) for stage in stages for row, n in rows.items()}
        drawn = {f"prior-000001-{i:02d}-replay.png": (WIDTH, TILE + 3) for i in range(2)}
        assert sizes(folder / "pictures" / name) == expected | (drawn if kind == "pixelcnn" else {})
    assert sizes(folder).keys() == {"generator.png"}  # two epochs of a prior have no picture


def test_a_deployments_pictures_stay_in_the_state_directories(tmp_path):
    write_shards(tmp_path, SIZES)
    ran = run(tmp_path, "strategy=cwt", *FEW, "replay=vqvae2")
    folders = {path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("*.png")}
    assert folders == {("state", name) for name in SIZES}
    assert set(sizes(ran.state("c") / "pictures").values()) == {(WIDTH, 3 * TILE + 3)}  # of five images


def test_a_masks_channel_has_a_row_of_its_own(tmp_path):
    images = torch.stack([torch.zeros(8, 8), torch.ones(8, 8)])[None].expand(2, 2, 8, 8)
    draw_grid(tmp_path / "new" / "x.png", {"real": images, "replay": images})
    picture = Image.open(tmp_path / "new" / "x.png").convert("L")
    assert picture.size == (WIDTH, 4 * TILE + 3)
    middles = [[picture.getpixel((3 + TILE * j + 12, 3 + TILE * i + 12)) for j in range(3)] for i in range(4)]
    assert middles == [[0, 0, 255], [255, 255, 255]] * 2  # where there is no third image it is white
