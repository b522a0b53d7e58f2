"""With which noise a run trains under DP: sigma, C and the sampling rate, which stand beside every epsilon."""

from collections.abc import Mapping, Sequence
from typing import Any

from flwr_replay.privacy.accounting import rounded_up
from flwr_replay.privacy.local import LATENTS
from flwr_replay.privacy.plan import COUNTS, STATISTICS, UPDATE, PrivacyPlan

__all__ = ["noise_of", "shown_noise"]


def noise_of(plan: PrivacyPlan, examples: int, share: float = 1.0) -> list[dict[str, Any]]:
    """Return the noise at an institution with this number of examples, by mechanism, in its share of the rounds.

    Returns
    -------
    list of dict
        `mechanism`; `sigma`, the noise multiplier: the noise's standard deviation over the sensitivity; `clip`, C. For
        DP-SGD the sensitivity is C, and there are `sampling-rate` q = `batch` / `examples`, and `steps`, as many as an
        institution takes that stays to the end. For latents and updates it is 2C; labels have `label-epsilon`.
        For label counts it is 1, and there is no C; that of statistics is the method's own option. Of noise that is
        shared, sigma is that of the sum of `institutions`, `trust` how many of them may be what, `alone` the epsilon of
        one's own messages, and with colluders=0 `among` that of the sum against another of them.
    """
    config = plan.config
    if plan.local:
        release = plan.local.cost(config.delta_for(examples))
        local = {"mechanism": LATENTS, "sigma": release.sigma, "clip": config.latent_clip}
        return [{**local, "label-epsilon": config.label_epsilon, "examples": examples}]
    noise: list[dict[str, Any]] = []
    for passes in (passes.in_share(share) for passes in plan.passes):
        cost = plan.cost(passes.mechanism, examples, passes.epochs)
        noise.append(
            {
                "mechanism": passes.mechanism,
                "sigma": cost.sigma,
                **({} if passes.mechanism == STATISTICS else {"clip": config.clip_of(passes.mechanism)}),
                "sampling-rate": cost.rate,
                "batch": passes.batch or examples,
                "examples": examples,
                "steps": passes.steps or cost.steps,
            }
        )
        if plan.institutions:
            planned = plan.planned(examples, share)
            noise[-1] |= {"institutions": plan.institutions, "trust": plan.trust, "alone": plan.alone(*planned)}
            noise[-1] |= {} if plan.colluders else {"among": plan.among(*planned)}
    return noise + ([{"mechanism": COUNTS, "sigma": config.count_sigma}] if plan.counted else [])


def shown_noise(noise: Sequence[Mapping[str, Any]]) -> str:
    """Write the noise of all mechanisms in a line.

    >>> one = {"mechanism": "proxy", "sigma": 0.7, "clip": 1.0, "sampling-rate": 0.1, "batch": 32, "examples": 320}
    >>> shown_noise([{**one, "steps": 30}])
    'proxy: sigma 0.7, clip C 1, sampling rate 0.1 (32 of 320), up to 30 steps'
    """
    lines = []
    for entry in noise:
        line = f"{entry['mechanism']}: sigma {entry['sigma']:.3g}"
        line += f", clip C {entry['clip']:g}" if "clip" in entry else ""
        line += ", noise 2 C sigma" * (entry["mechanism"] == UPDATE)
        if "sampling-rate" in entry:
            line += f", sampling rate {entry['sampling-rate']:.3g} ({entry['batch']:,} of {entry['examples']:,})"
            line += f", up to {entry['steps']:,} steps"
        if "alone" in entry:
            line += f", on the sum of {entry['institutions']}, {entry['trust']}; "
            line += f"epsilon against another of them {rounded_up(entry['among'])}, " if "among" in entry else ""
            line += "epsilon without masks "
            line += rounded_up(entry["alone"])
        if "label-epsilon" in entry:
            line += f", noise 2 C sigma; labels: randomised response, epsilon {entry['label-epsilon']:g}"
        lines.append(line)
    return "; ".join(lines)
