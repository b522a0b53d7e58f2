"""The command `privacy audit`: what canaries in a simulated run show of an institution's epsilon."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from flwr_replay.cli.places import AsJson, Options, RunsDir, answer, say

__all__ = ["show_audit"]

NO_PROOF = "Not refuted is no proof: another attack may show more, and this one cannot show more than said above."


def show_audit(
    options: Options = None,
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
    runs_dir: RunsDir = "runs",
    as_json: AsJson = False,
) -> None:
    """Simulate a run with canaries at one institution, and test what its account claims. It ruins the run's accuracy.

    The options are those of flwr-replay run. The report is audit.json in the run's directory.

    Exit code 1: the claim is refuted, with 99 % confidence.
    """
    say()
    from flwr_replay.runs.options import resolve

    overrides, config = resolve(options or [], runs_dir, "")
    from flwr_replay.engines.simulate import Simulation
    from flwr_replay.lab.audit import audit
    from flwr_replay.report.progress import TerminalDisplay

    report, folder = audit(Simulation.of(config), overrides, institution, canaries, kind, TerminalDisplay())
    answer(report, _text(report, folder), as_json)
    if report["refuted"]:
        sys.exit(1)


def _text(report: dict[str, Any], folder: Path) -> str:
    """Say in a few lines what was found, and what that means."""
    from flwr_replay.privacy.accounting import rounded_up

    claim, bound, steps = report["claim"], report["bounds"]["steinke"], report.get("steps")
    lines = [f"{report['institution']}, at delta {rounded_up(claim['delta'], 2)}:"]
    if steps:
        lines.append(f"  {steps['steps']:,} steps of DP-SGD were seen, {steps['charged']:,} were charged")
        for kind in steps["kinds"]:
            sigma, rate = kind["sigma"], kind["rate"]
            lines.append(
                f"  one example adds up to {kind['most']:.4g} C; noise {sigma['seen']:.4g} times as much, "
                f"{sigma['charged']:.4g} charged; rate {rate['seen']:.3g}, {rate['charged']:.3g} charged"
            )
        lines.append(
            f"  an epsilon above {rounded_up(steps['detectable'])} would have been found in 95 of 100 audits, if "
            "noise, clipping or rate were wrong, alike in all steps; so would sums that grow after clipping by "
            f"{steps['growth']:.0%}; a step without a charge is always found"
        )
    lines += [
        f"  {report['canaries']:,} canaries ({report['kind']}), {report['in']:,} of them in; AUC {report['auc']:.3f}",
        f"  epsilon is at least {bound['epsilon']:.2f} by guesses, of which {bound['right']:,} of {bound['guesses']:,} "
        f"are right; if all were it would be {bound['most']:.2f}, so they can refute no larger claim",
        "  by all tests together an honest claim is refuted in at most 1 of 100 audits",
    ]
    if claim["epsilon"] is None:
        lines.append("No epsilon is claimed, so there is nothing to refute.")
    else:
        trained, unproven = ", ".join(claim["mechanisms"]), " (as the paper counts it)" if claim["unproven"] else ""
        verdict = "REFUTED" if report["refuted"] else "not refuted"
        lines.append(f"The account of {trained} claims epsilon {rounded_up(claim['epsilon'])}{unproven}: {verdict}.")
        if steps and steps["found"]:
            lines.append(f"Found: {'; '.join(steps['found'])}.")
        lines += [] if report["refuted"] else [NO_PROOF]
    return "\n".join([*lines, str(folder / "audit.json")])
