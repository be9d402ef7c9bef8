"""The frame codec: bytes <-> (header, arrays). Pure functions without JAX and without native code.

A frame is a header, then the arrays in sequence, in C order and little-endian. A header is a sequence of little-endian
u32 words. Numbers of 64 bits take two words, the high half first. The metadata is the msgpack encoding of a list with
one entry for each array, ``(type code, (d0, d1, ...))``; it is packed into words with the first of four bytes in the
most significant place, and padded with zeros.

======= =============================== ======= =========================================================
word    version 1                       word    version 2
======= =============================== ======= =========================================================
0       2178                            0       0x32544543 (the bytes ``CET2``)
1, 2    consumer id                     1, 2    consumer id
3       bytes of metadata, at most 112  3       bytes of metadata
4 - 31  metadata                        4       flags; 1: word 12 holds a checksum
..      ..                              5       device, a signed number; -1 is unknown
..      ..                              6, 7    run id
..      ..                              8, 9    sequence number
..      ..                              10, 11  time of emission, nanoseconds since 1970
..      ..                              12      CRC-32 of the frame with 0 in this word; 0 without the flag
..      ..                              13      words of the header, a multiple of 16
..      ..                              14      part of a program that runs on several devices, plus 1; 0: unknown
..      ..                              15      0
..      ..                              16 -    metadata
======= =============================== ======= =========================================================

In version 1 the arrays follow each other without padding. In version 2 each starts at the next multiple of 16 bytes
from the start of the frame, with zeros in between. Version 1 knows the type codes 0 to 11 of :data:`DTYPES`. Version 2
knows all of them, and entries with a third element: the name of the random number generator whose keys the array holds.
Values of fewer than 8 bits take a byte each, with zeros above. Consumer 0 ends a stream.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ml_dtypes
import msgpack
import numpy as np

END_OF_STREAM = 0
MAGIC_1 = 2178
MAGIC_2 = 0x32544543
MAX_METADATA_1 = 112
HAS_CHECKSUM = 1
ALIGNMENT = 16

_FIRST_METADATA_WORD = {MAGIC_1: 4, MAGIC_2: 16}
_HEADER_1_BYTES = 128
_FIXED_2_BYTES = 64
_CHECKSUM_BYTES = slice(48, 52)

#: Element types by type code. Those from 12 on need version 2.
DTYPES: tuple[np.dtype, ...] = tuple(
    np.dtype(t)
    for t in (
        np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64,
        np.float16, np.float32, np.float64, ml_dtypes.bfloat16,
        np.bool_, np.complex64, np.complex128, ml_dtypes.int2, ml_dtypes.int4, ml_dtypes.uint2, ml_dtypes.uint4,
        ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e3m4, ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3b11fnuz,
        ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz,
        ml_dtypes.float8_e8m0fnu,
    )
)  # fmt: skip
_NUM_TYPES = {MAGIC_1: 12, MAGIC_2: len(DTYPES)}
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

Bytes = bytes | bytearray | memoryview


class ProtocolError(ValueError):
    """Bytes that are no frame, or arrays that no frame can hold. `offset`: byte of the frame where it was noticed."""

    def __init__(self, message: str, offset: int = 0) -> None:
        super().__init__(f"{message} (at byte {offset})")
        self.offset = offset


@dataclass(frozen=True)
class ArraySpec:
    """Shape and element type of one array of a frame.

    Attributes:
        shape: of the array; for keys, of the u32 words, so that the last axis runs over the words of a key.
        dtype: element type.
        key: name of the random number generator when the array holds its keys.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    key: str | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """What the first bytes of a frame say. What version 1 does not say has its default."""

    consumer_id: int
    specs: tuple[ArraySpec, ...]
    version: int = 2
    device: int = -1
    run_id: int = 0
    seq: int = 0
    time_ns: int = 0
    part: int = -1

    @property
    def nbytes(self) -> int:
        """Length of the header."""
        return _HEADER_1_BYTES if self.version == 1 else _header_2_nbytes(len(_metadata(self.specs, MAGIC_2)))

    def offsets(self) -> list[int]:
        """Where the arrays start in the frame, and at the end the length of the frame."""
        alignment = 1 if self.version == 1 else ALIGNMENT
        starts, end = [], self.nbytes
        for spec in self.specs:
            starts.append(end := -(-end // alignment) * alignment)
            end += spec.nbytes
        return [*starts, end]


def _header_2_nbytes(metadata_nbytes: int) -> int:
    return _FIXED_2_BYTES + -(-metadata_nbytes // 64) * 64


def _metadata(specs: Sequence[ArraySpec], magic: int) -> bytes:
    entries: list[tuple] = []
    for spec in specs:
        code = _CODES.get(spec.dtype, len(DTYPES))
        if code >= _NUM_TYPES[magic] or (spec.key is not None and magic == MAGIC_1):
            names = ", ".join(dtype.name for dtype in DTYPES[: _NUM_TYPES[magic]])
            kind = "keys have" if spec.key is not None else f"element type {spec.dtype} has"
            raise ProtocolError(f"{kind} no type code in this version of the frame; it can hold {names}")
        entries.append((code, spec.shape) if spec.key is None else (code, spec.shape, spec.key))
    return msgpack.packb(entries)


def encode_header(header: Header) -> bytes:
    """The bytes of a header, without a checksum.

    Raises:
        ProtocolError: an element type without a code; in version 1 also more arrays than 112 bytes of metadata can
            describe.

    >>> len(encode_header(Header(7, (ArraySpec((3,), np.dtype(np.float64)),), version=1)))
    128
    """
    if not 0 <= header.consumer_id < 2**64:
        raise ProtocolError(f"a consumer id is an unsigned 64-bit number, got {header.consumer_id}", 4)
    magic = MAGIC_1 if header.version == 1 else MAGIC_2
    metadata = _metadata(header.specs, magic)
    if header.version == 1 and len(metadata) > MAX_METADATA_1:
        raise ProtocolError(
            f"version 1 has {MAX_METADATA_1} bytes for shapes and types, these {len(header.specs)} arrays need "
            f"{len(metadata)}; use version 2",
            12,
        )
    nbytes = _HEADER_1_BYTES if header.version == 1 else _header_2_nbytes(len(metadata))
    words = np.zeros(nbytes // 4, "<u4")
    words[0], words[1:3], words[3] = magic, _halves(header.consumer_id), len(metadata)
    if header.version != 1:
        words[5] = header.device % 2**32
        words[6:8], words[8:10], words[10:12] = _halves(header.run_id), _halves(header.seq), _halves(header.time_ns)
        words[13], words[14] = len(words), header.part + 1
    first = _FIRST_METADATA_WORD[magic]
    words[first:] = np.frombuffer(metadata.ljust(nbytes - 4 * first, b"\0"), ">u4")
    return words.tobytes()


def _halves(number: int) -> tuple[int, int]:
    return number >> 32 & 0xFFFFFFFF, number & 0xFFFFFFFF


def decode_header(data: Bytes) -> Header:
    """Reads the header at the start of `data`; a checksum is left to :func:`decode_frame`.

    Raises:
        ProtocolError: the bytes are too few or no header. Never more memory is used than `data` has.

    >>> decode_header(encode_header(Header(7, ()))).consumer_id
    7
    """
    view = memoryview(data).cast("B")
    if len(view) < 16:
        raise ProtocolError(f"a header starts with 4 words, got {len(view)} bytes", len(view))
    magic, high, low, length = (int(word) for word in np.frombuffer(view[:16], "<u4"))
    if magic not in _FIRST_METADATA_WORD:
        raise ProtocolError(f"a frame starts with {MAGIC_1} or {MAGIC_2:#x}, got {magic:#x}", 0)
    if magic == MAGIC_1 and length > MAX_METADATA_1:
        raise ProtocolError(f"the metadata has at most {MAX_METADATA_1} bytes, the header says {length}", 12)
    nbytes = _HEADER_1_BYTES if magic == MAGIC_1 else _header_2_nbytes(length)
    if len(view) < nbytes:
        raise ProtocolError(f"the header has {nbytes} bytes, got {len(view)}", len(view))
    words = np.frombuffer(view[:nbytes], "<u4")
    first = _FIRST_METADATA_WORD[magic]
    metadata = words[first:].astype(">u4").tobytes()
    if any(metadata[length:]):
        raise ProtocolError("the header's padding is not zero", 4 * first + length)
    specs = _decode_metadata(metadata[:length], magic)
    consumer_id = high << 32 | low
    if magic == MAGIC_1:
        return Header(consumer_id, specs, version=1)
    w = [int(word) for word in words[:16]]
    if w[4] & ~HAS_CHECKSUM or (w[12] and not w[4] & HAS_CHECKSUM) or w[14] > 2**31 or w[15]:
        raise ProtocolError("flags that version 2 does not know, or words that must be zero", 16)
    if 4 * w[13] != nbytes:
        raise ProtocolError(f"the header has {nbytes // 4} words, it says {w[13]}", 52)
    device = w[5] - (w[5] >> 31 << 32)
    times = w[6] << 32 | w[7], w[8] << 32 | w[9], w[10] << 32 | w[11]
    return Header(consumer_id, specs, 2, device, *times, w[14] - 1)


def _decode_metadata(metadata: bytes, magic: int) -> tuple[ArraySpec, ...]:
    offset = 4 * _FIRST_METADATA_WORD[magic]
    try:
        entries = msgpack.unpackb(metadata, use_list=False) if metadata else ()
    except Exception as error:  # msgpack raises many unrelated types for malformed input
        raise ProtocolError(f"the metadata is not msgpack: {error}", offset) from error
    if not isinstance(entries, tuple):
        raise ProtocolError(f"the metadata is a list of entries, got {type(entries).__name__}", offset)
    return tuple(_decode_entry(entry, magic, offset) for entry in entries)


def _decode_entry(entry: object, magic: int, offset: int) -> ArraySpec:
    if not (isinstance(entry, tuple) and len(entry) in (2, 3) and isinstance(entry[1], tuple)):
        raise ProtocolError(f"an entry of the metadata is (type code, shape), got {entry!r}", offset)
    code, shape, *key = entry
    if type(code) is not int or not 0 <= code < _NUM_TYPES[magic]:
        raise ProtocolError(f"type codes are 0 to {_NUM_TYPES[magic] - 1}, got {code!r}", offset)
    if any(type(d) is not int or d < 0 for d in shape):
        raise ProtocolError(f"a shape has non-negative integers, got {shape!r}", offset)
    if key and (magic == MAGIC_1 or not isinstance(key[0], str) or DTYPES[code] != np.uint32 or not shape):
        raise ProtocolError(f"keys are arrays of u32 words with a name in version 2, got {entry!r}", offset)
    return ArraySpec(shape, DTYPES[code], *key)


def array_decoder(header: Header) -> Callable[[Bytes], list[np.ndarray]]:
    """A function from the bytes of a frame with this header to its arrays. Most streams repeat one header; what depends
    on it alone is done here, once.

    The arrays are views of the bytes, except for those whose place in the frame is not aligned for their type. They can
    be written to if the bytes can.
    """
    *starts, end = header.offsets()
    plan = [(spec.shape, spec.dtype, start) for spec, start in zip(header.specs, starts, strict=True)]
    misaligned = [i for i, (_, dtype, start) in enumerate(plan) if start % dtype.alignment]

    def decode(data: Bytes) -> list[np.ndarray]:
        if len(data) < end:
            raise ProtocolError(f"the frame has {end} bytes, got {len(data)}", len(data))
        arrays = [np.ndarray(shape, dtype, data, start) for shape, dtype, start in plan]
        for i in misaligned:
            writeable, arrays[i] = arrays[i].flags.writeable, arrays[i].copy()
            arrays[i].flags.writeable = writeable
        return arrays

    return decode


def decode_frame(data: Bytes) -> tuple[Header, list[np.ndarray]]:
    """The header and the arrays of the frame at the start of `data`.

    Raises:
        ProtocolError: no frame, a part of one, or one whose checksum is wrong.
    """
    header = decode_header(data)
    try:
        arrays = array_decoder(header)(data)
    except (ValueError, OverflowError) as error:  # NumPy: dimensions that no array can have
        if isinstance(error, ProtocolError):
            raise
        raise ProtocolError(f"no array has such a shape: {error}", 4 * _FIRST_METADATA_WORD[MAGIC_2]) from error
    if header.version == 2 and data[16] & HAS_CHECKSUM:
        frame = bytearray(data[: header.offsets()[-1]])
        stored = int.from_bytes(frame[_CHECKSUM_BYTES], "little")
        frame[_CHECKSUM_BYTES] = bytes(4)
        if zlib.crc32(frame) != stored:
            raise ProtocolError("the checksum is wrong", _CHECKSUM_BYTES.start)
    return header, arrays


def encode_payload(header: Header, arrays: Sequence[np.ndarray]) -> bytes:
    """The bytes that follow the header: the arrays, and the padding between them."""
    out, end = bytearray(), header.nbytes
    for array, start in zip(arrays, header.offsets()[:-1], strict=True):
        data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        out += bytes(start - end) + data
        end = start + len(data)
    return bytes(out)


def encode_frame(consumer_id: int, arrays: Sequence[np.ndarray], *, version: int = 2, checksum: bool = False) -> bytes:
    """A whole frame.

    >>> frame = encode_frame(7, [np.arange(3.0)])
    >>> decode_frame(frame)[1]
    [array([0., 1., 2.])]
    """
    specs = tuple(ArraySpec(array.shape, array.dtype.newbyteorder("=")) for array in arrays)
    header = Header(consumer_id, specs, version)
    frame = bytearray(encode_header(header) + encode_payload(header, arrays))
    if checksum:
        if version == 1:
            raise ProtocolError("version 1 has no checksum", 0)
        frame[16] |= HAS_CHECKSUM
        frame[_CHECKSUM_BYTES] = zlib.crc32(frame).to_bytes(4, "little")
    return bytes(frame)
