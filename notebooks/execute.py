"""Executes notebooks, each in a fresh kernel of the Python that runs this, and writes their outputs into them.

Run: python notebooks/execute.py [NOTEBOOK ...]     all of them by default
"""

from __future__ import annotations

import asyncio
import base64
import io
import sys
import time
from pathlib import Path
from typing import Any

import nbclient
import nbformat
from PIL import Image

FOLDER = Path(__file__).parent
TIMEOUT = 300  # seconds for one cell
COLOURS = 256  # of a picture


def run(path: Path) -> Any:
    """The executed notebook.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed, as one does whose assertion does not hold.
    """
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
    )
    asyncio.run(client.async_execute())
    return notebook


def tidy(notebook: Any) -> None:
    """Makes the file small, and the same for the same outputs: text in one piece, few colours, no version of Python."""
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        outputs: list[Any] = []
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and outputs and outputs[-1].get("name") == output.name:
                outputs[-1].text += output.text
                continue
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = _smaller(output.data["image/png"])
            outputs.append(output)
        if "outputs" in cell:
            cell.outputs = outputs


def _smaller(png: str) -> str:
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    file = io.BytesIO()
    picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(file, "png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def main(names: list[str]) -> None:
    for path in [Path(name) for name in names] or sorted(FOLDER.glob("*.ipynb")):
        start = time.perf_counter()
        notebook = run(path)
        tidy(notebook)
        nbformat.write(notebook, path)
        print(f"{path.name:<32} {time.perf_counter() - start:5.1f} s, {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
