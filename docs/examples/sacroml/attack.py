# /// script
# requires-python = ">=3.11"
# dependencies = ["sacroml==2.0.1", "torch", "numpy"]
# ///
"""Attack an exported model by SACRO-ML, in an environment of its own: `uv run attack.py MODEL DATA REPORT`.

MODEL is what `flwr-replay export` writes, DATA an .npz with train_images, who are the members, and test_images, who are
not: bytes, (N, H, W) or (N, H, W, C). Its worst-case attack knows these, and learns by the probabilities who is who.
REPORT becomes a folder with report.json and report.pdf.
"""

import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from sacroml.attacks.target import Target
from sacroml.attacks.worst_case_attack import WorstCaseAttack

model, data = torch.export.load(sys.argv[1]).module(), np.load(sys.argv[2])


def probabilities(split):
    """Return the model's, as it is exported, a row for each image: (N, classes)."""
    images = torch.from_numpy(data[f"{split}_images"]).float() / 255  # as the model card says
    images_BCHW = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2)
    with torch.no_grad():
        return torch.cat([model(batch) for batch in images_BCHW.split(256)]).numpy()


of = {"sha256": sha256(Path(sys.argv[1]).read_bytes()).hexdigest()}  # so that the report says which file it attacked
target = Target(model=model, model_params=of, proba_train=probabilities("train"), proba_test=probabilities("test"))
attacked = WorstCaseAttack(n_reps=10, output_dir=sys.argv[3]).attack(target)
print(attacked["metadata"]["global_metrics"])
