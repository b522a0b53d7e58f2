"""Write SCAFFOLD, FedBN and Ditto as a package of your own: `python docs/examples/methods/outside.py FOLDER`.

Their files are flwr-replay's, as you would have written them outside: under names of their own (`myscaffold`, …), with
stages that no other payload has, and an entry point each. `pip install --no-deps --no-build-isolation -e FOLDER`, then
change what you like. docs/extend.md walks through them.
"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

from flwr_replay.config.catalogue import conf_dir

METHODS = ("scaffold", "fedbn", "ditto")
HALVES = {"strategies": "strategy", "clients": "client", "payloads": "payload"}
PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "mymethods"
version = "0.1.0"
dependencies = ["flwr-replay"]

[project.entry-points."flwr_replay.strategies"]
{points}

[tool.setuptools.package-data]
"*" = ["conf/**/*.yaml"]
"""


def outside(text: str, method: str, stages: list[str]) -> str:
    """Return a file's text as a package of its own has it: imports, classes, name and stages are other ones."""
    for room, file in HALVES.items():
        text = text.replace(f"flwr_replay.{room}.{method} ", f"my{method}.{file} ")
        text = text.replace(f"`{room}/{method}.py`", f"`{file}.py`")
    text = re.sub(rf'(name = "|^name: )(?={method})', r"\1my", text, flags=re.M)
    for name in {*re.findall(rf"(?i:\b{method}(?:Config|Client)?\b)", text)} - {method, method.upper()}:
        text = re.sub(rf"\b{name}\b", f"My{name}", text)
    for stage in stages:
        word = stage.replace("-", "_")
        text = text.replace(f'"{stage}"', f'"my-{stage}"').replace(f"def {word}(", f"def my_{word}(")
    return text


def write(folder: Path) -> None:
    """Write the package into a new folder."""
    folder.mkdir(parents=True)
    for method in METHODS:
        sources = {file: Path(str(find_spec(f"flwr_replay.{room}.{method}").origin)) for room, file in HALVES.items()}
        stages = re.findall(r'stage="([\w-]+)"', sources["payload"].read_text())
        options = Path("conf", "strategy", f"my{method}.yaml")
        files = {Path(f"{file}.py"): source for file, source in sources.items()}
        for inside, source in {**files, options: conf_dir() / "strategy" / f"{method}.yaml"}.items():
            place = folder / f"my{method}" / inside
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(outside(source.read_text(), method, stages))
        (folder / f"my{method}" / "__init__.py").write_text(f'"""{method}, outside flwr-replay."""\n')
    (folder / "pyproject.toml").write_text(PROJECT.format(points="\n".join(f'my{m} = "my{m}"' for m in METHODS)))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
