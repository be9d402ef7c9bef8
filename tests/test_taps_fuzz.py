"""A fixed sample of the random programs of tests/fuzz/fuzz_taps.py; and that its interpreters notice what is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parent / "fuzz"))

import fuzz_taps
import tap_oracles
from tap_programs import Program, Tap

LOOP = """
def program(x):
    def last(x):
        def f(c, s):
            t = tap(0, c * x, ordered=True)
            return 0.5 * t, s
        return lax.scan(f, jnp.float64(2), jnp.arange(2.0))[0]
    return jax.grad(last)(x)
"""


def program(source: str, devices: int = 0) -> Program:
    shape = (3 * devices,) if devices else ()
    return Program(source, shape, {0: Tap(ordered=True)}, False, devices, False, not devices, [])


def test_random_programs():
    failed, counts = fuzz_taps.run(range(40))
    assert failed == []
    assert counts["programs"] > 30
    assert counts["on devices"] > 2


def test_what_the_interpreters_say_of_a_loop():
    # By hand, x = 3: c = 2, what is tapped is 6; c = 3, what is tapped is 9. The result is half of it: its derivative
    # by the 9 is 0.5, and by the 6 it is 0.5 * 3 * 0.5.
    want = [(6.0, ()), (9.0, ()), (0.5, ("jvp", "transpose")), (0.75, ("jvp", "transpose"))]

    def seen(events):
        return [(float(event.values[0]), event.derivatives) for event in events]

    x = jnp.asarray(3.0)
    jaxpr = jax.make_jaxpr(tap_oracles.define(LOOP, tap=tap_oracles.Recorder().tap))(x)
    interpreted, (derivative,) = tap_oracles.interpret(jaxpr, [x])
    assert seen(interpreted) == want
    assert derivative == 3.0  # of x^2 / 2
    events, result = tap_oracles.plain(LOOP, x)
    assert seen(events) == want[:2]
    assert result == 3.0
    events, result = tap_oracles.unrolled(LOOP, x)
    assert sorted(seen(events)) == sorted(want)
    assert result == 3.0


@pytest.mark.parametrize("oracle", ["interpret", "plain", "unrolled"])
@pytest.mark.parametrize("change", ["lost", "twice", "other value", "other transforms"])
def test_a_wrong_event_is_noticed(monkeypatch, oracle, change):
    true = getattr(fuzz_taps, oracle)

    def wrong(*args):
        events, result = true(*args)
        first = events[0]
        if change == "lost":
            del events[0]
        elif change == "twice":
            events.append(first)
        elif change == "other value":
            first.values = [value + 1 for value in first.values]
        else:
            first.transforms = (*first.transforms, ("jvp", {}))
        return events, result

    assert fuzz_taps.check(program(LOOP)) == []
    monkeypatch.setattr(fuzz_taps, oracle, wrong)
    assert fuzz_taps.check(program(LOOP))


@pytest.mark.parametrize("oracle", ["interpret", "plain"])
def test_a_wrong_order_is_noticed(monkeypatch, oracle):
    true = getattr(fuzz_taps, oracle)
    monkeypatch.setattr(fuzz_taps, oracle, lambda *args: (true(*args)[0][::-1], true(*args)[1]))
    assert any("order: " in line for line in fuzz_taps.check(program(LOOP)))


def test_shards_that_communicate():
    source = """
def program(x):
    f = lambda x: tap(0, x * lax.psum(x, 'i'), ordered=True)
    return jax.shard_map(f, mesh=mesh(2), in_specs=P('i'), out_specs=P('i'))(x)
"""
    communicating = program(source, devices=2)
    communicating.collective = True
    assert fuzz_taps.check(communicating) == []


def test_a_failing_program_becomes_small(monkeypatch):
    monkeypatch.setattr(fuzz_taps, "check", lambda program: ["jaxpr: wrong"] if "jnp.sin" in program.source else [])
    seed = next(s for s in range(100) if "jnp.sin" in fuzz_taps.random_program(s).source)
    text = fuzz_taps.report(seed, ["jaxpr: wrong"])
    assert "jnp.sin" in text
    assert len(text.splitlines()) <= len(fuzz_taps.random_program(seed).source.splitlines())
