"""Studies: their parts compose, their report holds what the runs found, and wrong names are told."""

import pytest

from flwr_replay.compose import compose
from flwr_replay.errors import ConfigError, DataError
from flwr_replay.simulations import partitions, skew
from flwr_replay.study import Part, run_study, studies


def test_every_part_composes():
    assert set(studies()) >= {"partitions", "skew"}
    for part in [*partitions.PARTS, *skew.PARTS]:
        shared = [o for o in part.options if not o.startswith(("seeds=", "fedreplay."))]
        for method in part.methods:
            name, *own = method.split(":")
            compose([f"strategy={name}", *shared, *own])
        assert part.against in part.methods


def test_a_report_has_all_tables_and_the_overview_of_a_group(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    common = ["task=diabetes", "nodes=2", "rounds=1", "seeds=2", "model.width=4"]
    parts = [
        Part(name=name, about="Tiny.", methods=["cwt", "fedreplay"], options=[*common, option], group="Tiny, MLP")
        for name, option in (("alike", "partition=iid"), ("apart", "forgetting=true"))
    ]
    monkeypatch.setattr(skew, "PARTS", parts)
    text, whole = run_study("skew", "", 1, tmp_path)
    assert whole
    assert text == (tmp_path / "study-skew.md").read_text()
    assert "| method | alike (mae) | apart (mae) |" in text
    assert text.count("| cwt |") == 3
    assert "cwt seed 1: mean drop" in text
    assert (tmp_path / "study-skew-tiny.png").read_bytes().startswith(b"\x89PNG")
    one, _ = run_study("skew", "", 1, tmp_path, ["apart"])
    assert "### alike" not in one


def test_what_is_not_there_is_told_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match="unknown study 'partition': did you mean partitions"):
        run_study("partition", "", 1, tmp_path)
    with pytest.raises(ConfigError, match="unknown part 'mnist-bad' of study partitions"):
        run_study("partitions", "", 1, tmp_path, ["mnist-bad"])
    with pytest.raises(DataError, match="needs mnist under --data"):
        run_study("partitions", str(tmp_path), 1, tmp_path, ["mnist-iid"])
    assert not list(tmp_path.iterdir())
