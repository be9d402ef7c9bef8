"""Taps with a name, to which consumers are attached while programs exist or run."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ceedtap import outfeed
from ceedtap.consumer import TAPS, Consumer, Failures, Policy, model_id
from ceedtap.native import ffi, lib
from ceedtap.primitive import id_tap as id_tap  # registers what programs with taps need when they are read
from ceedtap.routes import POLICIES


class Tap(Consumer):
    """A tap with a name, to which functions are attached while programs exist or run.

    A program that taps it need not be traced again when that changes. While nothing is attached, no event leaves it.

    Args:
        name: of the tap. Programs with taps of one name and the same shapes share their compiled form between
            processes, and a program that was exported (`jax.export`) finds its taps by it. A copy is the same tap.
        policy, every: as for :class:`Consumer`.

    >>> import ceedtap as ct, jax
    >>> flux = ct.Tap("flux")
    >>> f = jax.jit(lambda x: ct.id_tap(flux, 2 * x))
    >>> _ = f(1)  # nobody listens
    >>> with flux.attached(print):
    ...     _ = f(2)
    4
    """

    def __init__(self, name: str, *, policy: Policy = "block", every: int = 1) -> None:
        super().__init__(self._fan_out, policy=policy, every=every, name=name)
        self._lock = threading.Lock()
        self._attached: tuple[Consumer, ...] = ()
        self.enabled = False
        TAPS[name] = self
        self._model = _Model(self)
        self.routes.add(self._model)
        self._model.enable(False)
        outfeed.OUTFEED.adopt()

    @property
    def consumers(self) -> tuple[Consumer, ...]:
        """What is attached."""
        return self._attached

    def attach(self, func: Callable[..., Any] | Consumer) -> Consumer:
        """Attaches a function; returns what :meth:`detach` takes. Of a :class:`Consumer`, `on_error` applies here."""
        consumer = func if isinstance(func, Consumer) else Consumer(func)
        with self._lock:
            self._attached = (*self._attached, consumer)
            outfeed.OUTFEED.adopt()
            self.enable(True)
        return consumer

    def detach(self, consumer: Consumer) -> None:
        """Detaches what was attached. Events on their way do not reach it any more.

        Raises:
            ValueError: it is not attached.
        """
        with self._lock:
            if consumer not in self._attached:
                raise ValueError(f"{consumer!r} is not attached to the tap {self.name}")
            self._attached = tuple(other for other in self._attached if other is not consumer)
            self.enable(bool(self._attached))

    @contextlib.contextmanager
    def attached(self, func: Callable[..., Any] | Consumer) -> Iterator[Consumer]:
        """Attaches a function for the body of a `with` statement.

        At its end it waits until everything that was tapped in the body has been delivered; it gives up, as the end of
        the process does, where a consumer gets nothing done for ten seconds.

        >>> import ceedtap as ct, jax
        >>> flux = ct.Tap("flux")
        >>> with flux.attached(print):
        ...     _ = jax.jit(lambda x: ct.id_tap(flux, 2 * x))(2)
        4
        """
        consumer = self.attach(func)
        try:
            yield consumer
        finally:
            outfeed.deliver()
            self.detach(consumer)

    def _fan_out(self, *args: Any, **kwargs: Any) -> None:
        failures: list[tuple[Consumer, Exception]] = []
        for consumer in self._attached:
            if not consumer.enabled:
                continue
            try:
                consumer(*args, **kwargs)
            except Exception as error:
                failures.append((consumer, error))
        if failures:
            raise Failures(failures)

    def __copy__(self) -> Tap:
        return self

    def __deepcopy__(self, _: Any) -> Tap:
        return self

    def __reduce__(self) -> Any:
        """In another process it is the tap of that name there, made when there is none."""
        return _tap_named, (self.name, self.policy, self.every)


class _Model:
    """The settings of a tap for programs from elsewhere, which look for it when they are loaded."""

    def __init__(self, tap: Tap) -> None:
        self.native = lib.ct_consumer_get(model_id(tap.name))
        name, policy = tap.name.encode()[:120], POLICIES[tap.policy]
        lib.ct_consumer_configure(self.native, ffi.NULL, name, policy, tap.every)
        self._forget = functools.partial(lib.ct_registry_unref, lib.ct_consumers(), model_id(tap.name))

    def enable(self, enabled: bool) -> None:
        lib.ct_consumer_enable(self.native, enabled or outfeed.OUTFEED.has_tees)

    def __del__(self) -> None:
        self._forget()


def _tap_named(name: str, policy: Policy, every: int) -> Consumer:
    return TAPS.get(name) or Tap(name, policy=policy, every=every)
