"""Progress bars for loops inside compiled programs: `progress`."""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, TextIO

import jax
import numpy as np

from ceedtap import notebook
from ceedtap.consumer import Consumer
from ceedtap.outfeed import OUTFEED

_lock = threading.RLock()
_lines: dict[int, _Line] = {}  # by the id of their stream, while bars on it run


class ProgressBar(Consumer):
    """A consumer that shows how far a loop is; made by :func:`progress`.

    Attributes:
        n: steps of the loop.
        label: in front of the bar.
    """

    wants_device = True

    def __init__(self, n: int, label: str, every: int, stream: TextIO | None) -> None:
        # A bar that cannot be drawn, on a closed stream for example, says so once.
        name = f"progress {label}".strip()
        super().__init__(self._event, policy="drop_oldest", every=every, on_error="disable", name=name)
        self.n = n
        self.label = label
        self._stream = stream
        self._last: dict[jax.Device | None, int] = {}  # the number of the step that each device came to
        self._first = 0  # the number of the first step of this run of the loop
        self._up: bool | None = None  # whether the numbers grow; None: nobody can know yet
        self._held = False  # the only event so far has not been shown
        self._over = False  # since the last event, all has been delivered
        self._since = (0.0, 0)
        self._latest = 0.0
        # What the line wants: no news below this number of steps and before this time.
        self.quiet_below, self.quiet_until = 0.0, 0.0
        OUTFEED.add_display(self)

    @property
    def complete(self) -> bool:
        """Whether the last step has come, or the last of them that is tapped."""
        return bool(self._last) and self._steps + self.every > self.n

    @property
    def done(self) -> int:
        """Steps so far, of the slowest device."""
        return self.n if self.complete else max(self._steps, 0)

    @property
    def _steps(self) -> int:
        """Number of the step that the slowest device came to, the first being 1."""
        if not self._last:
            return 0
        inside = 0 <= self._first < self.n  # else the loop counts from somewhere else
        if self._up is False:
            return (self.n - 1 if inside else self._first) - max(self._last.values()) + 1
        return min(self._last.values()) - (0 if inside else self._first) + 1

    @property
    def seconds(self) -> float:
        """From the first step to the latest."""
        return self._latest - self._since[0]

    @property
    def rate(self) -> float:
        """Steps in a second; 0 when nobody knows yet."""
        return (self.done - self._since[1]) / self.seconds if self.seconds > 0 else 0.0

    def _event(self, *args: Any, transforms: Any = (), device: jax.Device | None = None, **_: Any) -> None:
        if any(name == "jvp" for name, _ in transforms):
            return
        index = _index(args, transforms)
        up: bool | None = True
        with _lock:
            self._latest = time.monotonic()
            last, over, was_complete = self._last.get(device), self._over, self.complete
            if index is None:
                begins = last is None or over or last + self.every >= self.n
                index = 0 if begins or last is None else last + self.every
            elif index == last and not over:
                return  # another shard of a program whose devices have no names here
            else:
                up = self._direction(last, index)
                begins = not self._last or (over and was_complete) or (last is not None and (index > last) != up)
            self._over = False
            if begins:
                self._last, self._first, up = {}, index, (True if index == 0 else None)
            self._last[device] = index
            self._up = up
            held, self._held = self._held, up is None
            if begins or over:
                self._since = (self._latest, self.done)
            if self._held:
                return  # the next event tells which step this is
            if begins or over or held:
                pass
            elif was_complete and self.complete:
                return  # the loop has more steps than was said
            elif self.done < self.quiet_below and self._latest < self.quiet_until and not self.complete:
                return
            self._show(begins or held)

    def _show(self, begins: bool) -> None:
        stream = self._stream if self._stream is not None else sys.stderr
        line = _lines.get(id(stream))
        if line is None:
            line = _lines[id(stream)] = _Line(stream, alone=self._stream is not None)
        if line.update(self, begins, self._latest):
            del _lines[id(stream)]

    def _direction(self, last: int | None, index: int) -> bool | None:
        """Whether the numbers grow: of two in a row the second tells, if it is not where a loop begins again."""
        if self._up is not None or last is None:
            return self._up
        return index > last or (index != last - self.every and index in (0, self._first))

    def settle(self) -> None:
        """The loop may have ended early: the bar stays as it is, and the next event begins another line."""
        with _lock:
            if self._held:
                self._held, self._up = False, True
                self._show(begins=True)
            self._over = True
            for key, line in list(_lines.items()):
                if self in line.bars:
                    del _lines[key]
                    line.end()

    def text(self, width: int, full: str = "#", empty: str = ".", brief: bool = False) -> str:
        """The bar in words, with a picture of `width` characters."""
        done, rate = self.done, self.rate
        picture = ""
        if width > 0:
            filled = int(width * done / self.n)
            picture = f" |{full * filled}{empty * (width - filled)}|"
        if self.complete or self._over:
            left = f"in {self.seconds:.1f} s" if self.seconds < 60 else f"in {_clock(self.seconds)}"
        else:
            left = f"ETA {_clock((self.n - done) / rate)}" if rate else ""
        speed = _speed(rate) if rate and not brief else ""
        words = (self.label, f"{100 * done // self.n:3d}%{picture}", f"{done}/{self.n}", speed, left)
        return " ".join(word for word in words if word)


class _Line:
    """What bars that run at the same time on one stream show: a line for all of them, or lines now and then."""

    def __init__(self, stream: TextIO, alone: bool) -> None:
        self.bars: list[ProgressBar] = []
        self._inner: set[ProgressBar] = set()  # have begun again while another one ran
        self._stream = stream
        self._shown: dict[ProgressBar, int] = {}
        self._drawn = -math.inf
        self._place = notebook.Place() if notebook.shell() is not None and not alone else None
        self._live = self._place is not None or stream.isatty()
        self._interval = 0.25 if self._place is not None else 0.1
        encoding = getattr(stream, "encoding", None) or "ascii"
        block = self._place is not None or encoding.lower().startswith("utf")
        self._characters = ("\u2588", "\u2591") if block else ("#", ".")

    def update(self, bar: ProgressBar, again: bool, now: float) -> bool:
        """Shows the new state of a bar; returns whether all have come to their end."""
        if bar not in self.bars:
            self.bars.append(bar)
        elif again and len(self.bars) > 1:
            self._inner.add(bar)
        # Where an outer loop taps at the start of its steps, the inner loops of its last step are still to come.
        inner_to_come = bar is self.bars[0] and bool(self._inner - {bar})
        ended = all(one.complete for one in self.bars) and not inner_to_come
        if not self._live:
            self._write_quarters(bar)
            return ended
        if ended:
            self.end()
        elif now - self._drawn >= self._interval:
            self._draw(now)
        bar.quiet_below, bar.quiet_until = math.inf, self._drawn + self._interval
        return ended

    def end(self) -> None:
        """Shows the last states."""
        if self._live:
            self._draw(time.monotonic())
            if self._place is None:
                self._write("\n")
        else:
            for bar in self.bars:
                if self._shown.get(bar) != bar.done and bar not in self._inner:
                    self._write(bar.text(0) + "\n")

    def _write_quarters(self, bar: ProgressBar) -> None:
        done, before = bar.done, self._shown.get(bar)
        quarter = 4 * done // bar.n
        bar.quiet_below, bar.quiet_until = (quarter + 1) * bar.n / 4, math.inf
        if bar not in self._inner and (before is None or quarter > 4 * before // bar.n):
            self._shown[bar] = done
            self._write(bar.text(0) + "\n")

    def _draw(self, now: float) -> None:
        self._drawn = now
        columns = 100 if self._place is not None else shutil.get_terminal_size().columns
        room = columns - 1 - sum(len(bar.text(0)) + 6 for bar in self.bars)
        width = min(24, room // len(self.bars))
        pictures = [bar.text(max(width, 4), *self._characters, brief=width < 4) for bar in self.bars]
        text = "   ".join(pictures)
        if self._place is not None:
            self._place.show({"text/plain": text})
        else:
            self._write(f"\r{text[: columns - 1]}\x1b[K")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _index(args: Sequence[Any], transforms: Any) -> int | None:
    """The number of the step, if it is tapped: an integer without dimensions, or one for each lane of a batch."""
    value = args[0] if isinstance(args[0], np.ndarray) else np.asarray(jax.tree.leaves(args)[0])
    lanes = sum(parameters["batch_dims"][0] is not None for name, parameters in transforms if name == "batch")
    if value.dtype.kind not in "iu" or value.ndim != lanes or value.size == 0:
        return None
    return int(value.max()) if lanes else int(value)  # lanes that are done have stopped counting


def _clock(seconds: float) -> str:
    minutes, rest = divmod(math.ceil(min(seconds, 1e9)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _speed(rate: float) -> str:
    return f"{rate:,.0f}/s" if rate >= 100 else f"{rate:.3g}/s" if rate >= 0.1 else f"{1 / rate:.3g} s each"


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    _lines.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def progress(n: int, label: str = "", *, every: int = 1, output_stream: TextIO | None = None) -> ProgressBar:
    """A progress bar for a loop inside a compiled program; a consumer for :func:`ceedtap.id_tap`.

    Tap the number of the step, which counts from 0: ``i = ct.id_tap(bar, i)``. A loop may start later, as one that is
    resumed, or run downwards; numbers that start outside of 0..n-1 count from where they start. Anything else that is
    tapped counts as one step. In a terminal the bars that run at the same time share one line, with rate and remaining
    time; in a notebook they share one output; elsewhere there is a line at the start and at each quarter. Loops may be
    nested; a bar begins again with its loop. Where a loop ends early, its bar ends at the next
    :func:`ceedtap.barrier_wait` or end of :func:`ceedtap.outfeed_receiver`.

    Under `jax.vmap` there is one step for all lanes. Of several devices the slowest counts. Derivatives do not count.
    The program never waits for its bar.

    Args:
        n: steps of the loop.
        label: in front of the bar.
        every: only every n-th step is sent, for loops with very short steps.
        output_stream: where it is drawn; None is `sys.stderr` at the time of drawing, or the notebook.

    Raises:
        ValueError: `n` or `every` is no positive integer.

    >>> import ceedtap as ct, jax, sys
    >>> bar = ct.progress(200, "steps", output_stream=sys.stdout)
    >>> def step(i, x):
    ...     i = ct.id_tap(bar, i)
    ...     return x + i
    >>> with ct.outfeed_receiver():
    ...     x = jax.jit(lambda: jax.lax.fori_loop(0, 200, step, 0))()  # doctest: +ELLIPSIS
    steps   0% 1/200
    steps  25% 50/200 ...
    steps  50% 100/200 ...
    steps  75% 150/200 ...
    steps 100% 200/200 ...
    """
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
        raise ValueError(f"n: expected a positive number of steps, got {n!r}")
    if not isinstance(label, str):
        raise TypeError(f"label: expected a string, got {label!r}")
    return ProgressBar(int(n), label, every, output_stream)
