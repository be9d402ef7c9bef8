"""Places in the output of a notebook whose content is replaced as a program goes on."""

from __future__ import annotations

import sys
from typing import Any


def shell() -> Any:
    """IPython's shell where it runs the cells of a notebook, else None. Works on every thread."""
    ipython = sys.modules.get("IPython")
    running: Any = ipython.get_ipython() if ipython is not None else None
    return running if hasattr(running, "kernel") else None


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
