"""Play data for a rehearsal: three institutions with a few kinds of scikit-learn's handwritten digits each.

python make_data.py data    writes data/clinic-a, data/clinic-b and data/clinic-c, and data/manifest.csv over all three
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

LABELS = {"clinic-a": (0, 1, 2, 3), "clinic-b": (3, 4, 5, 6), "clinic-c": (6, 7, 8, 9)}
EXAMPLES = {"clinic-a": 96, "clinic-b": 80, "clinic-c": 64}


def write_clinics(root: Path) -> None:
    """Write a folder of 8 x 8 grey images for each institution, and one manifest over all of them."""
    digits = load_digits()
    shares = np.array_split(np.random.default_rng(0).permutation(len(digits.target)), len(LABELS))
    everything = [("image", "label", "site")]
    for (clinic, labels), share in zip(LABELS.items(), shares, strict=True):
        (root / clinic).mkdir(parents=True)
        own = [("image", "label")]
        for n, i in enumerate([i for i in share if digits.target[i] in labels][: EXAMPLES[clinic]]):
            pixels = (digits.images[i] * 255 / 16).astype(np.uint8)
            Image.fromarray(pixels).save(root / clinic / f"{n:03d}.png")
            own.append((f"{n:03d}.png", str(digits.target[i])))
            everything.append((f"{clinic}/{n:03d}.png", str(digits.target[i]), clinic))
        _write(root / clinic / "manifest.csv", own)
    _write(root / "manifest.csv", everything)


def _write(path: Path, rows: Sequence[Sequence[str]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("error: name the folder to write: python make_data.py data")
    write_clinics(Path(sys.argv[1]))
