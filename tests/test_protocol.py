"""The frame codec."""

import struct

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ceedtap import protocol
from ceedtap.protocol import ArraySpec, ProtocolError, decode_frame, decode_header, encode_frame, encode_header

DTYPES = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", ml_dtypes.bfloat16]


def hand_made_frame(consumer_id: int, entries: list, payload: bytes) -> bytes:
    """The layout of version 1 written down once more, with struct in place of NumPy."""
    metadata = msgpack.packb(entries)
    packed = metadata + bytes(112 - len(metadata))
    words = [2178, consumer_id >> 32, consumer_id % 2**32, len(metadata), *struct.unpack(">28I", packed)]
    return struct.pack("<32I", *words) + payload


def test_type_codes():
    assert list(protocol.DTYPES) == [np.dtype(d) for d in DTYPES]


def test_layout():
    frame = encode_frame(0x0123456789ABCDEF, [np.array([1.5, 2.5]), np.array(7, np.int8)])
    payload = struct.pack("<2d", 1.5, 2.5) + b"\7"
    assert frame == hand_made_frame(0x0123456789ABCDEF, [(10, (2,)), (0, ())], payload)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip_of_every_type(dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    header, (out,) = decode_frame(encode_frame(5, [array]))
    assert header.consumer_id == 5
    assert out.dtype == array.dtype
    assert np.array_equal(out, array)


@pytest.mark.parametrize("consumer_id", [0, 1, 2**31, 2**32 - 1, 2**32, 1311768467463790320, 2**64 - 1])
def test_consumer_ids_keep_all_64_bits(consumer_id):
    assert decode_header(encode_header(consumer_id, [])).consumer_id == consumer_id


arrays = hnp.arrays(
    st.sampled_from([d for d in protocol.DTYPES if d != ml_dtypes.bfloat16]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)


@given(st.integers(0, 2**64 - 1), st.lists(arrays, max_size=6))
@settings(deadline=None, derandomize=True)
def test_round_trip(consumer_id, values):
    frame = encode_frame(consumer_id, values)
    header, out = decode_frame(frame)
    assert header.consumer_id == consumer_id
    assert header.frame_nbytes == len(frame)
    for a, b in zip(values, out, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()
        assert b.flags.aligned


@given(st.binary(max_size=400))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_random_bytes_are_no_frame(data):
    with pytest.raises(ProtocolError):
        decode_frame(data)


@given(st.binary(max_size=112), st.binary(max_size=40))
@settings(deadline=None, derandomize=True, max_examples=500)
def test_hostile_metadata(metadata, payload):
    words = [2178, 0, 1, len(metadata), *struct.unpack(">28I", metadata.ljust(112, b"\0"))]
    try:
        decode_frame(struct.pack("<32I", *words) + payload)
    except ProtocolError as error:
        assert 0 <= error.offset <= 168


def test_every_truncation_is_an_error():
    frame = encode_frame(3, [np.arange(3.0), np.arange(5, dtype=np.int16)])
    for n in range(len(frame)):
        with pytest.raises(ProtocolError):
            decode_frame(frame[:n])


@pytest.mark.parametrize(
    "entries", [[(12, ())], [(-1, ())], [(10, (-1,))], [(10, (1.5,))], [(True, ())], [10], [(10,)], {"a": 1}, 3, None]
)
def test_bad_metadata(entries):
    with pytest.raises(ProtocolError, match="byte 16"):
        decode_header(hand_made_frame(1, entries, b""))


def test_huge_shape_does_not_allocate():
    with pytest.raises(ProtocolError):
        decode_frame(hand_made_frame(1, [(10, (2**62, 2**62))], b"x" * 100))


def test_what_version_1_cannot_hold():
    with pytest.raises(ProtocolError, match="bool"):
        encode_header(1, [ArraySpec((), np.dtype(bool))])
    with pytest.raises(ProtocolError, match="112 bytes"):
        encode_header(1, [ArraySpec((1024, 1024), np.dtype("f8"))] * 13)
    with pytest.raises(ProtocolError, match="64-bit"):
        encode_header(2**64, [])
