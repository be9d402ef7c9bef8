"""Writes the test vectors in frames/: frames of versions 1 and 2, and what is in them. Made without ceedtap.

Each NAME.bin is a frame; NAME.json says what it holds (`header`, and for each array `type`, `shape`, `key` and the
bytes of its values in hexadecimal), or, when it is none, at which byte a reader notices (`error_at`).

    python tests/data/make_frames.py
"""

import json
import struct
import zlib
from pathlib import Path

import msgpack

FRAMES = Path(__file__).parent / "frames"
TYPES = [
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "bfloat16", "bool", "complex64", "complex128", "int2", "int4", "uint2", "uint4", "float4_e2m1fn", "float8_e3m4",
    "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu",
]  # fmt: skip


def halves(number):
    number %= 2**64
    return number >> 32, number % 2**32


def words_of(metadata, count):
    """Four bytes of metadata to a word, the first in the most significant place."""
    return struct.unpack(f">{count}I", metadata.ljust(4 * count, b"\0"))


def entries(arrays):
    return [[TYPES.index(a["type"]), a["shape"], *([a["key"]] if "key" in a else [])] for a in arrays]


def frame_1(header, arrays):
    metadata = msgpack.packb(entries(arrays))
    assert len(metadata) <= 112
    words = [2178, *halves(header["consumer_id"]), len(metadata), *words_of(metadata, 28)]
    return struct.pack("<32I", *words) + b"".join(a["data"] for a in arrays)


def frame_2(header, arrays, checksum=False):
    metadata = msgpack.packb(entries(arrays))
    count = -(-len(metadata) // 64) * 16
    words = [0x32544543, *halves(header["consumer_id"]), len(metadata), int(checksum), header["device"] % 2**32]
    for name in ("run_id", "seq", "time_ns"):
        words += halves(header[name])
    words += [0, 16 + count, header.get("part", -1) + 1, 0, *words_of(metadata, count)]
    frame = bytearray(struct.pack(f"<{16 + count}I", *words))
    for array in arrays:
        frame += bytes(-len(frame) % 16) + array["data"]
    if checksum:
        frame[48:52] = struct.pack("<I", zlib.crc32(frame))
    return bytes(frame)


def array(type_name, shape, data, **key):
    return {"type": type_name, "shape": list(shape), "data": data, **key}


def save(name, frame, content):
    (FRAMES / f"{name}.bin").write_bytes(frame)
    text = json.dumps(content, indent=1, default=lambda data: data.hex())
    (FRAMES / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def save_frame(name, version, header, arrays, **options):
    header = {"version": version, "device": -1, "run_id": 0, "seq": 0, "time_ns": 0, **header}
    frame = (frame_1 if version == 1 else frame_2)(header, arrays, **options)
    save(name, frame, {"header": header, "arrays": arrays})
    return frame


def main():
    FRAMES.mkdir(exist_ok=True)
    labels = {"device": 3, "run_id": 2**40 + 5, "seq": 2**33 + 7, "time_ns": 1_700_000_000_123_456_789}
    doubles = array("float64", [2], struct.pack("<2d", 1.5, 2.5))
    matrix = array("int16", [2, 3], struct.pack("<6h", 1, -2, 3, -4, 5, -6))
    flag = array("bool", [], b"\1")
    empty = array("float32", [0, 4], b"")
    key = array("uint32", [2, 2], struct.pack("<4I", 0, 1, 2, 2**32 - 1), key="fry")

    first = save_frame("1-two-arrays", 1, {"consumer_id": 0x0123456789ABCDEF}, [doubles, array("int8", [], b"\7")])
    save_frame("1-no-arrays", 1, {"consumer_id": 7}, [])
    save_frame("1-end-of-stream", 1, {"consumer_id": 0}, [])
    save_frame("1-every-type", 1, {"consumer_id": 2**64 - 1}, [
        array(t, [2], bytes(range(1, 1 + 2 * size)))
        for t, size in zip(TYPES[:12], (1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 2), strict=True)
    ])  # fmt: skip
    second = save_frame("2-three-arrays", 2, {"consumer_id": 0x0123456789ABCDEF, **labels}, [doubles, flag, matrix])
    save_frame("2-part", 2, {"consumer_id": 7, **labels, "part": 3}, [matrix])
    save_frame("2-no-arrays", 2, {"consumer_id": 7}, [])
    save_frame("2-end-of-stream", 2, {"consumer_id": 0}, [])
    save_frame("2-empty-array", 2, {"consumer_id": 7}, [empty, doubles])
    save_frame("2-keys", 2, {"consumer_id": 7}, [key])
    summed = save_frame("2-checksum", 2, {"consumer_id": 7, **labels}, [matrix], checksum=True)
    save_frame("2-hundred-arrays", 2, {"consumer_id": 7}, [array("uint8", [i % 3], bytes(i % 3)) for i in range(100)])
    sizes = dict(zip(TYPES, (1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 2, 1, 8, 16, *[1] * 13), strict=True))
    save_frame("2-every-type", 2, {"consumer_id": 7}, [
        array(t, [2], (b"\1\0" if size == 1 else bytes(range(1, 1 + 2 * size)))) for t, size in sizes.items()
    ])  # fmt: skip

    def broken(name, frame, offset):
        save(name, bytes(frame), {"error_at": offset})

    def changed(frame, position, data):
        return frame[:position] + data + frame[position + len(data) :]

    broken("x-nothing", b"", 0)
    broken("x-other-magic", changed(first, 0, b"\0"), 0)
    broken("x-1-long-metadata", changed(first, 12, struct.pack("<I", 113)), 12)
    broken("x-1-no-msgpack", changed(first, 16, b"\xc1\xc1\xc1\xc1"), 16)
    broken("x-1-half-a-header", first[:100], 100)
    broken("x-1-half-an-array", first[:-3], len(first) - 3)
    broken("x-2-unknown-flag", changed(second, 16, struct.pack("<I", 2)), 16)
    broken("x-2-wrong-length", changed(second, 52, struct.pack("<I", 48)), 52)
    broken("x-2-used-reserved-word", changed(second, 60, b"\1"), 16)
    broken("x-2-impossible-part", changed(second, 56, b"\xff\xff\xff\xff"), 16)
    broken("x-2-half-an-array", second[:-3], len(second) - 3)
    broken("x-2-wrong-checksum", changed(summed, len(summed) - 1, b"\x55"), 48)


if __name__ == "__main__":
    main()
