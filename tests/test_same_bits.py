"""Adding taps changes no bit of any result and of no gradient: random programs, with and without taps."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import ceedtap as ct

MATRIX = np.random.default_rng(0).normal(size=(8, 8)) / 2


def in_scan(x, tap):
    return lax.scan(lambda c, k: (tap(c * 0.9 + x * k), None), x, jnp.arange(3.0, dtype=x.dtype))[0]


def in_while(x, tap):
    # Only a loop with a fixed number of steps has a reverse derivative.
    return lax.fori_loop(0, 2, lambda i, c: tap(c - 0.1 * c * i), x)


def in_cond(x, tap):
    return lax.cond(jnp.sum(x) > 0, lambda x: tap(x * 1.5) + 1, lambda x: jnp.exp(-tap(x * x)), x)


STEPS = [
    lambda x, tap: jnp.sin(x) + x,
    lambda x, tap: x * x + 0.3,
    lambda x, tap: x * 0.7 - x / (1 + x * x),
    lambda x, tap: jnp.asarray(MATRIX, x.dtype) @ tap(x),
    lambda x, tap: x - jnp.mean(x),
    lambda x, tap: x / (1 + jnp.sum(tap(x * x))),
    lambda x, tap: jnp.cumsum(x)[::-1],
    lambda x, tap: jax.nn.softmax(x),
    lambda x, tap: jax.vmap(lambda a: jnp.tanh(tap(a * 2)))(x),
    in_scan,
    in_while,
    in_cond,
]


def evaluate(steps, tapped, tap, x):
    for index, is_tapped in zip(steps, tapped, strict=True):
        x = STEPS[index](x, tap if is_tapped else lambda v: v)
        x = tap(x) if is_tapped else x
    return jnp.sum(x * x), x


def ignore(x, transforms=()):
    pass


TAPS = {
    "effect": lambda x: ct.id_tap(ignore, x),
    "ordered": lambda x: ct.id_tap(ignore, x, ordered=True),
    "stateless": lambda x: ct.id_tap(ignore, x, stateful=False),
}

programs = st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.booleans()), min_size=1, max_size=6)
inputs = st.tuples(st.integers(0, 2**31), st.sampled_from([np.float32, np.float64]))


def bits(values):
    return [np.asarray(value).tobytes() for value in jax.tree.leaves(values)]


def run(transform, program, tap, x):
    steps, tapped = zip(*program, strict=True)
    return bits(transform(lambda x: evaluate(steps, tapped, tap, x))(x))


def check(transform, program, source, reference):
    seed, dtype = source
    x = np.random.default_rng(seed).normal(size=8).astype(dtype)
    expected = run(transform, program, reference, x)
    with ct.outfeed_receiver(60):
        for name, tap in TAPS.items():
            assert run(transform, program, tap, x) == expected, name


def observe(x):
    jax.debug.callback(ignore, x)
    return x


def with_gradient(f):
    return jax.value_and_grad(f, has_aux=True)


def compiled(f):
    return jax.jit(with_gradient(f))


@given(programs, inputs)
@settings(deadline=None, derandomize=True, max_examples=8)
def test_step_by_step_a_tap_changes_no_bit(program, source):
    check(with_gradient, program, source, lambda x: x)


@given(programs, inputs)
@settings(deadline=None, derandomize=True, max_examples=8)
def test_compiled_a_tap_gives_the_bits_of_any_other_observer(program, source):
    check(compiled, program, source, observe)


#: Without these two, XLA computes with other roundings where it can look at several operations at once.
NO_CONTRACTION = "--xla_cpu_max_isa=AVX"
NO_REWRITING = "--xla_disable_hlo_passes=algsimp,simplification"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the flag is for this architecture")
def test_compiled_a_tap_changes_no_bit_when_xla_keeps_the_operations_as_they_are():
    code = "import tests.test_same_bits as t; t.compare_compiled()"
    environment = dict(os.environ, XLA_FLAGS=f"{NO_CONTRACTION} {NO_REWRITING}", JAX_ENABLE_X64="1")
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=Path(__file__).parent.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@given(programs, inputs)
@settings(deadline=None, derandomize=True, max_examples=8)
def compare_compiled(program, source):
    check(compiled, program, source, lambda x: x)


@pytest.mark.parametrize("tap", [observe, *TAPS.values()], ids=["debug.callback", *TAPS])
def test_compiled_the_difference_is_at_most_a_rounding(tap):
    x, a, b = np.random.default_rng(1).normal(size=(3, 1000))
    f = lambda tap: jax.jit(lambda x, a, b: tap(x * a) + b)(x, a, b)  # noqa: E731
    assert np.allclose(f(tap), f(lambda x: x), rtol=0, atol=4 * np.finfo(float).eps * np.abs(x * a).max())
