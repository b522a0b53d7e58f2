"""The contract of a strategy: `check_strategy("cwt")` raises `AssertionError` if it is broken.

Third parties call it on their own strategy, which an installed package brings (`flwr-replay new strategy` writes one).
It runs small jobs in process, and checks:

- two runs with one seed are equal, and a resumed run equals an uninterrupted one
- dtypes are kept, inputs are unchanged, one failing institution is tolerated
- variances of batch norm that shrink at the institutions for 16 rounds stay non-negative, whatever a server's steps are
- the ledger counts the bytes sent, and the forecast equals the ledger
- recorded messages are those sent, and a run that records them has the same bits
- what the strategy declares of itself has the declared types, and names that exist
- every mechanism that can be trained by DP-SGD declares its passes, and the institutions are charged for exactly these
- every step that was charged is taken by DP-SGD; that no other step is taken, it cannot see
- a method that says `summed` has the same weights under masks, to within rounding
- the model that a run leaves is the one that institutions tested
"""

import contextlib
import json
import shlex
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Error, Message
from safetensors.numpy import load_file

from flwr_replay.client_app import app
from flwr_replay.config.catalogue import code_of, own_options
from flwr_replay.config.compose import compose, overrides_of
from flwr_replay.config.halves import load_client, load_strategy
from flwr_replay.config.own_code import allow
from flwr_replay.config.privacy import MECHANISMS
from flwr_replay.config.sources import idea_of
from flwr_replay.data.dealt import loaded
from flwr_replay.engines.inline import InlineGrid
from flwr_replay.engines.simulate import Simulation
from flwr_replay.errors import FlwrReplayError, RunError
from flwr_replay.files.tensors import digest, nested, unnested
from flwr_replay.finished.trained import load_model
from flwr_replay.forecast.forecast import expected, forecast, shares_of
from flwr_replay.institution.owner import Shard
from flwr_replay.learning.tasks import make_task
from flwr_replay.models.zoo import backbone
from flwr_replay.payloads.common import Evaluation, Present
from flwr_replay.report.progress import Display
from flwr_replay.rng import derived_seed
from flwr_replay.runs.execute import Job, execute
from flwr_replay.runs.opening import new_run_id
from flwr_replay.server.recorder import Recorder
from flwr_replay.wire.bounds import NEVER_NEGATIVE
from flwr_replay.wire.ledger import ledger_lines
from flwr_replay.wire.payload import CLIENT_APP_RAISED, REQUESTS
from flwr_replay.wire.recording import FOLDER, read_message
from flwr_replay.wire.records import StateDict, array_record, arrays_in, config_in, metrics_in, opened, undecoded
from flwr_replay.wire.weights import to_arrays

__all__ = ["check_strategy"]

JOB = ("task=digits", "partition=iid", "model=cnn", "model.width=4", "nodes=3", "rounds=2", "device=cpu")
OF_REPLAY, OF_OPTIONS = {"generator", "prior"}, {"statistics"}  # replay, or an option, declares their passes
SHRUNK = 0.01  # what is left of batch norm's variances after a long training on faint images
LONG = ("rounds=16", "evaluate_every=16")  # until a server's momentum shows
CLASSIFIERS = ("released", "kept", "none")
NEEDED = {"latents": ("latent_clip=1", "latent_epsilon=8", "label_epsilon=2")}  # options without a default
REPEATABLE = ("model.norm=group", "privacy.noise=seeded")  # under differential privacy: its noise is secret by default


def _shrunk(arrays: StateDict) -> StateDict:
    """Return the variances of batch norm among some arrays, as a long training on faint images leaves them."""
    return {name: SHRUNK * array for name, array in arrays.items() if name.endswith("running_var")}


class WatchedGrid(InlineGrid):
    """Counts bytes and messages in both directions; can make one node fail, and the others' variances shrink."""

    sent: int = 0
    failing: int | None = None

    @cached_property
    def messages(self) -> Counter[str]:
        """How many messages were sent, by their content."""
        return Counter()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, and count requests and replies."""
        requests = list(messages)
        for name, array in (item for request in requests for item in arrays_in(request.content).items()):
            assert not NEVER_NEGATIVE.fullmatch(name) or array.min(initial=0) >= 0, (
                f"variances must stay non-negative after the server's step; {name} is {array.min():.2g}: average "
                "running statistics as they came, as strategies/fedavgm.py does"
            )
        ids = list(super().push_messages(requests))
        replies = [self._replies[message_id] for message_id in ids]
        for message in [*requests, *(reply for reply in replies if reply.has_content())]:
            content = message.content
            self.sent += sum(record.count_bytes() for record in content.values())
            scalars = {**config_in(content), **metrics_in(content)}
            self.messages[_content(arrays_in(content), scalars)] += 1
        return ids

    def answer(self, message: Message) -> Message:
        """Answer a message; the node that is made to fail answers no training, and the others as after a long one."""
        if self.failing is None or message.metadata.message_type != "train":
            return super().answer(message)
        if message.metadata.dst_node_id == self.failing:
            return Message(Error(CLIENT_APP_RAISED, "made to fail"), reply_to=message)
        reply = super().answer(message)
        if reply.has_content() and (record := undecoded(reply.content)):
            sent, came = arrays_in(message.content), opened(record)
            record.update(array_record(_shrunk({name: sent.get(name, came[name]) for name in came})))
        return reply


class Evaluated(Recorder):
    """Keeps the last metrics by institution."""

    own: Mapping[str, Any] = {}

    def evaluated(self, exchange: int, pooled: dict[str, float], own: dict[str, dict[str, float]]) -> None:
        """Keep them."""
        self.own = own


class Breaking(Display):
    """Shows nothing; interrupts the run after a given exchange, if any."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after

    def exchange(self, exchange: int, metrics: dict[str, float], total_bytes: int, seconds: float) -> None:
        """Interrupt the run after the given exchange."""
        if exchange == self.stop_after:
            raise KeyboardInterrupt


def check_strategy(name: str, overrides: Sequence[str] = ()) -> None:
    """Check one strategy against the contract.

    Parameters
    ----------
    name : str
        The strategy's name, as in `strategy=<name>`.
    overrides : Sequence[str]
        Options added to those of the small job, `JOB`; a `model=` takes the place of its model.

    Raises
    ------
    AssertionError
        At the first clause that does not hold; the message names it.
    """
    try:
        allow(code_of(name))
        _check_declared(name)
        _check_mechanisms(name)
        _check_masked(name)
        with tempfile.TemporaryDirectory(prefix="flwr-replay-check-") as folder:
            _check_runs(name, Path(folder), overrides)
    except FlwrReplayError as error:
        raise AssertionError(f"a strategy must be found, and its jobs must run: {error}") from error


def _check_runs(name: str, folder: Path, overrides: Sequence[str]) -> None:
    given = any(word.startswith("model=") for word in overrides)
    small, repeatable = ([x for x in words if not (given and x.startswith("model"))] for words in (JOB, REPEATABLE))
    private = compose([f"strategy={name}", *small, *overrides]).privacy.dp != "none"
    job = [f"strategy={name}", *small, *(repeatable if private else ()), *overrides, f"runs_dir={folder}"]
    recorded = [*job, "run_name=whole", "record=all"]  # the other runs record nothing, and end with the same bits
    whole, grid, result = _run(recorded)
    _check_bytes(folder / "whole", grid, result)
    _check_recorded(folder / "whole", grid)
    _check_forecast(recorded, folder / "whole")
    _check_charges(job, folder / "whole")
    _check_dtypes(job, whole)
    _check_left(job, folder / "whole", result)
    _check_resumption(job, folder, whole, result)
    if not compose(job).hiding.sums_only:  # then an exchange needs all
        _check_failure([*job, "replay.missing=say", *LONG])


def _run(overrides: list[str], stop_after: int | None = None) -> tuple[StateDict, WatchedGrid, dict[str, Any]]:
    config = compose(overrides)
    grid = WatchedGrid.simulated(app, {"overrides": shlex.join(overrides)}, config.nodes)
    result, folder = execute(grid, config, Breaking(stop_after))
    return nested({file.stem: load_file(file) for file in _models(folder)}), grid, result


def _models(folder: Path) -> list[Path]:
    return sorted((folder / "models").glob("*.safetensors"))


def _same(first: StateDict, other: StateDict, what: str, advice: str = "") -> None:
    assert first.keys() == other.keys(), f"{what} must have the same weights by name"
    differing = [(a.dtype.kind != "f", key) for key, a in first.items() if a.tobytes() != other[key].tobytes()]
    assert not differing, f"{what} must end with the same bits; {min(differing)[1]} differs{advice}"


def _check_bytes(folder: Path, grid: WatchedGrid, result: dict[str, Any]) -> None:
    counted = sum(line["bytes"] for line in ledger_lines(folder))
    assert counted == grid.sent, f"the ledger's bytes must be those sent; it has {counted}, sent were {grid.sent}"
    assert result["bytes"]["up"] + result["bytes"]["down"] == grid.sent, "result.json must sum the ledger's bytes"


def _check_recorded(folder: Path, grid: WatchedGrid) -> None:
    named = {line["message"] for line in ledger_lines(folder) if "message" in line}
    recorded = [read_message(folder / FOLDER / name) for name in named]
    sent = Counter(_content(message.arrays, message.scalars) for message in recorded)
    assert sent == grid.messages, (
        f"recorded messages must be those sent; {sum((sent - grid.messages).values())} are others, "
        f"{sum((grid.messages - sent).values())} are missing"
    )


def _content(arrays: StateDict, scalars: Mapping[str, Any]) -> str:
    return f"{digest(arrays)} {json.dumps(scalars, sort_keys=True, default=bytes.hex)}"


def _check_forecast(overrides: list[str], folder: Path) -> None:
    expected: Counter[tuple[str, ...]] = Counter()
    for line in forecast(Simulation.of(compose(overrides))):
        expected[line.institution, line.direction, line.stage, line.field, line.kind] += line.bytes
    recorded: Counter[tuple[str, ...]] = Counter()
    for entry in ledger_lines(folder):
        key = (entry["institution"], entry["direction"], entry["stage"], entry["field"], entry["kind"])
        recorded[key] += entry["bytes"]
    differing = {key: (expected[key], recorded[key]) for key in expected | recorded if expected[key] != recorded[key]}
    assert not differing, f"the forecast must equal the ledger; they differ in {differing}"


def _check_declared(name: str) -> None:
    _ = load_strategy(name), load_client(name)  # both halves are found
    config = compose([f"strategy={name}"]).strategy
    assert isinstance(config.private_models, tuple), f"private_models must be a tuple; got {config.private_models!r}"
    assert config.unproven is None or isinstance(config.unproven, str), "unproven must be a sentence or None"
    assert config.classifiers in CLASSIFIERS, f"classifiers must be one of {CLASSIFIERS}; got {config.classifiers!r}"
    options, own = {field.name for field in fields(config)}, own_options("strategy", name)
    assert options == own, (
        f"conf/strategy/{name}.yaml must have the options of the config; they differ in {options ^ own}"
    )
    _check_names("files", config.files, options)
    instructions = {field for request in REQUESTS.values() for field in request.declared()}
    _check_names("chosen_later", config.chosen_later, options)
    _check_names("instructed", config.instructed, instructions)
    trained, passes = config.traits.dp_mechanisms, config.dp_passes(1)
    _check_names("dp_mechanisms", trained, MECHANISMS)
    _check_names("dp_passes", passes, MECHANISMS)
    whole = all(type(epochs) is int and epochs >= 0 for epochs in passes.values())
    assert whole, f"dp_passes must be whole numbers, none negative; got {dict(passes)}"
    lacking = sorted({*trained} - {name for name, epochs in passes.items() if epochs} - OF_REPLAY - OF_OPTIONS)
    assert not lacking, (
        f"dp_passes must have every mechanism that can be trained by DP-SGD; missing: {', '.join(lacking)}"
    )
    assert all(idea_of(name)), f"the text of strategies/{name}.py must have its Idea: and what Travels:"


def _check_names(declared: str, names: Iterable[str], known: Collection[str]) -> None:
    assert isinstance(names, tuple | Mapping), f"{declared} must be a tuple or a mapping; got {names!r}"
    unknown = [name for name in names if name not in known]
    assert not unknown, f"{declared} must have names among {', '.join(sorted(known))}; got {unknown}"


@cache
def _check_mechanisms(name: str) -> None:
    """Train every mechanism under DP, once for a strategy."""
    options = load_strategy(name)[1]
    without = OF_REPLAY | (OF_OPTIONS - {*options().dp_passes(1)})
    for mechanism in sorted({*options.traits.dp_mechanisms} - without):
        with tempfile.TemporaryDirectory(prefix="flwr-replay-check-") as folder:
            private = [f"dp={mechanism}", *NEEDED.get(mechanism, ())]
            job = [f"strategy={name}", *JOB, *REPEATABLE, "partition.size=100", *private, f"runs_dir={folder}"]
            _run([*job, "run_name=dp"])
            _check_charges(job, Path(folder) / "dp")


@cache
def _check_masked(name: str) -> None:
    """Compare masked weights with unmasked ones, once for a strategy that says that its server needs only the mean.

    Two rounds: what a server keeps beside the weights counts from the second on.
    """
    if not load_strategy(name)[1].traits.summed:
        return
    with tempfile.TemporaryDirectory(prefix="flwr-replay-check-") as folder:
        job = [f"strategy={name}", *JOB, "dp=none", "rounds=2", "partition=ks", f"runs_dir={folder}"]
        plain, _, _ = _run([*job, "run_name=plain"])
        masked, _, _ = _run([*job, "run_name=masked", "masked=true"])
        for line in ledger_lines(Path(folder) / "masked"):
            answer = REQUESTS[line["stage"]].answer
            if (
                line["direction"] == "up"
                and line["kind"] == "statistic"
                and not issubclass(answer, Present | Evaluation)
            ):
                assert answer.by_key()[line["field"]].public, (
                    f"under masks nothing of an institution's training leaves in clear but public counts; "
                    f"{line['field']} does: leave summed out of traits, or declare it withheld=True"
                )
    for key, array in plain.items():
        assert np.allclose(masked[key], array, rtol=1e-4, atol=1e-5 * max(1, np.abs(array).max(initial=0))), (
            f"summed is for methods whose server needs nothing but the weighted mean; under masks {key} is another: "
            "leave summed out of traits"
        )


def _check_charges(job: list[str], folder: Path) -> None:
    simulation = Simulation.of(compose(job))
    plan, partition = simulation.job.settings.privacy, simulation.partition
    if plan is None or plan.config.epsilon:  # a budget may be spent before the run ends
        return
    shares = shares_of(expected(simulation)[0], simulation.job.config.rounds)
    charged: Counter[str] = Counter()
    for (name, account), indices in zip(simulation.accounts(folder).items(), partition.train, strict=True):
        examples = sum(map(len, partition.train)) if plan.pooled else len(indices)
        steps: Counter[str] = Counter()
        for mechanism, cost in zip(account.mechanisms, account.spent, strict=True):
            steps[mechanism] += cost.steps
        for planned in plan.passes:
            mechanism = planned.mechanism
            due = planned.in_share(shares[name]).cost(examples, plan.config.sigma).steps
            assert steps[mechanism] in (0, due), (  # 0: another institution trains it, as FedReplay's encoder
                f"dp_passes must be the passes made; {planned.epochs} of {mechanism} are {due} steps, {name} was "
                f"charged for {steps[mechanism]}"
            )
        if plan.local:
            views = plan.local.views
            assert steps["latents"] == views, (
                f"an upload is charged once; {name} was charged {steps['latents']} of {views}"
            )
        charged += steps
    idle = [mechanism for mechanism in plan.mechanisms if not charged[mechanism]]
    assert not idle, f"mechanisms in dp= must be trained by DP-SGD; no institution was charged for {', '.join(idle)}"


def _check_dtypes(job: list[str], final: StateDict) -> None:
    config = compose(job)
    fresh = to_arrays(backbone(config.model, config.task)(0))
    for model, arrays in unnested(final).items():
        for key, array in fresh.items():
            dtype = arrays[key].dtype
            assert dtype == array.dtype, f"dtypes must be kept; {key} of {model} is {dtype}, was {array.dtype}"


def _check_left(job: list[str], folder: Path, result: dict[str, Any]) -> None:
    """Test again the models that the run has left, as `predict` finds them."""
    config = compose(job)
    simulation, traits = Simulation.of(config), load_strategy(result["strategy"])[0].traits()
    own = traits.own_models or config.strategy.classifiers == "kept"
    for k, name in enumerate(simulation.partition.names):
        if (folder / "models" / f"{name}.safetensors").exists():
            continue  # models that travel: this one may have begun here, and been tested elsewhere
        with contextlib.suppress(RunError):  # it has left none, and `predict` says so
            model = load_model(folder, name if own else "")
            task = make_task(model.task).scaled(model.mean, model.scale)
            test = Shard.of(simulation.partition.examples(loaded(model.task), k).test, torch.device("cpu"))
            again, reported = task.pool([task.evaluate(model.network, test.x, test.y)]), result["final"]["institutions"]
            differing = {key: value for key, value in again.items() if not np.isclose(value, reported[name][key], 1e-3)}
            assert not differing, (
                f"the model that a run leaves must be the one that {name} has tested; {differing} in place of "
                f"{ {key: reported[name][key] for key in differing} }: if institutions keep a part of it, say "
                'own_models=True in its traits, and self.save("model", …) all of it'
            )


def _check_resumption(job: list[str], folder: Path, whole: StateDict, result: dict[str, Any]) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        _run([*job, "run_name=broken"], stop_after=1)
    overrides = [*overrides_of(folder / "broken" / "config.yaml"), f"resume={folder / 'broken'}"]
    resumed, _, ended = _run(overrides)
    if digest(whole) != digest(resumed) or ended["final"] != result["final"]:  # which of two promises is broken?
        again, _, repeated = _run([*job, "run_name=again"])
        _same(whole, again, "two runs with the same seed")
        assert result["final"] == repeated["final"], "two runs with the same seed must have the same metrics"
    _same(whole, resumed, "a resumed run and an uninterrupted one", ": what a server keeps needs state and restore")
    first, other = ([file.read_bytes() for file in _models(folder / name)] for name in ("whole", "broken"))
    assert first == other, "a resumed run's models/ must have the same bytes, with the weights in the same order"
    for key in ("final", "examples-seen"):  # not the bytes, since the roll is called again
        assert ended[key] == result[key], f"a resumed run must report the same {key}; {ended[key]}, was {result[key]}"


def _check_failure(overrides: list[str]) -> None:
    """One institution fails, and the others go on; what the strategy was given stays as it was."""
    config, recorder = compose(overrides), Evaluated()
    fresh = to_arrays(backbone(config.model, config.task)(derived_seed(config.seed, "model")))
    initial = array_record({**fresh, **_shrunk(fresh)})  # small enough for a step of fixed size, such as Adam's
    before = {key: array.copy() for key, array in opened(initial).items()}
    grid = WatchedGrid.simulated(app, {"overrides": shlex.join(overrides)}, config.nodes)
    grid.failing = 3
    Job.of(config).strategy(new_run_id(config), recorder).start(grid, initial, config.rounds)
    named = {failure["institution"] for failure in recorder.failures}
    assert named == {"institution-2"} or not named, f"only the failing institution may be reported; got {named}"
    assert recorder.own, "the other institutions must continue"
    for key, array in opened(initial).items():
        assert np.array_equal(before[key], array), f"inputs must stay unchanged; initial_arrays[{key!r}] changed"
