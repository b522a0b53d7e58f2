"""What the command line says of itself: help, options, versions, and that saying so imports nothing heavy."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from flwr_replay.cli.main import app
from flwr_replay.config.catalogue import choices
from flwr_replay.terminal import installing


def test_doctor_finds_this_machine_fit(flwr_replay):
    code, out, _ = flwr_replay("doctor")
    assert "flwr " in out
    assert "GPU" in out
    assert code in (0, 1)


def test_help_imports_nothing_heavy():
    script = (
        "import sys; sys.argv = ['flwr-replay', '--help']\n"
        "from flwr_replay.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'flwr', 'hydra', 'numpy', 'matplotlib') if name in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip().endswith("[]")


def test_help_explains_every_argument():
    """In a docstring: Click 8.5 drops the help of Typer's arguments."""
    lacking, seen = [], 0
    places = [((), typer.main.get_command(app), "")]
    while places:
        words, place, around = places.pop()
        known = f"{around} {place.help or ''}"
        places += [((*words, name), command, known) for name, command in getattr(place, "commands", {}).items()]
        for param in place.params:
            if param.param_type_name == "argument":
                seen += 1
                name = (param.metavar or param.name.upper()).strip("[]…")
                if name != "OPTION=VALUE" and not any(word in known for word in name.split("|")):
                    lacking.append((*words, name))
    assert seen > 10
    assert lacking == []


def test_options_are_explained_on_80_columns(flwr_replay, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for words in ([], ["partition"], ["training"], ["strategy"], ["strategy=proxyfl"]):
        code, out, _ = flwr_replay("options", *words)
        assert code == 0
        assert max(map(len, out.splitlines())) <= 80
    assert "strategy.proxy-optimizer  (text)" in out
    code, out, _ = flwr_replay("options", "strategi")
    assert (code, out) == (2, "")
    _, out, _ = flwr_replay("run", "--help")
    named = " ".join(out.split())
    assert all(", ".join(choices(group)) in named for group in ("strategy", "task", "partition"))


def test_a_run_imports_no_more_than_it_uses(tmp_path):
    """These would take longer than all that a small run needs."""
    words = ["strategy=fedavg", "model=mlp", "model.width=4", "partition.size=40", "nodes=2", "rounds=1"]
    large = ("torch._dynamo", "sklearn", "scipy", "pandas", "opacus", "torchvision", "ray")
    script = (
        "import sys; from flwr_replay.cli.main import main\n"
        f"sys.argv = ['flwr-replay', 'run', *{words!r}, '--runs-dir', {str(tmp_path)!r}]\n"
        f"try:\n    main()\nfinally:\n    print([name for name in {large!r} if name in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip().endswith("[]"), done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "rouns=3", "batch-siz=2"], "unknown option 'rouns': did you mean rounds?"),
        (["run", "rounds=abc", "lr=auto"], "got 'abc' error: a run has one value of an option; got 'lr=auto'"),
        (["run", "rounds=1", "rounds=2"], "an option has one value"),
        (["run", "strategy=fedavg", "dp=latents", "local-epochs=0"], "got dp=latents"),
        (["run", "strategy=feder", "dp=classifier"], "strategy=feder can have dp=generator+prior"),
        (["run", "strategy=proxyfl", "alpha=2"], "strategy.alpha lies in [0, 1]; got 2.0"),
        (["run", "generator.epochs=0"], "generator.epochs"),
        (["run", "masked=true", "strategy=cwt"], "that of strategy=cwt does not"),
        (["compare", "fedavg,cwt", "rounds=abc"], "rounds must be a whole number; got 'abc'"),
        (["compare", "fedavg,cwt:muu=1", "lr=auto"], "unknown option 'muu' of the method cwt"),
        (["compare", "cwt", "lr=auto", "training.lr=1"], "got lr=auto and training.lr=1: keep one"),
        (["compare", "cwt", "lr=0.1..1"], "a range is searched by --tune; got lr=0.1..1"),
        (["study", "skwe"], "unknown study 'skwe': did you mean skew?"),
        (["compare", "fedavg,cwt", "lr=0.1..1", "--tune", "3"], f"--tune needs Optuna: {installing('optuna')}"),
    ],
)
def test_what_is_wrong_is_said_before_anything_large_is_imported(words, message):
    """As PyTorch takes seconds."""
    script = (
        "import sys; from flwr_replay.cli.main import main\n"
        f"sys.argv, sys.modules['optuna'] = {['flwr-replay', *words]}, None\n"
        "try:\n    main()\nfinally:\n    print([name for name in ('torch', 'flwr', 'numpy') if name in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, check=False)
    assert (done.returncode, done.stdout.strip()) == (2, "[]")
    assert message in " ".join(done.stderr.split())


def test_the_version_is_shown_and_an_unknown_command_has_one_suggestion(flwr_replay):
    code, out, _ = flwr_replay("--version")
    assert (code, out) == (0, "flwr-replay 0.1.0\n")
    code, _, err = flwr_replay("studdy")
    assert (code, err.count("Did you mean")) == (2, 1)
    code, out, _ = flwr_replay()
    assert "Usage:" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["data", "manifest", "x"], "Missing option '--patients'. A CSV file of your archive, a row an image. `"),
        (
            ["deploy", "remove", "x"],
            "Missing argument 'RECEIPT'. RECEIPT, a new folder, keeps the ledgers, and each run",
        ),
        (["runs", "show"], "Missing argument 'RUN…'. RUN is a run directory, or `last`: the newest in runs/. `"),
    ],
)
def test_what_is_missing_is_explained(flwr_replay, words, told):
    code, _, err = flwr_replay(*words)
    assert code == 2
    assert told in err
    assert err.strip().endswith("--help` says more.")
