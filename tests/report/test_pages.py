"""Pages of runs, comparisons and studies: what they say, and that they are whole, accessible and escaped."""

import json
import re
import shutil
import subprocess

import pytest
from page import Page

from flwr_replay.api import Comparison
from flwr_replay.cli.main import app
from flwr_replay.engines.simulate import run_inline
from flwr_replay.errors import RunError
from flwr_replay.files.atomic import read_json, write_json
from flwr_replay.privacy.accounting import SampledGaussian, epsilon
from flwr_replay.report.pages import write_page
from flwr_replay.report.progress import Display
from flwr_replay.report.run_files import read_result, write_of, write_result
from flwr_replay.report.summary import confusion_of, summary, warnings
from flwr_replay.runs.listing import watch
from flwr_replay.studies.compare import compare_strategies

TINY = ["task=digits", "nodes=2", "rounds=2", "partition=majority", "model.width=4", "seed=3"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLWR_REPLAY_HOME", str(tmp_path_factory.mktemp("home")))
        place = tmp_path_factory.mktemp("runs")
        options = [
            *TINY,
            "strategy=fedavg",
            "dp=classifier",
            "target-epsilon=8",
            "model.norm=group",
            f"runs_dir={place}",
        ]
        return run_inline([*options[:-1], f"runs_dir={place}"], Display())


@pytest.fixture(scope="module")
def officer(tmp_path_factory):
    place = tmp_path_factory.mktemp("officer")
    policy = place / "policy.yaml"
    policy.write_text(
        "kinds: [statistic, model]\nmax-upload-mb: 0.0002\nmetrics: counted\n# <script>alert(1)</script>\n"
    )
    words = ["run", *TINY, "strategy=fedavg", "--dry-run", "--policy", str(policy), "--out", str(place / "page")]
    with pytest.raises(SystemExit) as ended:
        app(words, standalone_mode=False)
    assert ended.value.code == 1
    return place / "page"


def test_the_officers_page_says_what_is_refused_and_what_is_enforced(officer):
    file = officer / "officer.html"
    page, page_values = Page(file), json.loads((officer / "officer.json").read_text())
    assert page.faults == []
    assert file.stat().st_size < 1_000_000
    assert file.stat().st_mode & 0o077 == 0
    assert "institution-1 and institution-2 refuse some of the messages" in page.text
    assert "What each of institution-1 and institution-2 would be asked to send, by kind" in page.text
    assert page.text.count("would be asked to send, by kind") == 1
    assert page.text.count("Every field that") == 1
    assert "and those of their tests" in page.text
    assert {rule["verdict"] for rule in page_values["rules"]} == {"kept"}  # as the page says it
    assert "policy lets at most 0.0002 MB leave in one message" in page.text
    assert page_values["claim"] in page.text
    assert "# <script>alert(1)</script>" in page.text  # the policy as it is, escaped
    refused = {(field["stage"], field["field"]) for field in page_values["fields"] if field["verdict"] == "refused"}
    assert ("train", "arrays") in refused
    assert ("roll-call", "num-examples") in refused  # it announces weights that may not leave, so no run begins
    for line in page_values["fields"]:
        assert line["field"] in page.text


def test_a_run_ends_with_a_page_that_says_what_happened(ran):
    result, folder = ran
    file = folder / "report.html"
    page = Page(file)
    assert page.faults == []
    assert file.stat().st_size < 1_000_000
    assert file.stat().st_mode & 0o077 == 0
    tested = {name: sum(counts) for name, counts in confusion_of(folder).items()}
    sentence = f"accuracy is {result['final']['global']['accuracy']:.3f} over all {sum(tested.values())} test examples"
    assert f"At the end {sentence}" in page.text
    for name, count in tested.items():  # as the table has them
        assert f"{name} {sum(result['skew']['labels']['institutions'][name])} {count} " in page.text
    assert "Can 2 institutions whose labels differ" in page.text
    assert result["privacy-claim"] in page.text
    for name, account in result["privacy"].items():
        assert name in page.text
        assert str(account["mechanism"]) in page.text
        examples = sum(result["skew"]["labels"]["institutions"][name])
        (noise,) = result["noise"][name]
        q, steps, sigma = 32 / examples, examples // 32 * 2, noise["sigma"]
        assert (noise["sampling-rate"], noise["steps"], noise["clip"]) == (q, steps, 1.0)
        # what is stated must make the epsilon that is stated
        assert epsilon([SampledGaussian(q, sigma, steps)], account["delta"], "prv") == pytest.approx(account["epsilon"])
        shown = f"sigma {sigma:.3g}, clip C 1, sampling rate {q:.3g} (32 of {examples}), up to {steps} steps"
        assert f"classifier: {shown}" in page.text
        assert f"DP-SGD, Poisson sampling; classifier: {shown}" in summary(result, folder)
    first, last = (
        line["value"]
        for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        if (line["institution"], line["metric"]) == ("", "validation-loss")
    )
    by_round = f"Loss on the institutions' validation examples, by round: {first:.3f} after 1, {last:.3f} after 2."
    assert by_round in page.text  # a curve has no more to tell
    assert file.read_text().count("<svg") == 1
    assert "model: weights or gradients of a network." in page.text
    assert "All institutions took part in every exchange." in page.text
    assert f"flwr {result['versions']['flwr']}" in page.text
    assert "target_epsilon: 8" in page.text


def test_counts_on_the_page_are_those_of_the_run(ran):
    result, folder = ran
    confusion = confusion_of(folder)
    pooled = [sum(column) for column in zip(*confusion.values(), strict=True)]
    right = sum(pooled[at * 11] for at in range(10)) / sum(pooled)
    assert right == pytest.approx(result["final"]["global"]["accuracy"])
    rows = [sum(pooled[at * 10 : at * 10 + 10]) for at in range(10)]
    assert (
        f"always the most frequent label of all would have {max(rows) / sum(rows):.3f}"
        in Page(folder / "report.html").text
    )
    labels = result["skew"]["labels"]
    extremes = result["skew"]["classes"]["institutions"]
    for name, counts in labels["institutions"].items():
        assert max(counts) == extremes[name]["largest"]["examples"]


def test_what_others_wrote_is_escaped_and_failures_are_told(ran, tmp_path):
    folder = shutil.copytree(ran[1], tmp_path / "run")
    result = read_json(folder / "result.json")
    result["failures"] = [{"round": 1, "institution": "b", "reason": "<script>alert(1)</script>"}]
    write_json(folder / "result.json", result)
    page = Page(write_page(folder))
    assert page.faults == []
    assert "b, exchange 1: <script>alert(1)</script>" in page.text


def test_a_model_that_knows_one_class_only_and_an_exploded_loss_are_warned_of(ran, tmp_path):
    one_class = {"a": [5, 0, 4, 0], "b": [1, 0, 0, 0]}
    fine = {"metric": "accuracy", "final": {"global": {"loss": 0.5}}}
    (line,) = warnings(fine, one_class, [], {})
    assert line.startswith(
        "The model predicts class 0 for every example that it was tested on. It has learned nothing: try more rounds"
    )
    assert "predicts class ill for" in warnings(fine, one_class, ["ill", "well"], {})[0]
    masks = {"final": {"global": {"dice": 0.0, "loss": 0.5}}}
    assert "predicts background for every pixel" in warnings(masks, {"a": [9, 0, 3, 0]}, [], {})[0]
    assert warnings(fine, {"a": [5, 0, 0, 0]}, [], {}) == []  # no other class was there
    assert warnings(fine, {"a": [5, 1, 0, 3]}, [], {"a": 20}) == []
    for loss in (1789.0, float("nan"), float("inf")):
        assert len(warnings({**fine, "final": {"global": {"loss": loss}}}, {}, [], {})) == 1
    assert warnings(fine, {}, [], {"north": 19, "south": 2, "east": 20}) == [
        "Few test examples: north 19, south 2. Figures of so few say little."
    ]
    folder = shutil.copytree(ran[1], tmp_path / "run")
    write_of(folder, "confusion.json", {"round": 2, "institutions": {"a": [9, 0, 9, 0]}})
    assert "warning: The model predicts class 0" in summary(ran[0], folder)
    assert "The model predicts class 0" in Page(write_page(folder)).text


def test_balanced_accuracy_stands_beside_accuracy_where_labels_are_unequal(ran, tmp_path):
    result, folder = ran[0], shutil.copytree(ran[1], tmp_path / "run")
    balanced = result["final"]["global"]["balanced-accuracy"]
    own = result["final"]["institutions"]["institution-1"]
    live = "  ".join(map(str, watch(folder)))
    assert "labels are unequal" not in summary(result, folder)
    assert "balanced" not in live
    counts = [0] * 100
    counts[0], counts[11] = 9, 3
    write_of(folder, "confusion.json", {"round": 2, "institutions": {"a": counts}})
    sentence = (
        f"labels are unequal: always naming the most frequent label would have accuracy 0.7500; "
        f"this model has balanced-accuracy {balanced:.4f} (guessing: 0.5000)"
    )
    assert sentence in summary(result, folder)
    line = f"institution-1: {own['accuracy']:.4f}, balanced-accuracy {own['balanced-accuracy']:.4f}"
    assert line in summary(result, folder)
    judged = result["final"]["global"]["validation-balanced-accuracy"]
    assert f"balanced-accuracy {judged:.4f}, loss" in "  ".join(map(str, watch(folder)))
    page = Page(write_page(folder))
    assert f"Labels are unequal; this model's balanced-accuracy is {balanced:.3f}." in page.text
    assert "Balanced-accuracy on the institutions' validation examples, by round" in page.text


def test_a_deployments_page_says_that_labels_are_unknown(ran, tmp_path):
    folder = shutil.copytree(ran[1], tmp_path / "run")
    result = read_json(folder / "result.json")
    del result["skew"]
    write_json(folder / "result.json", result)
    text = Page(write_page(folder)).text
    assert "How labels differ is counted where all data lie in one place" in text
    assert "No label went to the server" in text
    line = {"round": 0, "institution": "north", "direction": "up", "stage": "encode", "field": "labels"}
    with (folder / "ledger.jsonl").open("a") as ledger:
        ledger.write(json.dumps({**line, "kind": "per-sample", "bytes": 9, "protection": "none"}) + "\n")
    write_result(folder, read_result(folder))
    assert "The labels of north went to the server, one for each example." in Page(write_page(folder)).text
    assert "training labels" not in summary(result, folder)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [["task=diabetes", "strategy=cwt"], ["task=digits", "strategy=cwt", "replay=vqvae2", "partition=majority"]],
)
def test_other_tasks_and_replays_have_pages_too(options, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    result, folder = run_inline([*options, "nodes=2", "rounds=1", "model.width=4", f"runs_dir={tmp_path}"], Display())
    page = Page(folder / "report.html")
    assert page.faults == []
    assert (folder / "report.html").stat().st_size < 1_000_000
    assert ("These show patients." in page.text) == ("replay=vqvae2" in options)
    assert ("Of single patients: " in page.text) == ("replay=vqvae2" in options)
    assert ("less is better" in page.text) == (not result["higher-is-better"])


def test_rounds_in_metrics_are_rounds_and_exchanges_stand_beside_them(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    options = [*TINY, "strategy=cwt", "rounds=3", f"runs_dir={tmp_path}"]
    _, folder = run_inline(options, Display())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {(line["round"], line["exchange"]) for line in lines} == {(1, 2), (2, 4), (3, 6)}
    assert (folder / "report.html").read_text().count("<svg") == 3  # accuracy and loss by round, accuracies


@pytest.mark.sampled(2, of="slow studies")
def test_a_comparison_and_a_study_have_pages(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    options = ["task=digits", "nodes=2", "rounds=1", "seeds=2", "model.width=4", "model.norm=group", "delta=1e-3"]
    names = ["fedavg:dp=classifier:sigma=2", "cwt"]
    _, report = compare_strategies(names, options, "", 1, tmp_path)
    folder = tmp_path / report["folder"]
    page = Page(folder / "report.html")
    assert page.faults == []
    assert "Which of 2 methods has the best accuracy over 2 seeds" in page.text
    assert "minus cwt, 95 %" in page.text
    assert "at delta 0.001 (dp=classifier)" in page.text
    assert "fedavg:dp=classifier:sigma=2: at the smallest institution, classifier: sigma" in page.text
    assert "choose delta=" not in page.text
    text = Comparison(folder, report, "").shown("latex")
    assert "epsilon " in text
    assert "& sigma " in text
    assert "nan" not in text.lower()
    before = (folder / "report.html").read_bytes()
    app(["report", str(folder), "--figures", str(figures := tmp_path / "figures")], standalone_mode=False)
    assert capsys.readouterr().out.splitlines()[-2:] == [str(figures), str(folder / "report.html")]
    assert "fedavg:dp=classifier:sigma=2: privacy.sigma=2" in page.text
    assert (folder / "report.html").read_bytes() == before
    drawn = {f"{name}.{form}" for name in ("compare", "curves", "epsilon") for form in ("svg", "pdf", "csv")}
    assert {file.name for file in figures.iterdir()} == drawn
    assert re.search(r'<td class="number"><a href="\.\./cwt-seed1/report.html">0\.\d{4}</a>', before.decode())
    assert write_page(folder.parent) == folder / "report.html"  # the only comparison of these runs
    for link in re.findall(r'<a href="([^"]+)"', before.decode()):
        assert (folder / link).is_file()
    shutil.copytree(folder, folder.with_name("other"))
    with pytest.raises(RunError, match=f"one comparison; .* has {folder.name}, other: give one"):
        write_page(folder.parent)
    (tmp_path / "compare.png").write_bytes((folder / "compare.png").read_bytes())
    file = tmp_path / "study-tiny.md"
    file.write_text("# Study: tiny\n\nText <script>.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n![alt](compare.png)\n")
    app(["report", str(file)], standalone_mode=False)
    assert capsys.readouterr().out.strip() == str(tmp_path / "study-tiny.html")
    text = (tmp_path / "study-tiny.html").read_text()
    assert "<td>1</td>" in text
    assert "&lt;script&gt;" in text
    assert 'src="data:image/png;base64,iVBOR' in text


def test_what_has_no_page_is_said_in_one_line(tmp_path):
    with pytest.raises(RunError, match=r"is none of these$"):
        write_page(tmp_path)
    (tmp_path / "compare.json").write_text("{}")
    with pytest.raises(RunError, match="must be as it was written"):
        write_page(tmp_path)


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs Chromium; Debian's package chromium has it")
@pytest.mark.parametrize("page", ["run", "officer"])
def test_chromium_shows_the_page_without_an_error(page, ran, officer, tmp_path):
    switches = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    shot, folder = tmp_path / "page.png", f"--user-data-dir={tmp_path / 'profile'}"
    shown = [
        f"--screenshot={shot}",
        "--window-size=400,900",
        "--enable-logging=stderr",
        (ran[1] / "report.html" if page == "run" else officer / "officer.html").as_uri(),
    ]
    done = subprocess.run(
        ["chromium", *switches, folder, *shown], capture_output=True, text=True, timeout=90, check=True
    )
    assert "CONSOLE" not in done.stderr
    assert shot.read_bytes().startswith(b"\x89PNG")


def test_tables_are_printed_whole(ran):
    printed = (ran[1] / "report.html").read_text().partition("@media print {")[2].partition("</style>")[0]
    assert ".scroll { overflow: visible; }" in printed  # what scrolls on a screen would be cut off on paper


def damaged(folder):
    """Yield ways in which a metrics.jsonl is damaged, and what the page must say."""
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    file = folder / "metrics.jsonl"
    file.write_bytes(b"".join([*lines[:2], b"\x00\x00\n", *lines[3:]]))
    yield f"metrics.jsonl is damaged: 1 line of {len(lines)} cannot be read"
    file.write_bytes(b"".join([*lines[:-2], lines[-2][:9]]))
    yield f"metrics.jsonl is damaged: 1 line of {len(lines) - 1} cannot be read"
    file.write_bytes(b'[1]\n{"round": "a"}\n' + b"".join(lines))
    yield f"metrics.jsonl is damaged: 2 lines of {len(lines) + 2:,} cannot be read"
    file.write_bytes(b"".join(line for line in lines if json.loads(line)["round"] == 1))
    yield "metrics.jsonl ends with round 1 of 2"
    file.write_bytes(b"")
    yield "metrics.jsonl ends with round 0 of 2"
    file.unlink()
    yield "metrics.jsonl is missing"


def test_a_torn_history_does_not_stop_the_page_which_says_what_it_lacks(ran, tmp_path):
    folder = shutil.copytree(ran[1], tmp_path / "torn")
    assert "The curves lack" not in Page(write_page(folder)).text
    for damage in damaged(folder):
        page = Page(write_page(folder))
        assert f"Warning. torn: {damage}. The curves lack that; the other figures are from result.json." in page.text
        assert page.faults == []


@pytest.mark.parametrize("name", ["report.html", "forgetting.png", "pictures"])
def test_a_page_or_picture_that_cannot_be_written_costs_no_run(tmp_path, monkeypatch, caplog, name):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    folder = tmp_path / "runs" / "x"
    options = [*TINY, "strategy=local", "forgetting=true", f"runs_dir={folder.parent}"]
    if name == "pictures":
        options += ["strategy=fedavg", "replay=vqvae2", "generator.width=4", "generator.epochs=1", "prior.epochs=1"]

    class Blocked(Display):
        def exchange(self, *progress):
            if name == "pictures":
                (folder / name).touch()
            else:
                (folder / name).mkdir(exist_ok=True)

    result, _ = run_inline([*options, "run_name=x"], Blocked())
    assert result == read_result(folder)
    assert result["skew"]
    line, *_ = [line for line in caplog.messages if "is not written" in line]
    assert line.startswith(f"{folder / name} is not written, all results are: ")
    again, _ = run_inline([*options, f"resume={folder}"], Display())
    assert again == result


def test_a_page_or_picture_that_cannot_be_written_costs_no_comparison(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    first = compare_strategies(["local"], [*TINY[:3], "seeds=1"], "", 1, tmp_path)[1]
    [folder] = [file.parent for file in tmp_path.rglob("compare.json")]
    for name in ("compare.json", "compare.png", "curves.png", "report.html"):
        (folder / name).unlink()
        if name != "compare.json":
            (folder / name).mkdir()
    assert compare_strategies(["local"], [*TINY[:3], "seeds=1"], "", 1, tmp_path)[1]["cells"] == first["cells"]
    assert read_json(folder / "compare.json")["cells"] == first["cells"]
    assert len([line for line in caplog.messages if "is not written, all results are: " in line]) == 3
