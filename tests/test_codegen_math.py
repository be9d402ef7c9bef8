"""Elementary functions that are written out, and quotients by one number."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codegen_helpers import check, compiled, source_of

from ceedtap.codegen_math import INLINE, MAX_SITES

FUNCTIONS = {"log": jnp.log, "log1p": jnp.log1p, "exp": jnp.exp, "expm1": jnp.expm1, "tanh": jnp.tanh}


def body(source):
    """The loop over points, without comments."""
    return re.sub(r"/\*.*?\*/", "", source.split("CEED_QFUNCTION(f)")[1])


def calls(source, function):
    return body(source).count(f" {function}(")


def test_all_are_tested():
    assert FUNCTIONS.keys() == INLINE


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_call_is_left(name):
    source = source_of(FUNCTIONS[name], ())
    assert f"double {name}(" not in source
    assert calls(source, name) == 0
    assert calls(source, f"ceedtap_{name}") == 1
    precise = source_of(FUNCTIONS[name], (), precise=True)
    assert calls(precise, name) == 1
    assert "ceedtap_" not in precise


@pytest.mark.parametrize("name", FUNCTIONS)
def test_where_the_argument_is_reduced(name):
    """On both sides of every border between powers of two, as NumPy has it."""
    k = np.arange(-50, 51)
    borders = {
        "log": np.sqrt(0.5) * 2.0**k, "log1p": np.sqrt(0.5) * 2.0 ** np.abs(k) - 1, "exp": (k + 0.5) * np.log(2),
        "expm1": (k + 0.5) * np.log(2), "tanh": (k + 0.5) * np.log(2) / 2,
    }[name]  # fmt: skip
    x = np.concatenate([borders * (1 + e) for e in (-1e-3, -1e-9, -2e-16, 0.0, 2e-16, 1e-9, 1e-3)])
    (got,) = compiled(FUNCTIONS[name], ())(x)
    np.testing.assert_allclose(got, getattr(np, name)(x), rtol=5e-16)


def test_many_in_one_loop_are_calls():
    x = np.random.default_rng(0).uniform(0.5, 2, (5, MAX_SITES + 1))
    few, many = (source_of(lambda x, n=n: [jnp.log(x[i]) for i in range(n)], (n,)) for n in (MAX_SITES, MAX_SITES + 1))
    assert calls(few, "log") == 0
    assert calls(many, "log") == MAX_SITES + 1
    assert "double ceedtap_log(" not in many
    check(lambda x: [jnp.log(x[i]) + jnp.tanh(x[i]) for i in range(MAX_SITES + 1)], x, rtol=1e-15)


def divisions(source):
    return body(source).count(" / ")


def test_quotients_by_one_number():
    def several(x, y):
        return x[0] / y, x[1] / y, 1 / (y * 2), 1.0 / y

    assert divisions(source_of(several, (2,), ())) == 2
    assert divisions(source_of(several, (2,), (), precise=True)) == 4
    x, y = np.random.default_rng(0).standard_normal((6, 2)), np.array([3.0, -7.0, 0.0, -0.0, np.inf, np.nan])
    check(several, x, y, rtol=1e-15)


def test_quotients_in_derivatives_of_quotients_and_logarithms():
    def function(x, y):
        return x / y + jnp.log(y)

    second = jax.grad(lambda x, y: sum(jax.grad(function, (0, 1))(x, y)), (0, 1))
    assert divisions(source_of(second, (), ())) == 1
    assert divisions(source_of(jax.grad(lambda y: jnp.log(y) ** 2), ())) == 1
    rng = np.random.default_rng(0)
    check(second, rng.uniform(1, 2, 9), rng.uniform(1, 2, 9), rtol=1e-14)


def test_what_changes_in_a_loop_has_no_reciprocal():
    def function(x):
        return jax.lax.fori_loop(0, 1000, lambda i, c: (c[1] / c[0] + 1.0, (c[1] + 0.5) / c[0]), (x, x + 1))

    check(function, np.random.default_rng(0).uniform(1, 2, 9), rtol=1e-13)
    check(lambda x: jax.lax.fori_loop(0, 1000, lambda i, c: x / (x + i) + 1 / (x + i) + c, x), np.ones(3), rtol=1e-13)


def test_words_in_comments_declare_nothing():
    def log(x):  # a line whose words are those of a function
        return x * 2 + jnp.log(x)

    assert "simd" not in source_of(log, ())
