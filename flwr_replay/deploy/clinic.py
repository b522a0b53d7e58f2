"""Checks of a clinic's folder, as `flwr-replay deploy init` wrote it, where it is used: will it work.

Each check uses the code that the SuperNode's processes use: the same reader of data, policy and node config.
"""

import hashlib
import logging
import os
import shlex
import stat
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import psutil
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, RecordDict

from flwr_replay.ciphers.seal import Seal, make_key, read_pins
from flwr_replay.config.compose import compose
from flwr_replay.config.model import LITE0
from flwr_replay.config.quoting import node_config, quoted
from flwr_replay.config.run import RunConfig
from flwr_replay.deploy.deployment import PEERS_FILE, in_state
from flwr_replay.deploy.examining import certificate, connection, examined, free_space, is_authority, validity
from flwr_replay.engines.certificates import CA
from flwr_replay.engines.superlink import answers
from flwr_replay.errors import ConfigError, RunError
from flwr_replay.files.atomic import NAME, make_folder, read_bytes, read_text
from flwr_replay.files.disk import reading
from flwr_replay.forecast.officer import refusals, study_options
from flwr_replay.institution.node import institution_of
from flwr_replay.institution.policy import read_policy
from flwr_replay.models.zoo import encoder_digest
from flwr_replay.processes import left_clientapps
from flwr_replay.report.progress import shown_bytes
from flwr_replay.runs.environment import versions
from flwr_replay.runs.execute import Job
from flwr_replay.state.kept import ledger_bytes

__all__ = ["examine_clinic", "supernode"]

KEYS = ("NAME", "ADDRESS", "DATA", "PORT", "VERSIONS")  # of clinic.env
AGE = 300  # seconds after which a ClientApp that has hardly worked waits in vain


def examine_clinic(folder: Path) -> tuple[bool, str]:
    """Check a clinic's folder, as `deploy init` wrote it, with the institution's data and key; refuse any other.

    Returns whether all will work, and a line for each finding.
    """
    env = _read(folder)
    checks = (_versions, _names, _clientapps, _weights, _policy, _data, _state, _key, _seal, _certificate, _connection)
    return examined({check.__name__[1:]: partial(check, folder, env) for check in checks})


def _read(folder: Path) -> dict[str, str]:
    """Read `clinic.env` as a shell does."""
    file = folder / "clinic.env"
    if not file.is_file():
        raise ConfigError(f"--clinic must be a folder with clinic.env, as `deploy init` writes it; got {folder}")
    try:
        text = read_text(file)
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(f"{file} must be quoted as in a shell: {error}") from None
    set_lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    if set("$`;&|<>(") & set("".join(set_lines)):  # start.sh reads it as a shell
        raise ConfigError(f"{file} must have plain values, without $ ` ; & | < > (: it is read by a shell")
    env = {key: value for key, _, value in (word.partition("=") for word in words)}
    if missing := [key for key in KEYS if not env.get(key)]:
        raise ConfigError(f"{file} must have lines {', '.join(KEYS)}, without spaces around =; {missing[0]} is missing")
    return env | ({"DATA": data} if (data := os.environ.get("FLWR_REPLAY_DATA")) else {})  # as start.sh has it


def _versions(folder: Path, env: Mapping[str, str]) -> Iterator[str]:
    here = versions()
    for name, _, there in (word.partition("=") for word in env["VERSIONS"].split()):
        if here.get(name) != there:
            get = (
                "install it from where the coordinator says"
                if name == "flwr-replay"
                else f"pip install {name}=={there}"
            )
            raise RunError(f"{name} is {here.get(name, 'absent')} here and {there} at the coordinator: {get}")
        yield f"{name} {there}, as at the coordinator"


def _names(folder: Path, env: Mapping[str, str]) -> Iterator[str]:
    if not NAME.fullmatch(env["NAME"]):
        raise ConfigError(f"NAME in clinic.env must be the institution's name; got {env['NAME']!r}")
    for key, value in (("the folder", str(folder)), ("DATA", _node(folder, env)["data"])):
        if '"' in value or "\\" in value:  # start.sh puts them between double quotes
            raise ConfigError(f"{key} must have no double quotes and backslashes in its path; got {value}: rename it")
    port = env["PORT"]
    if not (port.isascii() and port.isdecimal()) or not 1 <= int(port) <= 65535:
        raise ConfigError(f"PORT in clinic.env must be from 1 to 65535; got {port!r}")
    if not answers(f"127.0.0.1:{port}"):
        yield f"this is {env['NAME']}; local port {port} is free"
    elif process := supernode(folder):
        yield f"this is {env['NAME']}; its SuperNode runs, as process {process}"
    else:
        raise RunError(f"port {port} is in use here by another program: change PORT in clinic.env")


def supernode(folder: Path) -> int:
    """Return the process that start.sh of a clinic's folder has become, as `supernode.pid` has it; 0: there is none."""
    try:
        process = psutil.Process(int(read_text(in_state(folder, "supernode.pid"))))
        return process.pid if Path(process.cwd()).samefile(folder) else 0
    except (RunError, OSError, ValueError, psutil.Error):
        return 0


def _clientapps(folder: Path, env: Mapping[str, str]) -> Iterator[str]:
    """Look for ClientApps that Flower leaves: a message came, and its run ended before its content did."""
    node = supernode(folder)
    waiting = [process.pid for process in left_clientapps(node, time.time() - AGE)] if node else []
    if waiting:
        raise RunError(
            f"a ClientApp still waits for the content of a message, after {AGE // 60} min and more: if no run is live, "
            f"it will not come; the next run ends process {', '.join(map(str, waiting))}. If a run is live, leave it: "
            "once it is killed, its SuperNode may wait for its answer for ever. Never use `kill -9`: every later "
            "answer of this SuperNode would come late"
        )
    yield from ()


def _weights(folder: Path, env: Mapping[str, str]) -> Iterator[str]:
    model, task = (config := _study(folder)).model, config.task
    if model.everywhere:
        frozen, file = encoder_digest(model, task), LITE0
        if model.copy:
            with reading(folder / model.copy), open(folder / model.copy, "rb") as opened:
                file = f"{model.copy}, SHA-256 {hashlib.file_digest(opened, 'sha256').hexdigest()}"
        yield f"weights: {file}; they fit, and what is frozen is {frozen or 'nothing'}"


def _policy(folder: Path, env: Mapping[str, str]) -> Iterator[str]:
    config = _study(folder)
    policy = read_policy(folder / "policy.yaml")
    stages, state = Job.of(config).strategy("").all_stages(), folder / "state" / env["NAME"]
    if refused := [rule for rule in refusals(policy, config, stages, [state]) if rule["reason"]]:
        raise ConfigError(f"policy.yaml refuses this study; {refused[0]['reason']}")
    yield f"policy.yaml is valid and lets {env['NAME']} take part; the dry run in README.md shows every field"


def _data(folder: Path, env: Mapping[str, str]) -> Iterator[str]:
    owned = _node(folder, env)
    config = {"overrides": shlex.join(study_options(folder / "study"))}
    log = logging.getLogger("flwr")
    log.disabled = True  # else what a node logs stands above the findings
    try:
        institution, _ = institution_of(Context(0, 0, dict(owned), RecordDict(), dict(config)))
    finally:
        log.disabled = False
    train, test = institution.data.train, institution.data.test
    if not len(test):
        raise RunError("there must be test examples; got none: add a column split to the manifest")
    kind = "manifest.csv" if (Path(owned["data"]) / "manifest.csv").is_file() else "no manifest.csv"
    validating = f", {len(institution.data.val):,} to validate on" if institution.data.val else ""
    yield f"data: {len(train):,} examples to train on{validating} and {len(test):,} to test on ({kind})"


def _state(folder: Path, env: Mapping[str, str]) -> Iterator[str]:
    existed = (folder / "state").exists()
    make_folder(folder / "state", "the folder state")
    if not existed:
        (folder / "state").rmdir()
    own_state = folder / "state" / env["NAME"]
    free = free_space(folder, f"`flwr-replay deploy state {own_state}` says what a run that is over has left")
    segments, size, recorded = ledger_bytes(own_state)
    yield (
        f"state: the folder can be written, {free}; ledger: {shown_bytes(size)}, segments: {segments}; recorded "
        f"messages: {shown_bytes(recorded)}"
    )


def _key(folder: Path, env: Mapping[str, str]) -> Iterator[str]:
    file = folder / "key"
    if not file.is_file():
        raise RunError(f"{file} is missing: run ./make-key.sh")
    mode = file.stat().st_mode
    if os.name == "posix" and mode & 0o077:
        raise RunError(f"{file} must be its owner's only; its mode is {stat.S_IMODE(mode):o}: chmod 600 key")
    try:
        key = serialization.load_ssh_private_key(read_bytes(file), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise RunError(f"{file} must be an OpenSSH key without a passphrase; {error}: run ./make-key.sh") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise RunError(f"{file} must be an ECDSA key, as ./make-key.sh makes it; got {type(key).__name__}")
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    sent = folder / f"{env['NAME']}.pub"
    if not sent.is_file() or read_bytes(sent).split()[:2] != public.split()[:2]:
        raise RunError(f"{sent} must be the public half of key: ssh-keygen -y -f key > {sent.name}, and send it again")
    yield f"key: its owner's only; {sent.name} is its public half"


def _seal(folder: Path, env: Mapping[str, str]) -> Iterator[str]:
    if not compose(study_options(folder / "study")).hiding.pinned:
        return
    make = f"flwr-replay deploy seal-key {env['NAME']}, in this folder"
    for needed, advice in (("seal.key", make), (PEERS_FILE, "put every institution's line into it")):
        if not (folder / needed).is_file():
            raise RunError(f"the study needs keys, and {folder / needed} is missing: {advice}")
    seal = Seal(env["NAME"], make_key(folder / "seal.key")[0], read_pins(folder / PEERS_FILE))
    yield f"seal: {len(seal.pins)} pinned keys ({', '.join(seal.pins)}); compare with the others: {seal.digest}"


def _certificate(folder: Path, env: Mapping[str, str]) -> Iterator[str]:
    authority = certificate(folder / CA, "ask the coordinator for it again")
    if not is_authority(authority):
        raise RunError(
            f"{folder / CA} must be the certificate of the study's authority: ask the coordinator for it again"
        )
    digest = hashlib.sha256(read_bytes(folder / CA)).hexdigest()
    yield f"{CA}: {validity(authority, 'ask for a new one')}; SHA-256 {digest}"


def _connection(folder: Path, env: Mapping[str, str]) -> Iterator[str]:
    silent = "has the coordinator started it, does the firewall let you?"
    yield connection(env["ADDRESS"], folder / CA, silent, "ask the coordinator")


def _study(folder: Path) -> RunConfig:
    """Return the study's options, with the institution's own copy of an encoder's weights."""
    options = study_options(folder / "study")
    own = compose(options).model.copy
    return compose([*options, f"model.weights={quoted(str(folder.absolute() / own))}"] if own else options)


def _node(folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Return what start.sh gives the SuperNode as its node config."""
    data = (folder / env["DATA"]).resolve()  # an absolute DATA stays as it is
    owned = {"name": env["NAME"], "data": str(data), "state": str(folder / "state")}
    owned["policy"] = str(folder / "policy.yaml")
    if (folder / PEERS_FILE).is_file():
        owned |= {"seal-key": str(folder / "seal.key"), "seal-peers": str(folder / PEERS_FILE)}
    if own := compose(study_options(folder / "study")).model.copy:
        owned["weights"] = str(folder / own)
    node_config(owned)
    return owned
