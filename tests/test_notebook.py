"""Prints of compiled programs in notebooks."""

import asyncio
import warnings

import nbclient
import nbformat


def test_prints_go_into_the_cell_that_ran_the_program():
    cells = [
        "import jax, ceedtap as ct\nf = jax.jit(lambda x: ct.id_print(2 * x, what='twice'))",
        "with ct.outfeed_receiver():\n    f(1)",
        "with ct.outfeed_receiver():\n    f(2)",
        "f(3)\nct.barrier_wait()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries that run notebooks
        asyncio.run(nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").async_execute())
    printed = ["".join(o.text for o in cell.outputs if o.output_type == "stream") for cell in notebook.cells]
    assert printed == ["", "what: twice\n2\n", "what: twice\n4\n", "what: twice\n6\n"]
