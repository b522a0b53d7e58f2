"""A rehearsal: a real SuperLink and a real SuperNode for each institution on this machine, with data of their own.

    rehearsal-…/data/<institution>/     its images and manifest.csv, dealt from one folder
    rehearsal-…/state/<institution>/    its ledger, account and models
    rehearsal-…/logs/                   what SuperLink and SuperNodes said
    rehearsal-…/runs/rehearsal/         the coordinator's run directory

Everything that a deployment does happens: messages, policies, accounts, and with `tls` certificates and keys, made on
the spot. What is missing is the network between machines (docs/deploy.md).
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr_replay.ciphers.seal import KEY, make_key
from flwr_replay.config.compose import compose, compose_own
from flwr_replay.config.quoting import key_of, node_config, quoted
from flwr_replay.convert.checked import write_manifest
from flwr_replay.data.classes import Classes
from flwr_replay.data.folder import folder_rows, form_of
from flwr_replay.data.manifest import ManifestRow
from flwr_replay.engines.certificates import CA, write_key
from flwr_replay.engines.superlink import COLOUR, SuperLink, flower, flwr_run, free_port, superlink
from flwr_replay.errors import ConfigError, DataError, RunError
from flwr_replay.files.atomic import NAME, private_folder, write_atomic
from flwr_replay.institution.policy import read_policy
from flwr_replay.report.run_files import read_result
from flwr_replay.rng import derived_rng
from flwr_replay.runs.options import encoder_options, file_options

__all__ = ["deal", "rehearse", "supernode"]

# What a rehearsal sets itself.
OWN = ("nodes", "runs_dir", "run_name", "task", "data_dir", "task.data_dir", "partition")
SHOWN = 8  # lines of a log


def rehearse(
    options: Sequence[str],
    data: Path,
    institutions: int,
    policy: Path | None,
    place: Path,
    say: Callable[[str], None],
    tls: bool = False,
    record: bool = False,
) -> tuple[dict[str, Any], Path]:
    """Deal a folder of images among institutions, deploy on this machine, run, and stop everything.

    The arguments are those of `flwr-replay rehearse`; without a number of institutions, they are as many as the
    manifest's sites, else three. `say` receives the run's log with its summary, line by line; then the last lines of
    the log of each institution that refused or failed, of all if there is no result.

    Returns
    -------
    result : dict
        The content of `result.json`.
    folder : Path
        The run directory.

    Raises
    ------
    FlwrReplayError
        If the options or data cannot be used, before anything starts; `RunError` if the run does not end well.
    """
    keys = [key_of(option) for option in options]
    for key in keys:
        if key in OWN:
            raise ConfigError(f"a rehearsal sets {key.replace('_', '-')} itself: leave it out")
    rows = folder_rows(data)
    named = {key.removeprefix("task.") for key in keys}
    task = [f"task.{key}={quoted(value)}" for key, value in form_of(rows, named).items()]
    names = _names(rows, institutions)
    node_config({"--out": str(place)})  # a folder that Flower could not be told is reported now, too
    policies = {name: _policy(policy, name) for name in set(names)} if policy else {}
    runs = [f"nodes={len(set(names))}", f"runs_dir={quoted(place / 'runs')}", "run_name=rehearsal"]
    overrides = ["task=folder", *task, *options, *runs]
    overrides += encoder_options(overrides)
    config = compose_own(overrides, options)  # a wrong option is reported before anything is written
    classes = Classes(config.task)
    for row in rows:
        classes.number(row.label, row.where)  # so is a label of no class
    shared = {"record": "all"} if record else {}
    overrides += file_options(config)
    shared |= {"weights": compose(overrides).model.weights} if config.model.copy else {}
    shared |= {"own-code": " ".join(config.own_code)} if config.own_code else {}
    if place.exists():
        raise RunError(f"a rehearsal's folder must be new; {place} exists: choose another --out, or delete it")
    for inner in ("data", "state", "logs"):
        private_folder(place / inner)
    deal(rows, names, place / "data")
    if config.hiding.pinned:
        states = {name: private_folder(place / "state" / name) for name in sorted(set(names))}
        pins = "".join(f"{name} {make_key(state / KEY)[1]}\n" for name, state in states.items())
        write_atomic(place / "peers.txt", pins)
        shared["seal-peers"] = str(place / "peers.txt")
    with ExitStack() as stack:
        link = stack.enter_context(_linked(place, tls))
        for name in sorted(set(names)):
            owned = {"name": name, "data": str(place / "data" / name), "state": str(place / "state"), **shared}
            stack.enter_context(supernode(link, name, owned | ({"policy": policies[name]} if policy else {})))
        for line in flwr_run(link, overrides):
            say(line.rstrip("\n"))
    folder = place / "runs" / "rehearsal"
    result = read_result(folder) if (folder / "result.json").exists() else None
    failed = {failure["institution"] for failure in result["failures"]} if result else set()
    for log in sorted((place / "logs").glob("*.log")):
        if not result or log.stem in failed:
            text = COLOUR.sub("", log.read_text(encoding="utf-8", errors="replace"))
            lines = [line for line in text.splitlines() if line.strip()]
            say("\n".join([f"--- the end of {log}", *lines[-SHOWN:]]))
    if not result:
        raise RunError(
            f"the rehearsal ended without a result; its reason is above, and all logs are in {place / 'logs'}"
        )
    return result, folder


@contextmanager
def _linked(place: Path, tls: bool) -> Iterator[SuperLink]:
    """Start the SuperLink; afterwards keep its log and those of the nodes."""
    home = private_folder(place / "flower")
    try:
        with superlink(home, simulation=False, secured=tls) as link:
            yield link
    finally:
        for log in home.glob("*.log"):
            shutil.copy(log, place / "logs" / log.name)
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def supernode(link: SuperLink, name: str, owned: Mapping[str, str]) -> Iterator[None]:
    """Start an institution's SuperNode in a session of its own and with a Flower home of its own; end it afterwards.

    Parameters
    ----------
    link : SuperLink
        What it connects to; the log is `<name>.log` in its folder.
    name : str
        Of the log.
    owned : Mapping
        Its `--node-config`.
    """
    home = private_folder(link.folder / name)
    command = [flower("flower-supernode"), "--superlink", f"127.0.0.1:{link.port}"]
    command += ["--port", str(free_port()), "--node-config", node_config(owned)]
    command += _identity(link, home / "key") if link.secured else ["--insecure"]
    environment = {**link.environment, "FLWR_HOME": str(home), "FLWR_REPLAY_HOME": str(home / "unused")}
    with open(home.with_suffix(".log"), "w", encoding="utf-8") as log:
        node = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=home)
        try:
            yield
        finally:  # asked politely, it takes seconds to go
            with suppress(ProcessLookupError):
                os.killpg(node.pid, 9)
            node.wait(timeout=10)


def _identity(link: SuperLink, key: Path) -> list[str]:
    """Make a SuperNode's key, register it, and return the words by which the SuperNode proves itself over TLS."""
    write_key(key)
    register = [flower("flwr"), "supernode", "register", f"{key}.pub", "replay"]
    ended = subprocess.run(register, env=link.environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RunError(f"a SuperNode's key must be registered; Flower says {(ended.stdout + ended.stderr)[-500:]}")
    return ["--root-certificates", str(link.folder / CA), "--auth-supernode-private-key", str(key)]


def deal(rows: Sequence[ManifestRow], names: Sequence[str], root: Path) -> None:
    """Copy each institution's images to `root/<name>`, with a `manifest.csv`; `names` says whose each image is."""
    for name in sorted(set(names)):
        folder = private_folder(root / name)
        its_rows = []
        for n, row in enumerate(row for row, whose in zip(rows, names, strict=True) if whose == name):
            its_rows.append(replace(row, file=folder / f"{n:06d}{row.file.suffix.lower()}", site=None))
            shutil.copy(row.file, its_rows[-1].file)
        write_manifest(folder, its_rows, {})


def _policy(policy: Path, name: str) -> str:
    """Return an institution's policy file, which can be read."""
    file = policy / f"{name}.yaml" if policy.is_dir() else policy
    if not file.is_file():
        raise ConfigError(f"--policy must be a file, or a folder with a file for each institution; got {file}")
    read_policy(file)
    return str(file)


def _names(rows: Sequence[ManifestRow], institutions: int) -> list[str]:
    """Say whose each image is: the site's, else of one of so many institutions, at random."""
    sites = [row.site for row in rows]
    if all(sites):
        named = [str(site) for site in sites]
        if institutions not in (0, len(set(named))):
            raise ConfigError(
                f"--institutions must be 0, or the manifest's {len(set(named))} sites; got {institutions}"
            )
        if wrong := [name for name in named if not NAME.fullmatch(name)]:
            raise DataError(
                f"a site's name has letters, digits, spaces, dots, hyphens and underscores; got {wrong[0]!r}"
            )
        return named
    number = institutions or 3
    if not 2 <= number <= len(rows):
        raise ConfigError(f"--institutions must be from 2 to the number of images, {len(rows)}; got {institutions}")
    order = derived_rng(0, "rehearsal").permutation(len(rows))
    return [f"clinic-{at % number + 1}" for at in order.argsort()]
