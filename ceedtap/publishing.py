"""Publishing the events of a process to others: a Unix socket, and a thread that sends what followers can take.

Followers get the frames and definitions of a recording. What one of them is too slow for is dropped and counted.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import selectors
import socket
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from ceedtap import outfeed, protocol
from ceedtap import recording_format as fmt
from ceedtap.outfeed import OUTFEED
from ceedtap.publication_names import socket_path
from ceedtap.recording_definition import definition, pack, tap_name
from ceedtap.routes import Route

#: Frames are sent at such intervals, in seconds: a thread that is woken by each of them would disturb the program.
TICK_SEC = 0.05
#: Events that are copied for followers in a tick, besides the first one of each tap. A tap that has more, or more bytes
#: than its share, stays silent for the rest of the tick: followers cost a program little, however fast it is.
TICK_EVENTS = 250
#: Bytes that may wait for one follower.
BACKLOG_BYTES = 32 << 20
STATUS_SEC = 0.5
#: How long the end of a publication waits for followers that are slow.
END_SEC = 0.5

_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # a follower that dies is no reason to end the process


class _Follower:
    """A connection, with what waits to be sent."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.waiting: deque[memoryview] = deque()
        self.bytes = 0
        self.lost: Counter[str] = Counter()
        self.defined: dict[int, bytes] = {}

    def add(self, data: bytes) -> None:
        self.waiting.append(memoryview(data))
        self.bytes += len(data)

    def send(self) -> None:
        """Sends what goes without waiting."""
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while self.waiting:
                parts = [self.waiting[i] for i in range(min(64, len(self.waiting)))]
                count = self.socket.sendmsg(parts, (), _NO_SIGNAL)
                self.bytes -= count
                while count and count >= len(self.waiting[0]):
                    count -= len(self.waiting.popleft())
                if count:
                    self.waiting[0] = self.waiting[0][count:]


class Publisher:
    """A publication; see :func:`publish`. Closing it twice does nothing."""

    lossy = True

    def __init__(self, name: str, taps: Iterable[str] | None, megabytes_per_sec: float) -> None:
        if not megabytes_per_sec > 0:
            raise ValueError(f"publish: megabytes_per_sec is positive, got {megabytes_per_sec!r}")
        self.name = name
        self._tick_bytes = megabytes_per_sec * 1e6 * TICK_SEC
        self._names = (taps,) if isinstance(taps, str) else taps if taps is None else tuple(taps)
        self._path = socket_path(name)
        self._lock_fd = _lock(self._path, name)
        self._pid = os.getpid()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)  # of a process that was killed
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self._path)
        os.chmod(self._path, 0o600)
        self._listener.listen(8)
        self._listener.setblocking(False)
        self._wake_reading, self._wake_writing = os.pipe()
        self._lock = threading.Lock()
        self._pending: list[tuple[Route, bytes]] = []
        self._pending_bytes = 0
        self._missed: Counter[str] = Counter()  # events that were not copied, for all followers
        self._served: set[Route] = set()  # in this tick
        self._muted: set[Route] = set()  # for the rest of it
        self._skipped: weakref.WeakKeyDictionary[Route, int] = weakref.WeakKeyDictionary()
        self._definitions: dict[int, tuple[Route, bytes]] = {}
        self._followers: list[_Follower] = []
        self._closed = False
        _publishers.add(self)
        self._thread = threading.Thread(target=self._run, name="ceedtap-publishing", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def num_followers(self) -> int:
        """How many follow now."""
        return len(self._followers)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the publication. Followers get what has been emitted, if they take it within half a second."""
        if self._closed or os.getpid() != self._pid:
            return
        if self._followers and threading.current_thread().name != "ceedtap-receiver":
            outfeed.wait_for_programs()
            OUTFEED.drain(timeout=END_SEC)
        self._closed = True
        os.write(self._wake_writing, b"x")
        self._thread.join()
        atexit.unregister(self.close)
        _publishers.discard(self)

    def after_fork(self) -> None:
        """In the child of a fork: the socket and the name are the parent's."""
        self._listener.close()
        for follower in self._followers:
            follower.socket.close()
        for fd in (self._lock_fd, self._wake_reading, self._wake_writing):
            os.close(fd)

    # -- from the receiver thread --------------------------------------------------------------------------------

    def wants(self, route: Route) -> bool:
        """Whether followers get the events of a route."""
        wanted = self._names is None or tap_name(route.binding) in self._names
        if wanted:
            self._skipped[route] = _skipped(route)
        return wanted

    def take(self, route: Route, frame: Any) -> None:
        """Copies a frame for the followers, unless there are too many already."""
        size = len(frame)
        with self._lock:
            if not self._followers:
                return
            full = len(self._pending) >= TICK_EVENTS or self._pending_bytes + size > self._tick_bytes
            if full and route in self._served:
                self._missed[tap_name(route.binding)] += 1
                mute = route not in self._muted
                self._muted.add(route)
            else:
                self._served.add(route)
                self._pending.append((route, bytes(frame)))
                self._pending_bytes += size
                mute = False
        if mute:
            route.mute()

    # -- the publication's own thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, self._accept)
            selector.register(self._wake_reading, selectors.EVENT_READ, None)
            self._serve(selector)
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
            os.unlink(f"{self._path}.lock")
        for fd in (self._lock_fd, self._wake_reading, self._wake_writing):
            os.close(fd)

    def _serve(self, selector: selectors.BaseSelector) -> None:
        status_at = tick_at = 0.0
        while not self._closed:
            wait = max(0.0, tick_at - time.monotonic()) if self._followers else None
            for key, events in selector.select(wait):
                if key.fileobj is self._listener:
                    self._accept(selector)
                elif isinstance(key.data, _Follower):
                    self._exchange(selector, key.data, events)
            now = time.monotonic()
            if self._followers and now >= tick_at:
                tick_at = now + TICK_SEC
                self._distribute(selector)
                if now >= status_at:
                    status_at = now + STATUS_SEC
                    self._tell_status()
        self._tell_status()
        OUTFEED.detach(self)
        self._distribute(selector)
        self._tell_status()
        end = time.monotonic() + END_SEC
        for follower in self._followers:
            follower.add(fmt.frame_of(protocol.END_OF_STREAM))
            with contextlib.suppress(OSError):
                while follower.waiting and time.monotonic() < end:
                    follower.send()
                    time.sleep(0.001 if follower.waiting else 0)
            follower.socket.close()
        self._followers = []

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone again, or there are no more file descriptors
            time.sleep(0.01)
            return
        follower = _Follower(connection)
        content = {"format": fmt.FORMAT, "time_ns": time.time_ns(), "pid": self._pid, "name": self.name}
        follower.add(fmt.message(fmt.PREAMBLE, pack(content)))
        selector.register(connection, selectors.EVENT_READ, follower)
        if not self._followers:
            OUTFEED.attach(self)
        self._followers.append(follower)
        self._exchange(selector, follower, selectors.EVENT_WRITE)

    def _exchange(self, selector: selectors.BaseSelector, follower: _Follower, events: int) -> None:
        """Sends to a follower, and notices when it has gone; nothing that it says matters."""
        try:
            if events & selectors.EVENT_READ and not follower.socket.recv(4096):
                raise ConnectionResetError
            if events & selectors.EVENT_WRITE:
                follower.send()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            selector.unregister(follower.socket)
            follower.socket.close()
            if self._followers == [follower]:
                OUTFEED.detach(self)
                with self._lock:
                    self._pending, self._pending_bytes = [], 0
            self._followers.remove(follower)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if follower.waiting else 0)
        selector.modify(follower.socket, wanted, follower)

    def _distribute(self, selector: selectors.BaseSelector) -> None:
        """Gives every follower what has come since the last time, as far as it keeps up."""
        with self._lock:
            pending, self._pending, self._pending_bytes = self._pending, [], 0
            missed, self._missed = self._missed, Counter()
            muted, self._muted, self._served = self._muted, set(), set()
        for route in muted:
            route.enable(route.binding.consumer.enabled)
        for follower in list(self._followers):
            follower.lost.update(missed)
            for route, data in pending:
                if follower.bytes and follower.bytes + len(data) > BACKLOG_BYTES:
                    follower.lost[tap_name(route.binding)] += 1
                    continue
                described = self._definition(route)
                if follower.defined.get(route.header.consumer_id) is not described:
                    follower.defined[route.header.consumer_id] = described
                    follower.add(described)
                follower.add(data)
                if pad := fmt.padding(len(data)):
                    follower.add(bytes(pad))
            self._exchange(selector, follower, selectors.EVENT_WRITE)

    def _definition(self, route: Route) -> bytes:
        """The frame that says what those of a route are; the same object as long as it is the same."""
        known = self._definitions.get(route.header.consumer_id)
        if known is not None and known[0] is route:
            return known[1]
        described = fmt.message(fmt.DEFINITION, definition(route).encode())
        if known is not None and known[1] == described:
            described = known[1]
        self._definitions[route.header.consumer_id] = (route, described)
        return described

    def _tell_status(self) -> None:
        missed: Counter[str] = Counter()
        for route, before in list(self._skipped.items()):
            if (now := _skipped(route)) > before:
                self._skipped[route] = now
                missed[tap_name(route.binding)] += now - before
        for follower in self._followers:
            follower.lost.update(missed)
        dropped = outfeed.queue_stats()["dropped"]
        for follower in self._followers:
            content = {"lost": dict(follower.lost), "dropped": dropped, "time_ns": time.time_ns()}
            follower.add(fmt.message(fmt.STATUS, pack(content)))


def _skipped(route: Route) -> int:
    """Events that did not leave their programs, although they were not sampled out."""
    offered, devices = route.counts()
    return -(-offered // route.binding.consumer.every) - sum(counts["emitted"] for counts in devices.values())


_publishers: weakref.WeakSet[Publisher] = weakref.WeakSet()


def _after_fork() -> None:
    for publisher in list(_publishers):
        publisher.after_fork()
    _publishers.clear()


os.register_at_fork(after_in_child=_after_fork)


def _lock(path: str, name: str) -> int:
    """Takes the lock of a name, which ends with the process."""
    while True:
        fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == os.stat(f"{path}.lock").st_ino:
                os.ftruncate(fd, 0)
                os.write(fd, str(os.getpid()).encode())
                return fd
        except FileNotFoundError:
            pass  # the last publisher has removed it just now
        except BlockingIOError:
            owner = os.read(fd, 20).decode(errors="replace") or "another one"
            os.close(fd)
            text = f"{name!r} is being published already, by process {owner}; choose another name"
            raise ConnectionError(text) from None
        os.close(fd)


def publish(name: str, *, taps: Iterable[str] | None = None, megabytes_per_sec: float = 20.0) -> Publisher:
    """Lets other processes of this user follow tapped events: ``ceedtap follow NAME``, :func:`ceedtap.follow`.

    As long as nobody follows this costs nothing. Followers get some of the events when there are many, 5000 a second,
    and the program never waits for them; what they miss is counted. A recording has everything.

    Args:
        name: letters, digits and ``-._``.
        taps: names of the taps, as for :func:`ceedtap.record`; None: all.
        megabytes_per_sec: what is copied for followers at most. Of each tap they get an event now and then in any case.

    Returns:
        A context manager that ends the publication; :meth:`Publisher.close` and the end of the process do as well.

    Raises:
        ConnectionError: the name is being published already.

    >>> import ceedtap as ct
    >>> with ct.publish("example") as publisher, ct.follow("example") as events:
    ...     while not publisher.num_followers:
    ...         pass
    ...     _ = ct.id_tap(ct.Tap("flux"), 42.0)
    ...     event = next(events)
    >>> print(event.tap, event.value)
    flux 42.0
    """
    return Publisher(name, taps, megabytes_per_sec)
