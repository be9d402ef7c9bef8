"""What tapped values go to: functions, with what shall happen when they are slow or fail."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from typing import Any, Literal

from ceedtap.host_functions import check_function, check_result

#: Taps by their name, for programs that come from elsewhere.
TAPS: weakref.WeakValueDictionary[str, Consumer] = weakref.WeakValueDictionary()


def model_id(name: str) -> int:
    """The id of the native consumer that has the settings of the :class:`ceedtap.Tap` of this name."""
    return int.from_bytes(hashlib.blake2b(f"named tap {name}".encode(), digest_size=8).digest(), "big") or 1


Policy = Literal["block", "drop_newest", "drop_oldest"]
OnError = Literal["raise", "log", "disable"]


class Consumer:
    """A function for :func:`ceedtap.id_tap`, with what shall happen when it is slow or fails.

    Args:
        func: gets the tapped values.
        policy: when the events that wait for their consumers have used up the device's budget (see
            :func:`ceedtap.outfeed.configure`): ``"block"``, the program waits; ``"drop_newest"``, the event is dropped;
            ``"drop_oldest"``, earlier events of this consumer are dropped. Drops are counted in
            :func:`ceedtap.outfeed.stats`.
        every: only every n-th event leaves the program, starting with the first.
        on_error: what becomes of an exception that `func` raises: ``"raise"``, it is kept for
            :func:`ceedtap.barrier_wait`; ``"log"``, it goes to the logger ``ceedtap``; ``"disable"``, it is kept and
            `func` is not called again.
        name: in messages and statistics; by default the name of the function.

    >>> import ceedtap as ct, jax
    >>> seen = []
    >>> rare = ct.Consumer(lambda x: seen.append(int(x)), every=3)
    >>> with ct.outfeed_receiver():
    ...     _ = jax.jit(lambda: jax.lax.fori_loop(0, 8, lambda i, c: ct.id_tap(rare, i, result=c), 0))()
    >>> seen
    [0, 3, 6]
    """

    #: Whether `func` gets ``device=`` even where the tap does not say ``tap_with_device=True``.
    wants_device = False

    def __init__(
        self,
        func: Callable[..., Any],
        *,
        policy: Policy = "block",
        every: int = 1,
        on_error: OnError = "raise",
        name: str | None = None,
    ) -> None:
        if not callable(func):
            raise TypeError(f"a consumer needs a function, got {type(func).__name__}")
        check_function(func, "a consumer")
        _check("policy", policy, Policy)
        _check("on_error", on_error, OnError)
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every is a positive integer, got {every!r}")
        self.func = func
        self.policy: Policy = policy
        self.every = every
        self.on_error: OnError = on_error
        self.name = name or getattr(func, "__qualname__", None) or type(func).__qualname__
        self.enabled = True
        #: Where programs have this consumer; the outfeed enters them. Each has a method `enable`.
        self.routes: weakref.WeakSet[Any] = weakref.WeakSet()

    def enable(self, enabled: bool) -> None:
        """Lets events leave the programs, or not; at once, without compiling anything."""
        self.enabled = enabled
        for route in list(self.routes):
            route.enable(enabled)

    def settle(self) -> None:
        """Called where a barrier has found that everything is delivered, of the displays of the outfeed."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        result = self.func(*args, **kwargs)
        if result is not None:
            check_result(result, self.func, "a consumer")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


def _check(name: str, value: object, choices: Any) -> None:
    allowed = choices.__args__
    if value not in allowed:
        raise ValueError(f"{name} is one of {', '.join(map(repr, allowed))}, got {value!r}")


class Failures(Exception):
    """What the consumers of a :class:`Tap` raised for one event."""

    def __init__(self, failures: list[tuple[Consumer, Exception]]) -> None:
        super().__init__(failures)
        self.failures = failures


def failures_of(consumer: Consumer, error: Exception) -> list[tuple[Consumer, Exception]]:
    """The consumers that failed, with their exceptions."""
    return error.failures if isinstance(error, Failures) else [(consumer, error)]
