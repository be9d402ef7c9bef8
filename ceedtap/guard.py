"""Locks of Python code that does not run on in the child of a fork."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType


class Guard:
    """A lock for ``with`` blocks that nobody holds in the child of a fork: there is no thread that could give it back.

    For what is short and leaves nothing half done that matters to the child.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _guards.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Makes it free, whoever held it."""
        self._lock = threading.Lock()


_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


def _after_fork() -> None:
    for guard in list(_guards):
        guard.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
