"""The command `privacy audit`: what canaries in a simulated run show of an institution's epsilon."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["show_audit"]

NO_PROOF = "Not refuted is no proof: another attack may show more, and these canaries cannot show more than said above."
GAUSSIAN = "as of a Gaussian's trade-off curve"


def show_audit(
    options: Annotated[list[str] | None, typer.Argument(metavar="[OPTION=VALUE]…")] = None,
    canaries: Annotated[int, typer.Option("--canaries", help="How many, each in by a fair coin.")] = 500,
    kind: Annotated[
        str,
        typer.Option(
            "--kind",
            help="gradients: inside DP-SGD | images: mislabelled, scored on classifiers, proxies and encoders | noise: "
            "images of noise, scored on generators, priors and drawn images.",
        ),
    ] = "gradients",
    institution: Annotated[str, typer.Option("--institution", help="Whose epsilon; empty: the first one's.")] = "",
    runs_dir: Annotated[str, typer.Option("--runs-dir", help="The folder for run directories.")] = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Simulate a run with canaries at one institution, and test what its account claims. It ruins the run's accuracy.

    The options are those of flwr-replay run. The report is audit.json in the run's directory.

    Exit code 1: the claim is refuted, with 95 % confidence.
    """
    print("loading …", file=sys.stderr, flush=True)
    from flwr_replay.runs.options import resolve

    overrides, config = resolve(options or [], runs_dir, "")
    from flwr_replay.report.progress import TerminalDisplay
    from flwr_replay.runs.audit import audit
    from flwr_replay.runs.simulate import Simulation

    report, folder = audit(Simulation.of(config), overrides, institution, canaries, kind, TerminalDisplay())
    print(json.dumps(report, indent=2) if as_json else _text(report, folder))
    if report["refuted"]:
        sys.exit(1)


def _text(report: dict[str, Any], folder: Path) -> str:
    """Say in a few lines what was found, and what that means."""
    from flwr_replay.privacy.accounting import rounded_up

    claim, delta = report["claim"], rounded_up(report["claim"]["delta"], 2)
    lines = [
        f"{report['institution']}: {report['canaries']:,} canaries ({report['kind']}), {report['in']:,} of them in; "
        f"AUC {report['auc']:.3f}"
    ]
    for method, one in report["bounds"].items():
        assumed = f", {GAUSSIAN}" if method == "mahloujifar" else ""
        lines.append(
            f"  {method.capitalize()}: epsilon is at least {one['epsilon']:.2f}{assumed}; {one['right']:,} of "
            f"{one['guesses']:,} guesses are right, and if all were it would be {one['most']:.2f}"
        )
    lines.append(
        f"  both with 95 % confidence together, at delta {delta}, corrected for {report['thresholds']} numbers of "
        "guesses and two bounds"
    )
    if claim["epsilon"] is None:
        lines.append("No epsilon is claimed, so there is nothing to refute.")
    else:
        trained, unproven = ", ".join(claim["mechanisms"]), " (as the paper counts it)" if claim["unproven"] else ""
        by_any = report["bounds"]["steinke"]["epsilon"] > claim["epsilon"]
        verdict = ("REFUTED" if by_any else f"REFUTED, {GAUSSIAN}") if report["refuted"] else "not refuted"
        lines.append(f"The account of {trained} claims epsilon {rounded_up(claim['epsilon'])}{unproven}: {verdict}.")
        lines += [] if report["refuted"] else [NO_PROOF]
    return "\n".join([*lines, str(folder / "audit.json")])
