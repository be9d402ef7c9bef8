"""What ``ceedtap follow`` shows: a line for each tap, with its rate and its last values."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ceedtap.following import Follower, Received

NORMS: dict[str, Callable[[np.ndarray], float]] = {
    "l2": lambda x: float(np.sqrt(np.sum(np.abs(x) ** 2))),
    "max": lambda x: float(np.max(np.abs(x), initial=0.0)),
    "mean": lambda x: float(np.mean(x.real)) if x.size else math.nan,
    "l1": lambda x: float(np.sum(np.abs(x))),
}
HEADINGS = ("tap", "arrays", "events", "events/s", "MB/s", "lost", "norm", "", "last values")
_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 24
_NUMBERS = 4  # of the last values that are shown


class Line:
    """One tap: counters, and the last event."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.events = 0
        self.last: Received | None = None
        self.norms: deque[float] = deque(maxlen=_HISTORY)
        self._before = (0, 0)

    def add(self, received: Received) -> None:
        self.events += 1
        self.last = received

    def cells(self, seconds: float, norm: str, lost: int) -> tuple[str, ...]:
        """The line; rates are those since it was last asked for, and count what was lost on the way."""
        assert self.last is not None
        events, missed = self.events - self._before[0], lost - self._before[1]
        self._before = (self.events, lost)
        nbytes = (events + missed) * self.last.layout.nbytes
        leaves = self.last.leaves()
        if events:
            # In float64, that a float16 may hold the sum of its squares.
            parts = [leaf.astype(np.complex128 if leaf.dtype.kind == "c" else np.float64).ravel() for leaf in leaves]
            with np.errstate(all="ignore"):
                self.norms.append(NORMS[norm](np.concatenate(_fields(leaves, parts))))
        arrays = ", ".join(dict.fromkeys(_shape(leaf) for leaf in leaves))
        rate, megabytes = f"{(events + missed) / seconds:.1f}", f"{nbytes / seconds / 1e6:.2f}"
        value = f"{self.norms[-1]:.6g}" if self.norms else ""
        names = self.last.definition.leaves
        values = " ".join(f"{name}={_brief(a)}" if name else _brief(a) for name, a in zip(names, leaves, strict=True))
        return (self.label, arrays, str(self.events), rate, megabytes, str(lost), value, sparkline(self.norms), values)


def _fields(leaves: list[np.ndarray], parts: list[np.ndarray]) -> list[np.ndarray]:
    """What the norm is of: the floating-point arrays, and where there are none, all."""
    chosen = [part for leaf, part in zip(leaves, parts, strict=True) if leaf.dtype.kind not in "biu"]
    return chosen or parts or [np.zeros(0)]


def _shape(leaf: np.ndarray) -> str:
    return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"


def _brief(leaf: np.ndarray) -> str:
    numbers = [f"{value:.5g}" if leaf.dtype.kind in "fc" else str(value) for value in leaf.flat[:_NUMBERS]]
    if not leaf.ndim:
        return numbers[0]
    return f"[{' '.join(numbers)}{' ...' if leaf.size > _NUMBERS else ''}]"


def sparkline(values: Any) -> str:
    """Values as bars between their extremes, on a logarithmic scale when they are positive and far apart.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7])
    '▁▂▃▄▅▆▇█'
    >>> sparkline([1, 3e-4, 1e-8, float("nan")])
    '█▅▁x'
    """
    numbers = np.array(list(values), float)
    finite = numbers[np.isfinite(numbers)]
    if not finite.size:
        return "x" * len(numbers)
    if finite.min() > 0 and finite.max() > 100 * finite.min():
        numbers, finite = np.log(np.where(numbers > 0, numbers, np.nan)), np.log(finite)
    low, span = finite.min(), np.ptp(finite)
    bars = []
    for value in numbers:
        if math.isfinite(value):
            bars.append(_BARS[min(7, int(8 * (value - low) / span))] if span else _BARS[4])
        else:
            bars.append("x")
    return "".join(bars)


class Table:
    """The lines of a publication."""

    def __init__(self, follower: Follower, norm: str, taps: list[str] | None) -> None:
        self._follower = follower
        self._norm = norm
        self._taps = taps
        self._lines: dict[tuple[str, tuple[str, ...]], Line] = {}
        self._asked = time.monotonic()

    def add(self, received: list[Received]) -> None:
        for one in received:
            definition = one.definition
            if self._taps is not None and definition.tap not in self._taps:
                continue
            key = (definition.tap, tuple(name for name, _ in definition.transforms))
            line = self._lines.get(key)
            if line is None:
                label = f"{key[0]} ({', '.join(key[1])})" if key[1] else key[0]
                line = self._lines[key] = Line(label)
            line.add(one)

    def rows(self) -> list[tuple[str, ...]]:
        """The table, with rates since it was last asked for."""
        now = time.monotonic()
        seconds, self._asked = max(1e-6, now - self._asked), now
        return [line.cells(seconds, self._norm, self._follower.lost[key[0]]) for key, line in self._lines.items()]

    def summary(self) -> str:
        """The line below the table."""
        follower = self._follower
        state = "" if not follower.ended else ", which has ended the publication"
        losses = f"{sum(follower.lost.values())} events lost here, {follower.dropped} dropped by the producer"
        return f"{follower.name}, published by process {follower.pid}{state}; {losses}"


def plain(rows: list[tuple[str, ...]]) -> str:
    """The table in plain text."""
    lines = [HEADINGS, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _batches(follower: Follower, table: Table, interval: float) -> Iterator[bool]:
    """Takes events; yields after every interval, and False at the end."""
    due = time.monotonic() + interval
    while True:
        received = follower.receive(max(0.0, due - time.monotonic()))
        if received is None:
            yield False
            return
        table.add(received)
        if time.monotonic() >= due:
            due = time.monotonic() + interval
            yield True


def run(
    name: str,
    *,
    norm: str = "l2",
    taps: list[str] | None = None,
    interval: float = 0.5,
    plain_text: bool = False,
    once: bool = False,
    wait: bool = False,
) -> int:
    """Shows the table of a publication until it ends; the exit status: 1 when there is none, or its process was killed.

    Raises:
        ImportError: rich is not installed, and `plain_text` is not asked for.
    """
    if not (plain_text or once):
        try:
            import rich.live
            import rich.table
        except ImportError as error:
            raise ImportError("the live table needs rich: pip install ceedtap[follow]; or use --plain") from error
    try:
        follower = Follower(name, math.inf if wait else 0.0)
    except (ConnectionError, ValueError, PermissionError) as error:
        print(f"ceedtap follow: {error}", file=sys.stderr)
        return 1
    with follower:
        table = Table(follower, norm, taps)
        if plain_text or once:
            for alive in _batches(follower, table, interval):
                print(plain(table.rows()), table.summary(), sep="\n", end="\n\n", flush=True)
                if once or not alive:
                    break
        else:
            with rich.live.Live(auto_refresh=False) as live:
                for _ in _batches(follower, table, interval):
                    view = rich.table.Table(*HEADINGS, caption=table.summary(), caption_justify="left")
                    for i, column in enumerate(view.columns):
                        column.justify = "right" if 2 <= i <= 6 else "left"
                        column.no_wrap = i != len(HEADINGS) - 1
                    for row in table.rows():
                        view.add_row(*map(rich.markup.escape, row))
                    live.update(view, refresh=True)
        killed = follower.gone and not follower.ended
    if killed:
        print(f"ceedtap follow: process {follower.pid}, which published {name!r}, has gone", file=sys.stderr)
    return 1 if killed else 0
