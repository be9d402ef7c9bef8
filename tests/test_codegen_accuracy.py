"""Functions of translated code against mpmath, over all of their domains, in units in the last place."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codegen_helpers import compiled
from jax import lax

mpmath = pytest.importorskip("mpmath")
mp = mpmath.mp

TINY = np.finfo(float).tiny
EVERYWHERE = (-np.inf, np.inf)


# By name: the function of JAX, of mpmath, the domain, ulp with the vector library, ulp with the scalar one.
FUNCTIONS = {
    "exp": (jnp.exp, mp.exp, (-750.0, 720.0), 4, 1),
    "exp2": (jnp.exp2, lambda x: mp.power(2, x), (-1080.0, 1030.0), 4, 1),
    "expm1": (jnp.expm1, mp.expm1, (-50.0, 720.0), 4, 2),
    "log": (jnp.log, mp.log, (0.0, np.inf), 4, 1),
    "log1p": (jnp.log1p, mp.log1p, (-1.0, np.inf), 4, 1),
    "sin": (jnp.sin, mp.sin, EVERYWHERE, 4, 1),
    "cos": (jnp.cos, mp.cos, EVERYWHERE, 4, 1),
    "tan": (jnp.tan, mp.tan, EVERYWHERE, 4, 1),
    "asin": (jnp.arcsin, mp.asin, (-1.0, 1.0), 4, 1),
    "acos": (jnp.arccos, mp.acos, (-1.0, 1.0), 4, 1),
    "atan": (jnp.arctan, mp.atan, EVERYWHERE, 4, 1),
    "sinh": (jnp.sinh, mp.sinh, (-712.0, 712.0), 4, 2),
    "cosh": (jnp.cosh, mp.cosh, (-712.0, 712.0), 4, 2),
    "tanh": (jnp.tanh, mp.tanh, EVERYWHERE, 4, 3),
    "asinh": (jnp.arcsinh, mp.asinh, EVERYWHERE, 4, 2),
    "acosh": (jnp.arccosh, mp.acosh, (1.0, np.inf), 4, 2),
    "atanh": (jnp.arctanh, mp.atanh, (-1.0, 1.0), 4, 2),
    "sqrt": (jnp.sqrt, mp.sqrt, (0.0, np.inf), 1, 1),
    "rsqrt": (lax.rsqrt, lambda x: 1 / mp.sqrt(x), (TINY, np.inf), 2, 2),
    "cbrt": (jnp.cbrt, lambda x: mp.sign(x) * mp.cbrt(abs(x)), EVERYWHERE, 4, 4),
    "erf": (lax.erf, mp.erf, EVERYWHERE, 4, 1),
    "erfc": (lax.erfc, mp.erfc, (-30.0, 27.5), 4, 4),
    "logistic": (jax.nn.sigmoid, lambda x: 1 / (1 + mp.exp(-x)), (-700.0, 700.0), 5, 3),
    "erf_inv": (lax.erf_inv, mp.erfinv, (-1.0, 1.0), 4, 4),
    "bessel_i0e": (lax.bessel_i0e, lambda x: mp.besseli(0, x) * mp.exp(-abs(x)), (-1e9, 1e9), 4, 4),
    "bessel_i1e": (lax.bessel_i1e, lambda x: mp.besseli(1, x) * mp.exp(-abs(x)), (-1e9, 1e9), 5, 5),
}


def sample(low: float, high: float, number: int) -> np.ndarray:
    """Numbers of every size in an interval, denormal ones too, and its ends."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 0x7FF0000000000000, number * 4).view(np.float64)
    x = np.concatenate([bits, -bits, rng.uniform(max(low, -30), min(high, 30), number), rng.standard_normal(number)])
    if np.isfinite(high):
        x = np.concatenate(
            [x, rng.uniform(max(low, -1e4), high, number), high - np.abs(rng.standard_normal(20)) * 1e-9]
        )
    x = x[(x >= low) & (x <= high) & np.isfinite(x)]
    rng.shuffle(x)
    special = np.array([0.0, -0.0, 1.0, -1.0, 0.5, 5e-324, -5e-324, 1e-310, TINY, low, high])
    special = special[np.isfinite(special) & (special >= low) & (special <= high)]
    return np.concatenate([x[:number], special])


def ulps(got: np.ndarray, want: list) -> np.ndarray:
    """Errors in units in the last place of the exact values, and of the smallest number at least."""
    errors = np.zeros(len(got))
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        nearest = float(w)
        if not math.isfinite(nearest) or g == nearest:
            same = g == nearest or (math.isnan(g) and math.isnan(nearest))
            # At the border of what overflows
            near = math.isinf(nearest) and abs(g) > 1.79e308
            errors[i] = 0.0 if same or near else math.inf
        elif math.isinf(g) or math.isnan(g):
            errors[i] = 0.0 if abs(nearest) > 1.7976931348623e308 and math.isinf(g) else math.inf
        else:
            errors[i] = float(abs(mp.mpf(float(g)) - w) / mp.mpf(math.ulp(nearest)))
    return errors


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_accuracy(name, precise):
    function, exact, (low, high), vector_ulp, scalar_ulp = FUNCTIONS[name]
    x = sample(low, high, 400)
    (got,) = compiled(function, (), precise=precise)(x)
    with mp.workdps(60):
        want = [exact(mp.mpf(float(v))) for v in x]
        want = [mp.re(w) for w in want]
        errors = ulps(got, want)
    worst = int(np.argmax(errors))
    limit = scalar_ulp if precise else vector_ulp
    found = f"{name}({x[worst]!r}) = {got[worst]!r}, exactly {float(want[worst])!r}"
    assert errors[worst] <= limit, f"{found}: {errors[worst]} ulp"


def powers(rng, n):
    return np.exp(rng.uniform(-200, 200, n)), rng.uniform(-3.5, 3.5, n)


def powers_near_one(rng, n):
    return 1 + rng.uniform(-1e-3, 1e-3, n), rng.uniform(-1e5, 1e5, n)


def all_sizes(rng, n):
    return [rng.standard_normal(n) * 10.0 ** rng.integers(-150, 150, n) for _ in range(2)]


def moderate(rng, n):
    return rng.standard_normal(n) * 1e6, rng.standard_normal(n)


# By name: the function of JAX, of mpmath, arguments, ulp with the vector library, ulp with the scalar one.
TWO_ARGUMENTS = {
    "pow": (lax.pow, mp.power, powers, 4, 1),
    "pow near 1": (lax.pow, mp.power, powers_near_one, 4, 1),
    "atan2": (lax.atan2, mp.atan2, all_sizes, 4, 1),
    "hypot": (jnp.hypot, mp.hypot, all_sizes, 4, 4),
    "rem": (lax.rem, lambda x, y: mp.sign(x) * mp.fmod(abs(x), abs(y)), moderate, 0, 0),
}


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("name", TWO_ARGUMENTS)
def test_accuracy_of_two_arguments(name, precise):
    function, exact, draw, vector_ulp, scalar_ulp = TWO_ARGUMENTS[name]
    x, y = draw(np.random.default_rng(1), 400)
    (got,) = compiled(function, (), (), precise=precise)(x, y)
    with mp.workdps(60):
        errors = ulps(got, [exact(mp.mpf(float(u)), mp.mpf(float(v))) for u, v in zip(x, y, strict=True)])
    assert errors.max() <= (scalar_ulp if precise else vector_ulp), errors.max()


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize(("name", "reference"), [("pow", np.power), ("atan2", np.arctan2), ("hypot", np.hypot)])
def test_special_values_of_two_arguments(name, reference, precise):
    x, y = (a.reshape(-1) for a in np.meshgrid(SPECIAL[:13], SPECIAL[:13]))
    (got,) = compiled(TWO_ARGUMENTS[name][0], (), (), precise=precise)(x, y)
    with np.errstate(all="ignore"):
        want = reference(x, y)
    if name == "hypot":  # in JAX nan is stronger than infinity, in C and NumPy infinity is
        either = np.isnan(x) | np.isnan(y)
        want[either] = got[either]
    np.testing.assert_array_equal(
        np.isnan(got), np.isnan(want), err_msg=str(np.array([x, y])[:, np.isnan(got) != np.isnan(want)])
    )
    np.testing.assert_allclose(got, want, rtol=1e-14, atol=1e-323)
    exact = np.isinf(want) | (want == 0)
    np.testing.assert_array_equal(np.signbit(got[exact]), np.signbit(want[exact]))


SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 2.0, -2.0, 5e-324, -5e-324, 1e308, -1e308] * 4)


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n not in ("bessel_i0e", "bessel_i1e")])
def test_special_values(name, precise):
    """Infinities, nan and the sign of zero come out as in NumPy or in SciPy."""
    special = pytest.importorskip("scipy.special")
    by_name = {
        "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "asinh": np.arcsinh, "acosh": np.arccosh,
        "atanh": np.arctanh, "erf": special.erf, "erfc": special.erfc,
        "erf_inv": lambda x: np.copysign(special.erfinv(x), x),
        "logistic": special.expit, "rsqrt": lambda x: 1 / np.sqrt(x),
    }  # fmt: skip
    reference = by_name.get(name) or getattr(np, name)
    (got,) = compiled(FUNCTIONS[name][0], (), precise=precise)(SPECIAL)
    with np.errstate(all="ignore"):
        want = np.array([reference(v) for v in SPECIAL])
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    infinite = np.isinf(want) | (want == 0)
    np.testing.assert_array_equal(got[infinite], want[infinite])
    np.testing.assert_array_equal(np.signbit(got[infinite]), np.signbit(want[infinite]))
    finite = np.isfinite(want)
    np.testing.assert_allclose(got[finite], want[finite], rtol=1e-14, atol=0)
