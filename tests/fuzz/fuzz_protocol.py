"""Fuzzes the frame decoder: any bytes are a frame or a ProtocolError with an offset inside of them.

    python tests/fuzz/fuzz_protocol.py --inputs 1000000             guided by coverage if atheris is installed
    python tests/fuzz/fuzz_protocol.py --inputs 1000000 --builtin   random changes of the test vectors

An input that breaks the rule is written to the directory where the fuzzer runs.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

VECTORS = sorted((Path(__file__).resolve().parents[1] / "data" / "frames").glob("*.bin"))
MAX_BYTES = 4096


def check(data):
    """1 when the input is a frame."""
    from ceedtap import protocol

    try:
        header, arrays = protocol.decode_frame(data)
    except protocol.ProtocolError as error:
        offset = error.offset
        arrays = None
    if arrays is None:
        assert 0 <= offset <= max(len(data), 4 * 16), f"offset {offset} of {len(data)} bytes"
        return 0
    assert header.offsets()[-1] <= len(data)
    assert sum(array.nbytes for array in arrays) <= len(data)
    again = protocol.decode_header(protocol.encode_header(header))
    assert again == header, "the header does not survive encoding"
    return 1


def mutate(data, rng):
    """A few random changes: of bits, bytes, words and lengths; parts removed, repeated or taken from elsewhere."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        size = len(data)
        position = rng.randrange(size + 1)
        kind = rng.randrange(8)
        if kind == 0 and size:
            data[position % size] ^= 1 << rng.randrange(8)
        elif kind == 1 and size:
            data[position % size] = rng.choice((0, 1, 0x7F, 0x80, 0x90, 0xC1, 0xCF, 0xDC, 0xFF, rng.randrange(256)))
        elif kind == 2:
            word = rng.choice((0, 1, 112, 113, 2**31, 2**32 - 1, rng.randrange(2**32)))
            position -= position % 4
            data[position : position + 4] = word.to_bytes(4, "little")
        elif kind == 3:
            del data[position:]
        elif kind == 4:
            data[position:position] = rng.randbytes(rng.randrange(1, 17))
        elif kind == 5:
            del data[position : position + rng.randrange(1, 17)]
        elif kind == 6:
            data[position:position] = data[position : position + rng.randrange(1, 65)]
        else:
            other = rng.choice(SEEDS)
            data[position:] = other[rng.randrange(len(other) + 1) :]
    return bytes(data[:MAX_BYTES])


SEEDS = [path.read_bytes() for path in VECTORS]


def run_builtin(inputs, seed):
    rng = random.Random(seed)
    frames = 0
    for count in range(inputs):
        data = mutate(rng.choice(SEEDS), rng)
        try:
            frames += check(data)
        except BaseException:
            Path("crash.bin").write_bytes(data)
            print(f"input {count} is in crash.bin", file=sys.stderr)
            raise
    return frames


def run_atheris(atheris, inputs, seed):
    with atheris.instrument_imports(include=["ceedtap", "msgpack"]):
        import ceedtap.protocol  # noqa: F401
    arguments = [sys.argv[0], f"-runs={inputs}", f"-seed={seed}", f"-max_len={MAX_BYTES}", "-print_final_stats=1"]
    with tempfile.TemporaryDirectory() as corpus:  # what it finds goes to the first directory, not to the vectors
        atheris.Setup([*arguments, corpus, str(VECTORS[0].parent)], lambda data: check(data) and None)
        atheris.Fuzz()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--builtin", action="store_true", help="random changes even if atheris is installed")
    options = parser.parse_args()
    if not options.builtin:
        try:
            import atheris
        except ImportError:
            pass
        else:
            run_atheris(atheris, options.inputs, options.seed)
            return
    start = time.perf_counter()
    frames = run_builtin(options.inputs, options.seed)
    print(f"{options.inputs} inputs in {time.perf_counter() - start:.0f} s, {frames} of them frames, no fault")


if __name__ == "__main__":
    main()
