"""The institution's last word, as a Flower mod around any ClientApp: policy first, own ledger before anything leaves.

app = ClientApp(mods=[guard])
"""

from __future__ import annotations

import logging

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from flwr_replay.compose import load_client
from flwr_replay.errors import FlwrReplayError, PrivacyError, RefusedError, TrainingError, WireError
from flwr_replay.institution import Institution, institution_of
from flwr_replay.payloads.common import Failure
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.wire import REQUESTS, Payload, Request, config_in, metrics_in, request_of, rows

__all__ = ["guard"]


def guard(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Refuse what the policy forbids, before any data are read where that can be decided; record what leaves, first.

    What goes wrong becomes a `Failure` reply, one line that the server shows. In a deployment it tells the rule that
    was broken; what the data or this machine look like (paths, values, tracebacks) stays in the institution's own log.
    """
    deployed = "data" in context.node_config or "name" in context.node_config
    name = str(context.node_config.get("name", ""))
    try:
        institution, config = institution_of(context)
        load_client(config.strategy.name)  # declares the payloads of the method
        plan = PrivacyPlan.of(config)
    except Exception as error:
        return _failure(message, error, name, deployed)
    request = request_of(message)
    try:
        institution.policy.check_strategy(config.strategy.name)
        if request is not None:
            for asked in _asked(message, request):
                institution.policy.check_release(asked, plan.promise if plan else None)
            _check_size_before(institution, message, request.answer)
        reply = call_next(message, context)
        found = list(rows(reply.content, request.answer if request else None))
        if plan:
            found = plan.protected(found, request.answer if request else None, metrics_in(reply.content))
        if request is None:  # nothing was declared: what is there shows only now
            for row in found:
                institution.policy.check_field(row.field, row.kind)
        institution.policy.check_upload(sum(row.bytes for row in found), "the answer")
    except Exception as error:
        reply = _failure(message, error, institution.name, deployed)
        found = list(rows(reply.content, Failure))
    instructions = config_in(message.content)
    try:
        institution.record_release(
            found,
            run=str(instructions.get("run", context.run_id)),
            server_round=int(instructions.get("server-round", 0)),
            stage=str(instructions.get("stage", message.metadata.message_type)),
        )
    except Exception as error:  # what cannot be written down does not leave; only this notice does
        return _failure(message, error, institution.name, deployed)
    return reply


def _asked(message: Message, request: type[Request]) -> list[type[Payload]]:
    """Return what would leave: this stage's answer, and at the roll call those of all stages announced."""
    announced = config_in(message.content).get("stages", [])
    return [request.answer, *(REQUESTS[str(stage)].answer for stage in announced if stage in REQUESTS)]


def _check_size_before(institution: Institution, message: Message, answer: type[Payload]) -> None:
    """Whole models leave as large as they came: refuse them before any data are read."""
    arrays = message.content.get("arrays")
    if arrays and any(field.kind == "model" and not field.part for field in answer.declared().values()):
        institution.policy.check_upload(arrays.count_bytes(), "the model")


def _failure(message: Message, error: Exception, name: str, deployed: bool) -> Message:
    told = isinstance(error, (PrivacyError, RefusedError, TrainingError, WireError)) or not deployed
    if not isinstance(error, FlwrReplayError):
        logging.getLogger("flwr").error("this institution cannot answer", exc_info=error)
    elif not told:
        logging.getLogger("flwr").error("this institution cannot answer: %s", error)
    line = " ".join(str(error).split()) if told else f"{type(error).__name__}; the institution's own log says more"
    line = line or type(error).__name__
    return Message(Failure(failure=line, error=type(error).__name__, name=name).encode(), reply_to=message)
