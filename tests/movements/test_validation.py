"""split=validation: rounds are judged by held-out examples; the last round's model is tested, too."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hostile_server import HostileServer, refusal
from peers import NAMES, hospitals, run

from flwr_replay import run as simulate
from flwr_replay.config.compose import compose
from flwr_replay.data import load
from flwr_replay.data.dealt import dealt, loaded, pooled
from flwr_replay.data.subjects import divide
from flwr_replay.engines.simulate import run_inline
from flwr_replay.errors import DataError, RunError
from flwr_replay.finished.export import card
from flwr_replay.institution.owner import Institution
from flwr_replay.payloads.common import Evaluate
from flwr_replay.report.progress import Display
from flwr_replay.report.run_page import write_run_page
from flwr_replay.report.summary import confusion_of, summary
from flwr_replay.report.summary import tested_of as numbers
from flwr_replay.studies.compare import planned

VALIDATED = "split=validation"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    hospitals(folder)
    return folder


def splits(ran):
    lines = [json.loads(line) for line in (ran.folder / "ledger.jsonl").read_text().splitlines()]
    return [line["split"] for line in lines if line.get("split") and line["direction"] == "down"]


def test_rounds_are_judged_by_validation_examples_and_the_last_by_test_examples(folder):
    ran = run(folder, "strategy=fedavg", VALIDATED, "rounds=3")
    asked = [split for split in splits(ran) if split]
    assert asked.index("test") >= 2 * len(NAMES)  # in the last round only
    tested = run(folder, "strategy=fedavg", "split=test", "rounds=3")
    final = ran.result["final"]["global"]
    assert {"accuracy", "validation-accuracy", "loss", "validation-loss"} <= final.keys()
    assert {*tested.result["final"]["global"]} <= {*final}
    lines = [json.loads(line) for line in (ran.folder / "metrics.jsonl").read_text().splitlines()]
    assert {line["round"] for line in lines if line["metric"] == "validation-accuracy"} == {1, 2, 3}
    assert {line["round"] for line in lines if line["metric"] == "accuracy"} == {3}
    assert "validation examples" in ran.result["metrics-note"]
    assert "judged by test examples" in tested.result["metrics-note"]
    alone = run(folder, "strategy=local", VALIDATED, "rounds=1")
    assert "test examples only. Rounds are judged" in alone.result["metrics-note"]
    rounds = [line["value"] for line in lines if line["metric"] == "validation-accuracy" and not line["institution"]]
    assert rounds[-1] == final["validation-accuracy"]
    assert ran.result["best"]["validation-accuracy"] == max(rounds)
    counts = confusion_of(ran.folder)
    assert {name: sum(cells) for name, cells in counts.items()} == numbers(ran.folder)
    hits = sum(sum(cells[at * 3 + at] for at in range(3)) for cells in counts.values())
    assert hits / sum(numbers(ran.folder).values()) == pytest.approx(final["accuracy"])  # counts of test examples
    text, page = summary(ran.result, ran.folder), write_run_page(ran.folder).read_text()
    best = f"best {max(rounds):.4f} in round {ran.result['best']['round']}"
    assert f"accuracy {final['accuracy']:.4f} (test; validation {rounds[-1]:.4f}, {best})" in text
    assert f"Test examples were used only then; of validation examples accuracy is {rounds[-1]:.3f}" in page
    assert "validation" not in summary(tested.result, tested.folder)


def test_a_card_states_only_metrics_of_the_examples_that_it_names(tmp_path):
    ran = simulate(
        task="digits", nodes=2, partition="iid", strategy="fedavg", rounds=1, external=True, runs_dir=tmp_path
    )
    last, best = card(ran.folder, ran.model(), ""), card(ran.folder, ran.model(), "", best=True)
    assert "- On all institutions' test examples: accuracy" in last
    assert "validation-" not in last
    assert "external-accuracy" in last
    assert "- On all institutions' validation examples: validation-accuracy" in best
    assert "external-" not in best


def test_further_tests_on_test_examples_wait_for_the_last_round_too(tmp_path):
    """External examples are others' test examples; before mixing, each name says which examples it is of."""
    options = {"task": "digits", "nodes": 3, "partition": "iid", "strategy": "fedavg", "rounds": 3, "external": True}
    options |= {"evaluate_before_mixing": True, "runs_dir": tmp_path}
    ran, tested = simulate(**options), simulate(**options, split="test")
    lines = [json.loads(line) for line in (ran.folder / "ledger.jsonl").read_text().splitlines()]
    asked = {(line["round"], line["split"]) for line in lines if line.get("split") and line["direction"] == "down"}
    assert asked == {*((n, "validation") for n in (1, 2, 3)), (3, "test"), (3, "external")}
    final = ran.result["final"]["global"]
    assert {*tested.result["final"]["global"]} <= {*final}
    assert final["validation-before-mixing-loss"] != final["before-mixing-loss"]
    at = {}
    for line in map(json.loads, (ran.folder / "metrics.jsonl").read_text().splitlines()):
        at.setdefault(line["metric"], set()).add(line["round"])
    assert at["validation-before-mixing-accuracy"] == {1, 2, 3}
    assert at["before-mixing-accuracy"] == at["external-accuracy"] == at["accuracy"] == {3}


def test_the_examples_are_nobody_elses():
    options = ["task=digits", "partition=iid", "nodes=3"]
    plain, held = compose([*options, "split=test"]), compose(options)
    before, after = load(plain.task), load(held.task)
    assert before.val is None
    assert 0.07 < len(after.val) / len(before.train) < 0.13
    assert len(after.train) + len(after.val) == len(before.train)
    np.testing.assert_array_equal(after.test.x, before.test.x)
    dealing = dealt(held.task, held.partition, 3, 0)
    owned = [dealing.examples(loaded(held.task), k) for k in range(3)]
    assert sum(len(dataset.val) for dataset in owned) == len(after.val)
    assert len(pooled(held.task, held.partition, 3, 0, loaded(held.task)).train) == len(after.train)


def test_an_institutions_examples_have_its_own_mix():
    """As many as a tenth of its own images would be: a hospital has no others."""
    config = compose(["task=digits", "partition=majority", "majors=random", "partition.size=90", "nodes=4"])
    dealing = dealt(config.task, config.partition, 4, 0)
    for k in range(4):
        own = dealing.examples(loaded(config.task), k)
        major = np.bincount(own.train.y).argmax()
        assert 6 <= len(own.val) <= 16
        assert 0.6 < np.mean(own.val.y == major) < 0.95


def test_a_further_example_moves_no_other(tmp_path):
    """Neighbouring data differ by one example: else no epsilon would be of one example."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (61, 8, 8), dtype=np.uint8), np.arange(61) % 3
    outcomes = []
    for n in (60, 61):
        arrays = {"train_images": x[:n], "train_labels": y[:n, None], "test_images": x[:9], "test_labels": y[:9, None]}
        np.savez(tmp_path / "made.npz", **arrays)
        options = ["task=medmnist", f"task.data_dir={tmp_path}/made.npz", "task.size=8", "classes=3", VALIDATED]
        data = load(compose(options).task)
        outcomes.append({row.tobytes() for row in data.val.x})
        assert len(data.val)
    assert len(outcomes[1] - outcomes[0]) <= 1
    assert outcomes[0] <= outcomes[1]


def test_a_patients_images_are_held_out_together(tmp_path):
    from PIL import Image

    rng = np.random.default_rng(0)
    lines = ["image,label,patient"]
    for n in range(90):
        Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(tmp_path / f"{n}.png")
        lines.append(f"{n}.png,{n % 2},p{n // 3}")
    (tmp_path / "manifest.csv").write_text("\n".join(lines) + "\n")
    base = ["task=folder", f"task.data_dir={tmp_path}", "task.size=8", "task.channels=1", "task.classes=2"]
    plain, held = load(compose([*base, "split=test"]).task), load(compose(base).task)
    assert len(held.val) % 3 == len(held.train) % 3 == 0
    assert len(held.val) >= 3
    np.testing.assert_array_equal(held.test.x, plain.test.x)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [
        ["strategy=fedavg"],
        ["strategy=proxyfl", "listen=pool", "alpha=0", "private-epochs=1", "dp=none"],
        ["strategy=fedreplay"],
    ],
)
@pytest.mark.parametrize("validating", [0, 1])
def test_an_institution_without_validation_examples_is_tested_at_the_end(tmp_path, monkeypatch, options, validating):
    from PIL import Image

    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    rng, lines = np.random.default_rng(0), ["image,label,split"]
    for n in range(24):
        Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(tmp_path / f"{n}.png")
        lines.append(f"{n}.png,{n % 2},{'test' if n > 17 else 'val' if n == 17 and validating else 'train'}")
    (tmp_path / "manifest.csv").write_text("\n".join(lines) + "\n")
    task = ["task=folder", f"task.data-dir='{tmp_path}'", "task.size=8", "task.channels=1", "task.classes=2"]
    job = [*task, "partition=iid", "nodes=3", "rounds=2", "model=mlp", "model.width=4", f"runs_dir='{tmp_path}'"]
    if not validating:
        monkeypatch.setattr(Institution, "validation", None)
    result, folder = run_inline([*job, *options], Display())
    assert result["failures"] == []
    own = result["final"]["institutions"]
    assert sum("validation-accuracy" in metrics for metrics in own.values()) == validating
    assert all("accuracy" in metrics for metrics in own.values())
    assert len(own) == 3
    first = summary(result, folder).splitlines()[0]
    assert f": accuracy {result['final']['global']['accuracy']:.4f}" in first
    sentence = "Few validation examples judged the rounds, 1 in all" if validating else "No institution has validation"
    assert f"warning: {sentence}" in summary(result, folder)
    assert write_run_page(folder).exists()


def test_a_run_whose_test_examples_nobody_could_test_is_no_result(folder, monkeypatch):
    """Else the metrics of validation examples would pass for those of test examples."""
    answer = Institution.shard

    def refusing(self, split):
        if split == "test":
            raise DataError("no test examples today")
        return answer(self, split)

    monkeypatch.setattr(Institution, "shard", refusing)
    with pytest.raises(RunError, match="no institution could evaluate the last round"):
        run(folder, "strategy=fedavg", VALIDATED, "rounds=1")


def test_an_institution_tests_on_them_only_where_the_run_says_so(folder):
    server = HostileServer(folder, "strategy=fedavg", "split=test")
    assert "split=validation" in refusal(server.send(Evaluate(arrays=server.weights, run="r", split="validation")))


def test_a_comparison_is_of_test_examples(tmp_path):
    options = ["task=digits", "partition=iid", VALIDATED, "seeds=2"]
    plan = planned(["fedavg", "cwt"], options, "", tmp_path)
    assert plan.about["metric"] == "accuracy"
    assert planned(["fedavg", "cwt"], options, "", tmp_path, "validation-loss").about["higher-is-better"] is False
    assert planned(["ditto"], options, "", tmp_path, "global-loss").about["higher-is-better"] is False
    assert plan.about["higher-is-better"]


def test_one_site_alone_holds_out_what_it_does_among_all(tmp_path):
    """What a deployment rests on: each institution reads its own rows, a simulation reads all of them."""
    from PIL import Image

    rng, rows = np.random.default_rng(1), {"a": [], "b": [], "c": []}
    for n in range(120):
        site = "abc"[n % 3]
        Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(tmp_path / f"{n}.png")
        split = ("val" if n % 9 == 1 else "test" if n % 9 == 4 else "train") if site == "b" else "test" * (n % 7 == 0)
        rows[site].append(f"{n}.png,{n % 2},{site},{split or 'train'}")  # only b has a validation split of its own
    base = ["task=folder", f"task.data_dir={tmp_path}", "task.size=8", "task.channels=1", "task.classes=2"]
    options = [*base, "partition=natural", "nodes=3", VALIDATED]

    def read(lines):
        (tmp_path / "manifest.csv").write_text("\n".join(["image,label,site,split", *lines]) + "\n")
        return load(compose(options).task)

    whole = read([line for lines in rows.values() for line in lines])
    for site, lines in rows.items():
        alone = read(lines)
        for split in ("train", "val", "test"):
            among = getattr(whole, split)
            np.testing.assert_array_equal(getattr(alone, split).x, among.x[among.sites == site])
            assert len(getattr(alone, split))


def test_subjects_of_one_stratum_do_not_move_another():
    task = replace(
        compose(["task=retina", "task.data_dir=none", VALIDATED]).task, train_size=0, val_size=0, test_size=0
    )
    task = replace(task, balanced=False)
    names = [f"s{n}" for n in range(150)]
    strata = ["a" if n % 3 else "b" for n in range(150)]
    whole = divide(names, strata, task, None)
    own = [n for n in range(150) if strata[n] == "a"]
    alone = divide([names[n] for n in own], ["a"] * len(own), task, None)
    for split in ("train", "val", "test"):
        assert {names[own[n]] for n in alone[split]} == {names[n] for n in whole[split] if strata[n] == "a"}
        assert len(alone[split])
