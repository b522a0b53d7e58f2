"""A method's halves and options, found by name."""

import subprocess
import sys


def test_options_are_declared_without_pytorch_as_their_class_has_them():
    script = """
import sys
from dataclasses import fields
from flwr_replay.config.catalogue import choices
from flwr_replay.config.halves import declared_options, load_options
both = [(group, name) for group in ("strategy", "generator", "prior") for name in choices(group)]
declared = {each: declared_options(*each) for each in both}
assert "torch" not in sys.modules
for each, options in declared.items():
    loaded = load_options(*each)
    assert loaded is not options and loaded.__name__ == options.__name__
    assert [(f.name, f.default) for f in fields(loaded)] == [(f.name, f.default) for f in fields(options)]
    assert dir(loaded) == dir(options) and getattr(loaded, "traits", 0) == getattr(options, "traits", 0)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
