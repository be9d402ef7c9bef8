"""Writing recordings: frames go from the receiver thread to a file, as they are."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from ceedtap import outfeed, protocol
from ceedtap import recording_format as fmt
from ceedtap.consumer import Consumer
from ceedtap.native import ffi, lib
from ceedtap.outfeed import OUTFEED
from ceedtap.recording_definition import definition, pack, tap_name
from ceedtap.recording_format import RecordingError
from ceedtap.routes import Route

#: What is in memory goes to the file after this time, in seconds, or when it has so many bytes.
FLUSH_SEC = 0.4
FLUSH_BYTES = 1 << 18
#: An index is written when so many frames have come since the last one, or at the next flush after a second.
INDEX_FRAMES = 1 << 16
INDEX_SEC = 1.0


class Recorder:
    """A recording that is being made; see :func:`record`. Closing it twice does nothing."""

    lossy = False

    def __init__(self, path: str | os.PathLike[str], taps: Iterable[str] | None = None) -> None:
        names = (taps,) if isinstance(taps, str) else taps if taps is None else tuple(taps)
        if names is not None and not all(isinstance(name, str) for name in names):
            raise TypeError(f"record: taps are names, got {', '.join(type(name).__name__ for name in names)}")
        self.path = os.fspath(path)
        self._names = names
        self._own: set[Consumer] = set()
        self._defined: dict[int, Route] = {}
        self._definitions: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._fd = _create(self.path)
        self._pid = os.getpid()
        self._buffer = bytearray()
        self._written = 0  # bytes of the file
        self._offsets: list[int] = []  # of the frames since the last index
        self._labels = bytearray()
        self._indexed, self._indexed_at = 0, time.monotonic()
        self._events = 0
        self._begun = time.time_ns()
        self._past_begin = False
        self._error: RecordingError | None = None
        content = {"format": fmt.FORMAT, "time_ns": self._begun, "pid": self._pid}
        self._append(fmt.message(fmt.PREAMBLE, pack(content)))
        self._flush()
        if self._error is not None:
            os.close(self._fd)
            OUTFEED.forget(self._error)
            raise self._error
        self._closed = threading.Event()
        threading.Thread(target=self._flush_in_time, name="ceedtap-recording", daemon=True).start()
        atexit.register(self._end)
        OUTFEED.attach(self)

    @property
    def events(self) -> int:
        """How many events have been recorded so far."""
        return self._events

    def tap(self, name: str, **options: Any) -> Consumer:
        """A consumer for :func:`ceedtap.id_tap` that does nothing but appear in this recording, as `name`.

        Args:
            name: of the tap, with which :func:`ceedtap.open` finds it.
            options: `policy` and `every` of :class:`ceedtap.Consumer`.
        """
        consumer = Consumer(_nothing, name=name, **options)
        consumer.enabled = False  # its events go to the file, and not to Python
        self._own.add(consumer)
        return consumer

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.close()
        except (RecordingError, TimeoutError) as other:
            if error is None:
                raise
            error.add_note(f"and in the recording: {other!r}")

    def close(self) -> None:
        """Waits for the events that have been emitted so far, and ends the recording.

        Raises:
            RecordingError: not everything could be written; the file is good up to where that happened.
            TimeoutError: a consumer did not return for a long time, so that events have not come here. The file is
                closed.
        """
        if self._closed.is_set():
            return
        drained = self._end()
        if self._error is not None:
            OUTFEED.forget(self._error)
            raise self._error
        if not drained:
            raise TimeoutError(f"the recording {self.path} is closed although {OUTFEED.backlog()}")

    def _end(self) -> bool:
        """Closes the file; whether everything that was emitted is in it. Errors of writing are kept by the outfeed."""
        if os.getpid() != self._pid:  # the child of a fork: the file is the parent's
            if not self._closed.is_set():
                self._closed.set()
                os.close(self._fd)
            return True
        outfeed.wait_for_programs()
        drained = OUTFEED.drain(patience=outfeed.EXIT_PATIENCE_SEC)
        OUTFEED.detach(self)
        with self._lock:
            if not self._closed.is_set():
                self._closed.set()
                self._append_index()
                self._append(fmt.frame_of(protocol.END_OF_STREAM, fmt.number(self._indexed)))
                self._flush()
                os.close(self._fd)
        atexit.unregister(self._end)
        return drained

    # -- from the receiver thread --------------------------------------------------------------------------------

    def wants(self, route: Route) -> bool:
        """Whether the events of a route are recorded."""
        consumer = route.binding.consumer
        return consumer in self._own or self._names is None or tap_name(route.binding) in self._names

    def take(self, route: Route, frame: Any) -> None:
        """Writes a frame, or keeps it for a moment to write it with others."""
        view = memoryview(frame)
        if not self._past_begin:  # emitted before the recording began, and only now on its way
            high, low = struct.unpack_from("<2I", view, 40)
            if high << 32 | low < self._begun:
                return
            self._past_begin = True
        header, body = _seal(view, len(route.header_bytes))
        with self._lock:
            if self._closed.is_set() or self._error is not None:
                return
            if self._defined.get(route.header.consumer_id) is not route:
                self._define(route)
            self._note(header)
            self._events += 1
            pad = bytes(fmt.padding(len(view)))
            if len(view) < FLUSH_BYTES:
                self._buffer += header
                self._buffer += body
                if pad:
                    self._buffer += pad
                if len(self._buffer) >= FLUSH_BYTES:
                    self._flush()
            else:
                self._buffer += header
                self._write([self._buffer, body, pad])
                self._buffer = bytearray()
            if len(self._offsets) >= INDEX_FRAMES:
                self._append_index()

    # -- the lock is held below ----------------------------------------------------------------------------------

    def _define(self, route: Route) -> None:
        """Writes what the frames of a route are, unless the file says so already."""
        route_id = route.header.consumer_id
        known = self._defined.get(route_id)
        self._defined[route_id] = route
        if known is not None and (known.binding, known.transforms) == (route.binding, route.transforms):
            return
        encoded = fmt.message(fmt.DEFINITION, definition(route).encode())
        if self._definitions.get(route_id) != encoded:
            self._definitions[route_id] = encoded
            self._note(encoded)
            self._append(encoded)

    def _note(self, header: bytes | bytearray) -> None:
        """Enters the frame that comes next into the index."""
        self._offsets.append(self._written + len(self._buffer))
        self._labels += header[fmt.LABELS]

    def _append_index(self) -> None:
        self._indexed_at = time.monotonic()
        if not self._offsets:
            return
        own = self._written + len(self._buffer)
        self._append(fmt.index(own, self._indexed, self._offsets, self._labels))
        self._indexed = own
        self._offsets, self._labels = [], bytearray()

    def _append(self, data: bytes) -> None:
        self._buffer += data

    def _flush(self) -> None:
        if self._buffer:
            self._write([self._buffer])
            self._buffer = bytearray()

    def _write(self, parts: list[Any]) -> None:
        """Writes whole frames, or, where that fails, nothing."""
        if self._error is not None:
            return
        views = [memoryview(part) for part in parts if len(part)]
        total = sum(map(len, views))
        try:
            while views:
                count = os.writev(self._fd, views)
                while views and count >= len(views[0]):
                    count -= len(views.pop(0))
                if views:
                    views[0] = views[0][count:]
        except OSError as error:
            self._fail(error)
        else:
            self._written += total

    def _fail(self, cause: OSError) -> None:
        self._error = RecordingError(f"{self.path}: {cause.strerror}; nothing more is recorded", self._written)
        self._error.__cause__ = cause
        with contextlib.suppress(OSError):  # no regular file; a reader finds where the good part ends
            os.ftruncate(self._fd, self._written)
        OUTFEED.keep(self._error)
        OUTFEED.detach(self)

    # -- the recording's own thread ------------------------------------------------------------------------------

    def _flush_in_time(self) -> None:
        """So that a process that is killed loses little, whatever the receiver thread is doing."""
        while not self._closed.wait(FLUSH_SEC):
            with self._lock:
                if self._closed.is_set():
                    return
                if time.monotonic() - self._indexed_at >= INDEX_SEC:
                    self._append_index()
                self._flush()


def _seal(frame: memoryview, header_nbytes: int) -> tuple[bytearray, memoryview]:
    """The header of a frame, with a checksum, and the rest."""
    header, body = bytearray(frame[:header_nbytes]), frame[header_nbytes:]
    header[16] |= protocol.HAS_CHECKSUM
    header[48:52] = crc32(body, zlib.crc32(header)).to_bytes(4, "little")
    return header, body


def crc32(data: Any, crc: int = 0) -> int:
    """The checksum of `zlib.crc32`, which takes longer than writing to a file does; large data go through native code.

    >>> crc32(bytes(100_000)) == zlib.crc32(bytes(100_000))
    True
    """
    if len(data) < 1 << 14:
        return zlib.crc32(data, crc)
    size = len(data) // 64 * 64
    rest = ffi.new("unsigned char[16]")
    if not lib.ct_crc32_fold(crc, ffi.from_buffer(data), size, rest):
        return zlib.crc32(data, crc)
    return zlib.crc32(memoryview(data)[size:], zlib.crc32(ffi.buffer(rest), 0xFFFFFFFF))


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing: the events of a recording's own taps do not come here."""


def _create(path: str) -> int:
    """Opens a file for a new recording. One that is there is replaced, so that its readers keep what they have open."""
    if os.path.isfile(path):
        old = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordingError(f"{path}: another recording is being written to it; choose another name") from None
        finally:
            os.close(old)
        os.unlink(path)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def record(path: str | os.PathLike[str], *, taps: Iterable[str] | None = None) -> Recorder:
    """Records tapped events in a file, until the end of a `with` statement, :meth:`Recorder.close` or the process.

    Events are written within half a second; of a process that is killed, the file holds what was written. A file of
    this name that is there already is replaced.

    Args:
        path: of the file, by custom with the suffix ``.ctap``.
        taps: names of the taps to record; None: all. The name of a tap is its label ``what=``, or else the name of its
            consumer. A :class:`ceedtap.Tap` to which nothing is attached sends its events to the recording alone.

    Raises:
        OSError: the file cannot be created.
        RecordingError: another recording is being written to the file. Where writing fails later, as on a full disk,
            the error is kept for :func:`ceedtap.barrier_wait` like those of consumers, and raised by closing.

    >>> import ceedtap as ct, jax, tempfile
    >>> path = tempfile.mkdtemp() + "/run.ctap"
    >>> flux = ct.Tap("flux")
    >>> f = jax.jit(lambda: jax.lax.fori_loop(0, 3, lambda i, x: ct.id_tap(flux, 2 * x), 1.0))
    >>> with ct.record(path):
    ...     _ = f()
    >>> with ct.open(path) as run:
    ...     print([float(x) for x in run["flux"]])
    [2.0, 4.0, 8.0]
    """
    return Recorder(path, taps)
