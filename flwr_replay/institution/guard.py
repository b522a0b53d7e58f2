"""The institution's last word, as a Flower mod around any ClientApp: policy first, own ledger before anything leaves.

app = ClientApp(mods=[guard])

What is refused here holds against any server and any sequence of its messages: what the policy forbids, mechanisms that
a method does not have, and answers that state another epsilon and delta than the institution's own account.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from flwr.app import Context, Message, MetricRecord
from flwr.clientapp.typing import ClientAppCallable

from flwr_replay.config.compose import load_client
from flwr_replay.config.sections import RunConfig
from flwr_replay.errors import (
    ConfigError,
    DivergedError,
    FlwrReplayError,
    PrivacyError,
    RefusedError,
    TrainingError,
    WireError,
)
from flwr_replay.institution.budget import PrivacyBudget
from flwr_replay.institution.node import institution_of
from flwr_replay.institution.owner import Institution
from flwr_replay.institution.policy import Policy
from flwr_replay.institution.state import StateStore
from flwr_replay.payloads.common import Evaluation, Failure, Present
from flwr_replay.privacy.plan import PrivacyPlan, mechanisms_of
from flwr_replay.wire.payload import REQUESTS, Payload, Request, Row, request_of, rows
from flwr_replay.wire.records import config_in, metrics_in

__all__ = ["guard"]

LONGEST = 200  # characters of a name that the own ledger holds


def guard(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Refuse what the policy forbids, before any data are read where that can be decided; record what leaves, first.

    What goes wrong becomes a `Failure` reply, one line that the server shows. In a deployment it tells the rule that
    was broken; what the data or this machine look like (paths, values, tracebacks) stays in the institution's own log.
    """
    deployed = "data" in context.node_config or "name" in context.node_config
    instructions: dict[str, Any] = {}
    try:
        institution, config = institution_of(context)
        plan = _plan(config)
    except Exception as error:
        return _failure(message, error, str(context.node_config.get("name", "")), deployed)
    try:
        instructions = config_in(message.content)
        run = str(instructions.get("run", context.run_id))
        reply, found = _answered(message, context, call_next, institution, config, run)
    except Exception as error:
        reply = _failure(message, error, institution.name, deployed, secretive=plan is not None)
        found = list(rows(reply.content, Failure))
    try:
        institution.record_release(
            found,
            run=str(instructions.get("run", context.run_id))[:LONGEST],
            server_round=asked if type(asked := instructions.get("server-round", 0)) is int else 0,
            stage=str(instructions.get("stage", message.metadata.message_type))[:LONGEST],
            split=str(instructions.get("split", ""))[:LONGEST],
        )
    except Exception as error:  # what cannot be written down does not leave; only this notice does
        return _failure(message, error, institution.name, deployed, secretive=plan is not None)
    return reply


def _answered(
    message: Message,
    context: Context,
    call_next: ClientAppCallable,
    institution: Institution,
    config: RunConfig,
    run: str,
) -> tuple[Message, list[Row]]:
    """Return the answer, and its fields with what protects them."""
    plan, policy, request = _plan(config), institution.policy, request_of(message)
    answer, store = request.answer if request else None, StateStore(institution)
    _check_request(message, request, policy, config)
    if answer and issubclass(answer, Evaluation):
        policy.check_evaluations(store.count_test(run))
    private = plan.private_fields(answer) if plan and answer else {}
    budget = PrivacyBudget(plan, institution, store, config.seed) if plan else None
    before = budget.charged(run) if budget and private else ()
    reply = call_next(message, context)
    if answer and policy.told_metrics != "exact":
        _keep_counts(reply, answer)
    found, told = list(rows(reply.content, answer)), metrics_in(reply.content)
    if plan and budget:
        leaving = {row.field for row in found}
        plan.check_withheld(answer, leaving)
        if named := {field: mechanism for field, mechanism in private.items() if field in leaving}:
            _check_account(budget, run, named, before, told)
        found = plan.protected(found, answer, told)
    if request is None:  # nothing was declared: what is there shows only now
        for row in found:
            policy.check_field(row.field, row.kind)
    policy.check_upload(sum(row.bytes for row in found), "the answer")
    return reply, found


@lru_cache(maxsize=64)
def _plan(config: RunConfig) -> PrivacyPlan | None:
    """Return what a run trains by DP-SGD, if this institution's half of the method does train it so."""
    client = load_client(config.strategy.name)  # declares the payloads of the method, too
    if plan := PrivacyPlan.of(config):
        plan.check_method(config.strategy.name, mechanisms_of(client))
    return plan


def _check_request(message: Message, request: type[Request] | None, policy: Policy, config: RunConfig) -> None:
    """Refuse what can be refused before any data are read."""
    plan, instructions = _plan(config), config_in(message.content)
    policy.check_strategy(config.strategy.name)
    _check_options(policy, config)
    policy.check_limits(instructions)
    policy.check_limits(metrics_in(message.content))
    if plan:
        policy.check_delta(plan.config.delta)
    if request is None:
        return
    request.check_scalars(message.content)
    _check_options_kept(instructions, config)
    announced = instructions.get("stages", [])  # at the roll call: what will be asked for
    for asked in (request.answer, *(REQUESTS[str(stage)].answer for stage in announced if stage in REQUESTS)):
        policy.check_release(asked, plan.promise if plan else None)
    _check_size(message, policy, request.answer)
    if config.task.mean and request.stage_name in dict(policy.weights):
        raise RefusedError(
            "policy pins the weights of this stage; task.mean and task.std would change what they make of an image: "
            "leave these out, or ask the institution to change its policy file"
        )


def _check_options_kept(instructions: Mapping[str, Any], config: RunConfig) -> None:
    """Refuse instructions that are not what the run's own options say: a larger share, another beta.

    An empty option means that the server chooses; learning rates fall, and batches may be as training has them.
    """
    for option, value in asdict(config.strategy).items():
        told = instructions.get(option.replace("_", "-"), value)
        if option not in config.strategy.chosen_later and value != "" and told != value:
            raise RefusedError(
                f"a server asks for what its run says; strategy.{option.replace('_', '-')} is {value!r}, it asks for "
                f"{str(told)[:40]}: refused"
            )


@lru_cache(maxsize=64)  # the same options come with every message
def _check_options(policy: Policy, config: RunConfig) -> None:
    """Refuse a configuration that asks for more than the policy's limits."""
    unused = ("generator", "prior") if config.replay.name == "none" else ()
    for section, values in asdict(config).items():
        if section in unused:
            continue
        policy.check_limits(
            {f"{section}.{name}": value for name, value in values.items()}
            if isinstance(values, dict)
            else {section: values}
        )


def _check_size(message: Message, policy: Policy, answer: type[Payload]) -> None:
    """Whole models leave as large as they came: refuse them before any data are read."""
    arrays = message.content.get("arrays")
    if arrays and any(field.kind == "model" and not field.part for field in answer.declared().values()):
        policy.check_upload(arrays.count_bytes(), "the model")


def _keep_counts(reply: Message, answer: type[Payload]) -> None:
    """Leave in the answer to a test what counts examples, and in any other no loss: it is a test of what was sent."""
    tested, told = issubclass(answer, Evaluation), metrics_in(reply.content)
    fields = answer.by_key()
    kept = {
        name: value
        for name, value in told.items()
        if name in fields and (fields[name].counted if tested else answer is Present or not fields[name].withheld)
    }
    if tested and not kept.keys() - {"num-examples"}:
        raise RefusedError(
            "policy lets counts of a test leave (metrics: counted); this task's metrics are no counts: choose a "
            "classification or segmentation, or ask the institution to change its policy file"
        )
    if kept != told:
        reply.content["metrics"] = MetricRecord(kept)


def _check_account(
    budget: PrivacyBudget, run: str, private: Mapping[str, str], before: Sequence[str], told: Mapping[str, Any]
) -> None:
    """Let nothing leave as private that this message has not been charged for, under any other epsilon than charged."""
    account = budget.account(run)
    charged = Counter(account.mechanisms) - Counter(before)
    for field, mechanism in private.items():
        if not charged[mechanism]:
            raise PrivacyError(
                f"{field} leaves as trained by DP-SGD only if its {mechanism} has been charged; the account of run "
                f"{run!r} has no such charge for this answer: choose dp=none, or a method that trains it so"
            )
    if (told.get("epsilon"), told.get("delta")) != (account.stated_epsilon, account.delta):
        raise PrivacyError(
            f"an answer states the epsilon and delta of the institution's account, {account.stated_epsilon} and "
            f"{account.delta:g}; it states {told.get('epsilon')} and {told.get('delta')}: it is kept back"
        )


def _failure(message: Message, error: Exception, name: str, deployed: bool, secretive: bool = False) -> Message:
    """Answer by a notice; a secretive one tells nothing that could come of data without noise."""
    log = logging.getLogger("flwr")
    told = isinstance(error, (PrivacyError, RefusedError, TrainingError, WireError)) or not deployed
    told &= not (secretive and isinstance(error, DivergedError))
    kind = type(error).__name__ if told or not secretive or isinstance(error, ConfigError) else "FlwrReplayError"
    if not isinstance(error, FlwrReplayError):
        log.error("this institution cannot answer", exc_info=error)
    elif not told:
        log.error("this institution cannot answer: %s", error)
    line = " ".join(str(error).split()) if told else f"{kind}; the institution's own log says more"
    return Message(Failure(failure=line or kind, error=kind, name=name).encode(), reply_to=message)
