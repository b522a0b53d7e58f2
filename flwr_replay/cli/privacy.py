"""The command `privacy`: attacks on recorded messages, audits of an epsilon, epsilon and noise, epsilon by epoch.

`synthetic.py` has the attacks on a generator.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flwr_replay.cli.completing import of_runs
from flwr_replay.cli.places import LAST, AsJson, Options, RunsDir, answer, finished_place, say
from flwr_replay.cli.synthetic import show_synthetic
from flwr_replay.config.quoting import digits
from flwr_replay.errors import ConfigError

if TYPE_CHECKING:  # NumPy and Opacus take seconds to import
    from flwr_replay.privacy.accounting import SampledGaussian

__all__ = ["app"]

# Qu et al. 2022, section 4.4 and Fig. 7: |D|, epochs, delta, the epsilon they report; batch 32, noise 0.7.
PAPER = ((1144, 225, 8.7e-4, 17.8), (10_000, 300, 1e-5, 5.0))
NO_PROOF = "Not refuted is no proof: another attack may show more, and this one cannot show more than said above."

app = typer.Typer(
    help="Epsilon of DP-SGD, the noise for an epsilon, attacks on what left, audits of an epsilon.",
    no_args_is_help=True,
)

Examples = Annotated[int, typer.Option("--examples", min=1, help="|D|: one institution's training examples.")]
Batch = Annotated[int, typer.Option("--batch", help="b: a step samples each example with probability b/|D|.")]
Noise = Annotated[
    float, typer.Option("--noise", min=0.01, help="The noise multiplier sigma: noise over clipping norm.")
]
Epochs = Annotated[int, typer.Option("--epochs", min=1, help="Epochs, of ⌊|D|/b⌋ steps each.")]
Delta = Annotated[float, typer.Option("--delta", help="0 means 1/|D|.")]


@app.command("attack")
def attack(
    place: Annotated[str, typer.Argument(metavar="RUN", autocompletion=of_runs)],
    institution: Annotated[str, typer.Option("--institution", help="Attack this one only.")] = "",
    field: Annotated[str, typer.Option("--field", help="Attack this field only: latents, arrays, codes …")] = "",
    only: Annotated[
        str,
        typer.Option(
            "--attack", help="Try this one only: 'latent matching', 'loss threshold' … | yours: mypkg:attack."
        ),
    ] = "",
    aux: Annotated[
        str,
        typer.Option(
            "--aux",
            help="The attacker's own images. none | undealt: those of a simulation's data set that no institution has "
            "| an institution's name: it colludes | a data folder.",
        ),
    ] = "none",
    data: Annotated[
        str, typer.Option("--data", help="The judge's originals: the institution's own data; empty: a simulation's.")
    ] = "",
    run: Annotated[
        str, typer.Option("--run", help="In an institution's state: the run's id; empty: the last recorded one.")
    ] = "",
    minutes: Annotated[float, typer.Option("--minutes", help="For all attacks together, about.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Attack a run's recorded messages; write RUN/attacks with figures, pictures of patients, and a page.

    RUN is a run directory with recorded messages (record=all), `last` for the newest in runs/, or an institution's own
    state.

    An interrupted command goes on where it stopped. A failed attack proves nothing.
    """
    folder = finished_place(place, unfinished=place != LAST)  # what was recorded so far
    from flwr_replay.lab.attack import FOLDER, attack_run
    from flwr_replay.lab.page import write_page
    from flwr_replay.lab.registry import Only
    from flwr_replay.lab.sentences import headline

    tell = say if as_json else partial(print, flush=True)
    report = attack_run(folder, Only(institution, field, only), aux, data, minutes, tell, run)
    page = write_page(folder / FOLDER, report)
    if as_json:
        answer(report, "", as_json)
    tell(headline(report["attacks"])[0])
    tell(f"{page}: shows patients; a failed attack proves nothing")


app.command("synthetic")(show_synthetic)


@app.command("audit")
def show_audit(
    options: Options = None,
    canaries: Annotated[int, typer.Option("--canaries", help="How many, each in by a fair coin.")] = 500,
    kind: Annotated[
        str,
        typer.Option(
            "--kind",
            help="gradients: inside DP-SGD | sums: in sums with noise, of fedsgd and fedstats | images: mislabelled, "
            "scored on classifiers, proxies and encoders | noise: images of noise, scored on generators, priors and "
            "drawn images.",
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
    answer(report, _audited(report, folder), as_json)
    if report["refuted"]:
        sys.exit(1)


@app.command("epsilon")
def show_epsilon(
    examples: Examples, batch: Batch, noise: Noise, epochs: Epochs, delta: Delta = 0.0, as_json: AsJson = False
) -> None:
    """Print the epsilon of DP-SGD, by Rényi DP (RDP) and by privacy loss random variables (PRV), if that is less.

    Where b = |D| it is exact.
    """
    from flwr_replay.privacy.accounting import SampledGaussian

    say("computing …")
    cost = SampledGaussian.of_epochs(examples=examples, batch=batch, sigma=noise, epochs=epochs)
    _print(cost, examples, batch, epochs, delta or 1 / examples, as_json)


@app.command("noise")
def show_noise(
    epsilon: Annotated[float, typer.Option("--epsilon", help="The epsilon to keep within.")],
    examples: Examples,
    batch: Batch,
    epochs: Epochs,
    delta: Delta = 0.0,
    accountant: Annotated[str, typer.Option("--accountant", help="rdp | prv, as runs with one mechanism.")] = "rdp",
    as_json: AsJson = False,
) -> None:
    """Print the least noise that keeps DP-SGD within an epsilon."""
    from flwr_replay.privacy.accounting import SampledGaussian, noise_for

    say("computing …")
    delta = delta or 1 / examples
    cost = SampledGaussian.of_epochs(examples=examples, batch=batch, sigma=0, epochs=epochs)
    sigma = math.ceil(1e4 * noise_for(epsilon, delta, [(cost.rate, cost.steps)], accountant)) / 1e4
    _print(replace(cost, sigma=sigma), examples, batch, epochs, delta, as_json)


@app.command("plot")
def plot(
    examples: Annotated[str, typer.Option("--examples", help="|D| of several institutions, separated by commas.")],
    batch: Batch = 32,
    noise: Noise = 0.7,
    epochs: Epochs = 300,
    delta: Delta = 0.0,
    out: Annotated[str, typer.Option("--out", help="The picture's file.")] = "epsilon.png",
    as_json: AsJson = False,
) -> None:
    """Draw epsilon (RDP) by epoch for several |D|, as in Fig. 7 of Qu et al. 2022, with their points next to ours."""
    from flwr_replay.files.atomic import make_folder, write_atomic
    from flwr_replay.privacy.accounting import SampledGaussian, epsilon
    from flwr_replay.report.plots import epsilons

    say("computing …")
    sizes, curves, marks, lines = _sizes(examples), {}, {}, []
    for size in sizes:
        whole = SampledGaussian.of_epochs(examples=size, batch=batch, sigma=noise, epochs=epochs)
        until = [(at, replace(whole, steps=whole.steps // epochs * at)) for at in range(1, epochs + 1)]
        at_delta = delta or 1 / size
        curve = [(float(at), epsilon([cost], at_delta)) for at, cost in until]
        curves[f"|D| = {size:,}, δ = {at_delta:.2g}"] = curve
        lines.append(f"|D| = {size:,}, delta {at_delta:.2g}: epsilon {curve[-1][1]:.1f} after {epochs} epochs (RDP)")
    for size, at, their_delta, theirs in PAPER:
        if size in sizes and (batch, noise) == (32, 0.7):
            cost = SampledGaussian.of_epochs(examples=size, batch=batch, sigma=noise, epochs=at)
            rdp, prv = (epsilon([cost], their_delta, accountant) for accountant in ("rdp", "prv"))
            marks[sizes.index(size)] = (float(at), theirs, rdp)
            lines.append(
                f"|D| = {size:,}, delta {their_delta:.2g}: after {at} epochs ({cost.steps:,} steps) the paper reports "
                f"{theirs}; we find {rdp:.1f} (RDP) and {prv:.1f} (PRV)"
            )
    file = Path(out).absolute()
    make_folder(file.parent, "--out's folder")
    chart, title = epsilons(curves, marks), f"DP-SGD, batch {batch}, noise {noise:g}, Poisson sampling, RDP"
    write_atomic(file, chart.file("png", title))
    write_atomic(file.with_suffix(".csv"), chart.csv)
    answer({"epsilons": curves, "files": [file, file.with_suffix(".csv")]}, "\n".join([*lines, str(file)]), as_json)


@app.command("digest")
def show_digest(file: Annotated[Path, typer.Argument(metavar="FILE")], as_json: AsJson = False) -> None:
    """Print the digest of an encoder's weights, for `weights` in an institution's policy.

    FILE is the .safetensors file that has them.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    from flwr_replay.files.tensors import digest

    try:
        sha256 = digest(load_file(file))
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"privacy digest reads a .safetensors file; got {file}: {error}") from None
    answer({"digest": sha256}, sha256, as_json)


def _sizes(examples: str) -> list[int]:
    try:
        return [int(digits(size)) for size in examples.split(",")]
    except ValueError:
        raise ConfigError(f"--examples takes whole numbers, comma-separated; got {examples!r}") from None


def _print(cost: SampledGaussian, examples: int, batch: int, epochs: int, delta: float, as_json: bool) -> None:
    from flwr_replay.privacy.accounting import epsilon, rounded_up

    bound, tight = epsilon([cost], delta), epsilon([cost], delta, "prv")
    report: dict[str, Any] = {
        "epsilon": {"rdp": bound, "prv": tight},
        "delta": delta,
        "noise": cost.sigma,
        "examples": examples,
        "batch": batch,
        "rate": cost.rate,
        "epochs": epochs,
        "steps": cost.steps,
    }
    by = "RDP" if cost.rate < 1 else "exact"
    prv = f", {rounded_up(tight, 4)} (PRV)" if tight < bound else ""
    answer(
        report,
        f"epsilon {rounded_up(bound, 4)} ({by}){prv} at delta {rounded_up(delta, 2)}, noise {cost.sigma:g}\n"
        f"{epochs} epochs of {examples // batch:,} steps make {cost.steps:,}; sampling rate {batch}/{examples:,} = "
        f"{cost.rate:.4g}\n"
        "for neighbours that differ by one example, with Poisson sampling; shuffled epochs are not covered",
        as_json,
    )


def _audited(report: dict[str, Any], folder: Path) -> str:
    """Say in a few lines what was found, and what that means."""
    from flwr_replay.privacy.accounting import rounded_up

    claim, bound, steps = report["claim"], report["bounds"]["steinke"], report.get("steps")
    lines = [f"{report['institution']}, at delta {rounded_up(claim['delta'], 2)}:"]
    if steps:
        what = "sums" if report["kind"] == "sums" else "steps of DP-SGD"
        lines.append(f"  {steps['steps']:,} {what} were seen, {steps['charged']:,} were charged")
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
        for name in claim["untested"]:
            lines.append(f"Its sums were not tested: audit dp={name} alone, with --kind sums.")
        if steps and steps["found"]:
            lines.append(f"Found: {'; '.join(steps['found'])}.")
        lines += [] if report["refuted"] else [NO_PROOF]
    return "\n".join([*lines, str(folder / "audit.json")])
