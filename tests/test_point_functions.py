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


# The programs run once and for a moment, so it is not worth while to optimise them.
jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)


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

    def f(values):
        return operator.reference(**values)

    values = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), values)
    outputs = jax.tree.map(lambda shape: jnp.ones(shape.shape), jax.eval_shape(f, values))
    directions, weights = like(values, 1), like(outputs, 2)
    return values, directions, weights, jit(functools.partial(all_derivatives, f))(values, directions, weights)


def difference(a, b):
    """Between two pytrees: the largest difference of a leaf, relative to its largest entry."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.abs(x - y).max() / jnp.maximum(jnp.abs(y).max(), 1e-300)) for x, y in pairs)


@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_equals_plain_jax(name, backend):
    values, directions, weights, want = expected(name)
    operator, _ = CASES[name].build(ct.Ceed(backend))
    got = jit(functools.partial(all_derivatives, lambda values: operator(**values)))(values, directions, weights)
    for what, tree in want.items():
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(tree)), what
        assert difference(got[what], tree) <= 1e-12, what
    assert_transposed(directions, got["jvp"], got["vjp"], weights)


def assert_transposed(directions, tangent, gradient, weights):
    """The dot test: <weights, J directions> = <J' weights, directions>."""

    def dot(a, b, absolute=False):
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return sum(float(jnp.sum(jnp.abs(x * y) if absolute else x * y)) for x, y in pairs)

    size = max(dot(weights, tangent, True), dot(gradient, directions, True))
    assert abs(dot(weights, tangent) - dot(gradient, directions)) <= 1e-13 * size


@pytest.mark.parametrize("name", ["neo_hookean", "navier_stokes", "j2_plasticity", "learned_law_8"])
def test_central_differences(name):
    operator, values = CASES[name].build(ct.Ceed("/cpu/self"))
    values = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), values)
    directions = like(values, 3)

    @jax.jit
    def value(step):
        return operator(**jax.tree.map(lambda x, d: x + step * d, values, directions))

    step = 1e-5 if name != "j2_plasticity" else 1e-8  # points may not change between elastic and plastic
    difference_quotient = jax.tree.map(lambda a, b: (a - b) / (2 * step), value(step), value(-step))
    _, tangent = jax.jvp(value, (0.0,), (1.0,))
    assert difference(difference_quotient, tangent) <= (1e-6 if name != "j2_plasticity" else 1e-4)
