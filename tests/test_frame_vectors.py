"""The frame codec against vectors that were made without it, and fuzzed from them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ceedtap.protocol import DTYPES, ProtocolError, decode_frame, encode_header

HERE = Path(__file__).parent
VECTORS = sorted((HERE / "data" / "frames").glob("*.bin"))


def content(path):
    return json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", [p for p in VECTORS if p.name[0] != "x"], ids=lambda path: path.stem)
def test_frames_hold_what_was_put_in(path):
    frame, expected = path.read_bytes(), content(path)
    header, arrays = decode_frame(frame)
    assert {name: getattr(header, name) for name in expected["header"]} == expected["header"]
    assert len(arrays) == len(expected["arrays"])
    for spec, array, entry in zip(header.specs, arrays, expected["arrays"], strict=True):
        assert array.dtype == next(dtype for dtype in DTYPES if dtype.name == entry["type"])
        assert list(array.shape) == entry["shape"]
        assert spec.key == entry.get("key")
        assert array.tobytes().hex() == entry["data"]
    assert header.offsets()[-1] == len(frame)
    if path.stem != "2-checksum":
        assert frame.startswith(encode_header(header))


@pytest.mark.parametrize("path", [p for p in VECTORS if p.name[0] == "x"], ids=lambda path: path.stem)
def test_what_is_no_frame_is_refused_at_the_right_byte(path):
    with pytest.raises(ProtocolError) as caught:
        decode_frame(path.read_bytes())
    assert caught.value.offset == content(path)["error_at"]


def test_the_vectors_are_what_the_script_makes(tmp_path):
    script = (HERE / "data" / "make_frames.py").read_text(encoding="utf-8")
    (tmp_path / "make_frames.py").write_text(script, encoding="utf-8")
    subprocess.run([sys.executable, str(tmp_path / "make_frames.py")], check=True)
    made = {path.name: path.read_bytes() for path in (tmp_path / "frames").iterdir()}
    assert made == {path.name: path.read_bytes() for path in (HERE / "data" / "frames").iterdir()}


def test_a_short_run_of_the_fuzzer():
    script = HERE / "fuzz" / "fuzz_protocol.py"
    done = subprocess.run(
        [sys.executable, str(script), "--inputs", "20000"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "20000 inputs" in done.stdout


def test_the_example_of_the_documentation_is_a_vector():
    document = (HERE.parent / "docs" / "protocol.md").read_text(encoding="utf-8")
    for name in ("1-two-arrays", "2-three-arrays"):
        dump = document.split(f"<!-- {name} -->")[1].split("```")[1]
        data = b"".join(bytes.fromhex(line[10:58].replace(" ", "")) for line in dump.strip().splitlines()[1:])
        assert data == (HERE / "data" / "frames" / f"{name}.bin").read_bytes()
