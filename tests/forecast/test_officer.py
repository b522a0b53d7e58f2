"""The officer's page says what the guard then does, in a real run under the same policy."""

import json
import re
from collections import Counter

import pytest
from harness import command, node_configs, run, write_shards
from torch import rand
from torchvision.utils import save_image

from flwr_replay.config.compose import compose
from flwr_replay.data.dealt import loaded
from flwr_replay.errors import ConfigError, RefusedError
from flwr_replay.files.lines import add_line
from flwr_replay.forecast.officer import NOT_IN_IT, findings, planned, study_options
from flwr_replay.report.officer_page import sums, write_officer_page
from flwr_replay.runs.options import INLINE_NODES
from flwr_replay.state.counts import FILE

TASK = ["task=medmnist", "task.size=8", "classes=3", "model=mlp", "model.width=6", "batch_size=8", "device=cpu"]
CUT = ["strategy=fedreplay", "cut=hidden1", "encoder_epochs=1", "rounds=2"]


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    write_shards(folder, {"a": 40, "b": 30, "c": 20})
    (folder / "study").mkdir()
    (folder / "study" / "pyproject.toml").write_text(
        '[tool.flwr.app.config]\nstrategy = "fedreplay"\nnodes = 3\nrounds = 2\nrun-name = "mine"\n'
        f'overrides = "{" ".join([*TASK, *CUT[1:3]])} partition=natural"\n'
    )
    return folder


def page_and_run(hospitals, policy):
    """Return what the page finds for a, from its own file alone, and the run of all three under that policy."""
    file = hospitals / f"policy-{len(policy)}.yaml"  # one process keeps what it has read
    file.write_text(policy)
    options = [*study_options(hospitals / "study"), f"data_dir={hospitals / 'a.npz'}"]
    verdicts = findings(*planned(options, ["a"]), file)
    nodes = [node | {"policy": str(file)} for node in node_configs(hospitals, hospitals / "state", "abc")]
    return verdicts, lambda: run(hospitals, [*TASK, *CUT], nodes)


def test_allowed_fields_are_those_that_left_with_their_bytes(hospitals):
    verdicts, deployed = page_and_run(hospitals, "metrics: counted\nstrategies: [fedreplay]\n")
    assert verdicts["allowed"]
    assert list(verdicts["institutions"]) == ["a"]
    expected = Counter()
    for line in verdicts["fields"]:
        if line["verdict"] == "allowed":
            expected[line["stage"], line["field"], line["kind"]] += line["bytes"]
    left = Counter()
    for line in deployed().own_ledger("a"):
        left[line["stage"], line["field"], line["kind"]] += line["bytes"]
    assert left == expected
    kept = [line["field"] for line in verdicts["fields"] if line["verdict"] == "kept here"]
    assert {"loss", "train-loss"} <= set(kept)
    meaning = {line["field"]: line["meaning"] for line in verdicts["fields"]}
    assert meaning["latents"] == "activations, a row for each example"
    assert all(meaning.values())
    assert (meaning["arrays"], meaning["epochs"][:6]) == ("weights", "epochs")


def test_a_clinic_that_knows_no_sizes_of_others_is_told_of_the_largest_sums(hospitals):
    """By its own few examples alone the head would be of class means, which need no products."""
    own = [*study_options(hospitals / "study"), f"data_dir={hospitals / 'a.npz'}"]
    stats = ["strategy=fedstats", "model=gabor", "model.train=head", "dp=statistics", "target-epsilon=1", "split=test"]
    options = [option for option in own if not option.startswith(("strategy", "model", "cut", "encoder"))]
    sent = {}
    for head in ("auto", "lda", "means"):
        fields = findings(*planned([*options, *stats, f"head={head}", "delta=1e-3"], ["a"]), None)["fields"]
        sent[head] = sum(line["bytes"] for line in fields if line["field"] == "arrays")
    assert sent["means"] < sent["auto"] == sent["lda"]


def test_a_test_of_too_few_examples_is_refused_on_the_page_too(hospitals, tmp_path):
    (tmp_path / "policy.yaml").write_text("min-count: 20\nmax-evaluations: 9\n")
    own = [*study_options(hospitals / "study"), f"data_dir={hospitals / 'a.npz'}", "strategy=fedavg"]
    options = [option for option in own if not option.startswith(("cut", "encoder", "strategy=fedreplay"))]
    found = findings(*planned(options, ["a"]), tmp_path / "policy.yaml")
    tested = [line for line in found["fields"] if line["stage"] == "evaluate"]
    assert {line["verdict"] for line in tested} == {"refused"}
    assert all("fewer than 20 examples were tested" in line["reason"] for line in tested)
    assert "allowed" in {line["verdict"] for line in found["fields"] if line["stage"] == "train"}


USED_UP = "of all runs together 4 may leave (max-evaluations); they are used up"


def test_a_refusal_has_the_words_that_the_institution_then_sends(hospitals, tmp_path):
    verdicts, deployed = page_and_run(hospitals, "kinds: [statistic]\n")
    assert "that would come down only the roll call does." in sums(verdicts)[0]
    left = {line["field"]: line["bytes"] for line in verdicts["fields"] if line["verdict"] == "allowed"}
    assert set(left) == {"name"}  # as the headline says, and the sums
    assert f" {left['name']} B may leave; " in sums(verdicts)[0]
    asked = {line["field"]: line["reason"] for line in verdicts["fields"] if line["stage"] == "roll-call"}
    assert asked == {"name": "", "num-examples": NOT_IN_IT, "raw-bytes": NOT_IN_IT, "proof": NOT_IN_IT}
    page = write_officer_page(tmp_path, verdicts)[0].read_text()
    assert "<details open><summary>Every field" in page
    assert page.count("takes no part. Nothing leaves but the name") == 1
    assert "`" not in page.partition("</style>")[2].partition("<h2>Policy")[0]
    held = dict(re.findall(r">what stage ([\w-]+) sends</t.>\s*<td>(\w+)", page))
    assert (held["roll-call"], held["extract"]) == ("kept", "broken")
    (row,) = re.findall('<th scope="row">per-sample</th>(.*)</tr>', page)
    assert re.findall("<td.*?>(.*?)</td>", row)[0] == ""  # nothing is allowed
    assert not verdicts["takes-part"]
    assert not verdicts["allowed"]
    reason, encoding = [finding["reason"] for finding in verdicts["rules"] if finding["verdict"] == "broken"]
    assert "Encoder.arrays is model" in encoding  # only the institution that trains the encoder is asked for it
    assert "Latents.latents is per-sample" in reason
    with pytest.raises(RefusedError, match="no institution takes part") as refused:
        deployed()
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("written", "place", "reason"),
    [
        (
            "max-evaluations: 2\n",
            "state/clinic",
            "policy allows 2 tests in a run (max-evaluations); this run asks for 4: ",
        ),
        ("min-count: 2\nmax-evaluations: 4\n", "state/clinic", USED_UP),
        ("min-count: 2\nmax-evaluations: 4\n", "home/state/a", USED_UP),
    ],
)
def test_a_run_with_more_tests_than_are_left_is_refused_whole(hospitals, tmp_path, monkeypatch, written, place, reason):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    policy, state = tmp_path / "policy.yaml", tmp_path / place
    policy.write_text(written)
    state.mkdir(parents=True)
    add_line(state / FILE, {"test": "1", "run": "an earlier one"})
    words = [*TASK, "strategy=fedavg", "nodes=3", "rounds=3", "partition=natural", f"data_dir={hospitals / 'a.npz'}"]
    verdicts = findings(*planned(words, ["a"]), policy)
    assert [rule["rule"] for rule in verdicts["rules"] if reason in rule["reason"]]
    assert not verdicts["takes-part"]
    page = write_officer_page(tmp_path, verdicts)[0].read_text()
    heads = re.findall(">([^<>]+)</th>", page.split("by kind</span>")[1].split("<tbody")[0])
    assert heads == ["kind", "allowed", "refused", "what it is"]  # nothing is kept here


def test_names_and_studies_that_do_not_fit_are_refused(hospitals, monkeypatch, capsys):
    options = [*study_options(hospitals / "study"), f"data_dir={hospitals / 'a.npz'}"]
    assert not any(option.startswith("run") for option in options)
    with pytest.raises(ConfigError, match="one institution's"):
        planned(options, ["a", "b"])
    with pytest.raises(ConfigError, match="a name has letters"):
        planned(options, ["../a"])
    with pytest.raises(ConfigError, match="--study must be a folder"):
        study_options(hospitals)
    words = ["strategy=fedavg", "task=digits", "model=mlp", "partition=iid", "rounds=1"]
    assert len(planned(words, [])[1]) == INLINE_NODES  # as `run` takes
    assert command(monkeypatch, "run", "--study", str(hospitals / "study")) == 2
    assert "belong to --dry-run" in capsys.readouterr().err


@pytest.mark.parametrize("sites", [["ward 1"], ["ward 1", "ward 2"], ["a"]])
def test_a_clinics_manifest_may_have_a_column_site(sites, tmp_path):
    """At its node the folder is one institution's, whatever the column says."""
    rows = ["image,label,site"]
    for number in range(20):
        save_image(rand(1, 8, 8), tmp_path / f"{number}.png")
        rows.append(f"{number}.png,{'ill' if number % 3 else 'well'},{sites[number % len(sites)]}")
    (tmp_path / "manifest.csv").write_text("\n".join(rows) + "\n")
    task = ["task=folder", f"data_dir={tmp_path}", "channels=1", "task.size=8", "classes=2", "partition=natural"]
    model = ["model=mlp", "model.width=6", "batch_size=8", "device=cpu", "rounds=1", "strategy=fedavg", "nodes=3"]
    options = [*task, *model, "task.class_names=[ill,well]"]
    verdicts = findings(*planned(options, ["a"]), None)
    assert list(verdicts["institutions"]) == ["a"]
    assert verdicts["institutions"]["a"]["examples"] == len(loaded(compose(options).task).train)  # as its node reads it
    assert verdicts["others-unknown"]


@pytest.mark.parametrize("strategy", ["fedavg", "proxyfl"])
def test_a_clinic_that_knows_no_other_name_is_told_of_every_round(hospitals, strategy, tmp_path):
    dp = "dp=proxy" if strategy == "proxyfl" else "dp=classifier"
    job = [
        *TASK,
        f"strategy={strategy}",
        dp,
        "partition=natural",
        "nodes=3",
        "rounds=3",
        f"data_dir={hospitals / 'a.npz'}",
    ]
    drawn, whole = (findings(*planned([*job, *more], ["a"]), None) for more in (["fraction=0.34"], []))
    assert drawn["fields"] == whole["fields"]
    assert {line["messages"] for line in drawn["fields"] if line["field"] == "epsilon"} == {3}
    pages = [write_officer_page(tmp_path, plan)[0].read_text() for plan in (drawn, whole)]
    assert ["counts every round" in page for page in pages] == [True, False]
    assert "fraction: 0.34" in pages[0]


def test_json_alone_can_be_had(hospitals, tmp_path, monkeypatch, capsys):
    words = ["--study", str(hospitals / "study"), f"data_dir={hospitals / 'b.npz'}", "--out", str(tmp_path / "out")]
    assert command(monkeypatch, "run", "--dry-run", "--json", *words) == 0
    page = json.loads(capsys.readouterr().out)
    assert list(page["institutions"]) == ["b.npz"]
    assert page == json.loads((tmp_path / "out" / "officer.json").read_text())


def test_the_page_says_what_can_be_made_of_latents_and_whose_sizes_these_are(hospitals, tmp_path, monkeypatch, capsys):
    words = ["--study", str(hospitals / "study"), f"data_dir={hospitals / 'b.npz'}", "--out", str(tmp_path)]
    assert command(monkeypatch, "run", "--dry-run", *words, "--clinics", "b", "model.width=200") == 0
    captured = capsys.readouterr()
    as_json = json.loads((tmp_path / "officer.json").read_text())
    own = sum(line["bytes"] for line in as_json["fields"] if line["kind"] == "per-sample")
    times = float(f"{own / as_json['institutions']['b']['raw-bytes']:.2g}")
    page = (tmp_path / "officer.html").read_text()
    for text in (page, captured.out):
        assert f"functions of single patients, {times:g} times the raw data" in text
    assert "Latents and labels are functions of single patients. Anyone who holds them" in page
    assert "proof that it is the same one as before" in page
    assert "uploads will be" not in captured.out + captured.err
    assert as_json["claim"] in captured.out  # no epsilon
    noise = ["dp=latents", "latent-clip=10", "latent-epsilon=50", "label-epsilon=5", "delta=1e-5"]
    assert command(monkeypatch, "run", "--dry-run", *words, *noise) == 0
    assert "latents and labels of stage extract, together: (55, " in (tmp_path / "officer.html").read_text()
    whom, *own = json.loads((tmp_path / "officer.json").read_text())["planned"]
    assert whom.endswith("of its latents, against whoever reads these, the server too")
    assert [line.partition(";")[0] for line in own] == ["  b.npz: epsilon 55 at delta 1e-05"]
    assert (
        "\n".join([whom, *own, json.loads((tmp_path / "officer.json").read_text())["claim"]]) in capsys.readouterr().out
    )


def test_the_page_of_a_sealed_run_says_what_the_seal_hides_and_what_not(hospitals, tmp_path, monkeypatch):
    job = [*TASK, "strategy=avgpush", "rounds=2", "nodes=3", "partition=natural", f"data_dir={hospitals / 'a.npz'}"]
    (tmp_path / "policy.yaml").write_text("sealed: true\n")
    words = [
        "run",
        "--dry-run",
        *job,
        "--clinics",
        "a",
        "--policy",
        str(tmp_path / "policy.yaml"),
        "--out",
        str(tmp_path),
    ]
    assert command(monkeypatch, *words) == 1
    page = (tmp_path / "officer.html").read_text()
    assert "policy asks for a sealed run (sealed: true)" in page
    assert "no forward secrecy" not in page
    assert command(monkeypatch, *words, "sealed=true") == 0
    page = (tmp_path / "officer.html").read_text()
    as_json = json.loads((tmp_path / "officer.json").read_text())
    assert {field["protection"] for field in as_json["fields"] if field["kind"] == "model"} == {"sealed"}
    for sentence in (
        "Of these the server sees sizes only",
        "who exchanges with whom, when, and how many bytes",
        "w of PushSum",
        "no forward secrecy",
        "It can hold a parcel back",
    ):
        assert sentence in page
    assert "which has them as they are" not in page
    assert "Weights made for reading images" not in page


def test_the_page_of_a_masked_run_says_what_masks_hide_and_what_not(hospitals, tmp_path, monkeypatch):
    job = [*TASK, "strategy=fedavg", "rounds=2", "nodes=3", "partition=natural", f"data_dir={hospitals / 'a.npz'}"]
    (tmp_path / "policy.yaml").write_text("masked: true\n")
    words = ["run", "--dry-run", *job, "--clinics", "a"]
    words += ["--policy", str(tmp_path / "policy.yaml"), "--out", str(tmp_path)]
    assert command(monkeypatch, *words) == 1
    assert (
        "policy asks for a masked run (masked: true); the server&#39;s says masked=false"
        in (tmp_path / "officer.html").read_text()
    )
    assert command(monkeypatch, *words, "masked=true") == 0
    page = (tmp_path / "officer.html").read_text()
    as_json = json.loads((tmp_path / "officer.json").read_text())
    assert {field["protection"] for field in as_json["fields"] if field["kind"] == "model"} == {"masked"}
    for sentence in (
        "The masks hide this institution&#39;s weights from the server, in those of all. Not hidden from it:",
        "Masks are no DP.",
        "from whoever has the keys of all the others",
        "With metrics: counted only counts of tests leave.",
        "How many institutions&#39; training diverged is seen, and not whose",
        "It masks one answer in an exchange",
        "Weights made for reading images are not recognised",
    ):
        assert sentence in page, sentence
    assert "which has them as they are" not in page
    assert "It can hold a parcel back" not in page


def test_the_first_page_is_a_summary_to_sign(hospitals, tmp_path):
    verdicts, _ = page_and_run(hospitals, "metrics: counted\nmin-count: 12\nkinds: [statistic]\n")
    page = write_officer_page(tmp_path, verdicts)[0].read_text()
    first = page[page.index('<section class="sign">') : page.index("</section>")]
    rows = dict(re.findall(r'<th scope="row">(.*?)</th><td>(.*?)</td>', first))
    assert list(rows)[:10] == [
        *(
            "purpose",
            "data subjects",
            "verdict",
            "what leaves",
            "to whom",
            "ε of this run",
            "ε before it",
            "small cells",
            "retention",
            "contact",
        )
    ]
    n = verdicts["institutions"]["a"]["examples"]
    assert rows["data subjects"].startswith(f"{n} training examples at a")
    assert "takes no part. Nothing leaves but the name" in rows["verdict"]
    left = sum(line["bytes"] for line in verdicts["fields"] if line["verdict"] == "allowed")
    assert rows["what leaves"].startswith(f"{left} B of notice")
    assert rows["small cells"] == "none below 12 leaves (min-count)"
    assert rows["ε of this run"].startswith("none")
    assert rows["ε before it"].startswith("a: all runs together, 0 of them")
