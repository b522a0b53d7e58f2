"""Image generators of institutions: time, what a classifier learns from their images, and what they show of patients.

    python benchmarks/image_generators.py task=mnist task.data-dir=DIR partition=ks ks=0.93 nodes=4 \
        generator=stylegan2 --losses none nearest pairs printed --seeds 0 1 2 --out FILE.jsonl

Every institution trains a generator; all losses go on from the same first part of the training. One line of JSON for
each (seed, institution, loss). Repeated, the command goes on with the institutions that are missing, and prints the
tables.

TSTR: the balanced accuracy of a small network trained on synthetic images and tested on all institutions' real test
images of the same classes, beside the same network trained on as many real ones of the institution. Both have labels
that are uniform over the classes. Diversity: mean distance of two images of a class, pixels, over the real images'.
Attacks: `flwr-replay privacy synthetic`.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from flwr.app import Context, RecordDict
from torch.nn import functional

from flwr_replay.config.compose import compose
from flwr_replay.generators.synthesis import SynthesisPlan
from flwr_replay.institution.node import institution_of
from flwr_replay.institution.synthesis import SynthesisStages
from flwr_replay.lab.exposure import examine
from flwr_replay.learning.training import batches, select_device, torch_rng
from flwr_replay.models.layers import as_input
from flwr_replay.models.zoo import backbone
from flwr_replay.state.store import StateStore


class Trained(SynthesisStages):
    """Stages whose generator has just been trained here."""

    generator = None

    def complete(self, run):
        """Return it."""
        return self.generator


def balanced_accuracy(config, x, y, test, seed, steps=400):
    """Train the run's model on x and y, on its device; return its mean recall over the test images' classes."""
    device = select_device(config.device)
    model = backbone(config.model, config.task)(seed).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    made = 0
    while made < steps:
        for x_B, y_B in batches(x, y, 32, torch_rng(seed, "tstr", made)):
            optimizer.zero_grad()
            functional.cross_entropy(model(x_B.to(device)), y_B.to(device)).backward()
            optimizer.step()
            made += 1
    with torch.no_grad():
        chunks = (as_input(images).to(device) for images in torch.split(test[0], 500))
        predicted = torch.cat([model.eval()(images).argmax(1).cpu() for images in chunks])
    return float(np.mean([float((predicted[test[1] == k] == k).float().mean()) for k in test[1].unique()]))


def uniform(data, classes, seed):
    """Return as many of an institution's images as it has, with labels uniform over the classes; some many times."""
    rng = np.random.default_rng(seed)
    rows = np.concatenate([rng.choice(np.flatnonzero(data.y == k), len(data) // len(classes)) for k in classes])
    return data.x[rows], data.y[rows]


def losses_of(plan, losses):
    """Return by name the plans with these privacy losses; of a generator that has none, the plan."""
    if not hasattr(plan.generator, "privacy_loss"):
        return {"": plan}
    return {loss: replace(plan, generator=replace(plan.generator, privacy_loss=loss)) for loss in losses}


def figures(config, stages, plans, first, seed, args):
    """Yield a row for each loss of an institution's generator."""
    data, cpu = stages.images(), torch.device("cpu")
    kept = torch.isin(first[1], stages.classes(data))
    test = first[0][kept], first[1][kept]
    real, begun, spent = None, None, 0.0
    for loss, plan in plans.items():
        generator = plan.fresh(seed, cpu)
        steps = getattr(plan.generator, "steps", generator.steps(len(data)))
        began = time.perf_counter()
        if begun is None:
            generator.train(data.x, data.y, range(steps))
            begun, spent = generator.state(), time.perf_counter() - began
        generator.load_state(begun)
        began = time.perf_counter()
        told = generator.train(data.x, data.y, range(steps, generator.steps(len(data))))
        seconds = spent + time.perf_counter() - began
        stages.generator = generator
        drawn = stages.drawn("", len(data), "benchmark")
        x, y = torch.from_numpy(drawn["images"]), torch.from_numpy(drawn["labels"])
        real = real or balanced_accuracy(config, *uniform(data, stages.classes(data), seed), test, seed)
        with tempfile.TemporaryDirectory() as folder:
            shown = examine(stages, "", args.images, args.samples, Path(args.pictures or folder))
        yield {
            "loss": loss,
            "steps": generator.steps(len(data)),
            "seconds": seconds,
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
            "margin": told.get("margin"),
            "tstr": balanced_accuracy(config, x, y, test, seed),
            "real": real,
            **shown,
        }


def table(rows):
    """Return the means over institutions and seeds, by loss, in Markdown."""
    head = [
        "privacy loss",
        "TSTR",
        "of real",
        "ratio",
        "diversity",
        "Fréchet",
        "real others",
        "seconds",
        "steps/s",
        "GB",
    ]
    lines = [head, ["---"] * len(head)]
    frechet = "frechet-distance, local features"
    for loss in dict.fromkeys(row["loss"] for row in rows):
        own = [row for row in rows if row["loss"] == loss]
        mean = {key: np.mean([row[key] for row in own]) for key in ("tstr", "real", "seconds", "steps", frechet)}
        ratio, diverse = (
            np.array(v) for v in zip(*((r["tstr"] / r["real"], r["diversity, pixels"]) for r in own), strict=True)
        )
        others = np.mean([row[f"{frechet}, of real others"] for row in own])
        lines.append(
            [
                *(loss or "–", f"{mean['tstr']:.3f}", f"{mean['real']:.3f}", f"{ratio.mean():.2f} ({ratio.min():.2f})"),
                *(f"{diverse.mean():.2f} ({diverse.min():.2f})", f"{mean[frechet]:.2f}", f"{others:.2f}"),
                *(
                    f"{mean['seconds']:.0f}",
                    f"{mean['steps'] / mean['seconds']:.1f}",
                    f"{max(r['memory'] for r in own):.1f}",
                ),
            ]
        )
    attacks = ["privacy loss", "attack", "distance", "members", "others", "AUC", "from", "to"]
    more = [attacks, ["---"] * len(attacks)]
    for loss in dict.fromkeys(row["loss"] for row in rows):
        own = [row["attacks"] for row in rows if row["loss"] == loss]
        for rows in zip(*own, strict=True):
            values = {key: [row[key] for row in rows] for key in ("members", "others", "auc")}
            more.append(
                [
                    *(loss or "–", rows[0]["attack"], rows[0]["distance"]),
                    *(f"{np.mean(values[key]):.4f}" for key in ("members", "others")),
                    *(f"{value:.2f}" for value in (np.mean(values["auc"]), min(values["auc"]), max(values["auc"]))),
                ]
            )
    return "\n".join("| " + " | ".join(line) + " |" for line in [*lines, [], *more]).replace("|  |", "")


def main():
    """Train what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", nargs="*", help="as of flwr-replay run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--losses", nargs="+", default=["nearest"])
    parser.add_argument("--images", type=int, default=100, help="members, and others, that are attacked")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--out", required=True)
    parser.add_argument("--pictures", default="", help="a folder for pictures; they show patients' images")
    args = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    out = Path(args.out)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    for seed in args.seeds:
        overrides = ["strategy=syncentral", "device=cpu", *args.options, f"seed={seed}"]
        nodes = compose(overrides).nodes
        context = {"overrides": shlex.join(overrides)}
        owned = [{"partition-id": k, "num-partitions": nodes} for k in range(nodes)]
        owners = [institution_of(Context(1, 1, node, RecordDict(), context)) for node in owned]
        test = [torch.cat([getattr(institution.test, key) for institution, _ in owners]) for key in "xy"]
        for institution, config in owners:
            if any(row["seed"] == seed and row["institution"] == institution.name for row in rows):
                continue
            plan = SynthesisPlan.of(config)
            stages = Trained(institution, StateStore(institution), plan)
            made = list(figures(config, stages, losses_of(plan, args.losses), test, seed, args))
            made = [{"seed": seed, "options": overrides, **row} for row in made]
            with out.open("a") as file:  # all of an institution or nothing
                file.write("".join(json.dumps(row) + "\n" for row in made))
            for row in made:
                print({key: row[key] for key in ("seed", "institution", "loss", "tstr", "real")}, flush=True)
            rows += made
    print(table(rows))


if __name__ == "__main__":
    main()
