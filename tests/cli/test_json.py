"""--json: what a script reads from each command; the keys are a promise."""

import json
import re
from pathlib import Path

from typer.main import get_command

from flwr_replay.cli.main import app

SMALL = ["strategy=fedavg", "model=mlp", "model.width=4", "rounds=1", "nodes=2"]
KEYS = {
    "runs list": {"run", "state", "metric", "bytes"},
    "runs show runs/one": {"run", "state", "result"},
    "runs compare runs/one": {"run", "strategy", "task", "seed", "final"},
    "predict runs/one shown": {"predictions", "left-out", "out"},
    "predict runs/one shown --out answers.csv": {"predictions", "left-out", "out"},
    "export runs/one": {"files"},
    "report runs/one": {"files"},
    "data show task=digits nodes=2": {"examples", "labels", "counts", "skew"},
    "data check shown": {"sound", "lines", "unreadable"},
    "data manifest shown --patients p.csv --id id": {"manifest", "faults"},
    "doctor": {"healthy", "lines"},
    "options partition": {"title", "options", "choices", "chosen"},
    "options ks": {"name", "type", "default", "text", "only"},
    "options": {"run", "task", "training", "strategy", "strategy=fedreplay"},
    "strategies": {"fedreplay", "cwt", "fedavg"},
    "strategies cwt": {"cwt"},
    "study skew --list": {"mnist-sorted"},
    "run --dry-run rounds=1": {"stage", "institution", "direction", "field", "kind", "bytes"},
    "run --resume runs/one": {"strategy", "final", "bytes", "privacy"},
    "compare fedavg seeds=1 rounds=1 model=mlp model.width=4 nodes=2": {"cells", "folder"},
    "deploy init --clinics a,b --out dep rounds=1 task.size=8 classes=2": {"coordinator", "clinics"},
    "deploy evidence runs/one": {"files"},
    "deploy evidence home/state/simulation/institution-1": {"files"},
    "deploy seal-key a": {"line", "pins", "digest"},
    "watch runs/one": {"exchange", "metrics", "seconds"},
    "runs plot runs/one": {"files"},
    "runs clean runs/one --yes": {"deleted"},
    "data images others --count 4": {"images", "folder"},
    "new study mine": {"folder"},
    "privacy plot --examples 100 --epochs 2": {"epsilons", "files"},
    "privacy digest runs/one/models/global.safetensors": {"digest"},
    "deploy state home/state/simulation/institution-1": {"runs", "decoded", "ledger"},
    "deploy remove home/state/simulation/institution-2 receipt --yes": {"removed", "receipt"},
    "privacy epsilon --examples 100 --batch 10 --noise 1 --epochs 1": {"epsilon", "delta", "noise", "steps"},
}


def commands(group, path=()):
    for name, command in group.commands.items():
        yield from (
            commands(command, (*path, name)) if hasattr(command, "commands") else [(" ".join((*path, name)), command)]
        )


def test_every_command_takes_json():
    assert {
        name for name, command in commands(get_command(app)) if not any("--json" in p.opts for p in command.params)
    } == set()


def test_the_keys_of_each_answer(flwr_replay):
    assert flwr_replay("run", *SMALL, "run-name=one", "task=digits")[0] == 0
    assert flwr_replay("data", "images", "shown", "--count", "4")[0] == 0
    Path("p.csv").write_text("file,id\n1.png,7\n")
    for words, keys in KEYS.items():
        code, out, err = flwr_replay(*words.split(), "--json")
        answer = json.loads(out.partition("\n")[0] if words.startswith("watch") else out)
        if isinstance(answer, list):
            (answer, *_) = answer
        assert keys <= answer.keys(), (words, answer.keys(), code, err)
    assert Path("answers.csv").exists()


def test_a_mistake_leaves_the_answer_empty(flwr_replay):
    code, out, err = flwr_replay("runs", "list", "--json")
    assert (code, out) == (2, "")
    assert re.match("error: there is no folder", err)
