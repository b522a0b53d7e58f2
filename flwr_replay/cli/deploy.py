"""flwr-replay deploy init | seal-key | evidence | state | remove, for a real deployment; rehearse, before it."""

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from flwr_replay.cli.completing import of_runs
from flwr_replay.cli.places import AsJson, Options, absolute, answer, finished_place, say
from flwr_replay.errors import ConfigError

__all__ = ["app", "rehearse"]

app = typer.Typer(
    help="Write the files of a real deployment; make keys; look after an institution's files.", no_args_is_help=True
)


@app.command()
def init(
    clinics: Annotated[str, typer.Option("--clinics", help="The institutions' names, separated by commas.")],
    options: Options = None,
    address: Annotated[
        str, typer.Option("--address", help="HOST:PORT at which the institutions reach the coordinator.")
    ] = "127.0.0.1:8000",
    out: Annotated[str, typer.Option("--out", help="A new folder.")] = "deployment",
    as_json: AsJson = False,
) -> None:
    """Write a folder for the coordinator and one for each institution: certificates, study, policy, scripts and README.

    The options are the study's. `flwr-replay doctor --clinic FOLDER` checks a clinic's folder where it is used.
    """
    say()
    from flwr_replay.deploy.deployment import COORDINATOR_FOLDER, init

    place, names = absolute(out), clinics.split(",")
    init(names, address, options or [], place)
    coordinator, folders = place / COORDINATOR_FOLDER, {name: place / name for name in names}
    lines = [f"for the coordinator: {coordinator}", *(f"send to {name}: {folder}" for name, folder in folders.items())]
    text = "\n".join([*lines, "README.md in each folder says what to do, in order"])
    answer({"coordinator": coordinator, "clinics": folders}, text, as_json)


@app.command("seal-key")
def seal_key(
    name: Annotated[str, typer.Argument(help="The institution's name.")],
    key: Annotated[str, typer.Option("--key", help="The file of its private key, made if there is none.")] = "seal.key",
    peers: Annotated[str, typer.Option("--peers", help="Check this file of pinned keys, and show its digest.")] = "",
    as_json: AsJson = False,
) -> None:
    """Make the institution NAME's key for sealed runs, and print the line that the others pin.

    The private key stays in its file, which its owner alone can read. The printed line is public. Get it to the other
    institutions by a way that the server's owner does not control, and compare the digest by telephone.
    """
    from flwr_replay.ciphers.seal import Seal, line_of, make_key, read_pins

    private, public = make_key(absolute(key))
    line, pins, digest = line_of(name, public), list[str](), ""
    if not as_json:
        print(line)  # though the pinned keys may be wrong
    if peers:
        pinned = read_pins(Path(peers).expanduser())
        pins, digest = sorted(pinned), Seal(name, private, pinned).digest
    if peers or as_json:
        text = f"{peers} pins {', '.join(pins)}; its digest, to compare with the others: {digest}"
        answer({"line": line, "pins": pins, "digest": digest}, text, as_json)


@app.command()
def evidence(
    place: Annotated[str, typer.Argument(metavar="RUN", autocompletion=of_runs)],
    audit: Annotated[str, typer.Option("--audit", help="The audit.json of a run with the same options.")] = "",
    sacroml: Annotated[str, typer.Option("--sacroml", help="SACRO-ML's report.json on the exported model.")] = "",
    model: Annotated[str, typer.Option("--model", help="With --sacroml: the exported file that it attacked.")] = "",
    policy: Annotated[
        str,
        typer.Option("--policy", help="Its min-count holds here, too. Default, of a state: policy.yaml of its folder."),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Write evidence.html and .json into a finished RUN: what a board and an egress reviewer can file.

    RUN is a run directory, `last`, or an institution's state directory: then it is of all its runs, from its own files.
    Attacks are quoted if `privacy attack` has run; under a policy's min-count without small numbers.
    """
    folder = finished_place(place)
    from flwr_replay.deploy.own_evidence import policy_beside, write_own_evidence
    from flwr_replay.files.atomic import read_json
    from flwr_replay.institution.policy import read_policy
    from flwr_replay.lab.sacroml import sacroml_found
    from flwr_replay.lab.sentences import sentence
    from flwr_replay.report.evidence_page import write_evidence
    from flwr_replay.report.run_files import CONFIG, RESULT, read_result
    from flwr_replay.state.counts import FILE as COUNTS
    from flwr_replay.wire.ledger import LEDGER

    made, attacked = absolute(audit) if audit else folder / "audit.json", folder / "attacks" / "attacks.json"
    own, rules = (folder / LEDGER).exists() and not (folder / CONFIG).exists(), absolute(policy) if policy else None
    if own and not rules:
        rules = policy_beside(folder)
    least, results = read_policy(rules).min_count, read_json(attacked)["attacks"] if attacked.exists() else []
    names = read_result(folder).get("floored") if (folder / RESULT).exists() else []
    names = [folder.name] if own and (folder / COUNTS).exists() else names
    if model and not sacroml:
        raise ConfigError(f"--model goes with --sacroml; got {model} alone: give the report, too")
    if (results or sacroml) and names and not (rules if own else least):
        raise ConfigError(
            f"attacks are quoted under a policy's min-count; {', '.join(names)} had one: give it, --policy FILE"
        )
    sentences = [sentence(result, least) for result in results]
    by_sacroml = sacroml_found(absolute(sacroml), least, absolute(model) if model else None) if sacroml else None
    if by_sacroml and model:
        from flwr_replay.finished.export import recognised

        by_sacroml["said"] += f" {recognised(absolute(model), folder)}"
    if own:
        page, data = write_own_evidence(folder, rules, sentences, by_sacroml)
    else:
        report = read_json(made) if audit or made.exists() else None
        if report and least:  # what the page says, without numbers of guesses
            report = {name: report[name] for name in ("institution", "kind", "canaries", "claim", "refuted")}
        page, data = write_evidence(folder, sentences, report, by_sacroml)
    answer({"files": [page, data]}, f"the page: {page}\nthe same as JSON: {data}", as_json)


@app.command()
def state(
    place: Annotated[str, typer.Argument(metavar="STATE")],
    runs: Annotated[
        list[str] | None, typer.Option("--remove", metavar="RUN", help="A run that is over, or decoded.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """List what an institution keeps in its state directory STATE, with the ε of all runs; --remove what a run left.

    Its models, latents and pictures go, a private model too. The ledger, the account of epsilon and the run's options
    stay. The institution answers no further message of that run. `--remove decoded` removes decoded images and
    features; those that simulations keep lie in $FLWR_REPLAY_HOME.
    """
    from flwr_replay.deploy.own_evidence import policy_beside
    from flwr_replay.institution.policy import read_policy
    from flwr_replay.report.progress import shown_bytes, shown_time
    from flwr_replay.state.kept import DECODED, bytes_of, kept, ledger_bytes, remove

    folder = absolute(place)
    runs_kept, made = kept(folder), folder / DECODED
    if runs:
        if not yes:
            going = [file for entry in runs_kept if entry.run in runs for file in entry.spare]
            going += made.glob("*") if DECODED in runs else []
            typer.confirm(f"Remove {shown_bytes(bytes_of(going))}? These runs cannot go on then", abort=True)
        remove(folder, runs)
        runs_kept = kept(folder)
    lines = []
    for entry in runs_kept:
        fate = "removed" if entry.removed and not entry.spare else f"{shown_bytes(bytes_of(entry.spare))} can go"
        lines.append(f"{entry.run}\n  {shown_bytes(entry.bytes)}, {fate}; last written {shown_time(entry.seconds)} ago")
    decoded = bytes_of([*made.glob("*")])
    lines.append(f"decoded images and features, made again when they are missing: {shown_bytes(decoded)}")
    number, size, recorded = ledger_bytes(folder)
    lines.append(f"ledger: {shown_bytes(size)}, segments: {number}; recorded messages: {shown_bytes(recorded)}")
    spent = read_policy(policy_beside(folder)).all_runs(folder).sentence()
    ledger = {"bytes": size, "segments": number, "recorded": recorded}
    told = {"runs": runs_kept, "decoded": decoded, "ledger": ledger, "all-runs": spent}
    answer(told, "\n".join([*lines, *[spent] * bool(runs_kept)]), as_json)


@app.command()
def remove(
    place: Annotated[str, typer.Argument(metavar="FOLDER")],
    receipt: Annotated[str, typer.Argument(metavar="RECEIPT")],
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove keys, models and images for good; first stop the SuperNode, or the SuperLink.

    FOLDER is a state directory, a clinic's or the coordinator's folder as `deploy init` wrote it (states, keys,
    certificates and runs go), or $FLWR_REPLAY_HOME (all states and decoded images go).

    RECEIPT, a new folder, keeps the ledgers, and each run's account of epsilon, options and counts. Its receipt.json
    names what was removed. Whoever joins again begins a new account: what has left before still counts.
    """
    from flwr_replay.deploy import coordinator
    from flwr_replay.deploy.clinic import supernode
    from flwr_replay.state.kept import leaving, retire

    folder = absolute(place)
    clinic = folder.resolve().parent.parent  # of state/NAME in it
    if process := supernode(folder) or supernode(clinic):
        raise ConfigError(f"a SuperNode must not run while its state is removed; process {process} does: stop it")
    look = coordinator.leaving if (folder / "superlink.sh").is_file() else leaving
    going, staying = look(folder)
    named = ", ".join(map(str, going))
    if not yes:
        typer.confirm(f"Remove {named} (files that a receipt keeps: {len(staying)})? No run can go on", abort=True)
    retire(folder, absolute(receipt), look)
    left = sorted(path.name for path in folder.glob("*"))
    text = f"removed: {named}; what shows what has left: {absolute(receipt)}"
    text += f"; what stays in {folder}, scripts and what others put there: {', '.join(left)}" * bool(left)
    answer({"removed": folder, "receipt": absolute(receipt), "left": left}, text, as_json)


def rehearse(
    data: Annotated[str, typer.Argument(metavar="DATA")],
    options: Options = None,
    institutions: Annotated[
        int, typer.Option("--institutions", help="How many; 0: as the manifest's column site says, else three.")
    ] = 0,
    policy: Annotated[str, typer.Option("--policy", help="A policy for all, or a folder of <institution>.yaml.")] = "",
    tls: Annotated[bool, typer.Option("--tls", help="With TLS, and a key for each SuperNode.")] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Every institution keeps its own messages, for attacks.")
    ] = False,
    out: Annotated[str, typer.Option("--out", help="A new folder; default: rehearsal-<date> here.")] = "",
    as_json: AsJson = False,
) -> None:
    """Deploy on this machine: a SuperLink, a SuperNode for each institution with data of its own, one run; then stop.

    DATA is a folder of images, as task=folder reads it.

    Shows the run with its summary, and the end of an institution's log if it refused or failed. Every test takes half a
    minute or more here: evaluate-every=N makes fewer. Ctrl-C stops everything.
    """
    say()
    from flwr_replay.deploy.rehearsal import rehearse

    place = absolute(out or f"rehearsal-{time.strftime('%Y%m%d-%H%M%S')}")
    rules, source = absolute(policy) if policy else None, absolute(data)
    if "=" in data and not source.exists():
        raise ConfigError(f"a rehearsal needs a folder of images before its options; got {data}")
    tell = say if as_json else partial(print, flush=True)
    try:
        result, folder = rehearse(options or [], source, institutions, rules, place, tell, tls, record)
    except KeyboardInterrupt:
        say(f"interrupted: everything is stopped; what there is lies in {place}")
        raise
    text = f"each institution's images: {place / 'data'}; its own ledger: {place / 'state'}; its log: {place / 'logs'}"
    answer({"run": folder, "result": result}, f"{text}\nthe run's page: {folder / 'report.html'}", as_json)
