"""The format of recordings: against a file made by hand, files of other versions, damaged ones and killed processes."""

import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import msgpack
import numpy as np
import pytest

import ceedtap as ct

HERE = Path(__file__).parent
FILE = HERE / "data" / "recording.ctap"
FULL = bool(os.environ.get("CEEDTAP_TEST_FULL"))
TYPES = {"u1": 4, "u4": 6, "u8": 7, "f8": 10}  # of docs/protocol.md


def frame(consumer, *arrays, device=-1, run=0, seq=0, time_ns=0):
    """A frame with checksum and padding, as docs/protocol.md and docs/recording.md describe it."""
    consumer = int.from_bytes(consumer, "big") if isinstance(consumer, bytes) else consumer
    metadata = msgpack.packb([[TYPES[a.dtype.str[1:]], list(a.shape)] for a in arrays])
    count = -(-len(metadata) // 64) * 16
    words = [0x32544543, consumer >> 32, consumer % 2**32, len(metadata), 1, device % 2**32]
    for number in (run, seq, time_ns):
        words += [number >> 32, number % 2**32]
    words += [0, 16 + count, 0, 0, *struct.unpack(f">{count}I", metadata.ljust(4 * count, b"\0"))]
    data = bytearray(struct.pack(f"<{16 + count}I", *words))
    for array in arrays:
        data += bytes(-len(data) % 16) + array.tobytes()
    data[48:52] = struct.pack("<I", zlib.crc32(data))
    return bytes(data) + bytes(-len(data) % 16)


def packed(content):
    return np.frombuffer(msgpack.packb(content), np.uint8)


def by_hand(ended=True):
    """A recording with two events of a tap `u` and an index, and where its frames start."""
    definition = {
        "route": 77, "tap": "u", "labels": {"unit": "m"}, "omitted": {}, "tree": ["tuple", [["dict", ["a"], [0]]]],
        "leaves": msgpack.ExtType(1, msgpack.packb(["a"])), "keys": [None],
        "transforms": [["batch", {"batch_dims": msgpack.ExtType(1, msgpack.packb([0]))}]], "with_device": False,
    }  # fmt: skip
    frames = [
        frame(b"ctap-rec", packed({"format": 1, "time_ns": 5, "pid": 1})),
        frame(b"ctap-def", packed(definition)),
        frame(77, np.array([1.5, 2.5]), device=3, run=2**40, seq=9, time_ns=10**18),
        frame(77, np.array([3.5, 4.5]), device=3, run=2**40, seq=10, time_ns=10**18 + 1),
    ]
    starts = np.cumsum([0, *map(len, frames)])
    labels = np.stack([np.frombuffer(f, "<u4", 11, 4) for f in frames[1:]])
    frames.append(frame(b"ctap-idx", np.array([starts[4], 0], "u8"), starts[1:4].astype("u8"), labels))
    if ended:
        frames.append(frame(0, np.array([starts[4]], "u8")))
    return b"".join(frames), starts.tolist()


def write(path, data):
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("ended", [True, False])
def test_a_recording_made_by_hand(ended, tmp_path):
    with ct.open(write(tmp_path / "x.ctap", by_hand(ended)[0])) as run:
        assert (list(run), run.ended, run.damage) == (["u"], ended, None)
        first, second = run.events()
        assert first.value["a"].tolist() == [1.5, 2.5]
        assert second.value["a"].tolist() == [3.5, 4.5]
        assert (first.labels, first.transforms) == ({"unit": "m"}, (("batch", {"batch_dims": (0,)}),))
        assert (first.device, first.run_id, first.seq, first.time_ns) == (3, 2**40, 9, 10**18)
        assert run["u"].leaves == ("a",)


def test_a_recording_of_another_version_of_jax_and_python():
    """tests/data/make_recording.py says what is in it."""
    with ct.open(FILE) as run:
        assert (list(run), run.num_events, run.ended, run.damage) == (["state", "energy", "keys"], 16, True, None)
        state = run["state"]
        assert state.leaves == ("step", "u.0", "u.1")
        assert state.steps.tolist() == list(range(0, 120, 10))
        np.testing.assert_array_equal(state["u.0"], np.arange(12.0)[:, None] + np.arange(3))
        np.testing.assert_array_equal(np.asarray(state["u.1"]).astype(float), np.arange(12) / 2)
        assert type(state[0]["u"]) is tuple
        energy = run["energy"]
        assert [float(e) for e in energy.select(transforms=())] == [9]
        assert [float(e) for e in energy.select(transforms=("jvp", "transpose"))] == [18]
        assert energy.select(transforms="batch")[0].tolist() == [0, 1, 4]
        assert run["keys"][0] == jax.random.key(7)
        assert run["keys"].labels == {"label": ("a", [1, 2.5]), "where": slice(0, 2)}


def test_a_recording_can_be_read_without_jax():
    code = (
        "import sys, ceedtap as ct, numpy as np\nwith ct.open(sys.argv[1]) as run: "
        "print(np.asarray(run['state']['u.0']).sum(), run.damage, 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, FILE], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (f"{12 * 3 + 3 * 66}.0 None False", "")


def test_the_script_makes_such_a_file(tmp_path):
    script = HERE / "data" / "make_recording.py"
    made = tmp_path / "made.ctap"
    subprocess.run([sys.executable, str(script), str(made)], check=True, capture_output=True)
    with ct.open(made) as new, ct.open(FILE) as old:
        ours, theirs = list(new.events()), list(old.events())
    assert [(e.tap, repr(e.args), e.labels, e.transforms) for e in ours] == [
        (e.tap, repr(e.args), e.labels, e.transforms) for e in theirs
    ]


def test_every_truncation(tmp_path):
    data, starts = by_hand(ended=False)
    path = tmp_path / "x.ctap"
    for size in range(len(data)):
        write(path, data[:size])
        # Frames that are there as a whole; the padding after the last one may be missing.
        whole = sum(size >= start for start in starts[1:])
        if whole == 0 and size < 12 + 52:
            with pytest.raises(ct.RecordingError):
                ct.open(path)
            continue
        try:
            run = ct.open(path)
        except ct.RecordingError:
            assert size < starts[1]
            continue
        with run:
            assert run.num_events == max(0, whole - 2) or size - starts[whole] > 128
            assert not run.ended
            if run.damage is not None:
                assert run.damage.offset == max(start for start in starts if start <= size)
                assert "the file ends within a" in str(run.damage)


@pytest.mark.parametrize("number", range(5))
def test_damage_is_where_the_damaged_frame_starts(number, tmp_path):
    data, starts = by_hand()
    broken = bytearray(data)
    broken[starts[number] + (130 if number in (2, 3) else 100)] ^= 4
    path = write(tmp_path / "x.ctap", broken)
    if number == 0:
        with pytest.raises(ct.RecordingError, match="at byte 0"):
            ct.open(path)
        return
    with ct.open(path) as run:
        assert run.damage.offset == starts[number]
        if number in (2, 3):
            assert "checksum" in str(run.damage)
            good = run["u"][3 - number]["a"]
            assert good.tolist() == [[3.5, 4.5], [1.5, 2.5]][number - 2]
            with pytest.raises(ct.RecordingError, match=f"at byte {starts[number]} of the file") as caught:
                run["u"][number - 2]
            assert caught.value.offset == starts[number]
        elif number >= 4:
            assert len(list(run.events())) == 2
        else:
            assert run.num_events == 0  # their definition is lost
        assert "damaged from byte" in str(run.damage)


@pytest.mark.parametrize("number", [2, 3, 4])
def test_whole_frames_that_are_missing(number, tmp_path):
    """The rest is a sequence of good frames; an index at another place than it says tells."""
    data, starts = by_hand()
    starts.append(len(data) - len(frame(0, np.zeros(1, "u8"))))
    with ct.open(write(tmp_path / "x.ctap", data[: starts[number]] + data[starts[number + 1] :])) as run:
        assert run.damage is not None or not run.ended
        assert len(run["u"]) == {2: 1, 3: 1, 4: 2}[number]


@pytest.mark.parametrize("data", [b"", b"CET2", b"no recording of ours" * 10, bytes(1000)], ids=len)
def test_files_that_are_no_recordings(data, tmp_path):
    with pytest.raises(ct.RecordingError, match=r"x\.ctap: .*\(at byte 0 of the file\)"):
        ct.open(write(tmp_path / "x.ctap", data))


def test_a_later_format_is_refused(tmp_path):
    with pytest.raises(ct.RecordingError, match="format 2; this ceedtap reads format 1"):
        ct.open(write(tmp_path / "x.ctap", frame(b"ctap-rec", packed({"format": 2}))))


def test_a_payload_that_looks_like_an_index(tmp_path):
    """Its bytes are in the file, aligned, after the last index."""
    data, starts = by_hand(ended=False)
    lure = np.frombuffer(data[starts[4] :], np.uint8)
    data += frame(77, lure[: len(lure) // 8 * 8].view("f8"))
    with ct.open(write(tmp_path / "x.ctap", data)) as run:
        assert (run.num_events, run.damage) == (3, None)


def test_killed_processes_and_damaged_files():
    kills, damages = (50, 20_000) if FULL else (4, 500)
    script = HERE / "fuzz" / "fuzz_recording.py"
    done = subprocess.run(
        [sys.executable, str(script), "--kills", str(kills), "--damages", str(damages)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("size", [0, 1, 63, 4096, 4100, 4159, 65536, 1_000_003])
def test_the_checksum_is_that_of_zlib(size):
    from ceedtap.native import ffi, lib
    from ceedtap.recording_writer import crc32

    data = np.random.default_rng(size).bytes(size)
    for crc in (0, 1, 0xFFFFFFFF, zlib.crc32(b"before")):
        assert crc32(data, crc) == zlib.crc32(data, crc)
    rest = ffi.new("unsigned char[16]")
    assert lib.ct_crc32_fold(0, data, 65, rest) == lib.ct_crc32_fold(0, data, 0, rest) == 0
    for short in range(64, min(size, 640), 64):
        if lib.ct_crc32_fold(0, data, short, rest):
            assert zlib.crc32(ffi.buffer(rest), 0xFFFFFFFF) == zlib.crc32(data[:short])
