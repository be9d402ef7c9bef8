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


def test_pictures_and_bars_are_one_output_of_the_cell_that_ran_the_program():
    cells = [
        "import jax, ceedtap as ct\n"
        "view, bar = ct.plot.live(interval=0.01), ct.progress(50, 'steps')\n"
        "def step(i, x):\n"
        "    i = ct.id_tap(bar, i)\n"
        "    return ct.id_tap(view, i, x / 2, result=x / 2)\n"
        "f = jax.jit(lambda x: jax.lax.fori_loop(0, 50, step, x))",
        "with ct.outfeed_receiver():\n    f(1.0)",
        "with ct.outfeed_receiver():\n    f(2.0)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asyncio.run(nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").async_execute())
    first, *runs = (cell.outputs for cell in notebook.cells)
    assert first == []
    for number, outputs in enumerate(runs, 1):
        assert {output.output_type for output in outputs} == {"display_data"}
        picture, bar = sorted((output.data for output in outputs), key=lambda data: "image/png" not in data)
        assert picture["text/plain"] == f"<a picture after {50 * number} events>"
        assert "50/50" in bar["text/plain"]
