"""The output of a notebook: the cell that threads print into, and places that are replaced as a program goes on."""

from __future__ import annotations

import sys
from typing import Any


def shell() -> Any:
    """IPython's shell where it runs the cells of a notebook, else None. Works on every thread."""
    ipython = sys.modules.get("IPython")
    running: Any = ipython.get_ipython() if ipython is not None else None
    return running if hasattr(running, "kernel") else None


def follow_cell() -> None:
    """In a notebook: what this thread prints from now on goes into the cell that runs.

    Kernels remember a cell for each thread: the one that started it, or the one that it was last told of.
    """
    running = shell()
    if not hasattr(running, "get_parent"):
        return
    cell = running.get_parent()
    for stream in (sys.stdout, sys.stderr):
        # For this thread only, where a kernel can (ipykernel 7): another cell may begin at any time.
        tell = getattr(stream, "set_thread_parent", None) or getattr(stream, "set_parent", None)
        if tell is not None:
            tell(cell)


class Place:
    """One output of the cell that runs when it is first shown."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, data: dict[str, Any]) -> None:
        """Shows, in place of what was shown before, the same thing in several formats by MIME type."""
        from IPython.display import display

        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def leave(self) -> None:
        """What is shown stays; what is shown next goes into the cell that runs then."""
        self._handle = None
