"""The notebooks run, with all that they assert, and have their outputs with them."""

import importlib.util
import os
import sys
import warnings
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# What differs between versions of Python and JAX is tested elsewhere; these two take the shortest.
EVERYWHERE = {"1_embed_and_tap", "3_large_deflection"}
FULL = sys.version_info < (3, 12) or os.environ.get("CEEDTAP_TEST_FULL")

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def execution():
    spec = importlib.util.spec_from_file_location("execute", FOLDER / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_five():
    assert [path.stem[0] for path in NOTEBOOKS] == ["1", "2", "3", "4", "5"]


@each
def test_runs(path, monkeypatch):
    if not FULL and path.stem not in EVERYWHERE:
        pytest.skip("to keep this short, on Python 3.11 only; CEEDTAP_TEST_FULL=1 runs it here")
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # a user's process has one device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries that run notebooks
        execution().run(path)


@each
def test_has_its_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert all(output.name == "stdout" for output in outputs if output.output_type == "stream")
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert sum("assert" in cell.source for cell in code) >= 3
    assert path.stat().st_size < 300_000


def test_a_failing_assertion_fails_the_run(tmp_path):
    path = tmp_path / "wrong.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 == 2")]), path)
    with warnings.catch_warnings(), pytest.raises(Exception, match="assert 1 == 2"):
        warnings.simplefilter("ignore")
        execution().run(path)
