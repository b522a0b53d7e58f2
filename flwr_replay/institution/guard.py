"""Decides what leaves an institution. A Flower mod around any ClientApp: `app = ClientApp(mods=[guard])`.

First the policy is asked, before any data are read. Then the ClientApp answers. Then the answer is checked and written
to the institution's own ledger. Only then does it leave.

These refusals hold against any server and any sequence of messages: what the policy forbids, mechanisms that the method
does not have, and an epsilon or delta that is not the one of the institution's own account.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import lru_cache, partial
from typing import Any

import psutil
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from flwr_replay.ciphers.masking import Masking
from flwr_replay.ciphers.sealing import Sealing, check_sealing
from flwr_replay.config.compose import model_named
from flwr_replay.config.halves import load_client
from flwr_replay.config.hiding import Hiding
from flwr_replay.config.own_code import users_code
from flwr_replay.config.run import RunConfig
from flwr_replay.errors import (
    ConfigError,
    DivergedError,
    FlwrReplayError,
    PrivacyError,
    RefusedError,
    TrainingError,
    WireError,
    one_line,
)
from flwr_replay.generators.sizes import bytes_of as generator_bytes
from flwr_replay.institution import floor
from flwr_replay.institution.budget import PrivacyBudget
from flwr_replay.institution.node import institution_of
from flwr_replay.institution.owner import Institution
from flwr_replay.institution.policy import ENCODING, Policy
from flwr_replay.models.zoo import bytes_of, encoder_digest
from flwr_replay.payloads.common import Evaluation, Failure, Present, RollCall, Unmask
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.state.store import StateStore
from flwr_replay.wire.payload import LedgerRow, Payload, Request, asked_for, request_of, rows
from flwr_replay.wire.records import config_in, metrics_in

__all__ = ["check_answer", "check_pinned", "check_release", "check_request", "guard", "run_rules"]

COVERS: dict[Hiding, type[Sealing | Masking]] = {Hiding.SEALED: Sealing, Hiding.MASKED: Masking}
LONGEST = 200  # characters of a name in the own ledger
COPIES = 3  # of a model while it trains: weights, gradients, and what arrived or an optimizer keeps


def guard(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Refuse what the policy forbids, answer, and record the answer before it leaves.

    An error becomes a `Failure` reply: one line, which the server shows. In a deployment that line names the rule that
    was broken. Whatever describes the data or this machine (paths, values, tracebacks) stays in the institution's log.
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
        reply, fields = _answered(message, context, call_next, institution, config, run)
    except Exception as error:
        reply = _failure(message, error, institution.name, deployed, secretive=plan is not None)
        fields = list(rows(reply.content, Failure))
    try:
        about = {
            "run": str(instructions.get("run", context.run_id))[:LONGEST],
            "round": exchange if type(exchange := instructions.get("server-round", 0)) is int else 0,
            "stage": str(instructions.get("stage", message.metadata.message_type))[:LONGEST],
        }
        about |= {"split": split[:LONGEST]} if (split := str(instructions.get("split", ""))) else {}
        records = message.content if message.has_content() else RecordDict()
        institution.record_release(about, records, reply.content, fields)
    except Exception as error:  # an answer that cannot be recorded does not leave; only this notice does
        return _failure(message, error, institution.name, deployed, secretive=plan is not None)
    return reply


def _answered(
    message: Message,
    context: Context,
    call_next: ClientAppCallable,
    institution: Institution,
    config: RunConfig,
    run: str,
) -> tuple[Message, list[LedgerRow]]:
    """Return the answer, and a ledger row for each of its fields, with its protection."""
    request = request_of(message)
    check_sealing(institution, config, message)
    check_request(message, request, institution.policy, config, institution.private_model)
    cover = COVERS[config.hiding](institution, config, run) if config.hiding.pinned else None
    plan, policy, answer, store = _plan(config), institution.policy, request and request.answer, StateStore(institution)
    with cover.alone() if cover and request and request is not RollCall else nullcontext():
        opened = cover.opened(message, request) if cover else message
        tests = bool(answer and issubclass(answer, Evaluation))
        if tests and not policy.min_count:
            policy.check_evaluations(store.count_test(run))
        dp_fields = plan.dp_fields(answer) if plan and answer else {}
        budget = PrivacyBudget(plan, institution, store, config.seed) if plan else None
        charged_before = budget.charged(run) if budget and dp_fields else ()

        def called() -> Message:
            if isinstance(cover, Masking) and request is Unmask:
                return Message(cover.unmasked(message).encode(), reply_to=message)
            try:
                with users_code(FlwrReplayError):
                    return call_next(opened, context)
            except FlwrReplayError:
                if policy.min_count:
                    floor.check_known(institution)  # its line may have the number of examples
                raise

        if tests and policy.min_count:
            counts = floor.released(institution).tested(run, opened.content, lambda: floor.floored(policy, called()))
            reply = Message(RecordDict({"metrics": MetricRecord(counts)}), reply_to=message)
        else:
            reply = called()
        if institution.digested and "data" in vars(institution):  # they were read
            store.note_data(run)
        leaving = check_answer(reply, answer, policy, config)
        if policy.min_count:
            if not tests:
                floor.check_counts(institution, run, answer, reply.content)
            floor.take_room(institution, config, run, request, config_in(message.content))
        if budget:
            budget.take_room(run, request is RollCall)
        names = {row.field for row in leaving}
        if budget and (sent := {field: mechanism for field, mechanism in dp_fields.items() if field in names}):
            _check_account(budget, run, sent, charged_before, metrics_in(reply.content))
        if cover and answer:
            cover.closed(reply, answer, config_in(message.content).get("server-round", 0))
            fields = rows(reply.content, answer)
            leaving = plan.protected(fields, answer, metrics_in(reply.content)) if plan else list(fields)
            policy.check_upload(sum(row.bytes for row in leaving), "the answer")
        return reply, leaving


def check_answer(reply: Message, answer: type[Payload] | None, policy: Policy, config: RunConfig) -> list[LedgerRow]:
    """Remove from an answer what the policy keeps here, refuse it if the rest may not leave; return what leaves.

    `answer` is its declaration, None if the message is not one of this package.
    """
    plan = _plan(config)
    counts_only = policy.allowed_metrics != "exact"
    if answer and (counts_only or (config.hiding.sums_only and not issubclass(answer, Evaluation))):
        # masks are no use if a loss at weights of the server's choice gives the gradient
        _keep_counts(reply, answer, policy)
    leaving = list(rows(reply.content, answer))
    if plan:
        plan.check_withheld(answer, {row.field for row in leaving})
        leaving = plan.protected(leaving, answer, metrics_in(reply.content))
    if answer is None:  # an undeclared message: its fields are known only now
        for row in leaving:
            policy.check_field(row.field, row.kind)
    policy.check_upload(sum(row.bytes for row in leaving), "the answer")
    return leaving


@lru_cache(maxsize=64)
def _plan(config: RunConfig) -> PrivacyPlan | None:
    """Return what a run trains by DP-SGD; refuse what the method as installed here does not train so."""
    load_client(config.strategy.name, config.replay.name)  # its import declares the method's payloads, too
    if plan := PrivacyPlan.of(config):
        plan.check_method(config.strategy.name, config.strategy.traits.dp_mechanisms)
    return plan


def run_rules(policy: Policy, config: RunConfig) -> dict[str, Callable[[], None]]:
    """Return what a policy asks of a run as a whole: by the policy's key, a check that refuses."""
    plan = _plan(config)
    rules: dict[str, Callable[[], None]] = {
        **({"min-count": partial(floor.check_options, policy, config)} if policy.min_count else {}),
        "max-evaluations": partial(floor.check_tests, policy, config),
        "strategies": lambda: policy.check_strategy(config.strategy.name),
        "recording": lambda: policy.check_recording(config.record),
        "limits": lambda: _check_options(policy, config),
        **{way: partial(policy.check_hidden, way, config.hiding) for way in COVERS},
    }
    if plan:
        rules["max-delta"] = lambda: policy.check_delta(plan.config.delta)
    if plan and plan.institutions:
        rules["min-colluders"] = lambda: policy.check_colluders(plan.colluders)
    return rules


def check_request(
    message: Message, request: type[Request] | None, policy: Policy, config: RunConfig, private_model: str = ""
) -> None:
    """Refuse what can be refused before any data are read.

    Refused is what the policy, or a promise that the run's options make, forbids. `request` is the message's
    declaration, None if it is not one of this package; `private_model` the model that the institution has chosen
    itself, empty if one of the run's options.
    """
    instructions = config_in(message.content)
    for check in run_rules(policy, config).values():
        check()
    policy.check_recording(str(instructions.get("record", "")))
    policy.check_limits(instructions)
    policy.check_limits(metrics_in(message.content))
    if request is None:
        return
    request.check_scalars(message.content)
    _check_options_kept(instructions, config)
    answers = asked_for(request, instructions)
    for answer in answers:
        check_release(answer, policy, config)
    _check_size(message, request, policy, answers, _sizes(config, private_model))
    if config.task.mean and request.stage_name in dict(policy.weights):
        raise RefusedError(
            "policy pins the weights of this stage; task.mean and task.std would change what they make of an image: "
            "leave these out, or ask the institution to change its policy file"
        )
    check_pinned(policy, config, (request.stage_name, *instructions.get("stages", [])))


def check_release(answer: type[Payload], policy: Policy, config: RunConfig) -> None:
    """Refuse a declaration of an answer with a field that may not leave in a run with these options."""
    plan = _plan(config)
    policy.check_release(answer, plan.promise if plan else None)
    if policy.min_count:
        floor.check_declared(policy, answer, plan.promise if plan else None)
    if plan:
        plan.check_covered(answer)


def check_pinned(policy: Policy, config: RunConfig, stages: Iterable[str]) -> None:
    """Refuse latents, or their sums, of a frozen encoder that the policy does not accept, or that no digest fixes."""
    for stage in sorted({*ENCODING} & {*stages} & dict(policy.weights).keys()):
        if fixed := encoder_digest(config.model, config.task):
            policy.check_weights(stage, fixed, str)  # no run's seed has drawn it
        elif config.model.library or config.model.dim:
            raise RefusedError(
                "policy pins weights, and not what model.name, model.size and model.dim do beside them: freeze them, "
                "model.train=head, and the digest has all"
            )


def _check_options_kept(instructions: Mapping[str, Any], config: RunConfig) -> None:
    """Refuse instructions that differ from the run's own options: a larger share, another beta."""
    for instruction, option, value in _kept_options(config):
        if (asked := instructions.get(instruction, value)) != value:
            raise RefusedError(
                f"a server asks for what its run says; {option} is {value!r}, it asks for {str(asked)[:40]}: refused"
            )


@lru_cache(maxsize=64)  # the same options come with every message
def _kept_options(config: RunConfig) -> tuple[tuple[str, str, Any], ...]:
    """Return the instructions that must equal an option, with the option and its value.

    They are the strategy's options of the same name, and what replay=buffer says of buffers. An empty option means
    that the server chooses, or that training says it. Learning rates fall, and a batch size may be that of training.
    """
    options = {**asdict(config.strategy), **config.strategy.instructed}
    for name, ours in config.strategy.from_training.items():
        options[name] = options[name] or getattr(config.training, ours)
    own = {name.replace("_", "-"): value for name, value in options.items() if name not in config.strategy.chosen_later}
    kept = [(name, f"strategy.{name}", value) for name, value in own.items() if value != ""]
    if config.replay.name == "buffer":
        kept += [("buffer", "replay.images", config.replay.images), ("buffer-refresh", "buffer-refresh", "never")]
    return tuple(kept)


@lru_cache(maxsize=64)  # the same options come with every message
def _check_options(policy: Policy, config: RunConfig) -> None:
    """Refuse a configuration that asks for more than the policy's limits."""
    generates = config.replay.name != "none" or config.draws_images
    unused = ("record_mb", *(() if generates else ("generator", "prior")))  # the former is of the server's own disk
    for section, values in asdict(config).items():
        if section in unused:
            continue
        policy.check_limits(
            {f"{section}.{name}": value for name, value in values.items()}
            if isinstance(values, dict)
            else {section: values}
        )


def _check_size(
    message: Message, request: type[Request], policy: Policy, answers: Sequence[type[Payload]], sizes: Mapping[str, int]
) -> None:
    """Refuse, before any data are read or a model is built, one too large to be built here, or to leave."""
    arrays = message.content.get("arrays")
    network, largest = max(sizes.items(), key=lambda pair: pair[1])
    policy.check_limits({"model.parameters": largest // 4})
    if COPIES * largest > _available(int(time.monotonic())):
        raise RefusedError(
            f"a model must fit into the institution's memory {COPIES} times, to be trained; {network} of this run has "
            f"{largest / 1e6:,.0f} MB, which do not: choose a smaller width or task.size"
        )
    whole = [[f for f in answer.declared().values() if f.kind == "model" and not f.part] for answer in answers]
    if arrays and whole[0]:
        added = sum(array.nbytes for array in request.added(config_in(message.content)).values())
        policy.check_upload(
            arrays.count_bytes() + added, "the model" + " and what is asked for beside it" * bool(added)
        )
    if any(field.means in ("weights", "gradient") for fields in whole for field in fields):
        policy.check_upload(next(iter(sizes.values())), "the model")


@lru_cache(maxsize=1)
def _available(second: int) -> int:
    """Return the bytes of memory that can be had; looked up once a second, since that takes as long as all checks."""
    return psutil.virtual_memory().available


@lru_cache(maxsize=64)  # the same options come with every message
def _sizes(config: RunConfig, private_model: str) -> dict[str, int]:
    """Return the bytes of all that a run may build here, by its name; those of the run's model first."""
    private = [private_model] if private_model else config.strategy.private_models
    first, whole = f"model={config.model.name}", bytes_of(config.model, config.task, whole=True)
    sizes = {first: bytes_of(config.model, config.task), f"all of {first}": whole}
    sizes |= {f"private-models={name}": bytes_of(model_named(name), config.task) for name in private}
    return {**sizes, "generator and prior": generator_bytes(config)}


def _keep_counts(reply: Message, answer: type[Payload], policy: Policy) -> None:
    """Remove from the answer to a test all that is no count, and from any other its losses.

    A training loss, too, tests the weights that the server sent.
    """
    tested, metrics = issubclass(answer, Evaluation), metrics_in(reply.content)
    fields = answer.by_key()
    kept = {
        name: value
        for name, value in metrics.items()
        if name in fields
        and (name in floor.TESTED or not policy.min_count or not tested)
        and (fields[name].counted if tested else answer is Present or not fields[name].withheld)
    }
    if tested and not kept.keys() - {"num-examples"}:
        raise RefusedError(
            "policy lets counts of a test leave (metrics: counted); this task's metrics are no counts: choose a "
            "classification or segmentation, or ask the institution to change its policy file"
        )
    if kept != metrics:
        reply.content["metrics"] = MetricRecord(kept)


def _check_account(
    budget: PrivacyBudget,
    run: str,
    dp_fields: Mapping[str, str],
    charged_before: Sequence[str],
    metrics: Mapping[str, Any],
) -> None:
    """Refuse a field under DP that this message was not charged for, and any epsilon but the account's."""
    account = budget.account(run)
    charged = Counter(account.mechanisms) - Counter(charged_before)
    for field, mechanism in dp_fields.items():
        if not charged[mechanism]:
            raise PrivacyError(
                f"{field} leaves as under DP only if its {mechanism} has been charged; the account of run {run!r} "
                "has no such charge for this answer: choose dp=none, or a method that trains it so"
            )
    if (metrics.get("epsilon"), metrics.get("delta")) != (account.stated_epsilon, account.delta):
        raise PrivacyError(
            f"an answer states the epsilon and delta of the institution's account, {account.stated_epsilon} and "
            f"{account.delta:g}; it states {metrics.get('epsilon')} and {metrics.get('delta')}: it is kept back"
        )


def _failure(message: Message, error: Exception, name: str, deployed: bool, secretive: bool = False) -> Message:
    """Return a notice in place of an answer.

    Under DP (`secretive`) it says nothing that may depend on examples without noise, such as that a loss diverged.
    """
    log = logging.getLogger("flwr")
    public = isinstance(error, (PrivacyError, RefusedError, TrainingError, WireError)) or not deployed
    public &= not (secretive and isinstance(error, DivergedError))
    kind = type(error).__name__ if public or not secretive or isinstance(error, ConfigError) else "FlwrReplayError"
    if not isinstance(error, FlwrReplayError):
        log.error("this institution cannot answer", exc_info=error)
    elif not public:
        log.error("this institution cannot answer: %s", error)
    line = one_line(error) if public else f"{kind}; the institution's own log says more"
    return Message(Failure(failure=line or kind, error=kind, name=name).encode(), reply_to=message)
