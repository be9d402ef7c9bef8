"""Following what another process publishes."""

from __future__ import annotations

import os
import select
import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from ceedtap import protocol
from ceedtap import recording_format as fmt
from ceedtap.publication_names import published, socket_path
from ceedtap.recording import Event
from ceedtap.recording_definition import Definition, unpack

#: No follower takes a frame that is larger; something else must be speaking.
MAX_FRAME_BYTES = 1 << 34


@dataclass(frozen=True)
class Received:
    """A frame that has come, not yet decoded."""

    definition: Definition
    layout: fmt.Layout
    data: bytearray

    def leaves(self) -> list[np.ndarray]:
        """The arrays."""
        return self.layout.decode(self.data)

    def event(self) -> Event:
        """The event."""
        header, leaves = protocol.decode_header(self.data), self.leaves()
        position = (header.device, header.run_id, header.seq, header.time_ns)
        shard = self.definition.shard(header.part, leaves)
        arguments = self.definition.arguments(leaves)
        return Event(self.definition.tap, *arguments, self.definition.transforms, *position, shard)


class Follower(Iterator[Event]):
    """The events of a publication; see :func:`follow`.

    Attributes:
        lost: by tap, events that did not come because this process was too slow.
        dropped: events that the producer has dropped by the policies of its consumers.
        pid: the producer's process.
        gone: whether nothing will come any more.
        ended: whether the producer has ended the publication properly.
    """

    def __init__(self, name: str, timeout_sec: float = 0.0) -> None:
        self.name = name
        self.lost: Counter[str] = Counter()
        self.dropped = 0
        self.pid = -1
        self.ended = False
        self._layouts = fmt.Layouts()
        self._definitions: dict[int, Definition] = {}
        self._buffer = bytearray()
        self.gone = False
        self._ready: list[Received] = []
        self._socket = _connect(name, timeout_sec)

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def receive(self, timeout_sec: float | None = None) -> list[Received] | None:
        """What comes within a time, as soon as there is something; None when nothing will come any more."""
        end = None if timeout_sec is None else time.monotonic() + timeout_sec
        while not self._ready and not self.gone:
            wait = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._socket], [], [], wait)[0]:
                return []
            try:
                data = self._socket.recv(1 << 20)
            except ConnectionError:
                data = b""
            self.gone = not data
            self._buffer += data
            self._take_frames()
        ready, self._ready = self._ready, []
        return ready or (None if self.gone else [])

    def _take_frames(self) -> None:
        start = 0
        while len(self._buffer) - start >= 64:
            head = self._buffer[start : start + 64]
            nbytes = 4 * int.from_bytes(head[52:56], "little")
            if int.from_bytes(head[:4], "little") != protocol.MAGIC_2 or nbytes > MAX_FRAME_BYTES:
                raise ConnectionError(f"what publishes {self.name!r} does not send frames")
            if len(self._buffer) - start < nbytes:
                break
            try:
                layout = self._layouts(memoryview(bytes(self._buffer[start : start + nbytes])))
            except protocol.ProtocolError as error:
                raise ConnectionError(f"what publishes {self.name!r} does not send frames: {error}") from error
            if layout.nbytes > MAX_FRAME_BYTES:
                raise ConnectionError(f"what publishes {self.name!r} announces a frame of {layout.nbytes} bytes")
            if len(self._buffer) - start < layout.padded:
                break
            self._take(layout, self._buffer[start : start + layout.nbytes])
            start += layout.padded
        del self._buffer[:start]

    def _take(self, layout: fmt.Layout, data: bytearray) -> None:
        consumer_id = int.from_bytes(data[4:8], "little") << 32 | int.from_bytes(data[8:12], "little")
        if consumer_id not in fmt.RESERVED:
            known = self._definitions.get(consumer_id)
            if known is not None:
                self._ready.append(Received(known, layout, data))
            return
        if consumer_id == protocol.END_OF_STREAM:
            self.ended = self.gone = True
            return
        content = layout.decode(data)[0].tobytes()
        if consumer_id == fmt.DEFINITION:
            definition = Definition.decode(content)
            self._definitions[definition.route] = definition
            return
        message: dict[str, Any] = unpack(content)
        if consumer_id == fmt.PREAMBLE:
            self.pid = message["pid"]
            if message["format"] != fmt.FORMAT:
                raise ConnectionError(f"{self.name!r} is published by another version of ceedtap")
        elif consumer_id == fmt.STATUS:
            self.lost, self.dropped = Counter(message["lost"]), message["dropped"]

    def __next__(self) -> Event:
        while not self._ready:
            received = self.receive()
            if received is None:
                raise StopIteration
            self._ready = received
        return self._ready.pop(0).event()

    def close(self) -> None:
        """Follows no longer."""
        self._socket.close()
        self.gone = True

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def _connect(name: str, timeout_sec: float) -> socket.socket:
    path, end = socket_path(name), time.monotonic() + timeout_sec
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
        except (FileNotFoundError, ConnectionError, BlockingIOError):
            connection.close()
        else:
            return connection
        if time.monotonic() >= end:
            names = ", ".join(other for other in published() if other != name) or "none"
            raise ConnectionError(f"nobody publishes {name!r}; names of this user in {os.path.dirname(path)}: {names}")
        time.sleep(0.1)


def follow(name: str, *, timeout_sec: float = 0.0) -> Follower:
    """The events that another process publishes, from now on.

    Args:
        name: that the process has given to :func:`ceedtap.publish`.
        timeout_sec: how long to wait for a process that publishes this name.

    Returns:
        An iterator over :class:`ceedtap.recording.Event` that ends with the publication, and a context manager.

    Raises:
        ConnectionError: nobody publishes this name.
    """
    return Follower(name, timeout_sec)
