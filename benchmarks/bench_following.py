"""The rate of a producer with and without a follower, and with a publication that nobody follows.

Run: python benchmarks/bench_following.py
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from pairs import compare, report, seconds

import ceedtap as ct
from ceedtap.publishing import Publisher

jax.config.update("jax_enable_x64", True)
SIZE = 20_000
STEPS = 1000


def loops(tap: ct.Tap) -> dict[str, Callable[[], object]]:
    """The same work, a fraction of a millisecond a step, as one program and as a program for each step."""

    def step(i: object, u: jax.Array) -> jax.Array:
        u = jnp.sin(u) + 1e-3 * jnp.roll(u, 1)
        return ct.id_tap(tap, u)

    whole = jax.jit(lambda u: jax.lax.fori_loop(0, STEPS, step, u))
    single = jax.jit(step)
    u = jnp.linspace(0, 1, SIZE)

    def one_program() -> None:
        whole(u).block_until_ready()

    def many_programs() -> None:
        v = u
        for i in range(STEPS):
            v = single(i, v).block_until_ready()

    return {"one program": one_program, "a program a step": many_programs}


@contextlib.contextmanager
def followed(publisher: Publisher) -> Iterator[None]:
    """A follower in a process of its own."""
    command = [sys.executable, "-m", "ceedtap", "follow", publisher.name, "--plain"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while not publisher.num_followers:
            time.sleep(0.01)
        time.sleep(0.5)
        yield
        process.kill()
    while publisher.num_followers:
        time.sleep(0.01)


def bench(name: str, run: Callable[[], object], tap: ct.Tap, listens: bool) -> bool:
    who = "a consumer listens" if listens else "nobody listens"
    context = tap.attached(lambda u: None) if listens else contextlib.nullcontext()
    with context, ct.publish("bench") as publisher:

        def with_follower() -> float:
            with followed(publisher):
                return seconds(run)

        ours, theirs, ratio = compare(with_follower, lambda: seconds(run), 9)
    print(f"{name}, {who}: {1e6 * theirs / STEPS:.1f} us a step, followed {1e6 * ours / STEPS:.1f} us")
    ok = report("  followed / not followed", ratio, "", 1.05)

    def published() -> float:
        with ct.publish("bench"):
            return seconds(run)

    with tap.attached(lambda u: None) if listens else contextlib.nullcontext():
        ratio = compare(published, lambda: seconds(run), 15)[2]
    return report("  published, and nobody follows / not published", ratio, "", 1.02) and ok


def main() -> int:
    tap = ct.Tap("u")
    results = []
    for name, run in loops(tap).items():
        run()
        results += [bench(name, run, tap, listens) for listens in (True, False)]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
