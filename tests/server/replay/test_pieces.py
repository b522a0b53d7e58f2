"""Visits of the generator in many messages: the bits of one, whatever is killed or lost between them."""

from functools import cache

import pytest
from flwr.app import Error, Message
from grid import NEVER, nth
from harness import json_lines, same, write_shards
from replay_runs import FEW, SIZES, broken, run, simulated

from flwr_replay.config.compose import compose, overrides_of
from flwr_replay.engines.simulate import Simulation
from flwr_replay.files.tensors import read_tensors
from flwr_replay.forecast.forecast import forecast
from flwr_replay.server import pieces
from flwr_replay.wire.records import array_record, arrays_in, metrics_in

EACH_STEP = "generator.piece_seconds=1e-9"  # a message for every step, or block of steps under DP
PLAIN = ["strategy=cwt", "rounds=1", "generator.epochs=3", "replay.ratio=1.5"]
JOBS = {
    "vqvae2": [*PLAIN, "replay=vqvae2"],
    "pixelcnn": [*PLAIN, "replay=pixelcnn", "prior.epochs=2"],
    "under DP": [*PLAIN, "replay=pixelcnn", "codebook=gradient", "model.norm=group", "dp=end-to-end", "noise=seeded"],
}
DP_SIZES = {"a": 70, "b": 33, "c": 20}


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    folders = {}
    for name, sizes in {"vqvae2": SIZES, "pixelcnn": SIZES, "under DP": DP_SIZES}.items():
        folders[name] = tmp_path_factory.mktemp("hospitals")
        write_shards(folders[name], sizes)
    return folders


@pytest.fixture(scope="module")
def undivided_run(hospitals):
    """Return how a job runs, once, in which every training takes one message."""
    return cache(lambda job: run(hospitals[job], *JOBS[job]))


def check(undivided_run, many):
    """Compare all that a run has learned, and what it says of it."""
    assert same(undivided_run.weights, many.weights)
    kept = sorted(path.name for path in (undivided_run.folder / "replay").iterdir())
    assert kept == sorted(path.name for path in (many.folder / "replay").iterdir())
    for name in kept:
        assert same(*(read_tensors(ran.folder / "replay" / name) for ran in (undivided_run, many))), name
    histories = [json_lines(ran.folder / "generator.jsonl") for ran in (undivided_run, many)]
    assert histories[0] == histories[1]
    assert undivided_run.result["examples-seen"] == many.result["examples-seen"]
    assert undivided_run.result["final"] == many.result["final"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("job", JOBS)
def test_many_messages_give_the_bits_of_one(hospitals, undivided_run, job):
    """Each of them to a new process, as in a deployment."""
    many = run(hospitals[job], *JOBS[job], EACH_STEP, forgetful=True)
    check(undivided_run(job), many)
    assert not many.result["failures"]
    trainings = many.grid.of("train-generator", "a")
    steps = [metrics_in(reply.content)["steps"] for _, reply in trainings]
    assert steps == ([4, 8, 12] if job == "under DP" else [*range(1, 13)])  # 4 batches x 3 epochs
    assert ["arrays" in asked.content for asked, _ in trainings] == [True] + [False] * (len(steps) - 1)
    assert ["arrays" in reply.content for _, reply in trainings] == [False] * (len(steps) - 1) + [True]


@pytest.mark.sampled(2, of="slow replay")
def test_the_accounts_of_many_messages_state_what_those_of_one_do(hospitals, undivided_run):
    many = run(hospitals["under DP"], *JOBS["under DP"], EACH_STEP)
    for name in DP_SIZES:
        costs = [
            [(charge["mechanism"], charge["rate"], charge["sigma"], charge["steps"]) for charge in ran.charges(name)]
            for ran in (undivided_run("under DP"), many)
        ]
        assert costs[0] == costs[1]


@pytest.mark.sampled(2, of="slow replay")
def test_messages_between_the_first_and_the_last_say_numbers_of_steps_alone(hospitals):
    """The same with secret noise; without DP no loss either."""
    ran = run(hospitals["under DP"], *JOBS["under DP"][:-1], EACH_STEP)
    for stage in ("train-generator", "train-prior"):
        *between, (_, last) = ran.grid.of(stage, "a")
        assert between
        for _, reply in between:
            metrics = metrics_in(reply.content)
            assert {*metrics} == {"num-examples", "examples-seen", "steps", "steps-left", "epsilon", "delta"}
            assert {*reply.content} == {"metrics"}
        assert "arrays" in last.content
        assert "losses" not in metrics_in(last.content)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("job", "stage", "how"),
    [
        ("vqvae2", "train-generator", "breaking"),
        ("pixelcnn", "train-prior", "stopping"),
        ("under DP", "train-generator", "stopping"),
        ("under DP", "train-prior", "breaking"),
    ],
)
def test_a_server_that_breaks_off_between_messages_goes_on_where_the_institution_is(
    hospitals, undivided_run, job, stage, how
):
    ran = broken(hospitals[job], *JOBS[job], EACH_STEP, forgetful=True, **{how: nth((stage, "b", 2))})
    check(undivided_run(job), ran)
    (first, reply), *_ = ran.grid.of(stage, "b")
    assert "arrays" in first.content  # the server asks with the weights again; the institution goes on
    assert metrics_in(reply.content)["steps"] > (2 if job == "under DP" else 1)  # b has two full batches


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("job", "code", "seen"),
    [("vqvae2", 5, True), ("pixelcnn", 8, False), ("under DP", NEVER, True), ("under DP", 5, False)],
    ids=["its node is gone", "its app was killed", "too late", "its node is gone, under DP"],
)
def test_a_message_that_is_lost_is_sent_once_more(hospitals, undivided_run, job, code, seen):
    lost = nth(("train-generator", "b", 1), ("train-generator", "b", 3))

    def lose(grid, message, *reply):
        at = grid.asked[-1]
        return Message(Error(code, "gone"), reply_to=message) if lost(grid, at) else None

    script = {"after": lose} if seen else {"before": lose}
    ran = run(hospitals[job], *JOBS[job], EACH_STEP, "timeout=2", **script)
    check(undivided_run(job), ran)
    assert [failure["institution"] for failure in ran.result["failures"]] == ["b", "b"]
    if job == "under DP":
        steps = [sum(charge["steps"] for charge in job_run.charges("b")) for job_run in (undivided_run(job), ran)]
        assert steps[0] == steps[1]  # what was trained is not charged again


@pytest.mark.sampled(1)
@pytest.mark.parametrize("job", ["vqvae2", "pixelcnn"])
@pytest.mark.parametrize("node", ["the same node", "another node"])
def test_an_institution_that_is_gone_is_waited_for(hospitals, undivided_run, monkeypatch, job, node):
    """A SuperNode without a key comes back as another node."""
    monkeypatch.setattr(pieces, "PAUSE", 0.01)
    gone = {}

    def killed(grid, message):
        if nth(("train-generator", "b", 2))(grid, grid.asked[-1]):
            gone["for"], gone["node"] = 5, message.metadata.dst_node_id
            return Message(Error(5, "gone"), reply_to=message)
        return None

    def there(grid):
        if not gone.get("for"):
            return None
        gone["for"] -= 1
        if not gone["for"] and node == "another node":
            grid.contexts[1000] = grid.contexts.pop(gone["node"])
        return [node for node in grid.contexts if node != gone["node"]]

    ran = run(hospitals[job], *JOBS[job], EACH_STEP, before=killed, there=there)
    assert gone["for"] == 0
    check(undivided_run(job), ran)
    asked = [(at.stage, at.name) for at in ran.grid.asked]
    again = asked.index(("train-generator", "b"), asked.index(("train-generator", "b")) + 2)
    assert ("roll-call", "b") in asked[:again][-2:]


@pytest.mark.sampled(2, of="slow replay")
def test_an_institution_that_does_not_return_fails_its_visit_and_the_others_go_on(hospitals, monkeypatch):
    monkeypatch.setattr(pieces, "PAUSE", 0.01)

    def gone(grid, message):
        at = grid.asked[-1]
        lost = at[:2] == ("train-generator", "b") and grid.times(at.stage, at.name) > 1
        return Message(Error(5, "gone"), reply_to=message) if lost else None

    ran = run(hospitals["vqvae2"], *JOBS["vqvae2"], EACH_STEP, "replay.missing=say", before=gone)
    assert ran.result["replay-lacks"] == {"b": "is not replayed"}
    assert {failure["institution"] for failure in ran.result["failures"]} == {"b"}
    assert ran.grid.who("train") == ["a", "b", "c"]


def answering(change):
    """Change the second answer of b."""

    def after(grid, message, reply):
        if nth(("train-generator", "b", 2))(grid, grid.asked[-1]):
            change(message, reply.content)
        return reply

    return after


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda _, content: content["metrics"].update({"steps": 1}), "must train on to step 9"),
        (lambda _, content: content["metrics"].update({"steps-left": 10**6}), "must train on to step 9"),
        (lambda _, content: content["metrics"].update({"steps-left": 0}), "weights must come back as they were sent"),
        (lambda _, content: content["metrics"].update({"steps": 2.5}), "Generated.steps must be int"),
    ],
    ids=["no step", "without end", "no weights", "half a step"],
)
def test_an_answer_that_would_not_end_a_training_fails_the_visit(hospitals, change, says):
    ran = run(
        hospitals["vqvae2"], *JOBS["vqvae2"], EACH_STEP, "replay.missing=say", "rounds=2", after=answering(change)
    )
    assert says in ran.result["failures"][0]["reason"]
    assert ran.grid.who("train")


@pytest.mark.sampled(2, of="slow replay")
def test_weights_of_another_form_at_the_end_are_refused(hospitals):
    def wider(grid, message, reply):
        if grid.asked[-1][:2] == ("train-generator", "b") and "arrays" in reply.content:
            arrays = {name: array.astype("float64") for name, array in arrays_in(reply.content).items()}
            reply.content["arrays"] = array_record(arrays)
        return reply

    ran = run(hospitals["vqvae2"], *JOBS["vqvae2"], EACH_STEP, "replay.missing=say", after=wider)
    assert "weights must come back as they were sent" in ran.result["failures"][0]["reason"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("job", [["replay=vqvae2"], ["replay=pixelcnn"]], ids=["vqvae2", "pixelcnn"])
def test_a_forecast_is_exact_where_a_training_takes_one_message(tmp_path, job):
    """Where it takes more, the ledger has the further messages, which hold numbers alone."""
    data = ["task=digits", "partition=iid", "partition.size=40", "model.width=4"]
    forecasts = {}
    for seconds in (300, 1e-9):
        ran = simulated(tmp_path / str(seconds), *job, *data, f"generator.piece_seconds={seconds}")
        lines_of = forecast(Simulation.of(compose(overrides_of(ran.folder / "config.yaml"))))
        expected = {}
        for line in lines_of:
            key = (line.direction, line.stage, line.kind)
            expected[key] = expected.get(key, 0) + line.bytes
        forecasts[seconds] = {}
        for entry in ran.ledger:
            key = (entry["direction"], entry["stage"], entry["kind"])
            forecasts[seconds][key] = forecasts[seconds].get(key, 0) + entry["bytes"]
        more = {key for key in forecasts[seconds] if forecasts[seconds][key] != expected[key]}
        trains = {stage for _, stage, _ in more}
        if seconds == 300:
            assert not more
        else:
            assert trains == {"train-generator", "train-prior"} - ({"train-prior"} if "vqvae2" in job[0] else set())
            assert {kind for _, _, kind in more} == {"statistic", "instruction"}


def test_options_of_few_epochs_take_one_message_by_default(hospitals):
    ran = run(hospitals["vqvae2"], "strategy=cwt", *FEW, "replay=vqvae2")
    assert ran.grid.who("train-generator") == list("abc")
