"""The data-protection officer's findings: what a run would send, and what the institution's own policy says to it.

Nothing is trained and nothing is sent. The messages of the forecast are put before the checks of
`flwr_replay/institution/guard.py`, which decides in the real run.
"""

import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from flwr.app import Message

from flwr_replay.config.compose import compose, overrides_in, to_yaml
from flwr_replay.config.halves import load_client
from flwr_replay.config.quoting import key_of
from flwr_replay.config.run import RunConfig
from flwr_replay.config.sections import PartitionConfig
from flwr_replay.config.sources import idea_of
from flwr_replay.data.dealt import dealt, loaded
from flwr_replay.engines.inline import identify_process
from flwr_replay.engines.simulate import Simulation
from flwr_replay.errors import ConfigError, FlwrReplayError
from flwr_replay.files.atomic import NAME, home, read_text
from flwr_replay.forecast.forecast import Expected, expected, planned_privacy
from flwr_replay.institution.floor import check_examples, check_room, check_tested
from flwr_replay.institution.guard import check_answer, check_pinned, check_release, check_request, run_rules
from flwr_replay.institution.policy import ENCODING, Policy, read_policy
from flwr_replay.payloads.common import Evaluation
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.runs.environment import versions
from flwr_replay.runs.execute import Job, claim, network_of
from flwr_replay.runs.options import INLINE_NODES
from flwr_replay.state.counts import FILE
from flwr_replay.state.store import RUNS
from flwr_replay.wire.fields import Field
from flwr_replay.wire.payload import REQUESTS, LedgerRow, Payload, rows
from flwr_replay.wire.records import metrics_in

__all__ = ["findings", "planned", "refusals", "study_options"]

OF_THE_RUN = ("runs_dir", "run_name", "resume")  # where the coordinator writes; nothing of it concerns a forecast
ANOTHER = "another institution"  # of a study, where the data are one institution's
ALLOWED, REFUSED, KEPT = "allowed", "refused", "kept here"  # of a field
HELD, BROKEN = "kept", "broken"  # of a rule
NOT_IN_IT = "the institution takes no part in the run, since another rule is broken"


def study_options(study: Path) -> list[str]:
    """Read the options that a study's `pyproject.toml` gives to all institutions.

    Raises
    ------
    ConfigError
        If there is none, or it is not that of a study.
    """
    file = study / "pyproject.toml"
    if not file.is_file():
        raise ConfigError(f"--study must be a folder with the study's pyproject.toml; got {study}")
    try:
        config = tomllib.loads(file.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
        options = overrides_in(config)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} must have a table [tool.flwr.app.config]; got {error!r}") from None
    return [option for option in options if key_of(option) not in OF_THE_RUN]


def planned(options: Sequence[str], clinics: Sequence[str]) -> tuple[Simulation, tuple[str, ...]]:
    """Plan a run over the data that are here; return it with the institutions whose data they are.

    Data that name no sites are one institution's, and so are those given with one name that is no site of theirs, as
    at its node. The others of the study are then taken to be one example smaller.

    Parameters
    ----------
    options : sequence of str
        Of the run.
    clinics : sequence of str
        The institutions' names; none: the sites in the data, else the name of the data's folder.

    Raises
    ------
    FlwrReplayError
        If options, data and names do not fit each other.
    """
    config = compose(options)
    if wrong := [name for name in clinics if not NAME.fullmatch(name)]:
        raise ConfigError(f"a name has letters, digits, spaces, dots, hyphens and underscores; got {wrong[0]!r}")
    sites = loaded(config.task).train.sites if config.partition.name == "natural" else None
    of_one = sites is None or (len(clinics) == 1 and (clinics[0] not in sites or len(set(sites)) == 1))
    if config.partition.name != "natural" or not of_one:
        nodes = config.nodes or len(config.partition.shares) or INLINE_NODES
        simulation = Simulation.of(replace(config, nodes=nodes))
        names = simulation.partition.names
        if clinics and not set(clinics) <= set(names):
            raise ConfigError(f"--clinics must be among the data's institutions {', '.join(names)}; got {clinics}")
        return simulation, tuple(clinics or names)
    if len(clinics) > 1:
        raise ConfigError(f"the data name no sites, so they are one institution's; got --clinics {','.join(clinics)}")
    own = clinics[0] if clinics else Path(config.task.data_dir).expanduser().absolute().name
    nodes = max(1, config.nodes)
    names = (own, *(f"{ANOTHER} {k}" for k in range(2, nodes + 1)))
    whole = dealt(config.task, PartitionConfig(name="iid"), 1, config.seed)
    val = None if whole.val is None else whole.val * nodes
    train = (whole.train[0], *[whole.train[0][:-1]] * (nodes - 1))  # what only the largest is asked for is shown, too
    partition = replace(whole, names=names, train=train, test=whole.test * nodes, val=val)
    return Simulation(Job.of(config, names), partition), (own,)


def findings(simulation: Simulation, names: Sequence[str], policy_file: Path | None) -> dict[str, Any]:
    """Return what the named institutions would send, and their policy's verdict on it, as `officer.json` has it.

    Without a file, the policy is what an institution without one allows.
    """
    identify_process()
    policy, config, partition = read_policy(policy_file), simulation.job.config, simulation.partition
    unknown = any(name.startswith(f"{ANOTHER} ") for name in partition.names)
    if unknown and config.fraction < 1:  # who is drawn depends on all names: no institution has more than all rounds
        job = Job.of(replace(config, fraction=1.0), partition.names)
        strategy, exchanges = expected(replace(simulation, job=job), complete=False)
    else:
        strategy, exchanges = expected(simulation, complete=not unknown)
    plan = strategy.settings.privacy
    fields: dict[tuple[str, ...], dict[str, Any]] = {}
    own = [sent for sent in exchanges if sent.member.name in names]
    train = {name: partition.examples(loaded(config.task), partition.names.index(name)).train for name in names}
    delta = config.privacy.delta_for(min(map(len, train.values())))  # the largest; 0 in the options is 1/|D|
    agreed = replace(config, privacy=replace(config.privacy, delta=delta))
    stages = [*strategy.all_stages(), *(sent.request.stage_name for sent in own)]
    beside = sorted(policy_file.parent.glob("state/*")) if policy_file else ()
    states = [*beside, *(home() / "state" / name for name in names)]
    rules = refusals(policy, agreed, stages, states)
    if policy.min_count:
        rules += [_verdict("min-count", partial(check_examples, policy, own)) for own in train.values()]
    takes_part = not any(rule["verdict"] == BROKEN for rule in rules)
    shards = {"test": partition.test, "validation": partition.val}
    for answered in own:
        given = "" if takes_part else NOT_IN_IT
        if isinstance(answered.answer, Evaluation) and (shard := shards.get(getattr(answered.request, "split", ""))):
            tested = len(shard[partition.names.index(answered.member.name)])
            given = given or _verdict("", partial(check_tested, policy, tested))["reason"]
        for row, verdict, reason in _judged(answered, policy, config, given):
            key = (answered.member.name, answered.request.stage_name, row.field, row.protection, verdict, reason)
            line = fields.setdefault(
                key,
                {
                    "institution": answered.member.name,
                    "stage": answered.request.stage_name,
                    "field": row.field,
                    "kind": row.kind,
                    "meaning": _meaning(type(answered.answer).by_key()[row.field]),
                    "messages": 0,
                    "bytes": 0,
                    "protection": row.protection,
                    "mechanism": plan.mechanism if plan and row.protection.startswith("(") else "",
                    "verdict": verdict,
                    "reason": reason,
                },
            )
            line["messages"] += answered.times
            line["bytes"] += row.bytes * answered.times
    lines = list(fields.values())
    down = {name: sum(_size(sent.request) * sent.times for sent in own if sent.member.name == name) for name in names}
    return {
        "strategy": config.strategy.name,
        "task": config.task.name,
        "rounds": config.rounds,
        "nodes": config.nodes,
        "others-unknown": unknown,
        "fraction": config.fraction,
        "idea": idea_of(config.strategy.name)[0],
        "network": network_of(config),
        "institutions": {
            name: {"examples": len(own), "raw-bytes": own.nbytes, "comes-down": down[name]}
            for name, own in train.items()
        },
        "policy": str(policy_file) if policy_file else "",
        "policy-text": read_text(policy_file) if policy_file else "",
        "allowed": takes_part and not any(line["verdict"] == REFUSED for line in lines),
        "takes-part": takes_part,
        "rules": rules,
        "fields": lines,
        "hides": config.hiding,
        "pinned": [stage for stage, _ in policy.weights if stage in strategy.all_stages()],
        "min-count": policy.min_count,
        "tests": policy.max_evaluations,
        "all-runs": [
            f"{state.name}: {policy.all_runs(state).sentence()}." for state in states if (state / RUNS).is_dir()
        ],
        "claim": claim(strategy),
        "planned": planned_privacy(strategy, config.rounds, names),
        "private": plan is not None and plan.config.secret,
        "options": to_yaml(config),
        "versions": versions(),
    }


def refusals(
    policy: Policy, config: RunConfig, stages: Sequence[str], states: Sequence[Path] = ()
) -> list[dict[str, str]]:
    """Return the verdict of every rule of a policy on a run as a whole, and on what each requested stage sends.

    In an institution's state directory, if it is here, lies what other runs have used up.
    """
    load_client(config.strategy.name, config.replay.name)  # its import declares the method's payloads
    verdicts = [_verdict(key, check) for key, check in run_rules(policy, config).items()]
    for stage in dict.fromkeys(("roll-call", *stages, "evaluate")):
        answer = REQUESTS[stage].answer
        verdicts.append(_verdict(f"what stage {stage} sends", partial(check_release, answer, policy, config)))
    if {*ENCODING} & {*stages}:
        verdicts.append(_verdict("weights", partial(check_pinned, policy, config, stages)))
    answers = [REQUESTS[stage].answer for stage in stages]
    used = [state for state in states if policy.min_count and (state / FILE).exists()]
    verdicts += [_verdict("room", partial(check_room, policy, state, config, answers)) for state in used]
    for state in (state for state in states if policy.max_total_epsilon is not None and (state / RUNS).is_dir()):
        check = partial(policy.all_runs(state).check, config.privacy.limit, config.privacy.delta)
        verdicts.append(_verdict("max-total-epsilon", check))
    return verdicts


def _verdict(rule: str, check: Callable[[], None]) -> dict[str, str]:
    try:
        check()
    except FlwrReplayError as error:
        return {"rule": rule, "verdict": BROKEN, "reason": str(error)}
    return {"rule": rule, "verdict": HELD, "reason": ""}


def _judged(sent: Expected, policy: Policy, config: RunConfig, given: str) -> Iterator[tuple[LedgerRow, str, str]]:
    """Yield a row for every field of an answer, with its verdict and the reason, as the guard would decide.

    With a reason given, all is refused but the name, which the refusal has.
    """
    kind, plan = type(sent.answer), PrivacyPlan.of(config)
    message = Message(sent.request.encode(), 1, sent.request.message_type)
    reply = Message(sent.answer.encode(), reply_to=message)
    whole = list(rows(reply.content, kind))
    whole = plan.protected(whole, kind, metrics_in(reply.content)) if plan else whole
    reason, leaving = given, []  # type: str, list[LedgerRow]
    try:
        check_request(message, type(sent.request), policy, config)
        leaving = check_answer(reply, kind, policy, config)
    except FlwrReplayError as error:
        reason = given or str(error)
    left = {row.field for row in leaving}
    for row in whole:
        declared = kind.by_key()[row.field]
        promise = plan.promise(kind, declared) if plan else inf
        name = f"{kind.__name__}.{row.field.replace('-', '_')}"
        single = _verdict("", partial(policy.check_field, name, row.kind, promise))
        if row.field == "name" or (row.kind == "notice" and not reason):
            yield row, ALLOWED, ""
        elif single["reason"] or reason:
            yield row, REFUSED, single["reason"] or reason
        elif row.field in left:
            yield row, ALLOWED, ""
        else:
            floor = f"that are not small leave (min-count: {policy.min_count})" if policy.min_count else ""
            rest = floor or f"of a test leave (metrics: {policy.allowed_metrics})"
            yield row, KEPT, f"the policy lets only counts {rest}"


def _meaning(declared: Field) -> str:
    """Say what a field's numbers are, by its declaration."""
    return (
        declared.unit or f"{declared.means or ''}{', a row for each example' * declared.kind.startswith('per-sample')}"
    )


def _size(payload: Payload) -> int:
    return sum(row.bytes for row in rows(payload.encode(), type(payload)))
