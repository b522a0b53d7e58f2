"""What a method's or a generator's file says of itself, read as text.

Importing it would import PyTorch, which takes seconds, and run the code of other packages.
"""

import ast
import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module, util
from pathlib import Path
from typing import Any

from flwr_replay.config.catalogue import check_choice, choices, package_of
from flwr_replay.errors import ConfigError

__all__ = ["Fields", "declared", "describe_strategies", "document_of", "fields_of", "idea_of", "place_of"]

OURS = __name__.partition(".")[0]
COMMENTED = re.compile(r"^    (\w+): [^#\n]*# (.*)$", re.M)

Fields = Mapping[str, tuple[str, str]]  # by a field's name: its type, and the comment behind it


def describe_strategies() -> dict[str, tuple[str, str]]:
    """Return each method's idea and what it sends, as its file states them; of a broken package, what is wrong."""
    ideas = {}
    for name in choices("strategy"):
        try:
            ideas[name] = idea_of(name)
        except ConfigError as error:
            ideas[name] = (str(error), "")
    return ideas


def document_of(name: str) -> str:
    """Return what a method's file says of it: source, idea, algorithm, deviations.

    Raises
    ------
    ConfigError
        If there is no such method, or its file cannot be read.
    """
    check_choice("strategy", name)
    return (ast.get_docstring(_tree(place_of("strategy", name))[1], clean=False) or "").strip()


def idea_of(name: str) -> tuple[str, str]:
    """Return a method's idea and what it sends; empty where its file does not say so."""
    document = document_of(name)
    return _paragraph(document, "Idea: "), _paragraph(document, "Travels: ")


def place_of(group: str, name: str) -> str:
    """Return the module with a method's options, or with a generator's or prior's."""
    if group != "strategy":
        return f"{OURS}.generators.{name}"
    package = package_of(name)
    return f"{package.package}.strategy" if package else f"{OURS}.strategies.{name}"


@cache
def fields_of(module: str, name: str) -> Fields:
    """Return the fields of a dataclass, inherited ones first, by its module and its name in any case; else none.

    Raises
    ------
    ConfigError
        If the module's file is missing or no Python.
    """
    text, tree, package = _tree(module)
    places = {
        (imported.asname or imported.name).lower(): (f"{'.' * node.level}{node.module or ''}", imported.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for imported in node.names
    }
    classes = {node.name.lower(): node for node in tree.body if isinstance(node, ast.ClassDef)}

    def found_as(written: str, own: Mapping[str, ast.ClassDef] = classes) -> Fields:
        if written.lower() in own:
            return fields_of(module, written)
        place, imported = places.get(written.lower(), ("", ""))
        return fields_of(util.resolve_name(place, package), imported) if place else {}

    if not (node := classes.get(name.lower())):
        return found_as(name)
    fields: dict[str, tuple[str, str]] = {}
    for base in reversed(node.bases):
        fields |= found_as(base.id, {} if base.id == node.name else classes) if isinstance(base, ast.Name) else {}
    comments = dict(COMMENTED.findall(ast.get_source_segment(text, node) or ""))
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            option, kind = line.target.id, ast.unparse(line.annotation)
            if not kind.startswith("ClassVar"):
                fields[option] = (kind, comments.get(option, fields.get(option, ("", ""))[1]))
    return fields


@cache
def declared(module: str, name: str) -> Any:
    """Return what a module has under a name, in any case; of ours that is not imported, made of what it needs alone."""
    if module in sys.modules or module.partition(".")[0] != OURS:
        return getattr(import_module(module), name)
    _, tree, package = _tree(module)
    bound = {name: node for node in tree.body for name in _bound(node)}
    name = name if name in bound else next(other for other in bound if other.lower() == name.lower())
    if isinstance(node := bound[name], ast.ImportFrom):
        (imported,) = (each.name for each in node.names if (each.asname or each.name) == name)
        return declared(util.resolve_name(f"{'.' * node.level}{node.module or ''}", package), imported)
    used = set(_names(node, ast.Load)) & bound.keys() - {name}
    scope = {"__name__": module, **{other: declared(module, other) for other in used}}
    exec(compile(ast.Module([node], []), module, "exec"), scope)
    return scope[name]


def _bound(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a module gives it."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [each.asname or each.name for each in node.names]
    return [node.name] if isinstance(node, ast.ClassDef | ast.FunctionDef) else _names(node, ast.Store)


def _names(node: ast.stmt, use: type[ast.expr_context]) -> list[str]:
    return [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, use)]


@cache
def _tree(module: str) -> tuple[str, ast.Module, str]:
    """Return the text of a module, its tree, and its package; nothing of it, or of others' packages, is imported."""
    top, *inner = module.split(".")
    spec = util.find_spec(module if top == OURS else top)  # which imports the packages above; ours are empty
    if top == OURS:
        files = [Path(spec.origin)] if spec and spec.origin else []
    else:
        folders = [Path(place, *inner) for place in (spec and spec.submodule_search_locations) or ()]
        files = [file for folder in folders for file in (folder.with_suffix(".py"), folder / "__init__.py")]
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
            return text, ast.parse(text), module if file.stem == "__init__" else module.rpartition(".")[0]
        except (SyntaxError, ValueError) as error:
            raise ConfigError(f"{file} must be Python; it is not: {' '.join(str(error).split())}") from None
        except OSError:
            continue
    raise ConfigError(f"there is no file of {module}: install it, or correct the package that names it")


def _paragraph(document: str, label: str) -> str:
    """Return a labelled paragraph of a method's own text; empty if it has none."""
    _, _, text = document.partition(f"\n{label}")
    for end in ("\n\n", "\nTravels:", "\nDeviations"):
        text, _, _ = text.partition(end)
    return " ".join(text.split())
