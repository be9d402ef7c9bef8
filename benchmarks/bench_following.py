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
PAIRS = 25


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


FOLLOWER = """
import os, select, sys, time
from ceedtap.following import Follower
from ceedtap.live_table import Table

os.nice(10)  # as ceedtap follow
while sys.stdin.readline():
    with Follower("bench") as follower:
        table, due = Table(follower, "l2", None), time.monotonic() + 0.5
        while not select.select([sys.stdin], [], [], 0)[0]:
            table.add(follower.receive(0.1) or [])
            if time.monotonic() >= due:
                table.rows()
                due += 0.5
    sys.stdin.readline()
"""


@contextlib.contextmanager
def a_follower(publisher: Publisher) -> Iterator[Callable[[bool], None]]:
    """A process that does what `ceedtap follow` does, when it is told to."""
    with subprocess.Popen([sys.executable, "-c", FOLLOWER], stdin=subprocess.PIPE, text=True) as process:

        def follow(on: bool) -> None:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            while bool(publisher.num_followers) != on:
                time.sleep(0.001)

        yield follow
        process.kill()


def bench(name: str, run: Callable[[], object], tap: ct.Tap, listens: bool) -> bool:
    who = "a consumer listens" if listens else "nobody listens"
    with tap.attached(lambda u: None) if listens else contextlib.nullcontext():
        with ct.publish("bench") as publisher, a_follower(publisher) as follow:

            def followed() -> float:
                follow(True)
                taken = seconds(run)
                follow(False)
                return taken

            ours, theirs, ratio = compare(followed, lambda: seconds(run), PAIRS)
            print(f"{name}, {who}: {1e6 * theirs / STEPS:.1f} us a step, followed {1e6 * ours / STEPS:.1f} us")
            ok = report("  followed / not followed", ratio, "", 1.05)

            def processor_time(on: bool) -> float:
                if on:
                    follow(True)
                start = time.process_time()
                run()
                taken = time.process_time() - start
                if on:
                    follow(False)
                return taken

            ratio = compare(lambda: processor_time(True), lambda: processor_time(False), PAIRS)[2]
            report("  the same in processor time of all threads", ratio, "")

        def published() -> float:
            with ct.publish("bench"):
                return seconds(run)

        ratio = compare(published, lambda: seconds(run), PAIRS)[2]
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
