"""The frame codec."""

import struct
import zlib

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ceedtap import protocol
from ceedtap.protocol import ArraySpec, Header, ProtocolError, decode_frame, decode_header, encode_frame, encode_header

DTYPES_1 = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", ml_dtypes.bfloat16]
DTYPES_2 = [*DTYPES_1, "bool", "c8", "c16", *(
    getattr(ml_dtypes, name) for name in (
        "int2", "int4", "uint2", "uint4", "float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz",
        "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    )
)]  # fmt: skip


def hand_made_frame_2(consumer_id, entries, payload, labels=(-1, 0, 0, 0), flags=0, checksum=0):
    metadata = msgpack.packb(entries)
    words = -(-len(metadata) // 64) * 16
    fixed = struct.pack("<4I", 0x32544543, consumer_id >> 32, consumer_id % 2**32, len(metadata))
    device, *longs = labels
    fixed += struct.pack("<Ii", flags, device)
    for number in longs:
        fixed += struct.pack("<2I", number >> 32, number % 2**32)
    fixed += struct.pack("<4I", checksum, 16 + words, 0, 0)
    packed = struct.unpack(f">{words}I", metadata.ljust(4 * words, b"\0"))
    return fixed + struct.pack(f"<{words}I", *packed) + payload


def hand_made_frame(consumer_id: int, entries: list, payload: bytes) -> bytes:
    """The layout of version 1 written down once more, with struct in place of NumPy."""
    metadata = msgpack.packb(entries)
    packed = metadata + bytes(112 - len(metadata))
    words = [2178, consumer_id >> 32, consumer_id % 2**32, len(metadata), *struct.unpack(">28I", packed)]
    return struct.pack("<32I", *words) + payload


def test_type_codes():
    assert list(protocol.DTYPES) == [np.dtype(d) for d in DTYPES_2]


def test_layout_of_version_1():
    frame = encode_frame(0x0123456789ABCDEF, [np.array([1.5, 2.5]), np.array(7, np.int8)], version=1)
    payload = struct.pack("<2d", 1.5, 2.5) + b"\7"
    assert frame == hand_made_frame(0x0123456789ABCDEF, [(10, (2,)), (0, ())], payload)


def test_layout_of_version_2():
    arrays = [np.array([1.5, 2.5, 3.5]), np.array(True), np.array([[1, 2]], np.uint16)]
    payload = struct.pack("<3d", 1.5, 2.5, 3.5) + bytes(8) + b"\1" + bytes(15) + struct.pack("<2H", 1, 2)
    entries = [(10, (3,)), (12, ()), (5, (1, 2))]
    assert encode_frame(0x0123456789ABCDEF, arrays) == hand_made_frame_2(0x0123456789ABCDEF, entries, payload)


def test_labels_of_version_2():
    labels = (3, 2**40 + 5, 2**33 + 7, 1_700_000_000_123_456_789)
    frame = hand_made_frame_2(9, [(10, ())], struct.pack("<d", 4.0), labels)
    header, (array,) = decode_frame(frame)
    assert (header.device, header.run_id, header.seq, header.time_ns) == labels
    assert array == 4.0
    assert encode_header(header) == frame[:-8]


def test_checksum():
    frame = encode_frame(9, [np.arange(5)], checksum=True)
    zeroed = frame[:48] + bytes(4) + frame[52:]
    assert int.from_bytes(frame[48:52], "little") == zlib.crc32(zeroed)
    assert np.array_equal(decode_frame(frame)[1][0], np.arange(5))
    for position in range(len(frame)):
        damaged = bytearray(frame)
        damaged[position] ^= 0x10
        with pytest.raises(ProtocolError):
            decode_frame(damaged)


def test_keys():
    spec = ArraySpec((4, 2), np.dtype("u4"), "fry")
    header = decode_header(encode_header(Header(1, (spec,))))
    assert header.specs == (spec,)
    with pytest.raises(ProtocolError, match="keys"):
        encode_header(Header(1, (spec,), version=1))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES_2, ids=str)
def test_round_trip_of_every_type(dtype, version):
    if version == 1 and dtype not in DTYPES_1:
        with pytest.raises(ProtocolError, match="type code"):
            encode_frame(5, [np.zeros(2, dtype)], version=1)
        return
    array = (np.arange(6).reshape(2, 3) % 3).astype(dtype)
    header, (out,) = decode_frame(encode_frame(5, [array], version=version))
    assert header.consumer_id == 5
    assert out.dtype == array.dtype
    assert out.tobytes() == array.tobytes()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("consumer_id", [0, 1, 2**31, 2**32 - 1, 2**32, 1311768467463790320, 2**64 - 1])
def test_consumer_ids_keep_all_64_bits(consumer_id, version):
    assert decode_header(encode_header(Header(consumer_id, (), version))).consumer_id == consumer_id


arrays = hnp.arrays(
    st.sampled_from([d for d in protocol.DTYPES[:15] if d != ml_dtypes.bfloat16]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)


@given(st.integers(0, 2**64 - 1), st.lists(arrays, max_size=40), st.booleans())
@settings(deadline=None, derandomize=True)
def test_round_trip(consumer_id, values, checksum):
    frame = encode_frame(consumer_id, values, checksum=checksum)
    header, out = decode_frame(frame)
    assert header.consumer_id == consumer_id
    assert header.offsets()[-1] == len(frame)
    for a, b in zip(values, out, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()
        assert b.flags.aligned


@given(st.binary(max_size=400), st.sampled_from([b"", b"CET2", struct.pack("<I", 2178)]))
@settings(deadline=None, derandomize=True, max_examples=500)
def test_random_bytes_are_no_frame(data, magic):
    with pytest.raises(ProtocolError):
        decode_frame(magic + data)


@given(st.binary(max_size=112), st.binary(max_size=40), st.sampled_from([1, 2]))
@settings(deadline=None, derandomize=True, max_examples=1000)
def test_hostile_metadata(metadata, payload, version):
    if version == 1:
        words = [2178, 0, 1, len(metadata), *struct.unpack(">28I", metadata.ljust(112, b"\0"))]
        frame = struct.pack("<32I", *words)
    else:
        n = -(-len(metadata) // 64) * 16
        words = struct.unpack(f">{n}I", metadata.ljust(4 * n, b"\0"))
        frame = struct.pack(f"<{16 + n}I", 0x32544543, 0, 1, len(metadata), *[0] * 9, 16 + n, 0, 0, *words)
    try:
        decode_frame(frame + payload)
    except ProtocolError as error:
        assert 0 <= error.offset <= 300  # noqa: PT017  some of these are frames


@pytest.mark.parametrize("version", [1, 2])
def test_every_truncation_is_an_error(version):
    frame = encode_frame(3, [np.arange(3.0), np.arange(5, dtype=np.int16)], version=version)
    for n in range(len(frame)):
        with pytest.raises(ProtocolError):
            decode_frame(frame[:n])


@pytest.mark.parametrize("make", [hand_made_frame, hand_made_frame_2])
@pytest.mark.parametrize(
    "entries",
    [[(28, ())], [(-1, ())], [(10, (-1,))], [(10, (1.5,))], [(True, ())], [10], [(10,)], {"a": 1}, 3, None,
     [(10, (2,), "fry")], [(6, (), "fry")], [(6, (2,), 5)], [(6, (2,), "fry", 0)]],
)  # fmt: skip
def test_bad_metadata(entries, make):
    with pytest.raises(ProtocolError, match=r"byte (16|64)"):
        decode_header(make(1, entries, b""))


@pytest.mark.parametrize("make", [hand_made_frame, hand_made_frame_2])
@pytest.mark.parametrize("shape", [(2**62, 2**62), (2**63, 0), (0,) * 100])
def test_impossible_shapes_do_not_allocate(shape, make):
    with pytest.raises(ProtocolError):
        decode_frame(make(1, [(10, shape)], b"x" * 100))


@pytest.mark.parametrize("word", [4, 12, 13, 15])
def test_words_of_version_2_that_must_have_their_value(word):
    frame = bytearray(encode_frame(1, [np.arange(3)]))
    frame[4 * word] ^= 2
    with pytest.raises(ProtocolError):
        decode_frame(frame)


def test_what_cannot_be_encoded():
    with pytest.raises(ProtocolError, match="112 bytes"):
        encode_header(Header(1, (ArraySpec((1024, 1024), np.dtype("f8")),) * 13, version=1))
    with pytest.raises(ProtocolError, match="64-bit"):
        encode_header(Header(2**64, ()))
    with pytest.raises(ProtocolError, match="type code"):
        encode_frame(1, [np.array(["text"])])
