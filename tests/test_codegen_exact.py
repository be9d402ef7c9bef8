"""Translated code rounds as JAX does, operation by operation: the same bits, branches, and places of nan."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codegen_helpers import compiled, eager, source_of
from jax import lax

SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, 0.1, 3.0, 49.0, -2.5, 1e-200, 1e200, 1e308, -1e308, np.inf, -np.inf, np.nan])


def pairs():
    """Special values against each other, and numbers of every last digit, half of them equal."""
    special = np.array(list(itertools.product(SPECIAL, SPECIAL)))
    rng = np.random.default_rng(0)
    random = rng.uniform(0.1, 9.0, (400, 2))
    random[::2, 1] = random[::2, 0]
    return np.concatenate([special, random]).T


def same_bits(got, want):
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got[~nan].view(np.int64), want[~nan].view(np.int64))


def damage(x, y):
    """Loads where a quotient reaches one: all points at which both numbers are equal."""
    return jnp.where(x / y >= 1.0, x / y - 0.1, (2.0 - x) / y)


FUNCTIONS = {
    "several quotients by one number": lambda x, y: (x / y, 2.0 * x / y, 1.0 / y, (x - y) / y),
    "loading": lambda x, y: (damage(x, y), jax.jvp(damage, (x, y), (1.0, 2.0))[1]),
    "gradient of a quotient": lambda x, y: jax.grad(lambda x, y: x / y, (0, 1))(x, y),
    "rounded quotients": lambda x, y: (jnp.floor(x / y), jnp.ceil(x / y), lax.round(x / y), jnp.sign(x / y - 1.0)),
    "differences of products": lambda x, y: (x * x - y * y, x * y - y * x, jnp.sqrt(x * x - y * y), x * x == y * y),
    "sums of products": lambda x, y: (x * x + y * 0.1 - x * 0.3, (x * y + 1.0) - x * y, x * 0.1 + y * 0.2),
    "zeros": lambda x, y: (x + 0.0, 0.0 + y, x - 0.0, 0.0 - x, x * 0.0, 0.0 * y, x + -0.0, 1.0 / (x + 0.0), x * 1.0),
    "signs of zeros": lambda x, y: (jnp.arctan2(x + 0.0, -1.0) > 0, 1.0 / (x * y), lax.sign(x), jnp.signbit(x - y)),
    "sums": lambda x, y: (jnp.sum(jnp.stack([x, y, -x])), jnp.sum(jnp.stack([x, y]) * 0.1), jnp.trace(jnp.outer(y, x))),
    "larger and smaller": lambda x, y: (
        jnp.maximum(x, y), jnp.minimum(x, y), 1.0 / jnp.maximum(x, 0.0), 1.0 / jnp.minimum(x, 0.0),
        1.0 / jnp.maximum(-0.0, x), 1.0 / jnp.minimum(-0.0, x), 1.0 / jnp.maximum(x, y), 1.0 / jnp.minimum(x, y),
        lax.clamp(0.0, x, 1.0), lax.clamp(-1.0, x, y), jnp.max(jnp.stack([x, y, -x])), jnp.min(jnp.stack([x, y, -x])),
        jax.nn.relu(x), jnp.maximum(jnp.abs(x), jnp.abs(y)), jnp.minimum(x * x, y * y),
    ),
    "integer powers": lambda x, y: [lax.integer_pow(x, n) for n in (-7, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 9)],
    "derivatives of integer powers": lambda x, y: [jax.grad(lambda x, n=n: x**n)(x) for n in (-3, -2, -1, 2, 3)],
    "comparisons": lambda x, y: (x == y, x != y, x < y, x <= y, x / y == 1.0, x - x == 0, x == x, (x + y) - y == x),
    "choices": lambda x, y: (jnp.where(x > y, x, y), jnp.where(x == x, x, 0.0), jnp.where(x >= y, x / y, y / x)),
    "roots": lambda x, y: (jnp.sqrt(x), jnp.sqrt(x) / y, jnp.sqrt(jnp.abs(x)) * jnp.sqrt(jnp.abs(x)) - jnp.abs(x)),
    "gradients through slices": lambda x, y: jax.grad(lambda a: a[0] * a[1] - a[0] * a[0] / a[1])(jnp.stack([x, y])),
    "loops": lambda x, y: lax.fori_loop(0, 3, lambda i, c: (c[1] / c[0] * 0.1, c[0] - c[1] * 0.3), (x, y)),
    "long loops": lambda x, y: lax.fori_loop(0, 999, lambda i, c: (c[1] / y, c[0] / y * 0.9), (x, y)),
    "whole numbers and back": lambda x, y: [
        part.astype(i).astype(x.dtype) for part in (x, x * 0.1, -y * 0.1) for i in (jnp.int32, jnp.int64, jnp.int16)
    ],
    "determinants": lambda x, y: (
        jnp.linalg.det(jnp.array([[x, y], [y, x]])), jnp.linalg.det(jnp.array([[x, y, 1.0], [y, x, 2.0], [x, x, 0.3]]))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_bits(name):
    """No product with a reciprocal, no contraction, no identity that fails for one number."""
    function = FUNCTIONS[name]
    x, y = pairs()
    for got, want in zip(compiled(function, (), ())(x, y, flush=True), eager(function, x, y), strict=True):
        same_bits(got, want)


def test_constant_zeros_do_not_swallow_nan_and_infinity():
    matrix = jnp.array([[1.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0]])

    def function(v):
        gradient = jax.grad(lambda v: jnp.sum(matrix @ v))(v)
        return jnp.eye(3) @ v, matrix @ v, jnp.einsum("ij,j,i", matrix, v, v), jnp.zeros((2, 3)) @ v, gradient

    v = np.array(list(itertools.product([1.0, -2.0, 0.0, np.nan, np.inf, 1e308], repeat=3)))
    for got, want in zip(compiled(function, (3,))(v), eager(function, v), strict=True):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        np.testing.assert_allclose(got[~np.isnan(got)], want[~np.isnan(got)], rtol=1e-15)


def test_quotients_of_arrays():
    """XLA itself multiplies an array with the reciprocal of one number; that is not what division is."""
    x, y = pairs()
    (got,) = compiled(lambda x, y: jnp.stack([x, y, x + y, x * y]) / y, (), ())(x, y)
    with np.errstate(all="ignore"):
        same_bits(got, np.stack([x, y, x + y, x * y], 1) / y[:, None])


def test_division_stays_division():
    """Also where a reciprocal is known, and in the derivative of a logarithm."""
    body = source_of(lambda x, y: (x[0] / y, x[1] / y, 1 / (y * 2), 1.0 / y), (2,), ()).split("CEED_QFUNCTION")[1]
    assert body.count(" / ") == 4

    def function(x, y):
        return jax.grad(lambda x, y: x / y * jnp.log(y), (0, 1))(x, y)

    x = np.random.default_rng(0).uniform(1, 2, (2, 50))
    for got, want in zip(compiled(function, (), ())(*x), eager(function, *x), strict=True):
        np.testing.assert_allclose(got, want, rtol=3e-15)


def test_complex_moduli():
    x, y = pairs()
    (got,) = compiled(lambda x, y: jnp.abs(lax.complex(x, y)), (), ())(x, y)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(got, np.hypot(x, y), rtol=1e-15)


def test_complex_products_and_quotients():
    """As in JAX where infinities, zeros and nan meet; quotients are accurate to the last digits of the number."""
    values = [0.0, -0.0, 1.0, -2.0, 3e5, np.inf, -np.inf, np.nan]
    parts = np.array(list(itertools.product(values, repeat=4)))

    def function(a, b, c, d):
        z, w = lax.complex(a, b), lax.complex(c, d)
        results = [z * w, z / w, 1 / z, jnp.conj(z), z + w, jnp.exp(z), *(lax.integer_pow(z, n) for n in (-1, 0, 1, 2))]
        return [part for r in results for part in (r.real, r.imag)]

    got = compiled(function, (), (), (), ())(*parts.T)
    for g, w in zip(got, eager(function, *parts.T), strict=True):
        np.testing.assert_array_equal(np.isnan(g), np.isnan(w))
        infinite = np.isinf(w)
        np.testing.assert_array_equal(g[infinite], w[infinite])
    rng = np.random.default_rng(0)
    z, w = (
        (rng.standard_normal(400) + 1j * rng.standard_normal(400)) * 10.0 ** rng.integers(-90, 90, 400) for _ in "zw"
    )
    got = compiled(function, (), (), (), ())(z.real, z.imag, w.real, w.imag)
    assert np.abs((got[2] + 1j * got[3]) / (z / w) - 1).max() < 1e-15
    assert np.abs((got[0] + 1j * got[1]) / (z * w) - 1).max() < 1e-15


@pytest.mark.parametrize("power", [-5, -3, -2, -1, 0, 1, 2, 3, 4, 7])
def test_complex_powers_and_their_derivatives(power):
    def function(a, b):
        z, dz = lax.complex(a, b), lax.complex(b, 1.0)
        value, tangent = jax.jvp(lambda z: z**power, (z,), (dz,))
        second = jax.jvp(lambda z: jax.jvp(lambda z: z**power, (z,), (dz,))[1], (z,), (dz,))[1]
        return [part for r in (value, tangent, second) for part in (jnp.real(r), jnp.imag(r))]

    a, b = np.random.default_rng(0).uniform(0.5, 2, (2, 40))
    got = compiled(function, (), ())(a, b)
    z, dz = a + 1j * b, b + 1j
    exact = [z**power, power * z ** (power - 1) * dz, power * (power - 1) * z ** (power - 2) * dz * dz]
    for k, want in enumerate(exact):
        np.testing.assert_allclose(got[2 * k] + 1j * got[2 * k + 1], want, rtol=1e-13)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int32, np.int8, np.uint8])
def test_top_k(dtype):
    """nan is the largest number; the smallest integer, whose negative there is not, the smallest."""
    special = [1.0, np.nan, 3.0, -np.inf, np.inf, -0.0, 0.0, 3.0, -2.0]
    rng = np.random.default_rng(0)
    if np.dtype(dtype).kind == "f":
        x = np.array([rng.permutation(special) for _ in range(40)])
    else:
        info = np.iinfo(dtype)
        x = np.array([rng.permutation([0, 1, info.min, info.max, 7, 7, info.max - 1]) for _ in range(40)], float)

    def function(x):
        return lax.top_k(x.astype(dtype), 4)

    for got, want in zip(compiled(function, x.shape[1:])(x), eager(function, x), strict=True):
        same_bits(got, want)


SHAPES = [(), (3,), (2, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_loops_of_a_batch(shape):
    """Each of them ends by itself: vmap of `while_loop`, of `fori_loop` with an end that is computed, and nested."""

    def newton(x):
        return lax.while_loop(lambda c: jnp.abs(c * c - x) > 1e-12 * x, lambda c: 0.5 * (c + x / c), x)

    def steps(x):
        return lax.fori_loop(0, jnp.int32(jnp.floor(x)), lambda i, c: (c[0] * 0.5 + i, c[1] + 1), (x, 0))

    def nested(x):
        return lax.while_loop(lambda c: c[0] < x, lambda c: (c[0] + 1.0, c[1] + newton(c[0] + 1.0)), (0.0, x))[1]

    def of_all(x):
        function = lambda x: (newton(x), *steps(x), nested(x))  # noqa: E731
        for _ in shape:
            function = jax.vmap(function)
        return function(x)

    x = np.random.default_rng(0).uniform(0.1, 9.0, (11, *shape))
    want = jax.vmap(of_all)(x)
    for got, w in zip(compiled(of_all, shape)(x), want, strict=True):
        np.testing.assert_allclose(got, w, rtol=1e-13)
    np.testing.assert_allclose(np.asarray(want[0]), np.sqrt(x), rtol=1e-12)
    (got,) = compiled(lambda x: jax.jvp(lambda x: of_all(x)[0], (x,), (x,))[1], shape)(x)
    np.testing.assert_allclose(got, np.sqrt(x) / 2, rtol=1e-9)
