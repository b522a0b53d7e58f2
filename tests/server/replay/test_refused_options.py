"""Options of replay and privacy that cannot be: one line with the rule and what to do, before anything is made."""

import pytest
from replay_runs import JOB

from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError
from flwr_replay.report.progress import Display
from flwr_replay.runs.execute import execute

VQVAE2, PIXELCNN, GRADIENT = "replay=vqvae2", "replay=pixelcnn", "generator.codebook=gradient"
END_TO_END = [PIXELCNN, GRADIENT, "dp=end-to-end", "model.norm=group"]
MASKS = ["task=isbi2012", "task.size=16", "task.classes=1", "model=unet"]


@pytest.mark.parametrize(
    ("options", "rule", "hint"),
    [
        (["task=diabetes", "task.size=1", "classes=1", "model=mlp", VQVAE2], "task=diabetes has tables", "replay=none"),
        ([*MASKS, PIXELCNN], "task=isbi2012 has masks", "replay=vqvae2"),
        *[
            ([f"strategy={name}", VQVAE2], f"got strategy={name}", "fedprox")
            for name in ("central", "fedreplay", "local")
        ],
        (["dp=generator", GRADIENT], "dp=generator needs a generator; got replay=none", "replay=vqvae2"),
        ([VQVAE2, "dp=generator"], "running means do; got generator.codebook=ema", "codebook=gradient"),
        (["task=heart_disease", "dp=classifier"], "medians of the training rows", "another task"),
        (["task=retina", "balanced=true", "dp=classifier"], "task.balanced=true leaves patients out", "balanced=false"),
        (["dp=classifier"], "no layer may mix examples; conv1.norm", "model.norm=group"),
        (
            ["strategy=fedprox", "dp=classifier", "model.norm=group"],
            "strategy=fedprox can have dp=",
            "generator",
        ),
        (
            ["strategy=fedavgshare", PIXELCNN, GRADIENT, "dp=generator"],
            "fedavgshare can have dp=none",
            "another",
        ),
        (["dp=encoder"], "can have dp=classifier, with", "another strategy"),
        ([VQVAE2, GRADIENT, "dp=generator+prior"], "dp=prior needs a prior; got replay=vqvae2", "replay=pixelcnn"),
        ([*END_TO_END, VQVAE2], "dp=end-to-end lets no codes leave; got replay=vqvae2", "replay=pixelcnn"),
        ([*END_TO_END, "forgetting=true"], "does not cover metrics on training examples", "leave forgetting out"),
        (["dp=generater"], "must be one of none, generator, prior", "did you mean generator"),
        (["dp=generator+clasifier"], "got 'clasifier'", "did you mean classifier"),
        (["noise=hidden"], "must be one of secret, shared, seeded", "choose one"),
        ([VQVAE2, "replay.ratio=0"], "replay.ratio lies in (0, 100]; got 0", "lies in"),
        ([VQVAE2, "replay.codes=other"], "must be one of paper, last-pass, stale; got 'other'", "choose one"),
        (["replay=vqvae"], "unknown replay 'vqvae'", "did you mean vqvae2"),
    ],
)
def test_options_that_cannot_be_are_one_line(tmp_path, monkeypatch, options, rule, hint):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        execute(None, compose(["strategy=cwt", *JOB, *options]), Display())
    line = str(refused.value)
    assert rule in line
    assert hint in line
    assert "\n" not in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dp", ["none+generator", "end-to-end+generator", "generator+generator"])
def test_a_mechanism_is_named_once_and_alone_where_it_stands_for_all(tmp_path, monkeypatch, dp):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"privacy\.dp|dp="):
        execute(None, compose(["strategy=cwt", *JOB, VQVAE2, GRADIENT, f"dp={dp}"]), Display())
