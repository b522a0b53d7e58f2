"""The command `privacy synthetic`: what a trained generator shows of the images that it has learned."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flwr_replay.cli.completing import of_runs
from flwr_replay.cli.places import AsJson, answer, say
from flwr_replay.errors import ConfigError

if TYPE_CHECKING:  # PyTorch takes seconds to import
    from flwr_replay.institution.synthesis import SynthesisStages

__all__ = ["show_synthetic"]

TRIED = "attacks that were tried; that they fail is evidence, and no guarantee: "
CLAIMS = {
    False: "no epsilon covers synthetic images",
    True: "the guarantee is the epsilon of training the generator, which the institution's account states",
}


def show_synthetic(
    run: Annotated[Path, typer.Argument(metavar="RUN", autocompletion=of_runs)],
    institution: Annotated[
        str, typer.Option("--institution", help="One of a simulation's; all of them if empty.")
    ] = "",
    node_config: Annotated[
        str, typer.Option("--node-config", help="What this institution's SuperNode was started with: its own data.")
    ] = "",
    images: Annotated[
        int, typer.Option("--images", min=8, help="Training images, and held-out images, at most.")
    ] = 100,
    samples: Annotated[int, typer.Option("--samples", min=8, help="Images that the generator draws.")] = 1024,
    weights: Annotated[
        str, typer.Option("--perceptual-weights", help="A file with AlexNet or VGG-16, for LPIPS distances too.")
    ] = "",
    inception: Annotated[
        str, typer.Option("--inception-weights", help="A file with FID's Inception, for that distance too.")
    ] = "",
    out: Annotated[
        str, typer.Option("--out", help="Folder for figures and pictures; they show patients' images.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Attack an institution's own generator, at the institution: nothing leaves.

    RUN is a run directory, or a folder with its config.yaml, run-id and SHA256SUMS.
    """
    from flwr_replay.files.atomic import private_folder, write_json
    from flwr_replay.lab.exposure import examine
    from flwr_replay.report.run_files import read_run_id

    results, under_dp = [], False
    for stages in _stages(run, node_config):
        name = stages.institution.name
        if institution not in ("", name):
            continue
        say(f"{name}: attacking its generator …")
        folder = Path(out).absolute() / name if out else stages.institution.state / "synthetic" / stages.identity
        private_folder(folder)
        under_dp = stages.budget is not None
        run_id = read_run_id(run.expanduser()) if under_dp else ""
        results.append(result := examine(stages, run_id, images, samples, folder, weights, inception))
        write_json(folder / "result.json", result, indent=2)
        if not as_json:
            print(_text(result, folder))
    if not results:
        raise ConfigError(f"--institution must be one of the run's; got {institution!r}: leave it out to see all")
    answer(results, TRIED + CLAIMS[under_dp], as_json)


def _stages(run: Path, node_config: str) -> list[SynthesisStages]:
    """Return the institutions of a simulated run, or the one that a SuperNode's configuration names."""
    from flwr.app import Context, RecordDict
    from flwr.common.config import parse_config_args

    from flwr_replay.config.compose import compose
    from flwr_replay.generators.synthesis import SynthesisPlan
    from flwr_replay.institution.budget import PrivacyBudget
    from flwr_replay.institution.node import institution_of
    from flwr_replay.institution.synthesis import SynthesisStages
    from flwr_replay.privacy.plan import PrivacyPlan
    from flwr_replay.runs.options import run_overrides
    from flwr_replay.state.store import StateStore

    overrides = run_overrides(run.expanduser())
    nodes = compose(overrides).nodes
    owned: list[dict[str, Any]] = [{"partition-id": k, "num-partitions": nodes} for k in range(nodes)]
    if node_config:
        owned = [parse_config_args([node_config])]
    if not owned:
        raise ConfigError("the run was deployed: each institution examines its own generator, with its --node-config")
    institutions = []
    for node in owned:
        institution, config = institution_of(Context(1, 1, node, RecordDict(), {"overrides": shlex.join(overrides)}))
        if (plan := SynthesisPlan.of(config)) is None:
            raise ConfigError(
                f"only generators of synthetic images can be examined; {run} has strategy={config.strategy.name}: "
                "choose a run of feder or syncentral"
            )
        state, under_dp = StateStore(institution), PrivacyPlan.of(config)
        budget = PrivacyBudget(under_dp, institution, state, config.seed) if under_dp else None
        institutions.append(SynthesisStages(institution, state, plan, budget))
    return institutions


def _text(result: dict[str, Any], folder: Path) -> str:
    """Say what was found, a line for each attack."""
    lines = [f"{result['institution']}: {result['images']} training images, as many held-out ones"]
    for attack in result["attacks"]:
        lines.append(
            f"  {attack['attack']}, {attack['distance']}: distance {attack['members']:.4f} of training images, "
            f"{attack['others']:.4f} of held-out ones; AUC {attack['auc']:.2f} "
            f"({attack['low']:.2f} to {attack['high']:.2f})"
        )
    made, real = (result[f"frechet-distance, local features{end}"] for end in ("", ", of real others"))
    lines.append(f"  Fréchet distance, local features: {made:.3f}; of real held-out images {real:.3f}")
    if (fid := result.get("frechet-inception-distance")) is not None:
        others = result["frechet-inception-distance, of real others"]
        lines.append(f"  Fréchet Inception distance: {fid:.2f}; of real held-out images {others:.2f}")
    return "\n".join([*lines, f"  pictures of patients, and figures: {folder}"])
