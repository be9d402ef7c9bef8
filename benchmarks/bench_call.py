"""Time of one call of a host function from a compiled program: `ceedtap.call` beside JAX's callbacks, in one run.

python benchmarks/bench_call.py
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import ceedtap as ct

REPEATS = 7


def identity(x):
    return np.asarray(x)


WAYS = {
    "ceedtap.call": lambda x: ct.call(identity, x, result_shape=x),
    "jax.pure_callback": lambda x: jax.pure_callback(identity, x, x),
    "io_callback": lambda x: io_callback(identity, x, x),
}


def in_a_loop(way, n):
    """n calls, each with the result of the one before."""
    return jax.jit(lambda x: jax.lax.fori_loop(0, n, lambda _, c: way(c), x))


def seconds(func, x):
    start = time.perf_counter()
    jax.block_until_ready(func(x))
    return time.perf_counter() - start


def main() -> None:
    print(f"jax {jax.__version__}; microseconds per call, median of {REPEATS} interleaved runs")
    cases = [(8, 2000), (800, 2000), (80_000, 1000), (8_000_000, 40)]
    for nbytes, n in cases:
        x = jnp.arange(nbytes // 8 or 1, dtype=jnp.float32 if nbytes < 8 else jnp.float64)
        report(f"in a loop, {nbytes} bytes", {name: in_a_loop(way, n) for name, way in WAYS.items()}, x, n)
    x = jnp.float64(1)
    programs = {name: jax.jit(way) for name, way in WAYS.items()}
    repeated = {name: lambda x, f=f: [f(x) for _ in range(500)][-1] for name, f in programs.items()}
    report("a program with one call", repeated, x, 500)


def report(what, funcs, x, n):
    times = {name: [] for name in funcs}
    for func in funcs.values():
        seconds(func, x)
    for _ in range(REPEATS):
        for name, func in funcs.items():
            times[name].append(seconds(func, x) / n * 1e6)
    print(f"{what:28}", *(f"{name} {statistics.median(t):9.1f}" for name, t in times.items()), sep="  ")


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
