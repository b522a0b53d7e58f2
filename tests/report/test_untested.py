"""An institution that trained and was not tested at the end is counted, and named as missing in the metrics."""

from harness import SHARDS, node_configs, run, write_shards

from flwr_replay.report.pages import write_page
from flwr_replay.report.summary import summary
from flwr_replay.state.store import StateStore


def test_who_was_not_tested_is_named(tmp_path, monkeypatch):
    counted = StateStore.count_test
    monkeypatch.setattr(
        StateStore, "count_test", lambda store, run: counted(store, run) + 1
    )  # a server tests once more
    write_shards(tmp_path, {"a": 40, "b": 30, "c": 20})
    (tmp_path / "policy.yaml").write_text("max-evaluations: 2\n")
    nodes = node_configs(tmp_path, tmp_path / "state", "abc")
    nodes[0] |= {"policy": str(tmp_path / "policy.yaml")}
    ran = run(tmp_path, [*SHARDS, "classes=3", "model.width=6", "device=cpu", "strategy=fedavg", "rounds=2"], nodes)
    assert (ran.result["nodes"], ran.result["untested"]) == (3, ["a"])
    text = summary(ran.result, ran.folder)
    assert "no metric is of a\n" in text
    assert "a failed in exchange 2: policy allows 2 tests in a run" in text
    assert "Can 3 institutions" in write_page(ran.folder).read_text()
