"""The institution's own rules: what it answers to, and what may leave.

The policy is a YAML file in the institution's hands:

    strategies: [fedreplay, cwt]              # which methods it takes part in
    kinds: [model, statistic, per-sample]     # which kinds of field may leave (notices always may); raw examples, which
                                              # FedAvg+Share sends, are a kind of their own, per-sample-raw
    max-upload-mb: 64                         # the largest message that may leave, 10^6 bytes
    max-epsilon: 8                            # what leaves must be differentially private with at most this epsilon:
                                              # the run needs dp=end-to-end and a budget, privacy.epsilon, within it.
                                              # The server chooses delta, and runs add up: neither is limited here

A key that is left out forbids nothing. The rules are enforced by this package's ClientApp, before any data are read
where the question can be decided then. They bind the code that the institution runs; they do not bind other code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

import yaml

from flwr_replay.errors import ConfigError, RefusedError, nearest
from flwr_replay.fields import Field, Kind
from flwr_replay.wire import Payload

__all__ = ["Policy", "read_policy"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What an institution allows; None allows everything."""

    strategies: tuple[str, ...] | None = None
    kinds: tuple[str, ...] | None = None
    max_upload_mb: float | None = None
    max_epsilon: float | None = None

    def check_strategy(self, strategy: str) -> None:
        """Refuse a strategy that is not allowed."""
        if self.strategies is not None and strategy not in self.strategies:
            raise RefusedError(
                f"policy allows strategies {', '.join(self.strategies) or 'none'}; the server runs {strategy!r}: "
                "choose an allowed strategy or ask the institution to change its policy file"
            )

    def check_release(
        self, answer: type[Payload], promise: Callable[[type[Payload], Field], float] | None = None
    ) -> None:
        """Refuse a payload whose fields, as declared, may not leave.

        Parameters
        ----------
        answer : type[Payload]
            The declaration of what would leave.
        promise : Callable | None
            Gives the largest epsilon that a field of it can have in this run; None: there is no differential privacy.
        """
        for name, field in answer.declared().items():
            self.check_field(f"{answer.__name__}.{name}", field.kind, promise(answer, field) if promise else math.inf)

    def check_field(self, name: str, kind: Kind, epsilon: float = math.inf) -> None:
        """Refuse a field of a kind, or with an epsilon, that may not leave."""
        if kind == "notice":
            return
        if self.kinds is not None and kind not in self.kinds:
            raise RefusedError(
                f"policy lets fields of kind {', '.join(self.kinds) or 'none'} leave; {name} is {kind}: "
                "choose a strategy that shares less or ask the institution to change its policy file"
            )
        if self.max_epsilon is not None and epsilon > self.max_epsilon:
            shown = f"epsilon {epsilon:g}" if math.isfinite(epsilon) else "no differential privacy (epsilon = inf)"
            raise RefusedError(
                f"policy asks for epsilon <= {self.max_epsilon:g}; {name} has {shown}: "
                "choose a differentially private setting or ask the institution to change its policy file"
            )

    def check_upload(self, size: int, what: str) -> None:
        """Refuse a message of more bytes than may leave at once."""
        if self.max_upload_mb is not None and size > self.max_upload_mb * 1e6:
            raise RefusedError(
                f"policy lets at most {self.max_upload_mb:g} MB leave in one message; {what} has {size / 1e6:.3g} MB: "
                "choose a smaller model (FedReplay: strategy.chunk-mb), or ask the institution to change its policy"
            )


def read_policy(path: Path | None) -> Policy:
    """Read a policy file; no file allows everything, a faulty file is an error and allows nothing.

    Raises
    ------
    ConfigError
        If the file is missing, is not YAML, or has unknown keys or kinds.
    """
    if path is None:
        return Policy()
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"the policy file must be readable YAML; got {path}: {' '.join(str(error).split())}"
        ) from None
    known = {field.name.replace("_", "-"): field.name for field in fields(Policy)}
    content = {} if content is None else content  # an empty file
    if not isinstance(content, dict):
        raise ConfigError(f"the policy file must hold keys {', '.join(known)}; got {type(content).__name__} in {path}")
    for key in content:
        if key not in known:
            raise ConfigError(f"unknown key {key!r} in policy file {path}: {nearest(str(key), known)}")
    for key in ("strategies", "kinds"):
        listed = content.get(key, [])
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            raise ConfigError(f"{key} in policy file {path} must be a list of names; got {listed!r}")
    for key in ("max-upload-mb", "max-epsilon"):
        number = content.get(key, 0)
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not number >= 0:  # nor nan
            raise ConfigError(f"{key} in policy file {path} must be a number, not below 0; got {number!r}")
    for kind in content.get("kinds", []):
        if kind not in get_args(Kind):
            raise ConfigError(f"unknown kind {kind!r} in policy file {path}: {nearest(str(kind), get_args(Kind))}")
    values: dict[str, Any] = {
        known[key]: tuple(value) if isinstance(value, list) else value for key, value in content.items()
    }
    return Policy(**values)
