"""Institutions on pages: their order, and personal models beside the global one."""

import re
from html import unescape

import pytest
from folders import draw, manifest

from flwr_replay.engines.simulate import run_inline
from flwr_replay.report.comparison import cells_of
from flwr_replay.report.metrics import ALIKE, OWN_MIX
from flwr_replay.report.progress import Display
from flwr_replay.report.run_files import read_result
from flwr_replay.report.summary import summary
from flwr_replay.report.texts import notes, of_methods
from flwr_replay.studies.compare import compare_strategies


@pytest.mark.parametrize("test", ["iid", "mirror"])
def test_personal_and_global_accuracy_stand_side_by_side(test, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    options = ["task=digits", "nodes=2", "rounds=2", "model.width=4", "partition=ks", f"partition.test={test}"]
    _, report = compare_strategies(["ditto", "local", "fedavg"], [*options, "seeds=1"], "", 1, tmp_path)
    finals = {cell["label"]: cell["result"]["final"]["global"] for cell in report["cells"]}
    columns, rows = cells_of(report)
    both = columns.index("accuracy"), columns.index("of the global model or proxy")
    own = {row[0]: [row[at] for at in both] for row in rows}
    assert both[1] == both[0] + 1
    assert own["ditto"] == [f"{finals['ditto'][name]:.4f}" for name in ("accuracy", "global-accuracy")]
    assert (own["local"][1], own["fedavg"][1]) == ("–", "–")
    mixes = [note for note in notes(report) if note.startswith("Test examples are dealt ")]
    assert mixes == [ALIKE if test == "iid" else OWN_MIX]  # once for two methods; fedavg's model is everybody's
    assert not {ALIKE, OWN_MIX} & {*of_methods(report)}
    [of_ditto] = [cell["folder"] for cell in report["cells"] if cell["label"] == "ditto"]
    folder = (tmp_path / report["folder"] / of_ditto).resolve()
    text, page = summary(read_result(folder), folder), (folder / "report.html").read_text()
    both = "accuracy {accuracy:.4f}, global-accuracy {global-accuracy:.4f} (test; "
    assert both.format_map(finals["ditto"]) in text
    assert (ALIKE if test == "iid" else OWN_MIX) in text
    assert [mix in unescape(page) for mix in (ALIKE, OWN_MIX)] == [test == "iid", test == "mirror"]
    assert f"on the same examples global-accuracy is {finals['ditto']['global-accuracy']:.3f}" in page
    heads = re.findall(r"<th[^>]*>([\w-]+)</th>", page)
    assert heads[(at := heads.index("accuracy")) : at + 2] == ["accuracy", "global-accuracy"]


@pytest.mark.parametrize("of", ["shares", "natural"])
def test_tables_keep_the_order_in_which_the_data_name_institutions(of, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    names = ["west", "south", "east"]
    if of == "shares":
        file = tmp_path / "shares.csv"
        file.write_text("\n".join(["institution," + ",".join("0123456789"), *(f"{n}" + ",0.1" * 10 for n in names)]))
        options = ["task=digits", "partition=shares", f"partition.file={file}"]
    else:
        rows = [f"{n}.png,{n % 2},{names[n // 20]}" for n in range(60)]
        for n in range(60):
            draw(tmp_path / "images" / f"{n}.png", n)
        manifest(tmp_path / "images", "image,label,site", rows)
        data = ["task.data-dir=" + str(tmp_path / "images"), "task.size=8", "task.channels=1", "task.classes=2"]
        options = ["task=folder", "partition=natural", *data]
    options += ["strategy=fedavg", "nodes=3", "rounds=1", "model.width=4", "dp=classifier", "delta=1e-3"]
    result, folder = run_inline(
        [*options, "model.norm=group", "batch_size=8", f"runs_dir={tmp_path / 'runs'}"], Display()
    )
    assert [*result["final"]["institutions"]] == [*read_result(folder)["privacy"]] == names
    page = (folder / "report.html").read_text()
    for table in re.findall(r"<table.*?</table>", page, re.DOTALL):
        rows = [name for name in re.findall(r'<th scope="row">([^<]+)</th>', table) if name in names]
        assert rows in ([], names)
    text = summary(result, folder)
    assert sorted(names, key=lambda name: text.index(f"  {name}: 0.")) == names
