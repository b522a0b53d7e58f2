"""Masked runs: the mean of an unmasked one, at a server that can read no institution's weights alone."""

import re
import weakref
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord
from harness import broken, command, same
from peers import NAMES, hospitals, run
from safetensors.numpy import load_file
from sealed_runs import pinned_keys, seal_of

from flwr_replay.check import check_strategy
from flwr_replay.config.compose import compose
from flwr_replay.config.hiding import Hiding
from flwr_replay.engines.inline import InlineGrid
from flwr_replay.engines.simulate import run_inline
from flwr_replay.errors import ConfigError, DivergedError, RunError
from flwr_replay.movements.parallel import Parallel
from flwr_replay.report.progress import Display
from flwr_replay.runs.execute import Job
from flwr_replay.wire.masked import MASKED, add, fixed_point, is_masked, mean_of
from flwr_replay.wire.records import arrays_in, opened

MASK = "masked=true"
DRAWS = ["replay=statistics", "model.train=head"]


def added(answers):
    total = {}
    for answer in answers:
        add(answer, to=total)
    return total


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    hospitals(folder)
    pinned_keys(folder)
    return folder


def masked(folder, *options, **script):
    return run(folder, *options, MASK, own=pinned_keys(folder), **script)


def model(ran):
    return load_file(ran.folder / "models" / "global.safetensors")


def sent(ran, stage="train"):
    """Return what institutions have sent in a run's first exchange, by name."""
    return {name: arrays_in(ran.grid.of(stage, name)[0][1].content) for name in NAMES}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [
        ["strategy=fedavg", "strategy.optimizer-state=keep"],
        ["strategy=fedprox", "mu=0.1"],
        ["strategy=fedavgm", "server-momentum=0.5"],
        ["strategy=fedsgd"],
        ["strategy=fedavg", "model=resnet34", "model.width=2", "rounds=1"],  # batch norm, and its counters
        ["strategy=fedavg", "split=validation"],
        ["strategy=scaffold", "rounds=3"],
        ["strategy=ditto"],
        ["strategy=fedavgm", *DRAWS],
        ["strategy=fml", "dp=none", "private-models=[lenet5]"],
        ["strategy=fml", "noise=seeded", "sigma=2", "delta=0.01"],
        ["strategy=fml", "dp=none", "alpha=0", "listen=pool", "private-epochs=1", "split=validation"],
    ],
)
def test_a_masked_run_has_the_mean_of_an_unmasked_one(folder, options):
    plain, ran = run(folder, *options), masked(folder, *options)
    assert not ran.result["failures"]
    for name, array in model(plain).items():
        assert array.dtype == model(ran)[name].dtype
        np.testing.assert_allclose(model(ran)[name], array, rtol=1e-5, atol=1e-6)


def test_no_institutions_weights_can_be_read_alone_nor_those_of_some(folder):
    """What leaves looks like random bytes, and only the sum of all four has a meaning."""
    plain, ran = sent(run(folder, "strategy=fedavg")), sent(masked(folder, "strategy=fedavg"))
    like = plain["a"]
    for name in NAMES:
        assert is_masked(ran[name])
        assert ran[name].keys() == {MASKED, *(f"{key}.{MASKED}" for key in plain[name])}
        masks = np.concatenate([np.ravel(array) for array in ran[name].values()]).view(np.uint8)
        assert np.histogram(masks, 8, (0, 256))[0].min() > masks.size / 8 / 1.5
    for k in (1, 2, 3):
        for some in combinations(NAMES, k):
            with pytest.raises(RunError, match="masks cancel only if all pinned institutions answer"):
                mean_of(added(ran[name] for name in some), like)
    mean = mean_of(added(ran.values()), like)
    for name, array in mean.items():
        np.testing.assert_allclose(array, np.mean([model[name] for model in plain.values()], axis=0), atol=1e-7)


def test_an_answer_that_is_taken_twice_is_in_the_sum_once(folder, monkeypatch):
    once, take = masked(folder, "strategy=fedavg"), Parallel.take
    monkeypatch.setattr(Parallel, "take", lambda *about: (take(*about), take(*about)))
    assert same(model(once), model(masked(folder, "strategy=fedavg")))


def test_numbers_of_any_size_and_sign_survive():
    like = {"x": np.zeros(4, np.float32), "n": np.zeros((), np.int64), "none": np.zeros((0, 3), np.float32)}
    ours = [{"x": np.float32([1e-8, -3.5, 1e5, -0.0]) * k, "n": np.array(k), "none": like["none"]} for k in (1, 2, 3)]
    still = {name: np.zeros(array.shape, np.int64) for name, array in like.items()}
    answers = [fixed_point(weights, n / 60, still) for weights, n in zip(ours, (10, 20, 30), strict=True)]
    mean = mean_of(added(answers), like)
    np.testing.assert_allclose(mean["x"], np.float32([1e-8, -3.5, 1e5, 0]) * 140 / 60, rtol=1e-6, atol=1e-12)
    assert (mean["n"], mean["n"].dtype, mean["none"].shape) == (2, np.int64, (0, 3))
    for wrong in (np.nan, np.inf, 2.0**20):
        spoiled = [fixed_point(ours[0] | {"x": np.array([0, 0, 0, wrong])}, 1, still) for _ in range(2)]
        assert [array.shape for array in spoiled[0].values()] == [array.shape for array in answers[0].values()]
        assert (spoiled[0][f"x.{MASKED}"] != spoiled[1][f"x.{MASKED}"]).all()
        with pytest.raises(DivergedError, match="those of an institution are not, and nothing says whose"):
            mean_of(added([answers[0], *spoiled]), like)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["fedavgm", "fedsgd"])
def test_a_run_whose_weights_diverge_says_so_and_not_whose(folder, strategy):
    with pytest.raises(DivergedError, match="those of an institution are not, and nothing says whose"):
        masked(folder, f"strategy={strategy}", "lr=1e30")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("at", "more"),
    [
        *((at, []) for at in [("train", "c", 2), ("train", "a", 1), ("evaluate", "b", 1)]),
        *((at, DRAWS) for at in [("summarise", "c", 1), ("keep-draws", "b", 1), ("train", "c", 1)]),
    ],
)
def test_a_masked_run_that_breaks_off_ends_with_the_same_bits(folder, at, more):
    """Institutions that have answered the exchange send the same bytes once more."""
    options = ["strategy=fedavg", "rounds=3", "strategy.optimizer-state=keep", *more]
    whole, resumed = masked(folder, *options), broken(masked, folder, *options, breaking=[at])
    assert same(model(whole), model(resumed))
    assert whole.result["final"] == resumed.result["final"]


@pytest.mark.parametrize(
    ("script", "more"),
    [
        ({"losing": [("train", "b", 2)]}, []),
        ({"failing": [("train", "b", 2)]}, []),
        ({"failing": [("summarise", "b", 1)]}, DRAWS),
    ],
)
def test_without_an_answer_the_run_says_whose_and_goes_on_when_all_are_there(folder, script, more):
    options, name = ["strategy=fedavg", "rounds=3", *more], f"without-b-{next(iter(script))}{len(more)}"
    with pytest.raises(RunError, match=r"needs every institution; exchange \d has no answer of b") as error:
        masked(folder, *options, name=name, **script)
    assert "resume the run when all are there" in str(error.value)
    resumed = masked(folder, *options, resume=str(folder / "runs" / name))
    assert same(model(masked(folder, *options)), model(resumed))


def test_under_dp_an_exchange_that_is_repeated_costs_nothing_so_the_budget_lasts_to_the_end(folder):
    options = ["strategy=fedsgd", "dp=gradient", "delta=0.001", "privacy.target-epsilon=2", "rounds=3"]
    options += ["privacy.noise=shared", "nodes=4"]
    with pytest.raises(RunError, match="exchange 2 has no answer of b"):
        masked(folder, *options, name="dp-without-b", failing=[("differentiate", "b", 2)])
    resumed = masked(folder, *options, resume=str(folder / "runs" / "dp-without-b"))
    assert {round(of["epsilon"], 2) for of in resumed.result["privacy"].values()} == {2.0}


def test_an_institution_that_was_not_there_from_the_start_is_missed(folder):
    with pytest.raises(RunError, match="masks cancel only if all pinned institutions answer the same request"):
        run(folder, "strategy=fedavg", MASK, own=pinned_keys(folder), names="abc")


def test_institutions_that_pin_others_are_left_out(folder):
    own = pinned_keys(folder) | {"d": pinned_keys(folder, "abcde")["d"]}
    with pytest.raises(RunError, match="masks cancel"):
        run(folder, "strategy=fedavg", MASK, own=own)


def test_both_ledgers_say_so(folder):
    ran = masked(folder, "strategy=fedavg")
    for entries in ([e for e in ran.ledger if e["direction"] == "up"], *(ran.own_ledger(name) for name in NAMES)):
        weights = [entry for entry in entries if entry["kind"] == "model"]
        assert weights
        assert {entry["protection"] for entry in weights} == {"masked"}
    [call] = {str(asked.content["config"]["sealed"]) for asked, _ in ran.grid.of("roll-call")}
    pins = {reply.content["config"]["pins"] for _, reply in ran.grid.of("roll-call")}
    assert (call, pins) == ("sums", {seal_of(folder, "a").digest})


def test_under_dp_the_ledger_has_the_epsilon_too(folder):
    ran = masked(folder, "strategy=fedavg", "dp=classifier", "sigma=2", "delta=0.01")
    protections = {e["protection"] for e in ran.ledger if e["direction"] == "up" and e["kind"] == "model"}
    assert all(protection.startswith("(") and protection.endswith("-DP, masked") for protection in protections)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("fedavg", []),
        ("fedsgd", []),
        ("fedavg", [*DRAWS, "model=gabor", "dp=statistics+classifier", "sigma=5", "delta=1e-4", "noise=seeded"]),
    ],
)
def test_a_masked_run_keeps_the_contract(name, more, monkeypatch, tmp_path):
    """The forecast is the ledger; a resumed run has the same bits."""
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    check_strategy(name, [MASK, "partition.size=60", *more])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["strategy=cwt"], "methods whose server averages weights and needs nothing else"),
        (["strategy=fedavgshare"], "methods whose server averages weights and needs nothing else"),
        (["strategy=proxyfl", "topology=complete"], "strategy=fml sums the proxies that proxyfl mixes by topology=co"),
        (["strategy=fml", "proxy-optimizer=travels"], "what is summed is a model alone; got strategy.proxy-optimizer"),
        (
            ["strategy=fml", "alpha=0", "listen=pool", "private-epochs=1", "split=test"],
            "set split=validation, or leave listen out",
        ),
        (["strategy=fedavg", "replay=vqvae2"], "got replay=vqvae2: leave replay out"),
        (["strategy=fedavg", "fraction=0.5"], "got fraction=0.5: leave fraction out"),
        (["strategy=fedavg", "evaluate-before-mixing=true"], "leave evaluate-before-mixing out"),
        (["strategy=fedavg", "forgetting=true"], "leave forgetting out"),
        (["strategy=fedavg", "nodes=2"], "at least three institutions; got nodes=2"),
        (
            ["strategy=fedavg", *DRAWS, "dp=statistics", "noise=shared", "delta=1e-4", "nodes=8", "dropouts=1"],
            "got privacy.dropouts=1: leave privacy.dropouts out",
        ),
    ],
)
def test_what_needs_more_than_the_mean_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Job.of(compose([*options, MASK]))


def test_the_command_of_the_page_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    page = (Path(__file__).parents[2] / "docs" / "masked.md").read_text()
    [line] = re.findall(r"```sh\n(flwr-replay .*)\n```", page)
    assert not command(monkeypatch, *line.split()[1:], "--runs-dir", str(tmp_path))
    assert "the server reads the mean of all institutions" in " ".join(capsys.readouterr().out.split())


def test_an_answer_that_is_not_under_masks_is_refused_and_the_other_way_round(folder):
    """A bad institution; the server's checks are of the form only."""
    from flwr.app import RecordDict

    from flwr_replay.errors import WireError
    from flwr_replay.payloads.common import Train, Trained
    from flwr_replay.server.answers import check_answer

    asked = Train(arrays={"x": np.zeros(2, np.float32)}, run="r", lr=0.1).encode()
    masks = fixed_point({"x": np.zeros(2)}, 1, {"x": np.zeros(2, np.int64)})

    def check(arrays, hidden):
        answer: RecordDict = Trained(arrays=arrays, num_examples=1, examples_seen=1, num_steps=1).encode()
        check_answer(answer, Trained, Train, asked, range(1, 2), Hiding.of(False, hidden))

    check(masks, True)
    check({"x": np.zeros(2, np.float32)}, False)
    for arrays, hidden in (
        ({"x": np.zeros(2, np.float32)}, True),
        (masks, False),
        ({**masks, "y.masked": np.zeros(2, np.uint64)}, True),
        ({"x.masked": masks["x.masked"]}, True),  # without the check
        ({**masks, "x.masked": np.zeros(3, np.uint64)}, True),
        ({**masks, "x.masked": np.zeros(2)}, True),
    ):
        with pytest.raises(WireError):
            check(arrays, hidden)
    assert MASKED in opened(masks)


@pytest.mark.parametrize("options", [[], [MASK], [MASK, "noise=shared", "dp=gradient", "epsilon=50", "delta=1e-5"]])
def test_masked_answers_are_not_held_until_all_are_there(tmp_path, monkeypatch, options):
    replies, held, answer = [], [], InlineGrid.answer

    def noted(grid, message):
        held.append(sum(reply() is not None for reply in replies))
        reply = answer(grid, message)
        replies.extend(weakref.ref(record) for record in reply.content.values() if isinstance(record, ArrayRecord))
        return reply

    monkeypatch.setattr(InlineGrid, "answer", noted)
    job = ["task=digits", "model=mlp", "partition.size=20", "nodes=6", "rounds=2", "evaluate_every=9"]
    run_inline([*job, "strategy=fedsgd", *options, f"runs_dir={tmp_path}"], Display())
    assert max(held) == (0 if options else 5)
