"""One run over a grid: plan it, build the strategy, start it, write the run directory."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from flwr.serverapp import Grid
from torch import nn

from flwr_replay.config.compose import model_named
from flwr_replay.config.halves import load_strategy
from flwr_replay.config.hiding import Hiding
from flwr_replay.config.run import RunConfig
from flwr_replay.config.sections import require
from flwr_replay.errors import refuse_all, refuse_each
from flwr_replay.files.atomic import alone, sweep
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.generators.synthesis import SynthesisPlan
from flwr_replay.learning.tasks import make_task
from flwr_replay.learning.training import select_device
from flwr_replay.models.pretrained import load_pretrained
from flwr_replay.models.zoo import backbone, described, encoder_digest
from flwr_replay.movements.base import Movement, Settings
from flwr_replay.payloads.common import Evaluation
from flwr_replay.privacy.claims import NOTHING, sentence
from flwr_replay.privacy.noise import noise_of
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.report.progress import Display
from flwr_replay.report.run_files import read_result
from flwr_replay.rng import derived_seed
from flwr_replay.runs.directory import RunDirectory
from flwr_replay.runs.opening import open_run, resumable, write_resume
from flwr_replay.runs.tracking import check_tracker
from flwr_replay.server.asking import unsaid_nodes
from flwr_replay.server.recorder import Recorder
from flwr_replay.wire.payload import REQUESTS
from flwr_replay.wire.records import array_record, opened
from flwr_replay.wire.weights import to_arrays

HIDDEN = {
    Hiding.SEALED: "The run is sealed: weights and images travel encrypted between the institutions, each of which has "
    "pinned the others' keys. Of these the server sees sizes only; every institution can read what the others send. "
    "Not hidden from the server: who exchanges with whom and when, numbers of examples, losses, metrics, w of PushSum.",
    Hiding.MASKED: "The weights that institutions send are under masks, which cancel in their sum: of the weights the "
    "server reads the mean of all institutions and no single one's, unless it has the keys of all the others. The "
    "mean, numbers of examples and metrics are not hidden from it, and the mean may tell of single examples.",
}
EVIDENCE = "That synthetic images lie far from real ones is evidence, and no guarantee."

ALIKE = (  # options that a strategy's settings have under the same name
    *("training", "nodes", "seed", "fraction", "evaluate_every", "split", "external", "evaluate_before_mixing"),
    *("forgetting", "timeout", "wait", "clinics", "hiding"),
)
NOT_DEPLOYED: Mapping[str, Any] = MappingProxyType({})

__all__ = ["Job", "claim", "execute", "network_of", "run_job", "settings_of"]


@dataclass(frozen=True)
class Job:
    """One run, composed, checked and planned."""

    config: RunConfig
    settings: Settings

    @classmethod
    def of(cls, config: RunConfig, names: Sequence[str] = ()) -> Self:
        """Plan a run, and refuse whatever can be refused before the institutions join.

        Parameters
        ----------
        config : RunConfig
            The resolved options.
        names : Sequence[str]
            The institutions' names, which only a simulation knows before the roll call.

        Raises
        ------
        ConfigError, TrainingError
            If the options do not fit each other.
        """
        check_tracker(config.tracking)
        job = cls(config, settings_of(config))
        method, synthesis = load_strategy(config.strategy.name)[0], job.settings.synthesis
        refuse_each(
            partial(method.check, config.strategy, job.settings, names),
            lambda: synthesis.check(names) if synthesis else None,
        )
        return job

    def strategy(self, run_id: str, recorder: Recorder | None = None) -> Movement:
        """Build the run's strategy; `run_id` is the run's id at the institutions."""
        strategy_type: type[Movement] = load_strategy(self.config.strategy.name)[0]
        return strategy_type(self.config.strategy, replace(self.settings, run=run_id), recorder)


def settings_of(config: RunConfig) -> Settings:
    """Return what a run's strategy needs in addition to its own options."""
    alike: dict[str, Any] = {name: getattr(config, name) for name in ALIKE}
    return Settings(
        **alike,
        roll_call=True,
        record="" if config.record == "none" else config.record,
        task=make_task(config.task),
        model=beginning(config),
        frozen=encoder_digest(config.model, config.task),
        private_models=tuple(backbone(model_named(name), config.task) for name in config.strategy.private_models),
        input_shape=(config.task.channels, config.task.size, config.task.size),
        device=select_device(config.device),
        replay_plan=ReplayPlan.of(config),
        synthesis=SynthesisPlan.of(config),
        privacy=PrivacyPlan.of(config),
    )


def beginning(config: RunConfig) -> Callable[[int], nn.Module]:
    """Return the builder of the server's initial model: fresh, or with the user's weights."""
    fresh, file = backbone(config.model, config.task), config.model.weights
    if config.model.everywhere:
        return fresh
    require(
        not file or load_strategy(config.strategy.name)[0].traits().begins_at_server,
        f"model.weights is read by the server, but strategy={config.strategy.name} begins with models of the "
        "institutions: remove one of the two options, or freeze what they share, model.train=head",
    )
    if not file:
        return fresh
    library, own_code = config.model.library, bool(config.model.build)
    return lambda seed: load_pretrained(fresh(seed), file, library, own_code)


def network_of(config: RunConfig) -> str:
    """Say what pretrained or frozen networks are, and when features are computed; empty if there are none."""
    text = described(config.model, config.task)
    if config.model.train != "all":
        how = f"anew in every step, since {config.features_anew}" if config.features_anew else "once"
        text += f" Institutions compute their features {how}."
    private = (described(model_named(name), config.task) for name in config.strategy.private_models)
    return " ".join([text, *(f"Private: {own}" for own in private if own)]).lstrip()


def claim(strategy: Movement) -> str:
    """Say what in a run is differentially private, by the declarations of its stages, and what seals or masks hide."""
    privacy, stages = strategy.settings.privacy, strategy.all_stages()
    if privacy is None:
        text = f"{NOTHING} {EVIDENCE}" if "train-piece" in stages else NOTHING
    else:
        text = sentence(privacy, {stage: REQUESTS[stage].answer for stage in stages})
    return f"{text} {HIDDEN.get(strategy.settings.hiding, '')}".rstrip()


def _noise(plan: PrivacyPlan, strategy: Movement, recorder: Recorder, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Return the planned noise of all that state an epsilon, by their numbers of examples and of rounds.

    Who stated one before the first checkpoint, and is absent since the run was resumed, has told no number.
    """
    counts = {member.name: member.num_examples for member in strategy.members.known}
    whole, times = sum(counts.values()), strategy.trainings(rounds)
    stating = [(name, whole if plan.pooled else counts[name]) for name in recorder.released if name in counts]
    return {name: noise_of(plan, examples, times.get(name, rounds) / rounds) for name, examples in stating}


def untrained(strategy: Movement) -> list[str]:
    """Return the institutions that were never drawn, or failed whenever they were; none without `fraction`.

    Where nothing goes on from an institution's last training, as in FedSGD, the server does not note who trained.
    """
    if strategy.settings.fraction == 1 or not strategy.exchanger.trained:
        return []
    return sorted(member.name for member in strategy.members.known if member.name not in strategy.exchanger.trained)


def without_best(strategy: Movement) -> str:
    """Say why the global model of the best round is not kept; empty: it is."""
    if strategy.evaluated is not Evaluation:
        return "institutions test their private models, which never leave them"
    if not strategy.settings.hiding.readable:
        return "the run was sealed, so the server cannot read any model"
    return "" if strategy.traits().global_model else "the method has no global model"


def execute(
    grid: Grid, config: RunConfig, display: Display, run_config: Mapping[str, Any] = NOT_DEPLOYED
) -> tuple[dict[str, Any], Path]:
    """Plan a run and run it over a grid; it returns what `run_job` returns."""
    return run_job(grid, Job.of(config), display, run_config)


def run_job(
    grid: Grid, job: Job, display: Display, run_config: Mapping[str, Any] = NOT_DEPLOYED
) -> tuple[dict[str, Any], Path]:
    """Run a planned run over a grid; return the content of `result.json`, and the run directory.

    The directory is made only here, once all checks that need no institution have passed.

    Parameters
    ----------
    grid : Grid
        Flower's, or `flwr_replay.engines.inline.InlineGrid`.
    job : Job
        The planned run; its option `resume` names the directory of a run to continue.
    display : Display
        Shows the progress.
    run_config : Mapping
        In a deployment, Flower's run config: the run directory keeps it, so that one command resumes the run.
    """
    refuse_all(unsaid_nodes(grid, job.settings.nodes))
    torch.set_num_threads(job.config.threads)
    config, run_id = open_run(job.config)
    stored = Path(config.runs_dir) / config.run_name / "result.json"
    if stored.exists() and (result := read_result(stored.parent))["rounds"] >= config.rounds:
        if result["rounds"] > config.rounds:
            text = "the run has done %s rounds, and is not made shorter: this is their result"
            logging.getLogger("flwr").info(text, result["rounds"])
        sweep(stored.parent)  # of a page that a killed process was writing
        return result, stored.parent  # a finished run is not run again
    fresh = job.settings.model
    assert fresh is not None
    first = array_record(to_arrays(fresh(derived_seed(config.seed, "model"))))
    engine = getattr(grid, "engine", "")  # of a cluster: what each machine has of state, it alone has
    with alone(stored.parent), resumable(stored.parent, config.rounds, deployed=bool(run_config), engine=engine):
        if run_config:
            write_resume(stored.parent, run_config)
        recorder = RunDirectory(config, display)
        strategy = job.strategy(run_id, recorder)
        recorder.no_best = without_best(strategy)
        if network := network_of(config):
            recorder.log(network)
            recorder.notes["network"] = network
        try:
            models = strategy.models_at_end(opened(strategy.start(grid, first, config.rounds).arrays))
            missing = strategy.replay.missing if strategy.replay else {}
            if names := untrained(strategy):
                recorder.notes["untrained"] = names
            if plan := job.settings.privacy:
                recorder.notes["noise"] = _noise(plan, strategy, recorder, config.rounds)
            if (scale := strategy.exchanger.label_scale) and not config.task.label_range:
                recorder.notes["label-scale"] = scale
            return recorder.finish(models, claim(strategy), missing), recorder.path
        finally:
            recorder.close()
