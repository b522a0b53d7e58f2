"""docs/options.md is what docs/options.py writes today, and says something of every option."""

import importlib.util
import re
from pathlib import Path

import yaml

from flwr_replay.config import catalogue
from flwr_replay.config.catalogue import choices
from flwr_replay.config.compose import compose, to_yaml

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = (DOCS / "options.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^- `([a-z.-]+)(?:=.*?)?`.*?: ?(.*)$", PAGE, re.M)


def test_the_page_is_what_conf_says(monkeypatch):
    """Of this package: another one's strategy, installed beside it, is not on the page."""
    other = catalogue.Brought("strategy", "other", "other", "other")
    monkeypatch.setattr(catalogue, "brought", lambda: {"strategy": {"other": (other,)}})
    assert "other" in choices("strategy")
    spec = importlib.util.spec_from_file_location("options", DOCS / "options.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.page() == PAGE, "run: python docs/options.py > docs/options.md"


def test_every_option_has_a_text():
    assert ROWS
    assert not [name for name, text in ROWS if not text.strip()]


def test_every_option_of_a_run_is_there():
    reported = {name for name, _ in ROWS}
    for strategy in choices("strategy"):
        resolved = yaml.safe_load(to_yaml(compose([f"strategy={strategy}"])))
        for section, value in resolved.items():
            if not isinstance(value, dict):
                assert section.replace("_", "-") in reported
            elif section in ("training", "privacy", "strategy", "replay", "generator", "prior"):
                names = {f"{section}.{option}".replace("_", "-") for option in value if option != "name"}
                assert names <= reported, strategy


def test_every_choice_is_there():
    for group in ("strategy", "task", "partition", "model", "replay", "generator", "prior", "preset"):
        assert {f"`{group}={choice}`" for choice in choices(group)} <= set(re.findall(r"`\w+=\w+`", PAGE))
