"""Reading recordings: the frames of a file and where they are, without loading it."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from ceedtap import protocol
from ceedtap import recording_format as fmt
from ceedtap.recording_definition import Definition, unpack
from ceedtap.recording_format import Layout, RecordingError


def _mark(consumer_id: int) -> bytes:
    """The first 12 bytes of a frame with this id."""
    return struct.pack("<3I", protocol.MAGIC_2, consumer_id >> 32, consumer_id & 0xFFFFFFFF)


_ENTRY = np.dtype([("offset", "<u8"), ("labels", "<u4", fmt.LABEL_WORDS)])


@dataclass(frozen=True)
class Damage:
    """Where a recording is damaged.

    Attributes:
        offset: the byte of the file where the part begins that cannot be read.
        reason: what is wrong there.
    """

    offset: int
    reason: str

    def __str__(self) -> str:
        return f"damaged from byte {self.offset} on: {self.reason}"


@dataclass(frozen=True)
class _Index:
    own: int  # where it is in the file
    after: int  # where the next frame is
    previous: int  # where the index before it is, or 0
    entries: np.ndarray


class FrameFile:
    """The frames of a recording.

    Attributes:
        size: bytes of the file when it was opened.
        preamble: what the recording says of itself.
        ended: whether the recording was ended properly.
        damage: what has been noticed so far; :meth:`check` looks at everything.
        definitions: what the events are.
        offsets, devices, run_ids, seqs, times, kinds: for every event, in the order of the file: where its frame is,
            what the header says (times in nanoseconds since 1970), and the number of its definition.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        with open(self.path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            if not self.size:
                raise RecordingError(f"{self.path}: the file is empty", 0)
            self._map: mmap.mmap = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
        self._view = memoryview(self._map)
        self._is_open = True
        self._layouts = fmt.Layouts()
        self.damage: Damage | None = None
        self.ended = False
        try:
            self.preamble = self._read_preamble()
            self._set_events(self._read_entries())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives the file back; as long as arrays refer to it, when the last of them dies."""
        # Not `mmap.close`: NumPy's arrays refer to the map without keeping it from closing.
        if self._is_open:
            self._is_open = False
            self._view = memoryview(b"")
            del self._map

    # -- single frames -------------------------------------------------------------------------------------------

    def layout(self, offset: int) -> Layout:
        """The layout of the frame at `offset`.

        Raises:
            RecordingError: there is no frame, or only a part of one.
        """
        if not self._is_open:
            raise RecordingError(f"{self.path}: the recording has been closed")
        try:
            layout = self._layouts(self._view[offset:])
        except protocol.ProtocolError as error:
            reason = "the file ends within a header" if offset + error.offset == self.size else f"no frame: {error}"
            raise RecordingError(f"{self.path}: {reason}", offset) from error
        if offset + layout.nbytes > self.size:
            raise RecordingError(f"{self.path}: the file ends within a frame of {layout.nbytes} bytes", offset)
        return layout

    def _good_layout(self, offset: int) -> Layout:
        layout = self.layout(offset)
        if not fmt.checksum_is_right(self._view[offset : offset + layout.nbytes], layout.header_nbytes):
            raise RecordingError(f"{self.path}: the checksum of a frame of {layout.nbytes} bytes is wrong", offset)
        if any(self._view[offset + layout.nbytes : offset + layout.padded]):
            raise RecordingError(f"{self.path}: the padding of a frame is not zero", offset)
        return layout

    def memory(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of the file."""
        return self._view[offset : offset + nbytes]

    def event(self, number: int) -> tuple[Layout, int]:
        """Layout and offset of an event; the first time, its checksum is compared.

        Raises:
            RecordingError: it is damaged.
        """
        offset = int(self.offsets[number])
        if self._checked[number]:
            return self.layout(offset), offset
        layout = self._good_layout(offset)
        self._checked[number] = True
        return layout, offset

    def leaves(self, number: int) -> list[np.ndarray]:
        """The arrays of an event. They share the file's memory."""
        layout, offset = self.event(number)
        try:
            return layout.decode(self.memory(offset, layout.nbytes))
        except (ValueError, OverflowError) as error:
            raise RecordingError(f"{self.path}: no array has such a shape: {error}", offset) from error

    def part(self, number: int) -> int:
        """The part of a program on several devices that an event comes from; -1: unknown."""
        return int.from_bytes(self.memory(int(self.offsets[number]) + 56, 4), "little") - 1

    def check(self) -> Damage | None:
        """Compares all checksums; the first damage, or None."""
        for number in range(len(self.offsets)):
            try:
                self.event(number)
            except RecordingError as error:
                if error.offset is None:
                    raise
                self._note_damage(error)
                break
        return self.damage

    def _note_damage(self, error: RecordingError) -> None:
        offset = error.offset or 0
        if self.damage is None or offset < self.damage.offset:
            self.damage = Damage(offset, error.message.removeprefix(f"{self.path}: "))

    # -- opening -------------------------------------------------------------------------------------------------

    def _reserved(self, offset: int, consumer_id: int) -> tuple[Layout, list[np.ndarray]]:
        """A frame with one of the reserved ids."""
        if self._view[offset : offset + 12] != _mark(consumer_id):
            raise RecordingError(f"{self.path}: another kind of frame was expected", offset)
        layout = self._good_layout(offset)
        return layout, layout.decode(self.memory(offset, layout.nbytes))

    def _read_preamble(self) -> dict[str, Any]:
        if self._view[:12] != _mark(fmt.PREAMBLE):
            raise RecordingError(f"{self.path}: no recording of ceedtap, it starts with {bytes(self._view[:12])!r}", 0)
        layout, arrays = self._reserved(0, fmt.PREAMBLE)
        self._first = layout.padded
        content: dict[str, Any] = unpack(arrays[0].tobytes())
        if content.get("format") != fmt.FORMAT:
            found = content.get("format")
            raise RecordingError(f"{self.path}: recordings of format {found}; this ceedtap reads format {fmt.FORMAT}")
        return content

    def _read_entries(self) -> np.ndarray:
        """Where all frames are: what the indices say, from the last one to the first, and scans of what no good index
        covers."""
        index = self._index_before(self.size)
        parts = [self._scan(index.after if index else self._first, self.size)]
        if self.ended and self._last_index != (index.own if index else 0):
            self._note_damage(RecordingError("the last index is not where the end says", max(self._last_index, 0)))
        while index is not None:
            parts.append(index.entries)
            if not index.previous:
                break
            try:
                index = self._index_at(index.previous)
            except RecordingError as error:
                self._note_damage(error)
                end = index.previous
                index = self._index_before(end)
                parts.append(self._scan(index.after if index else self._first, end))
        return np.concatenate(parts[::-1])

    def _index_at(self, offset: int) -> _Index:
        layout, arrays = self._reserved(offset, fmt.INDEX)
        shapes_fit = [a.shape for a in arrays[:1]] == [(2,)] and [a.shape for a in arrays[2:]] == [
            (*arrays[1].shape, fmt.LABEL_WORDS)
        ]
        if not shapes_fit or arrays[0][0] != offset or arrays[0][1] >= offset or np.any(arrays[1] >= offset):
            raise RecordingError(f"{self.path}: no index", offset)
        entries = np.empty(len(arrays[1]), _ENTRY)
        entries["offset"], entries["labels"] = arrays[1:]
        return _Index(offset, offset + layout.padded, int(arrays[0][1]), entries)

    def _index_before(self, end: int) -> _Index | None:
        """The last good index that starts before `end`."""
        while (end := self._map.rfind(_mark(fmt.INDEX), 0, end)) >= 0:
            if end % protocol.ALIGNMENT == 0:
                with contextlib.suppress(RecordingError):  # something else that looks like one, or a damaged one
                    return self._index_at(end)
        return None

    def _scan(self, start: int, end: int) -> np.ndarray:
        """The frames from `start` on, as an index lists them, up to `end` or to the first that is damaged."""
        offsets, labels = [], bytearray()
        while start < end:
            try:
                layout = self._good_layout(start)
            except RecordingError as error:
                self._note_damage(error)
                break
            mark = bytes(self._view[start : start + 12])
            if mark == _mark(protocol.END_OF_STREAM):
                self.ended = True
                last = layout.decode(self.memory(start, layout.nbytes))
                self._last_index = int(last[0][0]) if [a.shape for a in last] == [(1,)] else -1
            elif mark == _mark(fmt.INDEX):
                try:
                    self._index_at(start)
                except RecordingError as error:  # a good frame at a wrong place: whole frames before it are missing
                    self._note_damage(error)
            else:
                offsets.append(start)
                labels += self._view[start:][fmt.LABELS]
            start += layout.padded
        entries = np.empty(len(offsets), _ENTRY)
        entries["offset"] = offsets
        entries["labels"] = np.frombuffer(labels, "<u4").reshape(-1, fmt.LABEL_WORDS)
        return entries

    def _set_events(self, entries: np.ndarray) -> None:
        words = entries["labels"].astype(np.uint64)
        ids, runs, seqs, times = (words[:, i] << np.uint64(32) | words[:, i + 1] for i in (0, 5, 7, 9))
        self.definitions: list[Definition] = []
        starts: dict[int, list[tuple[int, int]]] = {}  # by route: where definitions are, and their numbers
        for offset in entries["offset"][ids == fmt.DEFINITION].tolist():
            try:
                definition = Definition.decode(self._reserved(offset, fmt.DEFINITION)[1][0].tobytes())
            except (RecordingError, ValueError, IndexError) as error:
                self._note_damage(RecordingError(getattr(error, "message", str(error)), offset))
                continue
            starts.setdefault(definition.route, []).append((offset, len(self.definitions)))
            self.definitions.append(definition)
        kinds = np.full(len(entries), -1)
        for route in np.unique(ids).tolist():
            if (known := starts.get(route)) and route not in fmt.RESERVED:
                mine = np.flatnonzero(ids == route)
                place = np.searchsorted([offset for offset, _ in known], entries["offset"][mine]) - 1
                kinds[mine] = np.where(place < 0, -1, np.array([number for _, number in known])[place])
        lost = (kinds < 0) & ~np.isin(ids, np.array(sorted(fmt.RESERVED), np.uint64))
        if lost.any():
            offset = int(entries["offset"][lost][0])
            self._note_damage(RecordingError("events of a tap whose definition is lost", offset))
        chosen = kinds >= 0
        self.kinds = kinds[chosen]
        self.offsets = entries["offset"][chosen].astype(np.int64)
        self.devices = entries["labels"][chosen, 4].astype(np.int32)
        self.run_ids, self.seqs, self.times = runs[chosen], seqs[chosen], times[chosen].astype(np.int64)
        self._checked = np.zeros(len(self.offsets), bool)
