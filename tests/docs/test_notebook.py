"""The notebook runs in an empty folder, with fewer scenes and steps; its file contains outputs, which the site shows."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.helpers.processes import THREADS

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs/tutorials/slots.ipynb"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_notebook_trains_and_looks_at_slots(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", str(THREADS))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs for cell in code[1:]) and not any(o.output_type == "error" for c in code for o in c.outputs)
    for cell in code:
        cell.outputs = []
    assert "SCENES, STEPS = 8000, 200" in code[0].source
    code[0].source = code[0].source.replace("SCENES, STEPS = 8000, 200", "SCENES, STEPS = 300, 4")
    code[0].source = code[0].source.replace("seed=0)", "seed=0, per_class=2, retrieval=100, pairs_per_kind=4)")
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = ["".join(o.get("text", "") for o in cell.outputs) for cell in code]
    assert "finished 4" in said[1] and "zeroshot" in said[2] and len(said[3].splitlines()) == 4
    assert any("image/png" in o.get("data", {}) for o in code[4].outputs)
    assert said[5].startswith("all 32 slots") and said[5].count("without slot") == 4
