"""Special functions against SciPy and mpmath, and the list of JAX's primitives, which has to stay complete."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np
import pytest
from codegen_helpers import check, compiled
from jax import lax

from ceedtap import codegen

special = pytest.importorskip("scipy.special")


def test_digamma():
    x = np.concatenate([np.geomspace(1e-300, 1e300, 200), -np.linspace(0.1, 50.03, 300), np.linspace(0.1, 20, 300)])
    (got,) = compiled(lax.digamma, ())(x)
    np.testing.assert_allclose(got, special.digamma(x), rtol=1e-13, atol=4e-16)
    (got,) = compiled(lax.digamma, ())(np.array([0.0, -1.0, -5.0, np.nan, np.inf]))
    np.testing.assert_array_equal(got, [np.nan] * 4 + [np.inf])


def test_zeta_and_polygamma():
    q, s = (a.reshape(-1) for a in np.meshgrid(np.geomspace(1e-3, 1e3, 20), np.linspace(1.1, 30, 20)))
    (got,) = compiled(lax.zeta, (), ())(s, q)
    np.testing.assert_allclose(got, special.zeta(s, q), rtol=2e-14)
    for m in range(5):
        x = np.linspace(0.1, 40, 100)
        (got,) = compiled(lambda x, m=m: jsp.polygamma(m, x), ())(x)
        np.testing.assert_allclose(got, special.polygamma(m, x), rtol=2e-14, atol=4e-16)
    check(jax.grad(lambda x: lax.lgamma(x) * lax.digamma(x)), np.linspace(0.2, 9, 20), rtol=1e-13)


@pytest.mark.parametrize(
    ("ours", "reference"),
    [(lax.igamma, special.gammainc), (lax.igammac, special.gammaincc)],
)
def test_incomplete_gamma(ours, reference):
    a, x = (v.reshape(-1) for v in np.meshgrid(np.linspace(0.2, 30, 25), np.linspace(0.0, 60, 25)))
    (got,) = compiled(ours, (), ())(a, x)
    np.testing.assert_allclose(got, reference(a, x), rtol=1e-11, atol=1e-300)


def test_incomplete_beta():
    a, b, x = (v.reshape(-1) for v in np.meshgrid(np.linspace(0.3, 9, 9), np.linspace(0.2, 7, 9), np.linspace(0, 1, 9)))
    (got,) = compiled(jsp.betainc, (), (), ())(a, b, x)
    np.testing.assert_allclose(got, special.betainc(a, b, x), rtol=1e-11, atol=1e-300)


COMPOSED = {
    "ndtri": lambda x: jsp.ndtri(jnp.clip(jnp.abs(x) % 1, 0.01, 0.99)),
    "ndtr": lambda x: (jsp.ndtr(x), jsp.log_ndtr(x), jsp.logit(jnp.abs(x) % 1), jsp.entr(jnp.abs(x))),
    "gamma": lambda x: (jsp.gamma(1 + jnp.abs(x)), jsp.factorial(jnp.abs(x)), jsp.beta(jnp.abs(x) + 1, 2.0)),
    "bessel": lambda x: (jsp.i0(x), jsp.i1(x), jax.grad(jsp.i0e)(x), jax.grad(jsp.i1)(x)),
    "igamma derivatives": lambda x: jax.grad(lambda a: lax.igamma(a, 2.0))(jnp.abs(x) + 0.5),
    "random gamma derivative": lambda x: lax.random_gamma_grad(jnp.abs(x) + 0.5, jnp.abs(x) + 0.1),
    "exponential integrals": lambda x: (jsp.expi(jnp.abs(x) + 0.1), jsp.exp1(jnp.abs(x) + 0.1)),
    "spence": lambda x: jsp.spence(jnp.abs(x) + 0.1),
    "xlogy": lambda x: (jsp.xlogy(x, jnp.abs(x)), jsp.xlog1py(x, jnp.abs(x)), jsp.rel_entr(jnp.abs(x), 2.0)),
    "total order": lambda x: (lax.lt_to_p.bind(x, -x), lax.le_to_p.bind(x, x * 1), lax.eq_to_p.bind(x, -x)),
    "multiply high": lambda x: lax.mulhi(jnp.int32(x * 1e9), jnp.int32(7e8)) if hasattr(lax, "mulhi") else x,
}


@pytest.mark.parametrize("name", COMPOSED)
def test_composed(name):
    x = np.random.default_rng(0).standard_normal(40) * 1.5
    check(COMPOSED[name], x, rtol=1e-13)


UNDECIDED = """
import importlib, pkgutil, sys
import jax._src.lax, jax.numpy, jax.scipy.linalg, jax.scipy.special
from ceedtap import codegen
for module in pkgutil.walk_packages(jax._src.lax.__path__, "jax._src.lax."):
    importlib.import_module(module.name)
kind = type(jax.lax.add_p)
modules = [m for name, m in list(sys.modules.items()) if name.startswith("jax.") and "pallas" not in name]
found = {v.name for module in modules for v in list(vars(module).values()) if isinstance(v, kind)}
codegen._load_rules()
print(len(found), sorted(found - set(codegen.RULES) - set(codegen.REFUSED)))
"""


def test_every_primitive_is_decided():
    """A new JAX with a new primitive fails here: give it a rule in codegen_*, or a reason in codegen_special.py."""
    # In a process of its own: other tests load parts of JAX, such as sparse matrices, with primitives of their own.
    done = subprocess.run([sys.executable, "-c", UNDECIDED], capture_output=True, text=True, check=False)
    count, _, undecided = done.stdout.strip().partition(" ")
    assert undecided == "[]", done.stderr
    assert int(count) > 200
    codegen._load_rules()
    assert set(codegen.RULES) & set(codegen.REFUSED) == set()


def test_elementwise_primitives_are_all_translated():
    """Of the names that jax.lax exports as functions of numbers, none is refused."""
    names = (
        "abs acos acosh add asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp cos cosh "
        "digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac integer_pow "
        "is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter polygamma pow "
        "regularized_incomplete_beta rem round rsqrt select_n sign sin sinh sqrt square sub tan tanh zeta "
    )
    codegen._load_rules()
    assert set(names.split()) <= set(codegen.RULES)
