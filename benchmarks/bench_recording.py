"""Recording against a plain file write of the same bytes; replay; a producer with and without a recording.

Run: python benchmarks/bench_recording.py [DIRECTORY]
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from pairs import compare, report, seconds

import ceedtap as ct

jax.config.update("jax_enable_x64", True)
TOTAL = 256 << 20


def taps(size: int, tap: ct.Tap):
    """A compiled loop that taps `size` doubles until TOTAL bytes have gone."""
    events = TOTAL // (8 * size)

    @jax.jit
    def run(x):
        return jax.lax.fori_loop(0, events, lambda i, x: ct.id_tap(tap, x, result=x), x)

    x = jnp.zeros(size)
    return lambda: run(x).block_until_ready()


def fresh(path: str) -> str:
    """The path, without the file that was there: giving its pages back takes as long as writing some."""
    if os.path.exists(path):
        os.unlink(path)
    return path


def recorded(path: str, run: Callable[[], object]) -> float:
    fresh(path)
    start = time.perf_counter()
    with ct.record(path):
        run()
    return time.perf_counter() - start


def written(path: str, run: Callable[[], object], tap: ct.Tap) -> float:
    """The same tap with a consumer that writes to a file."""
    fresh(path)
    start = time.perf_counter()
    with open(path, "wb") as file, ct.outfeed_receiver(None), tap.attached(file.write):
        run()
    return time.perf_counter() - start


def plain(path: str, data: np.ndarray, size: int) -> float:
    """The same bytes, without JAX. They come from memory, and not from a cache, as those of a program do."""
    fresh(path)
    start = time.perf_counter()
    with open(path, "wb") as file:
        for i in range(0, len(data), size):
            file.write(data[i : i + size])
    return time.perf_counter() - start


def bench_write(path: str) -> bool:
    ok, data = True, np.ones(TOTAL // 8)
    for size in (1 << 20, 1 << 16, 1 << 10):
        tap = ct.Tap("t")
        run = taps(size, tap)
        ours, theirs, ratio = compare(partial(recorded, path, run), partial(written, path, run, tap), 15)
        print(f"frames of {8 * size >> 10} KB: recorded at {TOTAL / ours / 1e6:.0f} MB/s, written by a consumer at "
              f"{TOTAL / theirs / 1e6:.0f} MB/s")  # fmt: skip
        ok &= report("  recording / a consumer that writes", ratio, "", 1.5)
        _, theirs, ratio = compare(partial(recorded, path, run), partial(plain, path, data, size), 15)
        print(f"  a loop of writes without JAX: {TOTAL / theirs / 1e6:.0f} MB/s")
        ok &= report("  recording / a loop of writes", ratio, "", 1.5 if size > 1 << 10 else None)
    return ok


def bench_replay(path: str) -> bool:
    tap = ct.Tap("t")
    ok = True
    for size in (1 << 20, 1 << 10):
        with ct.record(path):
            taps(size, tap)()
        ct.replay(path, {"t": lambda x: None})
        speed = TOTAL / min(seconds(lambda: ct.replay(path, {"t": lambda x: x[0]})) for _ in range(5)) / 1e6
        bar = 500 if size == 1 << 20 else None
        ok &= report(f"replay, frames of {8 * size >> 10} KB", speed, "MB/s", bar, at_least=True)
        start = time.perf_counter()
        with ct.open(path) as run:
            assert run.ended
            report("  opening it", 1e3 * (time.perf_counter() - start), "ms")
    return ok


def main() -> int:
    where = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(dir=where) as directory:
        path = os.path.join(directory, "run.ctap")
        results = [bench_write(path), bench_replay(path)]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
