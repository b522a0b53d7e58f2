"""What a real deployment needs, as files: a folder for the coordinator, and a clinic's folder for each institution.

    deployment/coordinator/   certificates, the study, scripts for SuperLink, keys and runs, README.md
    deployment/<clinic>/      ca.crt, the study, a proposed policy, scripts for key and SuperNode, README.md

Both have a recipe for containers. While they run, only `state` and the coordinator's `runs` are written to.

Their texts are the templates in `flwr_replay/templates/deployment`, in which `<<name>>` stands for a value.
No clinic's private key is in it: a key is made at the clinic, by `make-key.sh`. `flwr_replay/deploy/clinic.py` checks a
clinic's folder where it is used.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import torch
import yaml

from flwr_replay.config.compose import compose_own
from flwr_replay.config.hiding import Hiding
from flwr_replay.config.quoting import key_of, quoted, toml_text
from flwr_replay.config.run import RunConfig
from flwr_replay.config.sections import require
from flwr_replay.engines.certificates import CA, write_certificates
from flwr_replay.errors import ConfigError, RunError
from flwr_replay.files.atomic import new_folder, private_folder, read_bytes, write_atomic
from flwr_replay.forecast.forecast import exchanged
from flwr_replay.institution.policy import RANDOM
from flwr_replay.learning.tasks import make_task
from flwr_replay.models.zoo import encoder_digest
from flwr_replay.payloads.common import Evaluation, Present
from flwr_replay.privacy.fitting import trains_encoder
from flwr_replay.report.summary import RECONSTRUCT
from flwr_replay.runs.environment import versions
from flwr_replay.runs.execute import Job
from flwr_replay.runs.options import encoder_options, file_options, user_files
from flwr_replay.wire.payload import rows

__all__ = ["COORDINATOR_FOLDER", "PEERS_FILE", "host_of", "in_state", "init"]

TEMPLATES = Path(__file__).parent.parent / "templates" / "deployment"
SHARED = {"study/pyproject.toml": "pyproject.toml", "Containerfile": "Containerfile", "compose.yaml": "compose.yaml"}
COORDINATOR_FOLDER, PEERS_FILE = "coordinator", "peers.txt"
CLINIC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")  # a folder, a file, a word of a shell, a TOML text
HOST = re.compile(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
OWN = ("nodes", "clinics", "runs_dir", "run_name", "resume", "data_dir", "task.data_dir", "partition")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
LOCAL_PORT = 9094  # Flower's default between a SuperNode and its own processes
DAYS = 365  # that certificates are valid
EXAMPLES = 1000  # of an institution, where only the kinds and the largest message matter
UPLOAD_MB = 64  # of rows: FedReplay's largest message, unless strategy.chunk-mb says otherwise
STAYS = "Your images stay in this building."
LEAVES = {  # by the kind of field, the gravest first
    "per-sample-raw": "Some of your images leave this building as they are, with their labels, for all the others.",
    "per-sample": f"{STAYS} Numbers that were computed from every single one leave. {RECONSTRUCT}",
    "synthetic": f"{STAYS} Images leave that a generator drew after them; they may resemble yours.",
}
IN_STUDY = {
    Hiding.SEALED: "The run is sealed: the server cannot read what the hospitals send each other.",
    Hiding.MASKED: "The run is masked: of weights the server reads the mean of all hospitals, and no single one's.",
}
IN_POLICY = {
    Hiding.SEALED: "# No run in which the server could read weights.\nsealed: true\n",
    Hiding.MASKED: "# No run in which the server could read this hospital's weights alone.\nmasked: true\n",
}
WEIGHTS = ' weights=\\"$PWD/{}\\"'
MOUNTED = "{{type: bind, source: ./{0}, target: {1}{0}{2}}}"
IN_CONTAINER = {  # words of compose.yaml and Containerfile
    "coordinator": {
        "service": "superlink",
        "script": "superlink.sh",
        "mount": MOUNTED.format("runs", "/deployment/", ""),
        "inside": "./run.sh",
        "images": "",
        "seen": "",
    },
    "clinic": {
        "service": "supernode",
        "script": "start.sh",
        "mount": MOUNTED.format("data", "/", ", read_only: true") + "  # a folder, a link to one, or write its path",
        "inside": "flwr-replay doctor --clinic .",
        "images": "\n# It must be able to read the images, too: setfacl -R -m u:10001:rX /path/to/your/images",
        "seen": " FLWR_REPLAY_DATA=/data",
        "reached": "",
    },
}
SEAL_KEYS = ' seal-key=\\"$PWD/seal.key\\" seal-peers=\\"$PWD/peers.txt\\"'


def init(clinics: Sequence[str], address: str, options: Sequence[str], place: Path) -> None:
    """Write the folders of a deployment, with the arguments of `flwr-replay deploy init`.

    Without a task among the options, it is a folder of images.

    Raises
    ------
    FlwrReplayError
        If a name, the address or an option is wrong, before anything is written; or if the folder exists.
    """
    _check_names(clinics)
    host, port = host_of(address)
    require(not set(str(place)) & set('"\\\n'), f"--out must have no double quotes or backslashes; got {place}")
    if place.exists():
        raise RunError(f"a deployment's folder must be new; {place} exists: choose another --out, or delete it")
    for option in options:
        key = key_of(option)
        require(key not in OWN, f"deploy init sets {key.replace('_', '-')} itself: leave it out")
    task = [] if "task" in map(key_of, options) else ["task=folder"]
    study = [*task, *options, "partition=natural"]
    study += encoder_options(study)
    config = compose_own([*study, f"nodes={len(clinics)}"], options)
    if config.own_code:
        raise ConfigError(
            f"`deploy init` writes no start scripts for code of your own, {config.own_code[0]}: all must install "
            "and allow it by hand, as the page docs/extend.md in flwr-replay's repository says"
        )
    if config.task.name == "folder" and config.task.kind == "classification":
        require(
            "classes" in {key_of(option).removeprefix("task.") for option in options},
            "a study must say its classes, as no image is read here; got none: set task.classes, and task.class-names "
            "if the labels are words",
        )
    policy, digest = _policy(config, clinics), encoder_digest(config.model, config.task)
    with new_folder(place) as new:
        installed = versions()
        files = {key_of(option): option for option in file_options(config)}
        names = {*files, *(key.rpartition(".")[2] for key in files)}
        pairs = [option.partition("=") for option in [*(o for o in study if key_of(o) not in names), *files.values()]]
        named = {key.replace("_", "-"): value for key, _, value in pairs if key != "rounds"}
        named["clinics"] = quoted(clinics)
        lines = "\n".join(f"{toml_text(key)} = {toml_text(value)}" for key, value in named.items())
        words: dict[str, object] = {
            **policy,
            "options": lines,
            "nodes": len(clinics),
            "rounds": config.rounds,
            "clinics": ", ".join(clinics),
            "names": " ".join(clinics),
            "address": address,
            "port": port,
            "listen": host.strip("[]") if host in LOOPBACK else "::" if host.startswith("[") else "0.0.0.0",
            "task": config.task.name,
            "versions": f"flwr-replay={installed['flwr-replay']} flwr={installed['flwr']}",
            "replay_version": installed["flwr-replay"],
            "days": DAYS,
            "leaves": next((LEAVES[kind] for kind in LEAVES if kind in policy["kinds"].split(", ")), STAYS),
            "private": _private(config),
            "validates": ", and one in ten of the others validates" if config.split == "validation" else "",
            "weights": WEIGHTS.format(config.model.copy) if config.model.copy else "",
            "here": "'.[timm]'" if config.model.library else ".",
            "extra": " --extra timm" if config.model.library else "",
            "own_weights": f" model.weights={config.model.copy}" if config.model.copy else "",
            "weights_step": _filled("weights.md", {"file": config.model.copy, "digest": digest})
            if config.model.copy
            else "",
        }
        home = private_folder(new / COORDINATOR_FOLDER)
        private_folder(home / "runs")
        number = host in LOOPBACK or re.fullmatch(r"\[.+|[0-9.]+", host)
        itself = "" if number else f'\n    extra_hosts: ["{host}:127.0.0.1"]'
        read = [json.dumps(str(file)).replace("$", "$$") for file in user_files(config).values()]
        mounts = [f"\n      - {{type: bind, source: {file}, target: {file}, read_only: true}}" for file in read]
        words["reached"] = "".join([*mounts, f'\n    ports: ["{port}:{port}"]', itself])
        hosts = dict.fromkeys([host.strip("[]"), "localhost", "127.0.0.1"])
        words["ends"] = write_certificates(home / "certificates", list(hosts), DAYS).date()
        private_folder(home / "keys")
        _write("coordinator", home, words)
        for k, name in enumerate(clinics):
            clinic = private_folder(new / name)
            write_atomic(clinic / CA, read_bytes(home / "certificates" / CA))
            hidden = IN_STUDY.get(config.hiding, "")
            of_clinic = {**words, "hidden": hidden, "name": name, "local_port": LOCAL_PORT + k}
            step = _filled("step.md", of_clinic).rstrip()
            pinned = {"make_seal_key": _filled("make-seal-key", of_clinic), "sealed_step": step, "seal_keys": SEAL_KEYS}
            _write("clinic", clinic, of_clinic | (pinned if config.hiding.pinned else dict.fromkeys(pinned, "")))
            if config.hiding.pinned:
                write_atomic(clinic / PEERS_FILE, _filled(PEERS_FILE, of_clinic))


def host_of(address: str) -> tuple[str, int]:
    """Take an address HOST:PORT apart.

    >>> host_of("superlink.example.org:8000"), host_of("[::1]:1")
    (('superlink.example.org', 8000), ('[::1]', 1))

    Raises
    ------
    ConfigError
        If it is none.
    """
    host, _, port = address.rpartition(":")
    good = HOST.fullmatch(host) and ".." not in host and re.fullmatch("[0-9]{1,5}", port) and 1 <= int(port) <= 65535
    if good and (host.startswith("[") or re.fullmatch("[0-9.]+", host)):
        try:
            ip_address(host.strip("[]"))
        except ValueError:
            good = False
    if not good:
        raise ConfigError(f"an address is HOST:PORT, such as superlink.example.org:8000 or [::1]:8000; got {address!r}")
    return host, int(port)


def in_state(folder: Path, name: str, before: str = "") -> Path:
    """Return where a file lies that is written while a deployment's folder works: in `state`.

    In a folder of an older version it lies outside, under the name `before`, else the same one.
    """
    new = folder / "state" / name
    return new if new.exists() else folder / (before or name)


def _check_names(clinics: Sequence[str]) -> None:
    """Refuse names that cannot be a folder's, or differ in case only: some file systems take these for one."""
    if wrong := [name for name in clinics if not CLINIC_NAME.fullmatch(name)]:
        raise ConfigError(
            f"an institution's name has at most 40 letters, digits, hyphens, underscores, and begins with a letter or "
            f"digit; got {wrong[0]!r}"
        )
    folded = [name.lower() for name in clinics]
    if not clinics or len(set(folded)) < len(folded) or COORDINATOR_FOLDER in folded:
        raise ConfigError(
            f"--clinics must be different names, none of them {COORDINATOR_FOLDER}; got {','.join(clinics) or 'none'}"
        )


def _policy(config: RunConfig, clinics: Sequence[str]) -> dict[str, str]:
    """Propose the narrowest policy under which one can take part: the method, its kinds, its largest message."""
    job = Job.of(config, clinics)
    sums = make_task(config.task).label_sums(torch.arange(EXAMPLES))
    values = {"num_examples": EXAMPLES, "raw_bytes": EXAMPLES, **sums}
    present = [Present(name=name, **values) for name in clinics]  # type: ignore[arg-type]
    kinds, largest, tests = {"statistic": None}, 0, Counter[str]()
    for expected in exchanged(job, present)[1]:
        fields = list(rows(expected.answer.encode(), type(expected.answer)))
        kinds |= {row.kind: None for row in fields if row.kind != "notice"}  # type: ignore[misc]
        largest = max(largest, sum(row.bytes for row in fields))
        tests[expected.member.name] += expected.times * isinstance(expected.answer, Evaluation)
    rows_leave = any(kind.startswith("per-sample") for kind in kinds)
    return {
        "strategy": config.strategy.name,
        "kinds": ", ".join(kinds),
        "upload": str(max(UPLOAD_MB * rows_leave, math.ceil(1.1 * largest / 1e6))),
        "metrics": "exact" if config.task.kind == "regression" else "counted",
        "tests": str(2 * max(tests.values())),  # a run that is resumed repeats some
        "agreed": _agreed(config),
        "sealed": IN_POLICY.get(config.hiding, ""),
    }


def _agreed(config: RunConfig) -> str:
    """Write the rules that hold a server to the noise and the encoder on which a study has agreed.

    No rule holds it to the noise of a classifier or a proxy alone: with these the whole of what leaves has no epsilon.
    """
    privacy, agreed = config.privacy, dict[str, Any]()
    if math.isfinite(privacy.limit) and (config.end_to_end or "latents" in privacy.mechanisms):
        if not privacy.delta:
            raise ConfigError(
                "who agrees on an epsilon agrees on a delta; got delta=0, one over each institution's examples: set "
                "delta=1e-5, or what is far below one over the examples of the largest"
            )
        agreed["max-epsilon" if config.end_to_end else "max-local-epsilon"] = privacy.limit
        if config.end_to_end:
            agreed["max-total-epsilon"] = 2 * privacy.limit  # a run that breaks off may be begun anew
        agreed["max-delta"] = privacy.delta
    if privacy.noise == "shared":
        agreed["min-colluders"] = config.colluders
    encoder, fixed = getattr(config.strategy, "encoder", ""), encoder_digest(config.model, config.task)
    if encoder == RANDOM or (encoder and fixed and not trains_encoder(config)):
        agreed["weights"] = {"extract": [*filter(None, [fixed]), *([RANDOM] if encoder == RANDOM else [])]}
    return yaml.safe_dump(agreed, sort_keys=False) if agreed else ""


def _private(config: RunConfig) -> str:
    """Say in a README under which epsilon a run trains; nothing without DP."""
    privacy = config.privacy
    if not privacy.mechanisms:
        return ""
    most = f"at most {privacy.limit:g}" if privacy.limit < math.inf else "without a limit"
    most += " of the sum of all institutions' answers" * (privacy.noise == "shared")
    return (
        f" The study asks for differential privacy (dp={privacy.dp}) with an ε {most}, in one run. It covers "
        f"{'what depends on training images' if config.end_to_end else 'some of what leaves'}."
    )


def _write(kind: str, folder: Path, words: Mapping[str, object]) -> None:
    """Write the study, the recipe for containers and all other files of a folder; scripts can be run."""
    words = {**words, **IN_CONTAINER[kind]}
    for inner in ("study", "state"):
        private_folder(folder / inner)
    for file, template in SHARED.items():
        write_atomic(folder / file, _filled(template, words))
    for name in [source.stem for source in (TEMPLATES / kind).iterdir()]:
        write_atomic(folder / name, _filled(f"{kind}/{name}", words), mode=0o700 if name.endswith(".sh") else 0o600)


def _filled(name: str, words: Mapping[str, object]) -> str:
    text = (TEMPLATES / f"{name}.in").read_text(encoding="utf-8")
    return re.sub(r"<<(\w+)>>", lambda match: str(words[match[1]]), text)
