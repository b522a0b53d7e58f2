"""A comparison as text, Markdown, CSV, LaTeX and JSON."""

import csv
import json

import pytest

from flwr_replay.cli.main import app
from flwr_replay.errors import ConfigError


def test_a_table_for_spreadsheets_tells_the_noise(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    words = [
        "compare",
        "fedavg",
        "dp=classifier",
        "lr=0.1|0.2",
        "task=digits",
        "nodes=2",
        "rounds=1",
        "seeds=1",
        "model=mlp",
    ]
    app([*words, "sigma=2", "delta=1e-3", "--format", "csv"], standalone_mode=False)
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    for row in rows:
        assert float(row["sigma"]) > 0
        assert (row["clip"], int(row["steps"]) > 0) == ("1", True)
        assert 0 < float(row["sampling-rate"]) < 1
        assert (row["metric"], row["values"]) == ("accuracy", f"0:{row['mean']}")


@pytest.mark.sampled(2, of="slow studies")
def test_a_swept_comparison_is_written_in_every_format(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    words = ["compare", "cwt", "partition.size=60", "nodes=2", "rounds=1", "seeds=1", "model.width=4", "lr=0.01|0.1"]
    texts = {}
    for form in ("text", "md", "csv", "latex", "json"):
        app([*words, "--format", form], standalone_mode=False)
        texts[form] = capsys.readouterr().out
        assert "lr=0.1" in texts[form]
    rows = json.loads(texts["json"])["strategies"]
    mean = rows["cwt:lr=0.01"]["mean"]
    assert rows["cwt:lr=0.1"]["against"] == "cwt:lr=0.01"
    assert rows["cwt:lr=0.1"]["difference"]["mean"] == pytest.approx(rows["cwt:lr=0.1"]["mean"] - mean)
    columns, first, _ = csv.reader(texts["csv"].splitlines())
    assert {"method", "against", "epsilon", "delta", "proven", "sigma", "seeds"} <= {*columns}
    read = dict(zip(columns, first, strict=True))
    assert (read["mean"], read["against"], read["seeds"]) == (str(mean), "", "1")
    assert read["epsilon"] == read["sigma"] == ""
    assert f"| cwt:lr=0.01 | {mean:.4f} |" in texts["md"]
    assert r"\caption{" in texts["latex"]
    assert r"\toprule" in texts["latex"]
    assert "minus cwt:lr=0.01" in texts["latex"]
    assert "% no intervals: 1 seed" in texts["latex"]
    with pytest.raises(ConfigError, match="--format must be one of text, md"):
        app([*words, "--format", "html"], standalone_mode=False)
