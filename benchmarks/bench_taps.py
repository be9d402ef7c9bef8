"""Taps against jax.debug.callback, memcpy and no tap at all.

Run: python benchmarks/bench_taps.py
"""

import resource
import sys

import jax
import jax.numpy as jnp
import numpy as np
from pairs import compare, report, seconds

import ceedtap as ct

jax.config.update("jax_enable_x64", True)
EVENTS = 20_000


def consume(x: object) -> None:
    """The cheapest consumer: what is measured is the way to it."""


def loop(tap, size: int = 64):
    """A compiled loop that taps `size` doubles EVENTS times."""

    @jax.jit
    def run(x):
        def body(_, c):
            c = c + 1.0
            tap(c)
            return c

        return jax.lax.fori_loop(0, EVENTS, body, x)

    x = jnp.zeros(size)
    return lambda: run(x).block_until_ready()


def compute_and_deliver(run, wait):
    """Seconds per event on the compute side, and until all are delivered."""

    def measure() -> tuple[float, float]:
        compute = seconds(run)
        return compute / EVENTS, (compute + seconds(wait)) / EVENTS

    return measure


def bench_small() -> bool:
    none = loop(lambda c: None)
    tap = compute_and_deliver(loop(lambda c: ct.id_tap(consume, c)), ct.barrier_wait)
    callback = compute_and_deliver(loop(lambda c: jax.debug.callback(consume, c)), jax.effects_barrier)
    base = min(seconds(none) for _ in range(5)) / EVENTS
    ours, theirs, ratio = compare(lambda: tap()[0] - base, lambda: callback()[0] - base, 7)
    ok = report("tap of 64 doubles, compute side", 1e6 * ours, "us", 0.7)
    report("jax.debug.callback of 64 doubles, compute side", 1e6 * theirs, "us")
    ok &= report("ratio", 1 / ratio, "x", 50, at_least=True)
    ours, theirs, ratio = compare(lambda: tap()[1], lambda: callback()[1], 7)
    report("tap, delivered to a Python consumer", 1e6 * ours, "us")
    report("jax.debug.callback, delivered", 1e6 * theirs, "us")
    return report("ratio of events per second", 1 / ratio, "x", 8, at_least=True) and ok


def bench_large() -> bool:
    """The payload's cost: a program that taps 8 MB against the same program tapping 8 bytes, so that what every call
    of a function with an effect costs (see bench_dispatch) does not count."""
    x = jnp.zeros(1_000_000)
    target, source = np.zeros(1_000_000), np.asarray(x)
    large = jax.jit(lambda x: ct.id_tap(consume, x, result=x[0]))
    small = jax.jit(lambda x: ct.id_tap(consume, x[0], result=x[0]))

    def run(f) -> float:
        time = seconds(lambda: f(x).block_until_ready())
        ct.barrier_wait()
        return time

    memcpy = lambda: seconds(lambda: np.copyto(target, source))  # noqa: E731
    ours, theirs, ratio = compare(lambda: run(large) - run(small), memcpy, 101)
    print(f"tap of 8 MB {1e3 * ours:.3f} ms, memcpy {1e3 * theirs:.3f} ms")
    return report("tap of 8 MB / memcpy", ratio, "", 1.3)


def bench_dispatch() -> bool:
    x = jnp.zeros(64)

    def dispatch(f):
        return lambda: seconds(lambda: f(x), 500)

    plain = jax.jit(lambda x: x + 1)
    quiet = jax.jit(lambda x: ct.id_tap(consume, x + 1, stateful=False))
    exact = jax.jit(lambda x: ct.id_tap(consume, x + 1))
    ours, theirs, ratio = compare(dispatch(quiet), dispatch(plain), 31)
    print(f"call of a jitted function: {1e6 * theirs:.2f} us, with a stateful=False tap {1e6 * ours:.2f} us")
    ok = report("dispatch with stateful=False / without a tap", ratio, "", 2)
    report("dispatch with a stateful tap", 1e6 * compare(dispatch(exact), dispatch(plain), 11)[0], "us")
    ct.barrier_wait()
    return ok


def bench_memory() -> bool:
    run = loop(lambda c: ct.id_tap(consume, c))
    for _ in range(5):
        run()
        ct.barrier_wait()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(1_000_000 // EVENTS):
        run()
        ct.barrier_wait()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return report("growth of the peak memory over 10^6 events", grown, "MB", 8)


def main() -> int:
    results = [bench_small(), bench_large(), bench_dispatch(), bench_memory()]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
