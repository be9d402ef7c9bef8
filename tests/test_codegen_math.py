"""Elementary functions that are written out."""

import re

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


def test_words_in_comments_declare_nothing():
    def log(x):  # a line whose words are those of a function
        return x * 2 + jnp.log(x)

    assert "simd" not in source_of(log, ())
