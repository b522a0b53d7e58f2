"""Slides of four hospitals as bags of feature vectors, which a mean of vectors can tell apart."""

import csv

import numpy as np

F, CLASSES, GROUPS = 6, 4, ("lung", "lung", "kidney", "kidney")
SEEN = {"asterand": (0, 1, 2), "indivumed": (1, 2, 3), "mskcc": (0, 2, 3), "pittsburgh": (0, 1, 2, 3)}
TASK = [
    "task=histopathology",
    f"channels={F}",
    "task.size=3",
    f"classes={CLASSES}",
    "class_groups=[lung,lung,kidney,kidney]",
]


def write_slides(folder, each=20, sites=SEEN, external=False):
    """Write bags of 1 to 9 vectors and the manifest; of one site, its rows name no site."""
    rng = np.random.default_rng(0)
    rows = []
    for site, classes in sites.items():
        for i in range(each):
            label = classes[i % len(classes)]
            features = rng.normal(size=(rng.integers(1, 10), F)) + 3 * np.eye(CLASSES, F)[label]
            np.savez(folder / f"{site}-{i}.npz", features=features.astype(np.float32))
            split = "test" if i % 4 == 3 else "external" if external and i % 4 == 2 else "train"
            rows.append([f"{site}-{i}.npz", label, site, split])
    with open(folder / "manifest.csv", "w", newline="") as file:
        csv.writer(file).writerows([["bag", "label", "site", "split"], *rows])
    return rows
