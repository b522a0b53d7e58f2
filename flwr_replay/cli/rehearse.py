"""flwr-replay rehearse: a deployment on this machine, before the real one."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["rehearse"]


def rehearse(
    data: Annotated[str, typer.Argument(metavar="DATA")],
    options: Annotated[list[str] | None, typer.Argument(metavar="[OPTION=VALUE]…")] = None,
    institutions: Annotated[
        int, typer.Option("--institutions", help="How many; 0: as the manifest's column site says, else three.")
    ] = 0,
    policy: Annotated[str, typer.Option("--policy", help="A policy for all, or a folder of <institution>.yaml.")] = "",
    tls: Annotated[bool, typer.Option("--tls", help="With TLS, and a key for each SuperNode.")] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Every institution keeps its own messages, for attacks.")
    ] = False,
    out: Annotated[str, typer.Option("--out", help="A new folder; default: rehearsal-<date> here.")] = "",
) -> None:
    """Deploy on this machine: a SuperLink, a SuperNode for each institution with data of its own, one run; then stop.

    DATA is a folder of images, as task=folder reads it.

    Shows the run with its summary, and the end of an institution's log if it refused or failed. Every test takes half a
    minute or more here: evaluate-every=N makes fewer. Ctrl-C stops everything.
    """
    print("loading …", file=sys.stderr, flush=True)
    from flwr_replay.deploy.rehearsal import rehearse
    from flwr_replay.errors import ConfigError

    place = Path(out or f"rehearsal-{time.strftime('%Y%m%d-%H%M%S')}").expanduser().absolute()
    own = Path(policy).expanduser().absolute() if policy else None
    source = Path(data).expanduser().absolute()
    if "=" in data and not source.exists():
        raise ConfigError(f"a rehearsal needs a folder of images before its options; got {data}")
    say = partial(print, flush=True)
    try:
        _, folder = rehearse(options or [], source, institutions, own, place, say, tls, record)
    except KeyboardInterrupt:
        print(f"interrupted: everything is stopped; what there is lies in {place}", file=sys.stderr)
        raise
    print(f"each institution's images: {place / 'data'}; its own ledger: {place / 'state'}; its log: {place / 'logs'}")
    print(f"the run's page: {folder / 'report.html'}")
