"""What a run may claim of its privacy, in sentences."""

from collections.abc import Mapping

from flwr_replay.privacy.plan import GRADIENT, STATISTICS, UPDATE, PrivacyPlan
from flwr_replay.wire.payload import Payload

__all__ = ["NOTHING", "sentence"]

NOTHING = "Nothing here is differentially private; no epsilon can be stated."
ONE_EXAMPLE = "An epsilon is of one example; a patient with several has as many times it, or more."
ONE_PATIENT = (
    "An epsilon is of one patient, with all examples at an institution, where its data name patients; else of one "
    "example. Numbers of examples are public."
)
ONE_INSTITUTION = (
    "An epsilon is of one institution: of all its training examples, exchanged for any others, so of each patient's "
    "there, too. Numbers of examples are public."
)
ALL = "All that leaves and depends on training examples is differentially private"
PUBLIC = "Declared public: numbers and bytes of examples, names, who takes part and when"
OF_SUMS: Mapping[str, str] = {
    STATISTICS: "the noisy sums",
    GRADIENT: "the noisy gradients",
    UPDATE: "the noisy updates",
}


def sentence(plan: PrivacyPlan, stages: Mapping[str, type[Payload]]) -> str:
    """Return what the whole run's epsilon covers and what not, as the answers of all stages declare it."""
    if plan.config.noise == "seeded":
        return "The noise comes from the run's seed, for tests: nothing is protected."
    if plan.local:
        return plan.local.sentence()
    summed = [OF_SUMS[name] for name in plan.mechanisms if name in OF_SUMS]
    sums = summed[0] if len(plan.mechanisms) == 1 and summed else ""
    neighbours = ONE_INSTITUTION if plan.covers(UPDATE) else ONE_PATIENT if sums else ONE_EXAMPLE
    if plan.institutions:
        neighbours += f" It is that of the sum of {plan.institutions} institutions, {plan.trust}. "
        if not plan.colluders:
            neighbours += "Another of them knows its own share of the noise: against it a larger epsilon counts. "
        neighbours += "If masks are broken, that of each institution's own messages does, which is the largest."
    named = [*plan.mechanisms, *(["label counts"] if plan.counted else [])]
    covered = " and ".join([", ".join(named[:-1]), named[-1]] if named[1:] else named)
    if plan.end_to_end:
        own = "; those of an institution's own model, which never leaves and is trained without noise, also depend "
        own += "on its training examples"
        classes = "" if sums or plan.counted else ", the classes that an institution says it has"
        return (
            f"{ALL}: {sums or f'{covered}, together, for each institution by itself'}. {PUBLIC}{classes}. Not covered: "
            f"metrics on validation and test examples{own if plan.tests_own else ''}. {neighbours}"
        )
    samples, weights, numbers = [], [], False
    for stage, answer in stages.items():
        for name, field in answer.declared().items():
            free = field.public or plan.left_out(answer, field) or plan.covering(field.dp)
            samples += [name] if field.kind.startswith("per-sample") else []
            weights += [stage] if field.kind == "model" and not free else []
            numbers |= field.kind == "statistic" and not free
    left = [f"{' and '.join(samples)} of single patients"] if samples else []
    left += [f"the weights that stage {stage} returns" for stage in weights]
    left += ["losses, metrics, counts and, of a regression, sums of labels"] if numbers else []
    learns_replays = plan.replays_codes and "generator" in named and "prior" not in named
    others = " It also learns replays of the others' images, which are not protected." if learns_replays else ""
    if plan.unproven:
        return f"{plan.unproven} These also leave unprotected: {'; '.join(left)}."
    what = f"{sums} of an institution reveal" if sums else f"training the {covered} at an institution reveals"
    if summed and not sums:
        trained = " and ".join(name for name in plan.mechanisms if name not in OF_SUMS)
        what = f"{summed[0]} and training the {trained} at an institution reveal together"
    return (
        f"Only what {what} of its own examples is differentially private.{others} These leave unprotected: "
        f"{'; '.join(left)}. What leaves as a whole has no epsilon. {neighbours}"
    )
