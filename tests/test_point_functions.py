"""Values and derivatives of many point functions on libCEED's backends, against the same in plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ceed_helpers import BACKENDS
from point_functions import CASES

import ceedtap as ct

THOROUGH = ("/cpu/self/ref/serial", "/cpu/self/avx/blocked")
OTHERS = [backend for backend in BACKENDS if backend not in THOROUGH]
# Every function on two backends, and on one of the other four in turn.
PAIRS = [(name, backend) for i, name in enumerate(CASES) for backend in (*THOROUGH, OTHERS[i % len(OTHERS)])]


def like(tree, seed):
    """Random numbers in the shape of a pytree, of the size of its values."""
    random = np.random.default_rng(seed)

    def make(leaf):
        leaf = jnp.asarray(leaf, float)
        return jnp.asarray(random.standard_normal(leaf.shape) * (0.1 + jnp.abs(leaf).mean()))

    return jax.tree.map(make, tree)


def all_derivatives(f, values, directions, weights):
    """Value, jvp, vjp and jvp of the vjp."""

    def pulled(values):
        return jax.vjp(f, values)[1](weights)[0]

    value, tangent = jax.jvp(f, (values,), (directions,))
    gradient, change = jax.jvp(pulled, (values,), (directions,))
    return {"value": value, "jvp": tangent, "vjp": gradient, "jvp of vjp": change}


@functools.cache
def expected(name):
    """Inputs, directions, weights and the derivatives in plain JAX."""
    operator, values = CASES[name].build(ct.Ceed("/cpu/self/ref/serial"))
    f = jax.jit(lambda values: operator.reference(**values))
    values = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), values)
    directions, weights = like(values, 1), like(f(values), 2)
    return values, directions, weights, jax.jit(functools.partial(all_derivatives, f))(values, directions, weights)


def difference(a, b):
    """Between two pytrees: the largest difference of a leaf, relative to its largest entry."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.abs(x - y).max() / jnp.maximum(jnp.abs(y).max(), 1e-300)) for x, y in pairs)


@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_equals_plain_jax(name, backend):
    values, directions, weights, want = expected(name)
    operator, _ = CASES[name].build(ct.Ceed(backend))
    got = jax.jit(functools.partial(all_derivatives, lambda values: operator(**values)))(values, directions, weights)
    for what, tree in want.items():
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(tree)), what
        assert difference(got[what], tree) <= 1e-12, what
