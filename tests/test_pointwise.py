"""Compiled point functions over plain arrays."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ceedtap as ct
from ceedtap.native import lib

rng = np.random.default_rng(0)


def energy(F):
    J = jnp.linalg.det(F)
    return jnp.sum(F * F) / 2 - jnp.log(J) + jnp.log(J) ** 2


def gradients(n):
    return jnp.asarray(np.eye(3) + 0.1 * rng.standard_normal((n, 3, 3)))


@pytest.mark.parametrize("n", [0, 1, 7, 128, 129, 1000])
def test_equals_vmap(n):
    F = gradients(n)
    f = ct.pointwise(jax.grad(energy))
    expected = jax.vmap(jax.grad(energy))(F)
    assert np.allclose(f(F), expected, rtol=1e-12, atol=1e-13)
    assert np.allclose(jax.jit(f)(F), expected, rtol=1e-12, atol=1e-13)


def test_several_arguments_and_a_pytree():
    def function(a, b, c):
        return {"sum": a + b[0], "outer": jnp.outer(b, c)}

    a, b, c = (jnp.asarray(rng.standard_normal((9, *shape))) for shape in ((), (2,), (3,)))
    out = ct.pointwise(function)(a, b, c)
    assert np.array_equal(out["sum"], a + b[:, 0])
    assert np.array_equal(out["outer"], b[:, :, None] * c[:, None, :])


def test_derivatives():
    F = gradients(20)
    ours, theirs = ct.pointwise(energy), jax.vmap(energy)
    assert np.allclose(jax.grad(lambda F: ours(F).sum())(F), jax.grad(lambda F: theirs(F).sum())(F), rtol=1e-12)
    dF = jnp.cos(F)
    for f, g in ((ours, theirs), (ct.pointwise(jax.grad(energy)), jax.vmap(jax.grad(energy)))):
        assert np.allclose(jax.jvp(f, (F,), (dF,))[1], jax.jvp(g, (F,), (dF,))[1], rtol=1e-11)

    def nested(f):
        return jax.jvp(jax.grad(lambda F: jnp.sum(f(F) ** 2)), (F,), (dF,))[1]

    assert np.allclose(nested(ours), nested(theirs), rtol=1e-11)


def test_vmap_and_scan():
    f = ct.pointwise(lambda x, y: x * jnp.sin(y))
    x, y = jnp.asarray(rng.standard_normal((4, 6))), jnp.asarray(rng.standard_normal(6))
    assert np.allclose(jax.vmap(f, (0, None))(x, y), x * jnp.sin(y), rtol=1e-15)
    steps = jax.jit(lambda y: jax.lax.scan(lambda c, _: (f(c, c), None), y, None, length=5)[0])(y)
    expected = y
    for _ in range(5):
        expected = expected * jnp.sin(expected)
    assert np.allclose(steps, expected, rtol=1e-13)


def test_the_cotangent_of_what_serves_all_lanes_is_summed():
    f = ct.pointwise(lambda x, y: x * y**2)
    x, y = jnp.asarray(rng.standard_normal((4, 6))), jnp.asarray(rng.standard_normal(6))
    gradient = jax.grad(lambda y: jax.vmap(f, (0, None))(x, y).sum())(y)
    assert np.allclose(gradient, (2 * x * y).sum(0), rtol=1e-13)


def test_bad_arguments():
    f = ct.pointwise(lambda x, y: x + y)
    with pytest.raises(TypeError, match="argument 1 of <lambda> is float64, got float32"):
        f(jnp.zeros(3), jnp.zeros(3, jnp.float32))
    with pytest.raises(ValueError, match="one number of points"):
        f(jnp.zeros(3), jnp.zeros(4))
    with pytest.raises(ValueError, match="one number of points"):
        f(jnp.zeros(()), jnp.zeros(()))


def test_functions_die_with_their_programs():
    def collect():
        jax.clear_caches()
        for _ in range(3):
            gc.collect()

    collect()
    before = lib.ct_registry_size(lib.ct_pointwise_functions())
    f = ct.pointwise(lambda x: 3 * x)
    compiled = jax.jit(f).lower(jnp.zeros(4)).compile()
    del f
    collect()
    assert np.array_equal(compiled(jnp.ones(4)), 3 * np.ones(4))
    del compiled
    collect()
    ct.pointwise(lambda x: 4 * x)(jnp.ones(2))  # entering one lets go of others
    collect()
    assert lib.ct_registry_size(lib.ct_pointwise_functions()) <= before + 1


def test_many_outputs_that_lie_in_a_row():
    a, b = (jnp.asarray(rng.standard_normal((5, 40))) for _ in range(2))
    outer = ct.pointwise(lambda a, b: jnp.concatenate([a[:3], jnp.outer(a, b).ravel(), b[::-1]]))
    expected = jax.vmap(lambda a, b: jnp.concatenate([a[:3], jnp.outer(a, b).ravel(), b[::-1]]))(a, b)
    assert np.array_equal(outer(a, b), expected)
