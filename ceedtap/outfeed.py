"""The receiving side of taps: routes from compiled programs to consumers, the receiver thread, draining and errors.

Compiled programs put frames into the native queue. One thread takes them out, decodes them and calls the consumers.
It starts with the first tap; at exit everything that was emitted is delivered first.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ceedtap import jax_compat, notebook, protocol
from ceedtap.consumer import TAPS, Consumer, failures_of
from ceedtap.description import Description
from ceedtap.native import ffi, lib
from ceedtap.routes import Binding, Route, RouteReference, Tee, Transforms, fields
from ceedtap.shards import Parts

logger = logging.getLogger("ceedtap")

#: The custom calls of programs with taps. `jax.export` must be told of them.
CUSTOM_CALLS = ("ceedtap_tap", "ceedtap_partitioned_tap")
#: Consumers get views of a frame that is at least this large, without a copy. Smaller frames are copied, which costs
#: less than what lends a frame to Python.
LEND_BYTES = 1 << 16
#: Frames that are taken from the queue at a time. What is taken cannot be dropped any more.
BATCH = 256
#: Exceptions of consumers that are kept until somebody asks; the rest is counted.
MAX_KEPT_ERRORS = 100
#: At exit, draining ends when no event has been consumed for this long, in seconds.
EXIT_PATIENCE_SEC = 10.0
#: At exit, draining that takes longer than this is spoken of, in seconds.
EXIT_NOTICE_SEC = 5.0


class CallbackException(ExceptionGroup):
    """Exceptions that consumers raised, as they were raised; each has a note that names the tap."""

    def derive(self, excs: Sequence[Exception]) -> CallbackException:  # type: ignore[override]
        return CallbackException(self.message, excs)


@dataclass
class Errors:
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
        self._retired: list[tuple[Any, Route | None]] = []
        self._tees: tuple[Tee, ...] = ()
        self.lock = threading.RLock()  # of the routes, their native parts, and the start of the thread
        self._progress = threading.Condition()  # of the errors; notified when frames have been consumed
        self._errors = Errors()
        self._displays: weakref.WeakSet[Consumer] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._ending = False
        #: Whether there are programs with taps that JAX's own barrier does not know of.
        self.untracked = False

    # -- routes --------------------------------------------------------------------------------------------------

    def route(
        self,
        binding: Binding,
        transforms: Transforms,
        specs: Sequence[protocol.ArraySpec],
        parts: Parts | None = None,
    ) -> RouteReference:
        """A route for these arrays; it lives as long as the reference or a program compiled with it.

        The id is a hash of what the consumer is called and of what it gets, so that it is the same in the next process:
        programs in JAX's persistent cache are found again.
        """
        func = binding.consumer.func
        module = getattr(func, "__module__", None)
        options = (binding.with_device, binding.with_shard, binding.labels)
        text = repr((module, binding.name, str(binding.treedef), options, transforms, tuple(specs), parts))
        with self.lock:
            for attempt in itertools.count():
                digest = hashlib.blake2b(f"{text}#{attempt}".encode(), digest_size=8).digest()
                route_id = int.from_bytes(digest, "big") or 1  # 0 ends a stream
                route = self._routes.get(route_id)
                if route is None or route.binding is binding:
                    break
            native = lib.ct_consumer_get(route_id)
            if not native:
                raise MemoryError("ceedtap: no memory for a route")
            if route is None:
                route = Route(binding, transforms, protocol.Header(route_id, tuple(specs)), parts)
                self._routes[route_id] = route
                route.connect(native, self, self._tees)
        self._start()
        return RouteReference(route)

    def adopt(self) -> None:
        """Makes routes for the taps of programs that came without them, where this process knows who consumes them."""
        found = ffi.new("ct_consumer *[64]")
        with self.lock:
            for native in found[0 : lib.ct_consumers_unknown(found, 64)]:
                self._adopt(native)

    def _adopt(self, native: Any) -> None:
        self.untracked = True
        description = Description.of_native(native)
        known = self._routes.get(description.like)
        binding = description.find() if known is None else known.binding
        if binding is None:
            return
        header, told = protocol.decode_header(description.header), description.definition
        route = Route(binding, told.transforms if known is None else known.transforms, header, told.parts)
        for i, (other, _) in enumerate(self._retired):
            if other == native:  # its program has gone, the event has not
                self._retired[i] = native, route
                break
        else:
            self._routes[native.id] = route
        route.connect(native, self, self._tees)

    def emit(self, reference: RouteReference, arrays: Sequence[np.ndarray], device: int = -1, part: int = -1) -> None:
        """Puts one event into the queue from Python, as a compiled program does.

        Raises:
            TimeoutError: the queue has had no room for the time-out.
        """
        route = reference.route
        data = protocol.encode_payload(route.header, arrays)
        header = route.header_bytes
        outcome = lib.ct_queue_emit(route.native, device, part, header, len(header), data, len(data))
        if outcome == lib.CT_TIMED_OUT:
            raise TimeoutError(f"a tap waited for room in the outfeed until the time-out; {self.backlog()}")
        if outcome == lib.CT_INTERRUPTED:
            raise KeyboardInterrupt
        if outcome == lib.CT_NO_MEMORY:
            raise MemoryError("ceedtap: no memory for the frame of a tap")

    def attach(self, tee: Tee) -> None:
        """Lets a tee have what it wants of the routes that there are, and of those to come."""
        self.adopt()
        with self.lock:
            self._choose((*self._tees, tee))

    def detach(self, tee: Tee) -> None:
        with self.lock:
            self._choose(tuple(other for other in self._tees if other is not tee))

    @property
    def has_tees(self) -> bool:
        """Whether somebody listens besides consumers."""
        return bool(self._tees)

    def _choose(self, tees: tuple[Tee, ...]) -> None:
        self._tees = tees
        for route in self._routes.values():
            route.choose(tees)
        for tap in list(TAPS.values()):
            tap.enable(tap.enabled)

    def _reap(self) -> None:
        """Lets go of routes that nothing refers to any more, once their last event has been consumed."""
        keys, payloads = ffi.new("uint64_t[64]"), ffi.new("void *[64]")
        with self.lock:
            while n := lib.ct_registry_reap(lib.ct_consumers(), keys, payloads, 64):
                for key, payload in zip(keys[0:n], payloads[0:n], strict=True):
                    route = self._routes.pop(key, None)
                    native = ffi.cast("ct_consumer *", payload)
                    self._retired.append((native, route))
            busy = []
            for native, route in self._retired:
                if not lib.ct_consumer_idle(native):
                    busy.append((native, route))
                elif route is None:  # of a program from elsewhere, whose consumer this process does not have
                    lib.ct_consumer_free(native)
                else:
                    route.free()
            self._retired = busy

    # -- the receiver thread -------------------------------------------------------------------------------------

    def _start(self) -> None:
        with self.lock:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._run, name="ceedtap-receiver", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            self._reap()
            frame = lib.ct_queue_take(1_000_000, BATCH)
            while frame:
                following = frame.next
                self._deliver(frame)
                frame = following
            # Once for all frames that were taken: waking a waiter for each of them would cost more than they do.
            with self._progress:
                self._progress.notify_all()

    def _deliver(self, frame: Any) -> None:
        size = frame.size
        if not frame.consumer.route and frame.consumer.description:
            with self.lock:
                self._adopt(frame.consumer)
        handle = frame.consumer.route
        route: Route | None = ffi.from_handle(handle) if handle else None
        lent = size >= LEND_BYTES
        if lent:
            # Arrays made from this buffer keep it, it keeps the pointer, and that gives the frame back in the end.
            owner = ffi.gc(lib.ct_frame_bytes(frame), lambda _, frame=frame: lib.ct_frame_free(frame))
            data: protocol.Bytes = memoryview(ffi.buffer(owner, size)).toreadonly()
        else:
            data = bytes(ffi.buffer(lib.ct_frame_bytes(frame), size))
        try:
            if route is None:
                raise LookupError(_unknown(frame.consumer))
            for tee in route.tees:
                try:
                    tee.take(route, data)
                except Exception as error:
                    self.keep(error)
            if route.binding.consumer.enabled:
                notebook.follow_cell()
                shard = route.shard(frame.device, frame.part) if route.binding.with_shard else None
                route.binding.deliver(route.decode(data), route.transforms, frame.device, shard)
        except BaseException as error:  # nothing that a consumer does may end the stream
            self._keep(error, frame, route)
        finally:
            lib.ct_queue_consumed(frame, lent)

    def _keep(self, error: BaseException, frame: Any, route: Route | None) -> None:
        name = route.binding.name if route else "unknown"
        if not isinstance(error, Exception):
            cause, error = error, RuntimeError(f"consumer {name} raised {type(error).__name__}")
            error.__cause__ = cause
        note = f"raised by consumer {name} for event {frame.seq} of device {frame.device}, run {frame.run_id}"
        for consumer, exception in failures_of(route.binding.consumer, error) if route else [(None, error)]:
            exception.add_note(note)
            if isinstance(exception, TypeError) and "keyword argument" in str(exception):
                exception.add_note(
                    "consumers get transforms= for batches and derivatives, and where= and operator= for what is "
                    "tapped at quadrature points: take them, by name or as **labels; id_tap(..., tangents=False) "
                    "leaves the derivatives out"
                )
            if consumer is not None and consumer.on_error == "log":
                logger.error(note, exc_info=exception)
                continue
            if consumer is not None and consumer.on_error == "disable":
                consumer.enable(False)
            self.keep(exception)

    @property
    def is_receiver(self) -> bool:
        """Whether the calling thread is the one that calls consumers."""
        return threading.current_thread() is self._thread

    def keep(self, error: Exception) -> None:
        """Keeps an exception until somebody asks for those of consumers."""
        if self._ending:
            traceback.print_exception(error)
        with self._progress:
            self._errors.add(error)

    def forget(self, error: Exception) -> None:
        """Lets go of an exception that is raised elsewhere."""
        with self._progress:
            if error in self._errors.kept:
                self._errors.kept.remove(error)
                self._errors.count -= 1

    # -- waiting -------------------------------------------------------------------------------------------------

    def drain(self, timeout: float | None = None, patience: float | None = None) -> bool:
        """Waits until all that was emitted before the call is consumed.

        Args:
            timeout: seconds in all.
            patience: seconds without any progress.

        Returns:
            False when a limit was reached first.
        """
        if self.is_receiver:
            raise RuntimeError("a consumer cannot wait for the outfeed: it would wait for itself to return")
        target = queue_stats()["emitted"]
        if target:
            self._start()  # events of a program that was loaded, for example, of whose taps this process knows nothing
        end = None if timeout is None else time.monotonic() + timeout
        with self._progress:
            lib.ct_queue_wake()
            done, since = _settled(), time.monotonic()
            while done < target:
                now = time.monotonic()
                if (end is not None and now >= end) or (patience is not None and now >= since + patience):
                    return False
                if self._thread is None or not self._thread.is_alive():
                    return False
                self._progress.wait(0.05)
                if (latest := _settled()) > done:
                    done, since = latest, time.monotonic()
            return True

    def barrier_wait(self, timeout: float | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        wait_for_programs(timeout)
        if not self.drain(None if end is None else max(0.0, end - time.monotonic())):
            raise TimeoutError(f"{self.backlog()} after {timeout} s")
        self._settle()
        with self._progress:
            error = self._errors.take()
        if error is not None:
            raise error

    def add_display(self, consumer: Consumer) -> None:
        """Lets a consumer that shows something know when all has been delivered, by :meth:`Consumer.settle`."""
        with self.lock:
            self._displays.add(consumer)

    def _settle(self) -> None:
        with self.lock:
            displays = list(self._displays)
        for display in displays:
            try:
                display.settle()
            except Exception as error:
                error.add_note(f"raised by consumer {display.name} when all had been delivered")
                self.keep(error)

    def backlog(self) -> str:
        """What is left to do, in words."""
        stats = queue_stats()
        waiting = stats["emitted"] - stats["consumed"] - stats["dropped"]
        busy = ffi.new("char[192]")
        lib.ct_queue_busy(busy, 192)
        events = "event is" if waiting == 1 else "events are"
        return f"{waiting} tapped {events} not consumed, {ffi.string(busy).decode(errors='replace')}"

    def stats(self) -> dict[str, Any]:
        totals: dict[str, Any] = dict(queue_stats())
        totals["consumers"] = []
        with self.lock:
            for route in self._routes.values():
                offered, devices = route.counts()
                entry = {"name": route.binding.name, "offered": offered, "devices": devices}
                entry["transforms"] = route.transforms
                totals["consumers"].append(entry)
        return totals

    def after_fork(self) -> None:
        """In the child of a fork: no receiver thread, and locks that nobody holds. The next tap starts a thread."""
        lib.ct_queue_after_fork(True)
        self.lock = threading.RLock()
        self._progress = threading.Condition()
        self._errors = Errors()
        self._thread = None
        self._choose(())  # files and sockets belong to the parent
        # The parent's receiver may have been about to free some of these.
        self._retired = [(native, route) for native, route in self._retired if route is None or route.native]

    def shut_down(self) -> None:
        """At exit: delivers what there is, says what could not be delivered, and ends the thread."""
        if self.is_receiver:
            return
        wait_for_programs(EXIT_PATIENCE_SEC)
        if queue_stats()["emitted"]:
            self._start()  # of programs from elsewhere
        if self._thread is None:
            return
        try:
            drained = self.drain(timeout=EXIT_NOTICE_SEC)
            if not drained:
                print(f"ceedtap: before the process ends: {self.backlog()}. Ctrl-C leaves it.", file=sys.stderr)
                drained = self.drain(patience=EXIT_PATIENCE_SEC)
        except KeyboardInterrupt:
            drained = False
        self._settle()
        if drained:
            # Functions that were registered for the exit before this one run after it, and may tap.
            self._ending = True
            lib.ct_queue_linger(int(1000 * EXIT_PATIENCE_SEC))
        else:
            print(f"ceedtap: the process ends although {self.backlog()}", file=sys.stderr)
            self._stopping = True
            lib.ct_queue_close()
        with self._progress:
            error = self._errors.take()
        if error is not None:
            print("ceedtap: exceptions of consumers that nobody asked for (see ceedtap.barrier_wait):", file=sys.stderr)
            traceback.print_exception(error)


def queue_stats() -> dict[str, int]:
    """The totals of :func:`stats`."""
    stats = ffi.new("ct_queue_stats *")
    lib.ct_queue_get_stats(stats)
    return fields(stats[0])


def _unknown(native: Any) -> str:
    """What to do about an event that nobody has asked for."""
    text = f"an event came for consumer {native.id:#018x}, which this process does not have"
    if not native.description:
        return text
    description = Description.of_native(native)
    return f"{text}: `{description.definition.tap}` of a program from elsewhere; {description.advice()}"


def _settled() -> int:
    stats = queue_stats()
    return stats["consumed"] + stats["dropped"]


#: Threads in which no program may be waited for: those that run host functions which programs wait for.
no_waiting = threading.local()


def wait_for_programs(timeout: float | None = None) -> None:
    """Waits for the programs with taps: those that this thread has dispatched, and those of other threads whose results
    somebody holds. It gives up after the time-out."""
    # What a program failed with is raised where its result is used. Raising it here, again and again, would hide the
    # events that did arrive.
    jax_compat.wait_for_effects()
    # A Python callback of JAX's on a thread of XLA's (which Python calls a dummy) may be what a program waits for.
    is_callback = type(threading.current_thread()).__name__ == "_DummyThread"
    if OUTFEED.untracked and not (OUTFEED.is_receiver or is_callback or getattr(no_waiting, "here", False)):
        jax_compat.wait_for_results(timeout)


def deliver() -> None:
    """Waits until what has been emitted is consumed, unless a consumer is stuck, or it is a consumer that calls."""
    if not OUTFEED.is_receiver:
        wait_for_programs(EXIT_PATIENCE_SEC)
        OUTFEED.drain(patience=EXIT_PATIENCE_SEC)


OUTFEED = Outfeed()
atexit.register(OUTFEED.shut_down)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lib.ct_queue_before_fork,
        after_in_parent=lambda: lib.ct_queue_after_fork(False),
        after_in_child=OUTFEED.after_fork,
    )


def configure(*, budget_bytes: int = 64 << 20, block_timeout_sec: float | None = 300.0) -> None:
    """Sets the limits of the outfeed; what is not given gets its default.

    Args:
        budget_bytes: bytes of events that may wait for their consumers, for each device. An event that is larger passes
            when nothing else waits.
        block_timeout_sec: how long a program waits for room (``policy="block"``) while no event at all is consumed,
            before it fails with an error that names the consumer; None: for ever.
    """
    if budget_bytes < 0 or (block_timeout_sec is not None and block_timeout_sec < 0):
        raise ValueError(f"limits are not negative, got {budget_bytes=} and {block_timeout_sec=}")
    lib.ct_queue_configure(budget_bytes, -1 if block_timeout_sec is None else int(block_timeout_sec * 1000))


def stats() -> dict[str, Any]:
    """Counters of the outfeed.

    Returns:
        ``emitted``, ``consumed`` and ``dropped`` events, ``queued_bytes`` and their ``peak_bytes``; and ``consumers``,
        a list with an entry for each tap in a living program: ``name``, ``transforms``, ``offered`` (events of
        programs, whether they left or not) and, by device, the same counters. Once everything has been consumed,
        emitted equals consumed + dropped.

    >>> import ceedtap as ct
    >>> ct.id_tap(lambda x: None, 1)
    1
    >>> ct.barrier_wait()
    >>> counters = ct.outfeed.stats()
    >>> counters["emitted"] == counters["consumed"] + counters["dropped"]
    True
    """
    return OUTFEED.stats()


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
def outfeed_receiver(timeout_sec: float | None = 10.0) -> Iterator[None]:
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
        yield
    except BaseException as error:
        try:
            OUTFEED.barrier_wait(timeout_sec)
        except (CallbackException, TimeoutError) as other:
            error.add_note(f"and in the outfeed: {other!r}")
        raise
    OUTFEED.barrier_wait(timeout_sec)
