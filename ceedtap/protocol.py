"""The frame codec: bytes <-> (consumer id, arrays). Pure functions without JAX and without native code.

A frame of version 1 is a header of 32 little-endian u32 words followed by the arrays in sequence, in C order and
little-endian, without padding:

======= ==============================================================================
word    meaning
======= ==============================================================================
0       2178
1, 2    consumer id, high and low half; consumer 0 ends a stream
3       length of the metadata in bytes, at most 112
4 - 31  metadata: each word holds four bytes, the first in its most significant place
======= ==============================================================================

The metadata is the msgpack encoding of ``[(type_code, (d0, d1, ...)), ...]``, one entry for each array; the type codes
are the indices of :data:`DTYPES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ml_dtypes
import msgpack
import numpy as np

MAGIC = 2178
HEADER_WORDS = 32
HEADER_BYTES = 4 * HEADER_WORDS
MAX_METADATA_BYTES = HEADER_BYTES - 16
END_OF_STREAM = 0

#: Element types by type code.
DTYPES: tuple[np.dtype, ...] = tuple(
    np.dtype(t)
    for t in (
        np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64,
        np.float16, np.float32, np.float64, ml_dtypes.bfloat16,
    )
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


class ProtocolError(ValueError):
    """Bytes that are no frame, or arrays that no frame can hold. `offset`: byte of the frame where it was noticed."""

    def __init__(self, message: str, offset: int = 0) -> None:
        super().__init__(f"{message} (at byte {offset})")
        self.offset = offset


@dataclass(frozen=True)
class ArraySpec:
    """Shape and element type of one array of a frame."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """What the first bytes of a frame say. `nbytes` is the length of the header itself."""

    consumer_id: int
    specs: tuple[ArraySpec, ...]
    nbytes: int = HEADER_BYTES

    @property
    def frame_nbytes(self) -> int:
        """Length of the whole frame."""
        return self.nbytes + sum(spec.nbytes for spec in self.specs)


def encode_header(consumer_id: int, specs: Sequence[ArraySpec]) -> bytes:
    """The header of a frame.

    Args:
        consumer_id: 0 <= id < 2**64.
        specs: the arrays that follow.

    Raises:
        ProtocolError: an element type without a code, or more arrays than 112 bytes of metadata can describe.

    >>> len(encode_header(7, [ArraySpec((3,), np.dtype(np.float64))]))
    128
    """
    if not 0 <= consumer_id < 2**64:
        raise ProtocolError(f"a consumer id is an unsigned 64-bit number, got {consumer_id}", 4)
    entries = []
    for spec in specs:
        code = _CODES.get(spec.dtype)
        if code is None:
            names = ", ".join(dtype.name for dtype in DTYPES)
            raise ProtocolError(f"element type {spec.dtype} has no type code in a frame of version 1; it can hold {names}")
        entries.append((code, spec.shape))
    metadata = msgpack.packb(entries)
    if len(metadata) > MAX_METADATA_BYTES:
        raise ProtocolError(
            f"a frame of version 1 has {MAX_METADATA_BYTES} bytes for shapes and types, these {len(specs)} arrays need "
            f"{len(metadata)}; tap fewer arrays at a time, or concatenate some",
            12,
        )
    words = np.zeros(HEADER_WORDS, "<u4")
    words[:4] = MAGIC, consumer_id >> 32, consumer_id & 0xFFFFFFFF, len(metadata)
    words[4:] = np.frombuffer(metadata.ljust(MAX_METADATA_BYTES, b"\0"), ">u4")
    return words.tobytes()


def decode_header(data: bytes | bytearray | memoryview) -> Header:
    """Reads the header at the start of `data`.

    Raises:
        ProtocolError: the bytes are too few or no header; never more memory is used than `data` has.

    >>> decode_header(encode_header(7, [])).consumer_id
    7
    """
    view = memoryview(data).cast("B")
    if len(view) < HEADER_BYTES:
        raise ProtocolError(f"a header has {HEADER_BYTES} bytes, got {len(view)}", len(view))
    words = np.frombuffer(view[:HEADER_BYTES], "<u4")
    magic, high, low, length = (int(word) for word in words[:4])
    if magic != MAGIC:
        raise ProtocolError(f"a frame starts with the word {MAGIC}, got {magic}", 0)
    if length > MAX_METADATA_BYTES:
        raise ProtocolError(f"the metadata has at most {MAX_METADATA_BYTES} bytes, the header says {length}", 12)
    metadata = words[4:].astype(">u4").tobytes()
    if any(metadata[length:]):
        raise ProtocolError("the header's padding is not zero", 16 + length)
    return Header(high << 32 | low, _decode_metadata(metadata[:length]))


def _decode_metadata(metadata: bytes) -> tuple[ArraySpec, ...]:
    try:
        entries = msgpack.unpackb(metadata, use_list=False) if metadata else ()
    except Exception as error:  # msgpack raises many unrelated types for malformed input
        raise ProtocolError(f"the metadata is not msgpack: {error}", 16) from error
    specs = []
    if not isinstance(entries, tuple):
        raise ProtocolError(f"the metadata is a list of (type code, shape), got {type(entries).__name__}", 16)
    for entry in entries:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], tuple)):
            raise ProtocolError(f"an entry of the metadata is (type code, shape), got {entry!r}", 16)
        code, shape = entry
        if type(code) is not int or not 0 <= code < len(DTYPES):
            raise ProtocolError(f"type codes are 0 to {len(DTYPES) - 1}, got {code!r}", 16)
        if any(type(d) is not int or d < 0 for d in shape):
            raise ProtocolError(f"a shape has non-negative integers, got {shape!r}", 16)
        specs.append(ArraySpec(shape, DTYPES[code]))
    return tuple(specs)


def array_decoder(header: Header) -> Callable[[bytes | bytearray | memoryview], list[np.ndarray]]:
    """A function from the bytes of a frame with this header to its arrays. Most streams repeat one header; what depends
    on it alone is done here, once.

    The arrays are views of the bytes, except for those whose place in the frame is not aligned for their type.
    """
    plan, offset = [], header.nbytes
    for spec in header.specs:
        plan.append((spec.shape, spec.dtype, offset))
        offset += spec.nbytes
    misaligned = [i for i, (_, dtype, start) in enumerate(plan) if start % dtype.alignment]

    def decode(data: bytes | bytearray | memoryview) -> list[np.ndarray]:
        if len(data) < offset:
            raise ProtocolError(f"the frame has {offset} bytes, got {len(data)}", len(data))
        arrays = [np.ndarray(shape, dtype, data, start) for shape, dtype, start in plan]
        for i in misaligned:
            arrays[i] = arrays[i].copy()
        return arrays

    return decode


def decode_frame(data: bytes | bytearray | memoryview) -> tuple[Header, list[np.ndarray]]:
    """The header and the arrays of the frame at the start of `data`.

    Raises:
        ProtocolError: no frame, or a part of one.
    """
    header = decode_header(data)
    return header, array_decoder(header)(data)


def encode_frame(consumer_id: int, arrays: Sequence[np.ndarray]) -> bytes:
    """A whole frame.

    >>> frame = encode_frame(7, [np.arange(3.0)])
    >>> decode_frame(frame)[1]
    [array([0., 1., 2.])]
    """
    specs = [ArraySpec(array.shape, array.dtype.newbyteorder("=")) for array in arrays]
    payload = [np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes() for array in arrays]
    return b"".join([encode_header(consumer_id, specs), *payload])
