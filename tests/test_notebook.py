"""Prints of compiled programs in notebooks."""

import asyncio
import warnings

import nbclient
import nbformat


def run(cells):
    """The notebook of these cells, after they have run."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries that run notebooks
        asyncio.run(nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").async_execute())
    return notebook


def texts(notebook, stream="stdout"):
    """What each cell has printed."""
    return [
        "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == stream)
        for cell in notebook.cells
    ]


def test_prints_go_into_the_cell_that_ran_the_program():
    cells = [
        "import jax, ceedtap as ct\nf = jax.jit(lambda x: ct.id_print(2 * x, what='twice'))",
        "with ct.outfeed_receiver():\n    f(1)",
        "with ct.outfeed_receiver():\n    f(2)",
        "f(3)\nct.barrier_wait()",
    ]
    assert texts(run(cells)) == ["", "what: twice\n2\n", "what: twice\n4\n", "what: twice\n6\n"]


def test_whatever_consumers_and_host_functions_print_goes_into_the_cell_that_runs():
    """After an `id_print`, which is what once kept the prints of all other consumers in its cell."""
    cells = [
        "import sys, logging, jax, ceedtap as ct\n"
        "def error(x):\n    raise ValueError('bad')\n"
        "tap = ct.Tap('named')\n"
        "consumers = [\n"
        "    lambda x: print('plain', x),\n"
        "    lambda x: sys.stdout.write(f'write {x}\\n'),\n"
        "    lambda x: print('stderr', x, file=sys.stderr),\n"
        "    ct.Consumer(lambda x: print('consumer', x)),\n"
        "    ct.Consumer(error, on_error='log'),\n"
        "    ct.drive(lambda x: 2 * x, lambda x: print('driven', x)),\n"
        "    tap,\n"
        "]\n"
        "_ = tap.attach(lambda x: print('attached', x))\n"
        "logging.getLogger('ceedtap').addHandler(logging.StreamHandler(sys.stderr))\n"
        "def host(x):\n    ct.barrier_wait()  # prints of two threads may mix\n    print('host', x)\n    return x\n"
        "@jax.jit\n"
        "def f(x):\n"
        "    for consumer in consumers:\n"
        "        x = ct.id_tap(consumer, x)\n"
        "    return ct.call(host, x, result_shape=x)\n"
        "@jax.jit\n"
        "def p(x):\n"
        "    return ct.call(lambda x: ct.barrier_wait() or x, ct.id_print(x), result_shape=x)\n",
        *(
            f"{use}f({n}).block_until_ready()\nct.barrier_wait()"
            for n, use in enumerate(("", "p(9)\n", "", "p(9)\n", ""))
        ),
    ]
    notebook = run(cells)
    _, *printed = texts(notebook)
    for n, text in enumerate(printed):
        lines = [line for line in text.splitlines() if line != "9"]
        wanted = [f"{name} {n}" for name in ("attached", "consumer", "host", "plain", "write")]
        assert sorted(lines) == sorted([*wanted, f"driven {2 * n}"]), printed
    _, *errors = texts(notebook, "stderr")
    for n, text in enumerate(errors):
        assert f"stderr {n}\n" in text
        assert "ValueError: bad" in text
        assert text.count("stderr") == 1


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
    first, *runs = (cell.outputs for cell in run(cells).cells)
    assert first == []
    for number, outputs in enumerate(runs, 1):
        assert {output.output_type for output in outputs} == {"display_data"}
        picture, bar = sorted((output.data for output in outputs), key=lambda data: "image/png" not in data)
        assert picture["text/plain"] == f"<a picture after {50 * number} events>"
        assert "50/50" in bar["text/plain"]
