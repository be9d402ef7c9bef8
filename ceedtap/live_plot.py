"""Pictures that follow a running program; :func:`ceedtap.plot.live` makes them."""

from __future__ import annotations

import base64
import io
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ceedtap import notebook
from ceedtap.consumer import Consumer
from ceedtap.outfeed import OUTFEED

#: Numbers of one event that are drawn as lines.
_MOST_LINES = 20
#: Events of a history that are kept; of a longer one every second, every fourth and so on.
_MOST_EVENTS = 20_000


class Live(Consumer):
    """A picture of what is tapped; made by :func:`ceedtap.plot.live`.

    Attributes:
        events: number of events so far.
    """

    def __init__(
        self,
        draw_field: Callable[..., Any] | None,
        dim: int,
        label: str | list[str],
        log: bool,
        interval: float,
        path: str | None,
        every: int,
    ) -> None:
        super().__init__(self._event, policy="drop_oldest", every=every, on_error="disable", name="live plot")
        self.events = 0
        self._draw_field = draw_field
        self._dim = dim
        self._label = label
        self._log = log
        self._interval = interval
        self._path = path
        self._lock = threading.RLock()
        self._latest: list[np.ndarray] = []
        self._places: list[float] = []
        self._numbers: list[np.ndarray] = []
        self._stride = 1
        self._figure: Any = None
        self._new = False  # since the figure was drawn
        self._shown = True  # what has been tapped is in the notebook or file
        self._due = 0.0
        self._place: notebook.Place | None = None
        OUTFEED.add_display(self)

    @property
    def figure(self) -> Any:
        """matplotlib's Figure of what has been tapped so far; it belongs to no window."""
        with self._lock:
            if self._figure is None or self._new:
                self._draw()
            return self._figure

    def settle(self) -> None:
        """Shows the last state; what is tapped next begins a picture in the cell that runs then."""
        with self._lock:
            if not self._shown:
                self._show()
            self._place = None

    def _event(self, *args: Any, transforms: Any = (), **_: Any) -> None:
        if any(name == "jvp" for name, _ in transforms):
            return
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(args)]
        with self._lock:
            if self._draw_field is None:
                self._take_numbers(leaves)
            elif any(name == "batch" for name, _ in transforms):
                raise ValueError("a live picture of a field cannot show a batch; tap one lane of it")
            else:
                self._latest = leaves
            self.events += 1
            self._new, self._shown = True, False
            if time.monotonic() >= self._due:
                self._show()

    def _take_numbers(self, leaves: list[np.ndarray]) -> None:
        first = leaves[0] if len(leaves) > 1 else None
        if first is not None and first.size > 0:
            place = float(first.max())  # of several lanes, the one that goes on
            leaves = leaves[1:]
        else:
            place = float(self.events * self.every)
        numbers = np.concatenate([leaf.ravel().astype(np.float64) for leaf in leaves])
        if not 0 < numbers.size <= _MOST_LINES:
            raise ValueError(
                f"a live picture without a space draws 1 to {_MOST_LINES} numbers, got {numbers.size}; for a field use "
                "ceedtap.plot.live(space)"
            )
        if self._numbers and self._numbers[0].shape != numbers.shape:
            raise ValueError(f"a live picture of {self._numbers[0].size} numbers got {numbers.size}")
        if self._places and place < self._places[-1]:
            # The program runs again: its line is not joined to the one before.
            self._places.append(place)
            self._numbers.append(np.full_like(numbers, np.nan))
        if self.events % self._stride == 0:
            self._places.append(place)
            self._numbers.append(numbers)
        if len(self._places) > _MOST_EVENTS:
            self._places, self._numbers = self._places[::2], self._numbers[::2]
            self._stride *= 2

    def _show(self) -> None:
        """Draws the picture and shows it, where there is a place for it."""
        in_notebook = notebook.shell() is not None
        if not in_notebook and self._path is None:
            return
        began = time.monotonic()
        self._draw()
        if self._path is not None:
            _replace(self._path, self._picture(os.path.splitext(self._path)[1].lstrip(".") or "png"))
        if in_notebook:
            if self._place is None:
                self._place = notebook.Place()
            image = base64.b64encode(self._picture("png")).decode()
            self._place.show({"image/png": image, "text/plain": f"<a picture after {self.events} events>"})
        self._shown = True
        now = time.monotonic()
        self._due = now + max(self._interval, 4 * (now - began))

    def _picture(self, kind: str) -> bytes:
        content = io.BytesIO()
        self._figure.savefig(content, format=kind, dpi=100)
        return content.getvalue()

    def _draw(self) -> None:
        # No pyplot: its figures are for the main thread, and stay until somebody closes them.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 4.2) if self._draw_field else (6.4, 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        ax = figure.add_subplot(projection="3d" if self._dim == 3 else None)
        if self._draw_field is not None:
            if self._latest:
                self._draw_field(ax, *self._latest[:2])
        else:
            self._draw_history(ax)
        self._figure, self._new = figure, False

    def _draw_history(self, ax: Any) -> None:
        if self._numbers:
            lines = ax.plot(self._places, np.stack(self._numbers), linewidth=1.4)
            if len(self._places) < 40:
                for line in lines:
                    line.set(marker="o", markersize=3)
            if isinstance(self._label, list):
                ax.legend(lines, self._label, frameon=False)
        if isinstance(self._label, str):
            ax.set_ylabel(self._label)
        if self._log:
            ax.set_yscale("log")
        ax.grid(which="major", color="0.9")
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)


def _replace(path: str, content: bytes) -> None:
    """Viewers that watch the file never see half of it."""
    part = f"{path}.part"
    with open(part, "wb") as file:
        file.write(content)
    os.replace(part, path)
