"""What ``ceedtap info`` says of a recording."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ceedtap.recording import Recording, Series

_HEADINGS = ("tap", "events", "arrays", "MB", "steps", "devices", "from", "seconds")


def text(run: Recording) -> str:
    """A table of the taps, and what is to be said of the file."""
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for tap, series in run.items():
        seen = list(dict.fromkeys(tuple(name for name, _ in transforms) for transforms in series.transforms))
        for names in seen:
            label = f"{tap} ({', '.join(names)})" if names else tap
            rows.append((label, *_cells(series.select(transforms=names))))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    state = "ended" if run.ended else "not ended: its process was killed, or is still recording"
    lines.append(f"{run.path}: {run.num_events} events, {run.nbytes / 1e6:.2f} MB, {state}")
    if (damage := run.damage) is not None:
        lines.append(str(damage))
    return "\n".join(lines)


def _cells(series: Series) -> tuple[str, ...]:
    steps, times = series.steps, series.times
    span = (times.max() - times.min()) / np.timedelta64(1, "s")
    return (
        str(len(series)),
        ", ".join(series.array_types()),
        f"{series.nbytes / 1e6:.2f}",
        f"{steps.min()}..{steps.max()}",
        ",".join(map(str, np.unique(series.devices).tolist())),
        str(times.min().astype("datetime64[ms]")),
        f"{span:.3f}",
    )
