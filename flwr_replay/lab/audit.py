"""Audit the epsilon that an institution's account claims, by a simulated run with canaries at it.

The run is the one that `flwr-replay run` would do in this process, with the account, clipping, noise and messages of
every run. Canaries come in at two places that no option and no message reaches: the institution's DP-SGD, and its data.
A deployment is refused.

Inside DP-SGD the steps themselves are tested, too: `flwr_replay.lab.seen_steps`. An honest claim is refuted in at most
one of a hundred audits, by all tests together.

"Not refuted" is no proof: another attack may do better, m canaries cannot show more than `most`, and steps nothing
below `detectable`.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from numpy.typing import NDArray

from flwr_replay.attacks.membership import auc
from flwr_replay.client_app import client_of
from flwr_replay.config.privacy import ON_SUMS
from flwr_replay.config.sections import one_of, require
from flwr_replay.data.dealt import loaded
from flwr_replay.engines.simulate import Simulation, simulate
from flwr_replay.errors import ConfigError, nearest
from flwr_replay.files.atomic import home, write_json
from flwr_replay.institution.client import InstitutionClient
from flwr_replay.institution.guard import guard
from flwr_replay.institution.node import institution_of
from flwr_replay.lab.canaries import Canaries, GradientCanaries
from flwr_replay.lab.canary_images import ImageCanaries
from flwr_replay.lab.canary_sums import SumCanaries
from flwr_replay.lab.seen_steps import judged
from flwr_replay.privacy.account import Account
from flwr_replay.privacy.accounting import SampledGaussian
from flwr_replay.privacy.bounds import SIGNIFICANCE, Guesses, guessed, lower_bound
from flwr_replay.privacy.local import LATENTS
from flwr_replay.report.progress import Display
from flwr_replay.report.run_files import read_run_id
from flwr_replay.serve import serve
from flwr_replay.state.store import RUNS
from flwr_replay.wire.payload import REQUESTS

__all__ = ["KINDS", "audit", "audited_app"]

KINDS = ("gradients", "sums", "images", "noise")
SCORED = {"images": ("classifier", "proxy", "encoder"), "noise": ("generator", "prior")}  # on what these release
DELTA = 1e-5  # at most: at 1/|D| the term 2mδ takes Steinke's test its power
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)  # of the canaries that are guessed, fixed before any audit


def audit(
    simulation: Simulation, overrides: Sequence[str], institution: str, canaries: int, kind: str, display: Display
) -> tuple[dict[str, Any], Path]:
    """Simulate a run with canaries at one institution, and compare what guesses show with what its account claims.

    Parameters
    ----------
    simulation, overrides : Simulation, Sequence[str]
        Planned from these options.
    institution : str
        At which m canaries are; empty: the first.
    kind : str
        gradients: inside DP-SGD | sums: in sums that get noise | images: mislabelled, scored on released classifiers,
        proxies and encoders | noise: images of noise, scored on released generators and priors, and on drawn images.

    Returns
    -------
    report : dict
        Also written to `audit.json` in the run's directory.
    folder : Path
        That directory.

    Raises
    ------
    ConfigError
        If the run has no such institution, too few examples there, or nothing that such canaries test. Then nothing
        has run.
    """
    names, config = simulation.partition.names, simulation.job.config
    name = institution or names[0]
    require(name in names, f"--institution must be one of the run's; got {name!r}: {nearest(name, names)}")
    check(simulation, kind)
    at = names.index(name)
    tossed = Canaries.tossed(canaries, len(simulation.partition.train[at]), config.seed)
    probe: GradientCanaries | ImageCanaries = GradientCanaries(tossed, config.seed)
    if kind == "sums" and (plan := simulation.job.settings.privacy):
        probe = SumCanaries(tossed, config.seed, plan, name, names)
    elif kind != "gradients":
        probe = ImageCanaries(tossed, simulation.partition.examples(loaded(config.task), at), config, kind == "noise")
    _, folder = simulate(simulation, overrides, display, audited_app(name, probe))
    require(
        not isinstance(probe, ImageCanaries) or probe.releases > 0,
        f"images are scored on what leaves; {name} has released no such thing: choose --kind gradients, or another "
        "topology",
    )
    claim, charged = _claim(simulation, name, folder)
    claim["untested"] = [mechanism for mechanism in claim["mechanisms"] if mechanism in ON_SUMS and kind != "sums"]
    report: dict[str, Any] = {"institution": name, "kind": kind, "claim": claim}
    significance, refutations = SIGNIFICANCE, []
    if isinstance(probe, ImageCanaries):
        report["releases"] = probe.releases
    elif claim["epsilon"] is not None:
        require(
            bool(probe.seen) and all(steps.most for steps in probe.seen),
            f"steps and noisy sums are tested; {name} has taken none that an example joined: choose another "
            "--institution, or more rounds",
        )
        significance /= 2  # the other half is for the guesses
        report["steps"] = judged(probe.seen, charged, probe.stray, claim["delta"], significance)
        refutations = report["steps"]["found"]
    report |= _guessed(probe.scores_m, tossed.was_in_m, claim["delta"], significance)
    above = claim["epsilon"] is not None and report["bounds"]["steinke"]["epsilon"] > claim["epsilon"]
    report["refuted"] = above or bool(refutations)
    write_json(folder / "audit.json", report, indent=2)
    return report, folder


def check(simulation: Simulation, kind: str) -> None:
    """Raise `ConfigError` where canaries of this kind test nothing in a run."""
    one_of("--kind", kind, KINDS)
    config, plan = simulation.job.config, simulation.job.settings.privacy
    require(
        not config.strategy.traits.pooled,
        f"canaries are one institution's examples; strategy={config.strategy.name} trains on those of all: choose "
        "another strategy, or local",
    )
    if kind == "sums":
        require(
            plan is not None and {*plan.mechanisms} <= {*ON_SUMS} and not plan.dropouts,
            f"canaries in sums test noise on sums, dp={' or '.join(ON_SUMS)}, without dropouts; got dp="
            f"{config.privacy.dp}, dropouts={config.privacy.dropouts}: choose other options, or --kind gradients",
        )
        return
    if kind == "gradients":
        why = f"dp={config.privacy.dp} takes no such step" if plan else "got dp=none, which has no mechanism to audit"
        known = [name for name in config.strategy.traits.dp_mechanisms if name not in (LATENTS, *ON_SUMS)]
        advice = f"choose dp={' or '.join(known)}, or --kind images or noise"
        advice = advice if known else f"strategy={config.strategy.name} can have none: choose another strategy"
        advice = "choose --kind sums" if plan and {*plan.mechanisms} <= {*ON_SUMS} else advice
        steps = plan is not None and {*plan.mechanisms} - {LATENTS, *ON_SUMS}
        require(bool(steps), f"canaries that are gradients test DP-SGD; {why}: {advice}")
        return
    require(
        config.replay.name != "statistics",
        f"--kind {kind} puts images among the examples; replay=statistics puts features beside them: choose --kind "
        "gradients",
    )
    answers = [REQUESTS[stage].answer for stage in simulation.job.strategy("").all_stages()]
    fields = [
        field for answer in answers for field in answer.declared().values() if field.kind in ("model", "synthetic")
    ]
    leaves = {name for field in fields for name in field.dp.split("+")}
    leaves |= {"encoder"} & config.strategy.dp_passes(config.rounds).keys()
    released, scored = leaves & set(SCORED[kind]), " or ".join(SCORED[kind])
    require(
        bool(released) and config.task.kind == "classification",
        f"--kind {kind} is scored on a released {scored} of a classification; strategy={config.strategy.name} replay="
        f"{config.replay.name} on task={config.task.name} has none: choose other options, or --kind gradients",
    )
    require(
        plan is None or any(plan.covers(mechanism) for mechanism in released),
        f"--kind {kind} is scored on a released {scored}, which dp={config.privacy.dp} does not cover: add it to dp, "
        "or choose --kind gradients",
    )
    options = asdict(config.strategy)
    require(
        plan is None or (not options.get("private_epochs") and options.get("listen", "loss") == "loss"),
        "under DP canaries that are out are taken out of the batches of DP-SGD, and a private model with passes of its "
        "own has others: set private-epochs=0 and listen=loss, or choose --kind gradients",
    )


def audited_app(name: str, probe: GradientCanaries | ImageCanaries) -> ClientApp:
    """Return the ClientApp of a simulation in which one institution has canaries; a deployment is refused."""

    def make(context: Context) -> InstitutionClient:
        if "data" in context.node_config or "name" in context.node_config:
            raise ConfigError("an audit puts canaries among examples, in a simulation only; this node is deployed")
        institution, config = institution_of(context)
        if isinstance(probe, SumCanaries):
            client = client_of(institution, config)
            assert client.budget is not None
            probe.join(institution.name, client.budget)
            return client
        if institution.name != name:
            return client_of(institution, config)
        if isinstance(probe, ImageCanaries):
            institution = replace(institution, read=lambda: probe.data)
        client = client_of(institution, config)
        if client.budget:
            client.budget.training = probe.training
        return client

    def watch(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Watch the institution's steps, or score what leaves it, after the guard has let it."""
        own = institution_of(context)[0].name
        if isinstance(probe, SumCanaries):
            answer = call_next(message, context)
            if answer.has_content():
                probe.saw_answer(own, answer.content)
            return answer
        if own != name:
            return call_next(message, context)
        if isinstance(probe, GradientCanaries):
            with probe.message():
                return call_next(message, context)
        answer = call_next(message, context)
        if answer.has_content():
            probe.saw(message.content, answer.content)
        return answer

    mods: list[Mod] = [watch, guard]
    return serve(make, mods=mods)


def _claim(simulation: Simulation, name: str, folder: Path) -> tuple[dict[str, Any], list[SampledGaussian]]:
    """Return what the institution's account claims at the audit's delta, None where it claims nothing; its charges."""
    plan = simulation.job.settings.privacy
    if plan is None:
        return {"epsilon": None, "delta": DELTA, "mechanisms": [], "unproven": ""}, []
    examples = len(simulation.partition.train[simulation.partition.names.index(name)])
    delta = min(DELTA, plan.checked_delta(examples))
    account = Account(home() / "state" / "simulation" / name / RUNS / read_run_id(folder), delta=delta)
    claim = {
        "epsilon": account.stated_epsilon,
        "delta": delta,
        "mechanisms": sorted(set(account.mechanisms)),
        "unproven": plan.unproven,
    }
    return claim, account.spent


def _guessed(
    scores_m: NDArray[np.float64], was_in_m: NDArray[np.bool_], delta: float, significance: float
) -> dict[str, Any]:
    """Return what guesses by the scores show."""
    m = len(scores_m)
    require(
        bool(np.isfinite(scores_m).all()), "an audit's scores must be finite; a model has diverged: choose a lower lr"
    )
    numbers = sorted({max(2, round(share * m)) for share in SHARES})
    bound, best = lower_bound([guessed(scores_m, was_in_m, guesses) for guesses in numbers], delta, significance)
    most, _ = lower_bound([Guesses(m, guesses, guesses) for guesses in numbers], delta, significance)
    return {
        "canaries": m,
        "in": int(was_in_m.sum()),
        "auc": auc(scores_m[was_in_m], scores_m[~was_in_m]),
        "thresholds": len(numbers),
        "bounds": {"steinke": {"epsilon": bound, "guesses": best.guesses, "right": best.right, "most": most}},
    }
