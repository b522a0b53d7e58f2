"""Checks of a deployment from the coordinator's folder, as `flwr-replay deploy init` wrote it: what is wrong.

What the SuperLink knows it is asked by Flower's own `flwr supernode list` and `flwr list`.
"""

import json
import os
import re
import shlex
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from flwr_replay.deploy.deployment import in_state
from flwr_replay.deploy.examining import certificate, connection, examined, free_space, is_authority, validity
from flwr_replay.engines.certificates import CA, SERVER, SERVER_KEY
from flwr_replay.engines.superlink import answers, flower
from flwr_replay.errors import ConfigError, RunError
from flwr_replay.files.atomic import in_use, read_bytes, read_text
from flwr_replay.files.disk import entries, looked, looked_below
from flwr_replay.files.lines import segments
from flwr_replay.processes import superlinks, using
from flwr_replay.report.progress import shown_bytes, shown_time
from flwr_replay.report.run_files import FORMS, RUN_ID, SUMS, read_result
from flwr_replay.runs.opening import RESUME, check_unchanged, saved_options
from flwr_replay.state.kept import EVIDENCE
from flwr_replay.wire.ledger import LEDGER, ledger_lines, unanswered

__all__ = ["examine_coordinator", "leaving"]

ANEW = "make the deployment's folders anew with `flwr-replay deploy init`"
STRANGER = "stop what runs there, and start ./superlink.sh"
SECONDS = 60  # for an answer of Flower's `flwr`
NEW = "no other is known; if superlink.db is new: rm */*.registered, ./register.sh"
LOSES = 60  # by which a ServerApp has ended that lost its SuperLink
LARGEST = 3  # places on the disk that are named
WRITTEN = {  # what a folder that works has, by the place in it, and with it goes; others' files are not removed
    "certificates": ("*.crt", "*.key"),
    "keys": ("*.pub", "*.registered"),
    "state": ("*.registered", "superlink.db*", ".flower"),
    "runs": ("*",),
    "flower": ("*",),  # here and below: where an older version has what is now in state
    "superlink.db*": (),
}
KEPT = (*FORMS, RUN_ID, SUMS, "environment.json", EVIDENCE)  # of a run, beside its ledger's segments
Ask = Callable[..., dict[str, Any]]
ADDRESS = re.compile(r'^address = "(.+)"$', re.MULTILINE)
NODE = re.compile(r"\b\d+\b")  # its number, in what Flower says of one that is registered
NAMES = re.compile(r"^for name in (.+); do$", re.MULTILINE)


def examine_coordinator(folder: Path) -> tuple[bool, str]:
    """Check a coordinator's folder, as `deploy init` wrote it; refuse any other; return as `examine_clinic` does."""
    address, names = _read(folder)
    ask = cache(partial(_asked, folder, address))
    return examined(
        {
            "folder": partial(_files, folder),
            "certificates": partial(_certificates, folder),
            "keys": partial(_keys, folder, names),
            "connection": partial(_connection, folder, address),
            "SuperNodes": partial(_supernodes, folder, ask, names),
            "runs": partial(_runs, ask),
            "ServerApps": partial(_serverapps, folder, ask),
            "run directories": partial(_directories, folder),
            "disk": partial(_disk, folder),
        }
    )


def leaving(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return what of a coordinator's folder goes for good, and the files in it that show what its runs were.

    These are each run's ledger, options, results and figures: models, latents, messages and pages go.

    Raises
    ------
    ConfigError, RunError
        If it is no coordinator's folder; if a SuperLink or ServerApp works there; if there are others' files, or links.
    """
    address, _ = _read(folder)
    # others, too, call a file config.yaml
    begun = [file.parent for file in (folder / "runs").glob("*/config.yaml")]
    runs = [run for run in begun if (run / RUN_ID).exists() or (run / LEDGER).exists()]
    working = [f"the SuperLink at {address}"] * answers(address)
    working += [f"the SuperLink, process {process}," for process in superlinks(folder)]
    working += [f"a process in {run}" for run in runs if in_use(run)]
    if working:
        raise RunError(f"nothing may work while a coordinator's folder is removed; {working[0]} does: stop it")
    going = [path for name in WRITTEN for path in entries(folder, name)]
    inside = [path for part in going if part.is_dir() for path in entries(part)]
    if not going:
        raise RunError(f"{folder} has none of {', '.join(WRITTEN)}: there is nothing to remove")
    if linked := [path for path in (*going, *inside) if path.is_symlink()]:
        raise RunError(f"no link is followed; {linked[0]} is one: put what it points to in its place, or remove it")
    ours = {path for name, forms in WRITTEN.items() for form in forms for path in (folder / name).glob(form)}
    if others := sorted({*inside} - ours | {*entries(folder / "runs")} - {*runs}):
        raise RunError(f"no other files are removed; {others[0]} is not flwr-replay's: move it away")
    kept = [file for run in runs for name in KEPT for file in run.glob(name)]
    return going, [*kept, *(segment for run in runs for segment in segments(run / LEDGER)[:-1])]


def _read(folder: Path) -> tuple[str, list[str]]:
    """Return the SuperLink's address and the clinics' names, as a coordinator's folder has them."""
    texts = []
    for script, form in (("connect.sh", ADDRESS), ("register.sh", NAMES)):
        written = form.search(read_text(folder / script)) if (folder / script).is_file() else None
        if not written:
            raise ConfigError(f"a coordinator's folder is as `deploy init` writes it; got {folder}")
        texts.append(written[1])
    return texts[0], texts[1].split()


def _files(folder: Path) -> Iterator[str]:
    files = ("superlink.sh", "connect.sh", "register.sh", "run.sh", "study/pyproject.toml")
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise RunError(
            f"{', '.join(missing)} must lie in {folder}: give `flwr-replay deploy init` the same options and another "
            "--out, and copy what is missing from there"
        )
    yield "folder: its scripts and its study are there"


def _certificates(folder: Path) -> Iterator[str]:
    place = folder / "certificates"
    authority, server = (certificate(place / name, ANEW) for name in (CA, SERVER))
    try:
        server.verify_directly_issued_by(authority)
        key: Any = serialization.load_pem_private_key(read_bytes(place / SERVER_KEY), None)
    except (ValueError, TypeError, InvalidSignature):
        raise RunError(
            f"{SERVER} must be signed by {CA}, and {SERVER_KEY} a private key; they are not: {ANEW}"
        ) from None
    if not is_authority(authority) or key.public_key() != server.public_key():
        raise RunError(f"{SERVER_KEY} must be the key of {SERVER}, and {CA} an authority's; they are not: {ANEW}")
    if os.name == "posix" and (place / SERVER_KEY).stat().st_mode & 0o077:
        raise RunError(f"{place / SERVER_KEY} must be its owner's only: chmod 600 it")
    try:
        addresses = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise RunError(f"{SERVER} must name the addresses of the server; it names none: {ANEW}") from None
    yield f"certificates: {validity(server, ANEW)}, for {', '.join(str(address.value) for address in addresses)}"


def _keys(folder: Path, names: Sequence[str]) -> Iterator[str]:
    waiting = [name for name in names if not in_state(folder, f"{name}.registered", f"keys/{name}.registered").exists()]
    if waiting:
        came = [name for name in waiting if (folder / "keys" / f"{name}.pub").exists()]
        what = "run ./register.sh" if came == waiting else "put the institution's file into keys/, then ./register.sh"
        raise RunError(f"not registered: {', '.join(waiting)}: {what}")
    yield f"keys: {', '.join(names)} are registered"


def _connection(folder: Path, address: str) -> Iterator[str]:
    silent = "start ./superlink.sh; does the firewall let you?"
    yield connection(address, folder / "certificates" / CA, silent, STRANGER)


def _supernodes(folder: Path, ask: Ask, names: Sequence[str]) -> Iterator[str]:
    nodes = ask("supernode", "list", "superlink")["nodes"]
    online = [node for node in nodes if node["status"] == "online"]
    if len(online) < len(names):
        files = {name: in_state(folder, f"{name}.registered") for name in names}
        told = {name: NODE.search(read_text(file)) for name, file in files.items() if file.exists()}
        known = {node[0]: name for name, node in told.items() if node}
        away = "; ".join(
            f"{known.get(node['node-id'], node['node-id'])} {node['status']} since {node['offline-at']}"
            for node in nodes
            if node not in online
        ).replace(" since N/A", "")
        raise RunError(
            f"{len(online)} of {len(names)} SuperNodes are online ({away or NEW}): the others must run ./start.sh; "
            "a killed one is admitted again after about a minute"
        )
    yield f"SuperNodes: {len(online)} online"


def _runs(ask: Ask) -> Iterator[str]:
    runs, live = ask("list", "superlink")["runs"], _live(ask)
    last = max((run for run in runs if run not in live), key=lambda run: run["finished-at"], default=None)
    if last and not live and last["status"] == "finished:failed":
        raise RunError(
            f"the last run, {last['run-id']}, failed ({last['status-details'] or 'no details'}): `. ./connect.sh`, "
            f"then `flwr log {last['run-id']} superlink --show`"
        )
    together = ", which share the institutions' machines" * (len(live) > 1)
    yield f"runs: {len(live)} live{together}, {len(runs) - len(live)} ended"


def _live(ask: Ask) -> list[dict[str, Any]]:
    return [run for run in ask("list", "superlink")["runs"] if not run["status"].startswith("finished")]


def _serverapps(folder: Path, ask: Ask) -> Iterator[str]:
    """Look at the processes that work in run directories, each of which holds its directory's lock."""
    working = [run for run in _unfinished(folder) if in_use(run)]
    stops = {
        run: f"end process {', '.join(map(str, using(run))) or 'flwr-serverapp'}, then {_resume(run)}"
        for run in working
    }
    try:
        live = len(_live(ask)) if working else 0
    except RunError:
        live = 0
    if live < len(working):
        names = ", ".join(run.name for run in working)
        raise RunError(
            f"a ServerApp works on {names}, and the SuperLink has {live or 'no'} live run: one that lost its SuperLink "
            f"ends by itself within {LOSES} s; if it does not, {stops[working[-1]]}"
        )
    for run in working:
        last = max(status.st_mtime for status in looked((run / "config.yaml", *run.glob("*.jsonl"))).values())
        silent, longest = time.time() - last, saved_options(run)["timeout"]
        waits = ", ".join(line["institution"] for line in unanswered(ledger_lines(run, FORMS[LEDGER]))) or "nobody"
        if silent > longest:
            raise RunError(
                f"the ServerApp of {run.name} has written nothing for {shown_time(silent)}, and answers are waited for "
                f"timeout={longest:g} s (it waits for {waits}): see `flwr log`; if it hangs, {stops[run]}"
            )
        yield f"ServerApps: {run.name} goes on, {shown_time(silent)} after its last line; it waits for {waits}"


def _directories(folder: Path) -> Iterator[str]:
    runs, unfinished = [file.parent for file in (folder / "runs").glob("*/config.yaml")], _unfinished(folder)
    if left := [run for run in unfinished if not in_use(run)]:
        check_unchanged(left[-1])  # refuses what could not go on
        raise RunError(f"not finished: {', '.join(run.name for run in left)}: {_resume(left[-1])} where it was")
    for run in sorted(set(runs) - set(unfinished)):
        read_result(run)  # refuses what is damaged
    yield f"run directories: {len(runs) - len(unfinished)} finished{', one goes on' * bool(unfinished)}"


def _unfinished(folder: Path) -> list[Path]:
    runs = sorted(file.parent for file in (folder / "runs").glob("*/config.yaml"))
    return [run for run in runs if not (run / "result.json").exists()]


def _resume(run: Path) -> str:
    by = shlex.quote(str(run / RESUME)) if (run / RESUME).exists() else f"--run-config 'resume=\"{run}\"'"
    return f"./run.sh {by} goes on"


def _disk(folder: Path) -> Iterator[str]:
    databases = in_state(folder, "superlink.db").parent.glob("superlink.db*")
    sizes = {place.name: _bytes(place) for place in [*(folder / "runs").glob("*"), *databases]}
    largest = sorted(sizes, key=sizes.__getitem__)[-LARGEST:][::-1]
    most = ", ".join(f"{name} {shown_bytes(sizes[name])}" for name in largest) or "no runs"
    free = free_space(folder, f"`flwr-replay runs clean` says what can go; the largest: {most}")
    yield f"disk: this folder takes {shown_bytes(_bytes(folder))} ({most}), {free}"


def _bytes(place: Path) -> int:
    files = looked_below(place) if place.is_dir() else looked([place])
    return sum(status.st_size for file, status in files.items() if not file.is_symlink())


def _asked(folder: Path, address: str, *words: str) -> dict[str, Any]:
    """Return the JSON answer of Flower's `flwr`, which waits for a minute where nothing answers."""
    if _known((home := in_state(folder, ".flower", "flower")) / "config.toml") != address:
        raise RunError(f"Flower must know the SuperLink at {address}, by its config.toml; not so: run ./register.sh")
    silent = f"`flwr {' '.join(words)}` must answer; it does not: see the line connection"
    if not answers(address):
        raise RunError(silent)
    environment = {**os.environ, "FLWR_HOME": str(home), "FLWR_DISABLE_UPDATE_CHECK": "1"}
    command = [flower("flwr"), *words, "--format", "json"]
    try:
        ended = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=SECONDS
        )
        answer: dict[str, Any] = json.loads(ended.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        raise RunError(silent) from None
    if not answer.get("success"):
        raise RunError(f"`flwr {' '.join(words)}` is refused: {answer.get('error-message', 'without a reason')}")
    return answer


def _known(file: Path) -> object:
    """Return the SuperLink's address that Flower's file has, None if it has none."""
    try:
        return tomllib.loads(read_text(file))["superlink"]["superlink"]["address"] if file.is_file() else None
    except (RunError, ValueError, LookupError, TypeError):
        return None
