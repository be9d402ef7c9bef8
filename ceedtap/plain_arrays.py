"""Arrays that are numbers and nothing else, checked where arrays come in."""

from __future__ import annotations

from typing import Any

import numpy as np

_ADVICE = {
    "a mask": "for masked values there is no place, use .filled(...)",
    "a unit": "use its plain values, such as .magnitude or .value",
    "whatever its type adds": "pass numpy.asarray(...) of it, if its plain values are what you mean",
}


def plain_array(name: str, value: Any) -> np.ndarray:
    """`value` as a numpy array, not copied where that is not needed; see :func:`check_plain`."""
    check_plain(name, value)
    return np.asarray(value)


def check_plain(name: str, value: Any) -> None:
    """Refuses what carries more than numbers: the mask, the unit or whatever else it is would be dropped silently.

    Raises:
        TypeError: an array with a mask or a unit, of a subclass of numpy.ndarray that adds something, or a list or
            tuple that holds one.
    """
    if type(value) in (np.ndarray, int, float, bool, complex):
        return
    if isinstance(value, (list, tuple)):
        for item in value:
            check_plain(name, item)
        return
    if carries := _carries(value):
        kind = type(value)
        raise TypeError(
            f"{name}: {kind.__module__}.{kind.__qualname__} carries more than numbers, {carries}, which would be "
            f"dropped silently; {_ADVICE[carries]}"
        )


def _carries(value: Any) -> str:
    is_array = isinstance(value, np.ndarray)
    if isinstance(value, np.ma.MaskedArray) or isinstance(getattr(value, "mask", None), np.ndarray):
        return "a mask"
    # The quantities of pint, astropy, unyt and their like; other objects have units of another kind.
    if (is_array or hasattr(value, "magnitude") or hasattr(value, "value")) and any(
        getattr(value, unit, None) is not None for unit in ("units", "unit")
    ):
        return "a unit"
    # A subclass that adds something has to see to it when views are made.
    finalize = type(value).__array_finalize__ if is_array else None
    if is_array and finalize is not np.ndarray.__array_finalize__ and not isinstance(value, (np.memmap, np.recarray)):
        return "whatever its type adds"
    return ""
