"""What a recording holds besides the frames of taps: definitions and indices, which are frames themselves.

`docs/recording.md` describes the format. Nothing here needs JAX, so recordings can be read without it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np

from ceedtap import protocol

FORMAT = 1
PREAMBLE, DEFINITION, INDEX, STATUS = (
    int.from_bytes(name, "big") for name in (b"ctap-rec", b"ctap-def", b"ctap-idx", b"ctap-sta")
)
#: Consumer ids that no tap has.
RESERVED = frozenset((protocol.END_OF_STREAM, PREAMBLE, DEFINITION, INDEX, STATUS))
#: Words of a header that an index repeats: consumer id, bytes of metadata, flags, device, run, number and time.
LABELS = slice(4, 48)
LABEL_WORDS = 11


class RecordingError(Exception):
    """A recording that cannot be written or read.

    Attributes:
        message: what is wrong.
        offset: the byte of the file where that was noticed, or None.
    """

    def __init__(self, message: str, offset: int | None = None) -> None:
        super().__init__(message if offset is None else f"{message} (at byte {offset} of the file)")
        self.message = message
        self.offset = offset


def padding(size: int) -> int:
    """Bytes of zeros after a frame, so that the next one is aligned."""
    return -size % protocol.ALIGNMENT


def frame_of(consumer_id: int, *arrays: np.ndarray) -> bytes:
    """A frame of one of the reserved ids, with its checksum and padding."""
    frame = protocol.encode_frame(consumer_id, arrays, checksum=True)
    return frame + bytes(padding(len(frame)))


def number(value: int) -> np.ndarray:
    """A number as the array of a frame."""
    return np.array([value], np.uint64)


def message(consumer_id: int, content: bytes) -> bytes:
    """A frame with msgpack."""
    return frame_of(consumer_id, np.frombuffer(content, np.uint8))


def index(own: int, previous: int, offsets: Iterable[int], labels: bytes | bytearray) -> bytes:
    """An index of the frames at `offsets`, to be written at byte `own`; `previous`: where the last one is, or 0."""
    words = np.frombuffer(bytes(labels), "<u4").reshape(-1, LABEL_WORDS)
    return frame_of(INDEX, np.array([own, previous], np.uint64), np.array(list(offsets), np.uint64), words)


class Layouts:
    """Headers of frames, decoded once for all frames that have the same arrays."""

    def __init__(self) -> None:
        self._known: dict[bytes, Layout] = {}

    def __call__(self, data: memoryview) -> Layout:
        """The layout of the frame at the start of `data`.

        Raises:
            ProtocolError: no header of version 2.
        """
        head = bytes(data[:64])
        nbytes = 4 * int.from_bytes(head[52:56], "little")
        key = head[:4] + head[12:16] + head[52:56] + bytes(data[64 : min(nbytes, 1 << 20)])
        known = self._known.get(key)
        if known is None:
            header = protocol.decode_header(data)
            if header.version != 2:
                raise protocol.ProtocolError("a recording has frames of version 2", 0)
            known = self._known[key] = Layout(header)
        return known


class Layout:
    """Where the arrays of a frame are."""

    def __init__(self, header: protocol.Header) -> None:
        self.specs = header.specs
        *self.starts, self.nbytes = header.offsets()
        self.header_nbytes = header.nbytes
        self.padded = self.nbytes + padding(self.nbytes)
        self.decode = protocol.array_decoder(header)


def checksum_is_right(frame: memoryview, header_nbytes: int) -> bool:
    """Whether a frame has the checksum that it says; one without a checksum is wrong."""
    if not frame[16] & protocol.HAS_CHECKSUM:
        return False
    header = bytearray(frame[:header_nbytes])
    stored = int.from_bytes(header[48:52], "little")
    header[48:52] = bytes(4)
    return zlib.crc32(frame[header_nbytes:], zlib.crc32(header)) == stored
