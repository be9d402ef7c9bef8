"""Kills processes that record, and damages recordings: what is written before must be there, and nothing may be wrong.

python tests/fuzz/fuzz_recording.py --kills 50 --damages 20000
"""

import argparse
import contextlib
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import ceedtap as ct

LOST_SEC = 1.0  # what a process that is killed may lose
PRODUCER = """
import os, struct, sys, time
import jax, jax.numpy as jnp, ceedtap as ct

log = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
small, large = ct.Tap("small"), ct.Tap("large")
small.attach(lambda i, u: os.write(log, struct.pack("<qq", int(i), time.time_ns())))

@jax.jit
def step(i):
    ct.id_tap(small, i, i * jnp.arange(5))
    ct.id_tap(large, {"step": i, "u": jnp.full(40_000, i)})

step(0)
ct.barrier_wait()
recorder = ct.record(sys.argv[1])
print("ready", flush=True)
i = 0
while True:
    i += 1
    step(i)
    if sys.argv[3] == "slow":
        time.sleep(0.01)
"""


def kill_one(directory: Path, rng: random.Random) -> tuple[int, float]:
    """Events that a recording has after its process was killed, and how many seconds before that are missing."""
    path, log = directory / "run.ctap", directory / "log"
    log.unlink(missing_ok=True)
    pace = rng.choice(["slow", "fast"])
    command = [sys.executable, "-c", PRODUCER, str(path), str(log), pace]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0, 1.5))
        process.send_signal(signal.SIGKILL)
    data = log.read_bytes()
    consumed = [entry for entry in struct.iter_unpack("<qq", data[: len(data) // 16 * 16]) if entry[0] > 0]
    with ct.open(path) as run:
        assert not run.ended
        small, large = run.get("small", ()), run.get("large", ())
        for number, (i, u) in enumerate(small, 1):
            assert i == number
            np.testing.assert_array_equal(u, i * np.arange(5))
        for number, value in enumerate(large, 1):
            assert value["step"] == number
            assert value["u"].min() == value["u"].max() == number
        damage = run.damage
        assert damage is None or damage.offset <= path.stat().st_size
        if not consumed:
            return len(small), 0.0
        last = consumed[-1][1]
        missing = [stamp for i, stamp in consumed if i > len(small)]
        return len(small), (last - missing[0]) / 1e9 if missing else 0.0


def kill(count: int, rng: random.Random) -> None:
    lost = []
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(count):
            events, seconds = kill_one(Path(directory), rng)
            assert seconds <= LOST_SEC, f"{seconds} s are lost after {events} events"
            lost.append(seconds)
    print(f"{count} processes killed, at most {max(lost, default=0):.2f} s lost")


def damage(count: int, rng: random.Random) -> None:
    good = (Path(__file__).parent.parent / "data" / "recording.ctap").read_bytes()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run.ctap"
        path.write_bytes(good)
        with ct.open(path) as run:
            expected = [(e.tap, e.seq, repr(e.args)) for e in run.events()]
            # An event is before the damage when the next one begins before it; events begin with their labels.
            labels = [struct.pack("<4I", 0, e.seq, e.time_ns >> 32, e.time_ns % 2**32) for e in run.events()]
            starts = [good.index(label) - 32 for label in labels]
            assert run.damage is None
        noticed = 0
        for _ in range(count):
            data = bytearray(good)
            first = len(data)
            for _ in range(rng.choice([1, 1, 1, 2, 5])):
                kind, at = rng.randrange(4), rng.randrange(len(data) or 1)
                if not data:
                    break
                if kind == 0:
                    data[at] ^= 1 << rng.randrange(8)
                elif kind == 1:
                    data[at : at + 16] = rng.randbytes(len(data[at : at + 16]))
                elif kind == 2:
                    data[at : at + rng.randrange(200)] = b""
                else:
                    del data[at:]
                first = min(first, at)
            path.unlink()
            path.write_bytes(data)
            intact = expected[: max(0, sum(start <= first for start in starts) - 1)]
            noticed += check(path, expected, intact, good.startswith(data))
    print(f"{count} recordings damaged, {noticed} of them open")


def check(path: Path, expected: list, intact: list, prefix: bool) -> bool:
    """Reads a recording that differs from the good one from byte `first` on."""
    try:
        run = ct.open(path)
    except ct.RecordingError:
        assert not intact, "a recording whose beginning is intact does not open"
        return False
    with run:
        found: list = []
        with contextlib.suppress(ct.RecordingError):
            for event in run.events():
                found.append((event.tap, event.seq, repr(event.args)))
        assert all(entry in expected for entry in found), "an event that was never recorded"
        assert found[: len(intact)] == intact, "an event before the damage is lost"
        if not prefix:
            assert run.damage is not None or not run.ended
        if run.damage is not None:
            assert run.damage.offset <= path.stat().st_size
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--damages", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    generator = random.Random(options.seed)
    damage(options.damages, generator)
    kill(options.kills, generator)
