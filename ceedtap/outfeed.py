"""The receiving side of taps: routes from consumer ids to Python functions, the receiver thread, draining and errors.

Compiled programs put frames into the native queue. One thread takes them out, decodes them and calls the consumers.
It starts with the first tap; at exit everything that was emitted is delivered first.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import itertools
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ceedtap import protocol
from ceedtap.native import ffi, lib

#: Consumers get views of a frame that is at least this large, without a copy. Smaller frames are copied, which costs
#: less than what lends a frame to Python.
LEND_BYTES = 1 << 16
#: Exceptions of consumers that are kept until somebody asks; the rest is counted.
MAX_KEPT_ERRORS = 100
#: At exit, draining ends when no event has been consumed for this long, in seconds.
EXIT_PATIENCE_SEC = 10.0

Transforms = tuple[tuple[str, dict[str, Any]], ...]


class CallbackException(ExceptionGroup):
    """Exceptions that consumers raised, as they were raised; each has a note that names the tap."""

    def derive(self, excs: Sequence[Exception]) -> CallbackException:  # type: ignore[override]
        return CallbackException(self.message, excs)


@dataclass(frozen=True, eq=False)
class Consumer:
    """A function that gets tapped values: ``func(*args, **kwargs)``, and ``transforms=`` when there were any.

    Attributes:
        func: called on the receiver thread.
        treedef: structure of the tapped positional arguments.
        kwargs: keyword arguments of every call.
        keys: for each leaf, the name of the random number generator when it holds keys.
        with_device: whether `func` also gets ``device=``.
    """

    func: Callable[..., Any]
    treedef: Any
    kwargs: dict[str, Any]
    keys: tuple[str | None, ...]
    with_device: bool

    @property
    def name(self) -> str:
        func_name = getattr(self.func, "__qualname__", None) or type(self.func).__qualname__
        what = self.kwargs.get("what")
        return f"{func_name}[{what}]" if isinstance(what, str) else func_name

    def deliver(self, leaves: list[Any], transforms: Transforms, device: int) -> None:
        for i, key in enumerate(self.keys):
            if key is not None:
                leaves[i] = jax.random.wrap_key_data(leaves[i], impl=key)
        args = jax.tree.unflatten(self.treedef, leaves)
        kwargs = self.kwargs
        if transforms:
            kwargs = {**kwargs, "transforms": transforms}
        if self.with_device:
            kwargs = {**kwargs, "device": _devices().get(device)}
        self.func(*args, **kwargs)


@functools.cache
def _devices() -> dict[int, jax.Device]:
    return {device.id: device for device in jax.local_devices()}


class Route:
    """Where the frames with one consumer id go. A compiled program holds it by the id alone."""

    def __init__(self, consumer: Consumer, transforms: Transforms, header: protocol.Header) -> None:
        self.consumer = consumer
        self.transforms = transforms
        self.header = header
        self.header_bytes = protocol.encode_header(header)
        self.decode = protocol.array_decoder(header)


class _RouteReference:
    """Python's share in a route; compiled programs hold theirs in the native registry."""

    def __init__(self, route: Route) -> None:
        self.route = route
        weakref.finalize(self, lib.ct_registry_unref, lib.ct_consumers(), route.header.consumer_id)


@dataclass
class _Errors:
    """Exceptions of consumers since somebody last asked."""

    kept: list[Exception] = field(default_factory=list)
    count: int = 0

    def add(self, error: Exception) -> None:
        self.count += 1
        if len(self.kept) < MAX_KEPT_ERRORS:
            self.kept.append(error)

    def take(self) -> CallbackException | None:
        if not self.count:
            return None
        kept, count = self.kept, self.count
        self.kept, self.count = [], 0
        more = f", the first {len(kept)} are here" if count > len(kept) else ""
        return CallbackException(f"consumers raised {count} exception{'s' * (count > 1)}{more}", kept)


class Outfeed:
    """The receiver thread and what it needs. There is one for the process, :data:`OUTFEED`."""

    def __init__(self) -> None:
        self._routes: dict[int, Route] = {}
        self._lock = threading.Lock()  # of _routes, _thread and the start of the thread
        self._progress = threading.Condition()  # of everything below
        self._errors = _Errors()
        self._running: Consumer | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False

    # -- routes --------------------------------------------------------------------------------------------------

    def route(
        self, consumer: Consumer, transforms: Transforms, specs: Sequence[protocol.ArraySpec]
    ) -> _RouteReference:
        """A route for these arrays; it lives as long as the reference or a program compiled with it.

        The id is a hash of what the consumer is called and of what it gets, so that it is the same in the next process:
        programs in JAX's persistent cache are found again.
        """
        text = repr((_module(consumer.func), consumer.name, str(consumer.treedef), transforms, tuple(specs)))
        with self._lock:
            for attempt in itertools.count():
                digest = hashlib.blake2b(f"{text}#{attempt}".encode(), digest_size=8).digest()
                route_id = int.from_bytes(digest, "big")
                known = self._routes.get(route_id)
                if known is None or known.consumer is consumer:
                    break
            if route_id == protocol.END_OF_STREAM:
                raise AssertionError("a hash of 64 zero bits")
            if known is None:
                known = Route(consumer, transforms, protocol.Header(route_id, tuple(specs)))
                self._routes[route_id] = known
            if lib.ct_registry_add(lib.ct_consumers(), route_id, ffi.NULL):
                raise MemoryError("ceedtap: no memory for a route")
        self._start()
        return _RouteReference(known)

    def emit(self, reference: _RouteReference, arrays: Sequence[np.ndarray], device: int = -1) -> None:
        """Puts one event into the queue from Python, as a compiled program does."""
        route = reference.route
        data = protocol.encode_payload(route.header, arrays)
        header = route.header_bytes
        if lib.ct_queue_emit(header, len(header), route.header.consumer_id, device, data, len(data)):
            raise MemoryError("ceedtap: no memory for the frame of a tap")

    def _reap(self) -> list[Route]:
        """Routes that nothing refers to any more. Their last frames may still be in the queue: keep them that long."""
        keys = ffi.new("uint64_t[256]")
        dead: list[Route] = []
        with self._lock:
            while n := lib.ct_registry_reap(lib.ct_consumers(), keys, 256):
                dead += [route for key in keys[0:n] if (route := self._routes.pop(key, None)) is not None]
        return dead

    # -- the receiver thread -------------------------------------------------------------------------------------

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._run, name="ceedtap-receiver", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            # The order matters: a frame of a dead route was committed before the route died, so the frames that are
            # taken after reaping include its last one.
            retired = {route.header.consumer_id: route for route in self._reap()}
            frame = lib.ct_queue_take(1_000_000)
            while frame:
                following = frame.next
                self._deliver(frame, self._routes.get(frame.consumer) or retired.get(frame.consumer))
                frame = following
            # Once for all frames that were taken: waking a waiter for each of them would cost more than they do.
            with self._progress:
                self._progress.notify_all()

    def _deliver(self, frame: Any, route: Route | None) -> None:
        size = frame.size
        if size < LEND_BYTES:
            data = bytearray(ffi.buffer(lib.ct_frame_bytes(frame), size))
            lent = False
        else:
            # Arrays made from this buffer keep it, it keeps the pointer, and that gives the frame back in the end.
            owner = ffi.gc(lib.ct_frame_bytes(frame), lambda _, frame=frame: lib.ct_frame_free(frame))
            data = ffi.buffer(owner, size)
            lent = True
        try:
            if route is None:
                raise LookupError(f"an event came for consumer {frame.consumer:#018x}, which this process does not know")
            self._running = route.consumer
            route.consumer.deliver(route.decode(data), route.transforms, frame.device)
        except BaseException as error:  # nothing that a consumer does may end the stream
            self._keep(error, frame, route)
        finally:
            self._running = None
            lib.ct_queue_consumed(frame, lent)

    def _keep(self, error: BaseException, frame: Any, route: Route | None) -> None:
        name = route.consumer.name if route else "unknown"
        if not isinstance(error, Exception):
            cause, error = error, RuntimeError(f"consumer {name} raised {type(error).__name__}")
            error.__cause__ = cause
        error.add_note(f"raised by consumer {name} for event {frame.seq} of device {frame.device}, run {frame.run_id}")
        with self._progress:
            self._errors.add(error)

    # -- waiting -------------------------------------------------------------------------------------------------

    def drain(self, timeout: float | None = None, patience: float | None = None) -> bool:
        """Waits until all that was emitted before the call is consumed.

        Args:
            timeout: seconds in all.
            patience: seconds without any progress.

        Returns:
            False when a limit was reached first.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("a consumer cannot wait for the outfeed: it would wait for itself to return")
        target = lib.ct_queue_emitted()
        end = None if timeout is None else time.monotonic() + timeout
        with self._progress:
            lib.ct_queue_wake()
            done, since = self.settled(), time.monotonic()
            while done < target:
                now = time.monotonic()
                if (end is not None and now >= end) or (patience is not None and now >= since + patience):
                    return False
                if self._thread is None or not self._thread.is_alive():
                    return False
                self._progress.wait(0.05)
                if (latest := self.settled()) > done:
                    done, since = latest, time.monotonic()
            return True

    @staticmethod
    def settled() -> int:
        """Events that have been consumed or dropped."""
        stats = _queue_stats()
        return stats["consumed"] + stats["dropped"]

    def barrier_wait(self, timeout: float | None) -> None:
        _wait_for_programs()
        if not self.drain(timeout):
            raise TimeoutError(f"{self.backlog()} after {timeout} s")
        self.raise_errors()

    def raise_errors(self) -> None:
        with self._progress:
            error = self._errors.take()
        if error is not None:
            raise error

    def backlog(self) -> str:
        stats = _queue_stats()
        waiting = stats["emitted"] - stats["consumed"] - stats["dropped"]
        running = self._running
        busy = f"consumer {running.name} has not returned" if running else "no consumer is running"
        return f"{waiting} tapped event{'s are' if waiting != 1 else ' is'} not consumed, {busy}"

    def shut_down(self) -> None:
        """At exit: delivers what there is, says what could not be delivered, and ends the thread."""
        thread = self._thread
        if thread is None or threading.current_thread() is thread:
            return
        _wait_for_programs()
        try:
            drained = self.drain(patience=EXIT_PATIENCE_SEC)
        except KeyboardInterrupt:
            drained = False
        if not drained:
            print(f"ceedtap: the process ends although {self.backlog()}", file=sys.stderr)
        self._stopping = True
        lib.ct_queue_close()
        if drained:
            thread.join(EXIT_PATIENCE_SEC)
        with self._progress:
            error = self._errors.take()
        if error is not None:
            print("ceedtap: exceptions of consumers that nobody asked for (see ceedtap.barrier_wait):", file=sys.stderr)
            traceback.print_exception(error)


def _module(func: Callable[..., Any]) -> str:
    return getattr(func, "__module__", None) or ""


def _queue_stats() -> dict[str, int]:
    stats = ffi.new("ct_queue_stats *")
    lib.ct_queue_get_stats(stats)
    return {name: getattr(stats, name) for name, _ in ffi.typeof("ct_queue_stats").fields}


def _wait_for_programs() -> None:
    """Waits for the programs with taps that this thread has dispatched."""
    # What a program failed with is raised where its result is used. Raising it here, again and again, would hide the
    # events that did arrive.
    with contextlib.suppress(Exception):
        jax.effects_barrier()


OUTFEED = Outfeed()
atexit.register(OUTFEED.shut_down)


def barrier_wait(timeout: float | None = None) -> None:
    """Waits until every event that has been emitted so far, by any thread on any device, has been consumed.

    Programs with taps that the calling thread has started are waited for first.

    Args:
        timeout: seconds; None waits as long as it takes.

    Raises:
        CallbackException: consumers have raised since the last call; it holds their exceptions.
        TimeoutError: the time is over; the message names the consumer that is running.

    >>> import ceedtap as ct, jax
    >>> seen = []
    >>> _ = jax.jit(lambda x: ct.id_tap(seen.append, 2 * x))(21)
    >>> ct.barrier_wait()
    >>> print(seen[0])
    42
    """
    OUTFEED.barrier_wait(timeout)


@contextlib.contextmanager
def outfeed_receiver(timeout_sec: float | None = 10.0) -> Iterator[Outfeed]:
    """A scope at whose end everything that was tapped inside has been delivered.

    Args:
        timeout_sec: seconds to wait at the end; None waits as long as it takes.

    Raises:
        CallbackException: a consumer raised. When the body raises too, that exception goes on, with a note.
        TimeoutError: events are left; the message names the consumer that is running.

    >>> import ceedtap as ct, jax
    >>> seen = []
    >>> with ct.outfeed_receiver():
    ...     _ = jax.jit(lambda x: ct.id_tap(seen.append, x + 1))(1)
    >>> print(seen[0])
    2
    """
    try:
        yield OUTFEED
    except BaseException as error:
        try:
            OUTFEED.barrier_wait(timeout_sec)
        except (CallbackException, TimeoutError) as other:
            error.add_note(f"and in the outfeed: {other!r}")
        raise
    OUTFEED.barrier_wait(timeout_sec)
