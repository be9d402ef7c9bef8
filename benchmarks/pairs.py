"""Ratios of two measurements that are taken in turn, so that a busy machine disturbs both alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def seconds(run: Callable[[], object], repeat: int = 1) -> float:
    """Time of one run, as the mean of `repeat`."""
    start = time.perf_counter()
    for _ in range(repeat):
        run()
    return (time.perf_counter() - start) / repeat


def compare(a: Callable[[], float], b: Callable[[], float], pairs: int) -> tuple[float, float, float]:
    """Medians of the figures of `a` and `b`, and the median of a / b over pairs; the first pair warms up."""
    a(), b()
    figures = []
    for i in range(pairs):
        figures.append((a(), b()) if i % 2 else tuple(reversed((b(), a()))))
    return (
        statistics.median(x for x, _ in figures),
        statistics.median(y for _, y in figures),
        statistics.median(x / y for x, y in figures),
    )


def report(name: str, value: float, unit: str, bar: float | None = None, at_least: bool = False) -> bool:
    """Prints a line, and whether the bar is held."""
    held = bar is None or (value >= bar if at_least else value <= bar)
    verdict = "" if bar is None else f"   bar {'>=' if at_least else '<='} {bar:g}: {'held' if held else 'NOT HELD'}"
    print(f"{name:<58} {value:10.4g} {unit:<6}{verdict}", flush=True)
    return held
