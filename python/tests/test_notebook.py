"""The guide's notebook runs, and its sample is as near to the exact curve as it says."""

import re
from pathlib import Path

import nbclient
import nbformat

NOTEBOOK = Path(__file__).parents[2] / "docs/guide/curves.ipynb"


def test_the_notebook_runs_to_its_end():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    error = re.search(r"mean absolute error: ([\d.]+)", text)
    assert error is not None
    assert 0 < float(error[1]) < 0.03
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
