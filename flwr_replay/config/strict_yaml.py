"""YAML that a person writes. What two readers of YAML could take for two things is refused, with its line.

Values are those of YAML 1.2's core schema: PyYAML itself reads 1.1, where `1:30` is 90, `010` is 8 and `no` is false.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from flwr_replay.config.quoting import vanishes
from flwr_replay.errors import ConfigError

__all__ = ["DUMPER", "LOADER", "Lined", "read_yaml"]

CONSTANTS: dict[str, bool | None] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
CONSTANTS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*)")
NUMBER = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # of what we wrote ourselves; in C ten times as fast
DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # folds lines of other letters elsewhere
OLD: Any = yaml.SafeLoader("")  # what YAML 1.1 takes a text for
TEXT = "tag:yaml.org,2002:str"
BREAK = re.compile("[\x85\u2028\u2029]")  # ends a line for YAML 1.1, and no line that an editor shows
UNCLEAR = re.compile(r"[-+]?0[0-9o].*", re.S)  # and whatever YAML 1.1 takes for something else than a text


class Lined(dict[str, Any]):
    """A mapping, with the line in which each key stands, from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}


def read_yaml(path: Path, what: str) -> Lined:
    """Read a file with one mapping; an empty one holds none.

    Parameters
    ----------
    path : Path
        The file, in UTF-8.
    what : str
        Its name in messages: `the policy file`.

    Raises
    ------
    ConfigError
        If it is missing or no such YAML; for a key given twice, an anchor, an alias or a tag; for a value on which
        YAML 1.1 and 1.2 disagree, a line's end of 1.1 only, .inf, .nan, and numbers that a float takes for these or 0.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if found_break := BREAK.search(text):
            line = text.count("\n", 0, found_break.start()) + 1
            raise ConfigError(
                f"{what} must be readable YAML; got {path}, line {line}: U+{ord(found_break[0]):04X} ends a line for "
                "some readers only: remove it"
            )
        node = _Plain(text).get_single_node()
        content = Lined() if node is None else _built(node)
    except FileNotFoundError:
        raise ConfigError(f"{what} must be there where one is named; there is no {path}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}, line {mark.line + 1}" if mark else path
        problem = ", ".join(filter(None, [error.context, error.problem]))
        raise ConfigError(f"{what} must be readable YAML; got {place}: {problem}") from None
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{what} must be readable YAML; got {path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, Lined):
        raise ConfigError(f"{what} must hold keys with values; got {type(content).__name__} in {path}")
    return content


class _Plain(yaml.BaseLoader):
    """Composes nodes of texts; refuses what would put a value into another place or type."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) or getattr(event, "tag", None):
            raise _faulty("anchors (&), aliases (*) and tags (!) are not read: write the value itself", event)
        return super().compose_node(parent, index)


def _built(node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return [_built(item) for item in node.value]
    if isinstance(node, yaml.ScalarNode):
        return node.value if node.style else _scalar(node)
    mapping = Lined()
    for key, value in node.value:
        name = key.value
        if not isinstance(key, yaml.ScalarNode):
            raise _faulty("a key must be a name", key)
        if name in mapping:
            raise _faulty(f"the key {name!r} stands in line {mapping.lines[name]} already: remove one", key)
        mapping.lines[name] = key.start_mark.line + 1
        mapping[name] = _built(value)
    return mapping


def _scalar(node: yaml.ScalarNode) -> Any:
    """Return what a text without quotes means."""
    text: str = node.value
    if text in CONSTANTS:
        return CONSTANTS[text]
    if WHOLE.fullmatch(text):
        return int(text)
    if NUMBER.fullmatch(text):
        if vanishes(text):
            raise _faulty(f"{text[:40]} is too large or too small for a number: write another", node)
        return float(text)
    if UNCLEAR.fullmatch(text) or OLD.resolve(yaml.ScalarNode, text, (True, False)) != TEXT:
        raise _faulty(f"{text[:40]} is read in more than one way: write true, false, a decimal number or '…'", node)
    return text


def _faulty(problem: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)
