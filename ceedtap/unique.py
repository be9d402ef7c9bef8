"""Objects of which there is one in one process."""

from __future__ import annotations

from typing import Any, NoReturn


class Unique:
    """An object that is not copied or pickled: it stands for something outside of Python, at an address of a process.

    A copy would stand for the same thing, which is freed with the first of the two.
    """

    _instead = "use the object itself, in any thread; in another process make it again from what it was made of"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        # What copy.copy, copy.deepcopy and all picklers come to.
        raise TypeError(
            f"{self!r} cannot be copied or pickled: it stands for an object outside of Python, at an address of this "
            f"process, that is freed together with it. Instead, {self._instead}"
        )
