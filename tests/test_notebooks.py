"""The notebooks run from the first cell to the last, one after another in one kernel, which imports all once."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

FEWER = (('"rounds": 30', '"rounds": 2'), ('"lr_step": 24', '"lr_step": 2'), ("rounds=5", "rounds=1, width=4"))
NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "docs" / "notebooks").glob("*.ipynb"))
SHOWN = {"first_steps": "no epsilon can be stated", "proxyfl": "proven"}


def test_the_notebooks_run_and_are_kept_without_outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    notebooks, cells = {path.stem: nbformat.read(path, as_version=4) for path in NOTEBOOKS}, []
    for notebook in notebooks.values():
        assert not any(cell.get("outputs") for cell in notebook.cells)
        cells += [nbformat.v4.new_code_cell("%reset -f"), *notebook.cells]  # no names of the one before
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
        for many, few in FEWER:
            cell.source = cell.source.replace(many, few)
    together = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(together, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for name, notebook in notebooks.items():
        assert SHOWN[name] in str([cell.get("outputs") for cell in notebook.cells])
