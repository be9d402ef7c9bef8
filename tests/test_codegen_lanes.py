"""Functions with large products, which are written for several points at once."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codegen_helpers import check, source_of
from jax import lax

import ceedtap as ct
from ceedtap import codegen_lanes


def constants(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) / np.sqrt(shape[-1]))


def points(*shape, num=19, seed=1):
    return np.random.default_rng(seed).standard_normal((num, *shape))


SIZES = (3, 64, 50, 6)
WEIGHTS = [constants(b, a) for a, b in itertools.pairwise(SIZES)]
BIASES = [constants(b) for b in SIZES[1:]]


def network(x):
    for weight, bias in zip(WEIGHTS[:-1], BIASES, strict=False):
        x = jnp.tanh(weight @ x + bias)
    return WEIGHTS[-1] @ x + BIASES[-1]


def with_geometry(a):
    """Lines for single numbers before and after the network, and between its layers."""
    j = jnp.linalg.det(a)
    x = jnp.tanh(WEIGHTS[0] @ jnp.array([j, jnp.trace(a), jnp.log(1 + j * j)]))
    x = WEIGHTS[1] @ (x * j + BIASES[0] * a[0, 0])
    return (jnp.sum(x) * jnp.linalg.inv(a + 5 * jnp.eye(3))), j, x[:7] / j


FUNCTIONS = {
    "network": (network, (3,)),
    "vjp": (lambda x, y: jax.vjp(network, x)[1](y)[0], (3,), (6,)),
    "jvp": (lambda x, y: jax.jvp(network, (x,), (y,))[1], (3,), (3,)),
    "second derivative": (lambda x, y: jax.jvp(jax.grad(lambda x: jnp.sum(network(x) ** 2)), (x,), (y,)), (3,), (3,)),
    "with geometry": (with_geometry, (3, 3)),
    "derivative with geometry": (jax.grad(lambda a: sum(jnp.sum(y) for y in with_geometry(a))), (3, 3)),
    "both vary": (lambda a, b: (a @ b, a @ b.T, jnp.einsum("ij,kj->ik", b, a[:5])), (9, 9), (9, 9)),
    "several vectors": (lambda a: (constants(40, 9) @ a, (a.T @ constants(9, 33))[:, ::2]), (9, 3)),
    "batches": (lambda a: jnp.einsum("nij,nj->ni", constants(2, 32, 8), a), (2, 8)),
    "outer product": (lambda a, b: (jnp.outer(a, b) @ constants(40), jnp.outer(b, a)), (40,), (40,)),
    "inner product": (lambda a: constants(7, 90) @ jnp.sin(constants(90, 90) @ a), (90,)),
    "what does not vary": (lambda a: (constants(40, 40) @ constants(40), jnp.zeros(3), constants(40, 40) @ a), (40,)),
    "integers": (lambda a: (constants(40, 40) @ a)[jnp.argmax(a)] * jnp.argmin(a), (40,)),
    "choice": (lambda a: lax.cond(a[0] > 0, jnp.sin, jnp.cos, constants(40, 40) @ a), (40,)),
    "nan": (lambda a: jnp.sqrt(constants(40, 40) @ a), (40,)),
}  # fmt: skip
FUNCTIONS["index of the point"] = (
    lambda a: lax.dynamic_slice(jnp.tanh(constants(40, 40) @ a), [jnp.int32(4 * abs(a[0]))], [2]),
    (40,),
)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name):
    function, *shapes = FUNCTIONS[name]
    run = check(function, *(points(*shape, seed=i) for i, shape in enumerate(shapes)), rtol=1e-12)
    assert "CEEDTAP_LANES" in run.source


@pytest.mark.parametrize("num", [1, 2, 7, 8, 9, 16, 17])
def test_any_number_of_points(num):
    check(network, points(3, num=num), rtol=1e-13)


def test_weights_that_are_arguments():
    """In the context of the QFunction, as libCEED's operators have parameters; their derivatives as well."""
    space = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 2), degree=2)
    sizes = {"w1": (32, 2), "b1": (32,), "w2": (32, 32), "w3": (2, 32)}
    params = {name: constants(*shape, seed=i) for i, (name, shape) in enumerate(sizes.items())}

    @ct.operator(inputs={"u": space.grad, "w": space.weight}, outputs={"v": space.grad}, params=params)
    def flux(u, w, params):
        hidden = jnp.tanh(params["w1"] @ u + params["b1"])
        return w * (params["w3"] @ jnp.tanh(params["w2"] @ hidden))

    assert "CEEDTAP_LANES" in flux.source
    u = jnp.asarray(np.random.default_rng(0).standard_normal(space.shape))

    def total(f):
        return lambda u, params: jnp.sum(jnp.sin(f(u, params=params)))

    ours = jax.jit(jax.value_and_grad(total(flux), (0, 1)))(u, params)
    theirs = jax.jit(jax.value_and_grad(total(flux.reference), (0, 1)))(u, params)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def large_loop(a):
    return lax.fori_loop(0, 1000, lambda i, c: 0.9 * c + a, constants(40, 40) @ a)


@pytest.mark.parametrize(
    "function",
    [
        lambda a: lax.while_loop(lambda c: jnp.sum(c) > 1, lambda c: 0.5 * c, abs(constants(40, 40) @ a)),
        large_loop,
        lambda a: jnp.float32(constants(40, 40)) @ jnp.float32(a),
        lambda a: jnp.linalg.eigvalsh((constants(40, 40) @ a).reshape(8, 5)[:5]),
    ],
)
def test_one_point_at_a_time(function):
    """Loops that end at one point and not at the next one; single precision."""
    run = check(function, points(40), rtol=1e-6)
    assert "CEEDTAP_LANES" not in run.source


def test_small_functions_have_no_lanes():
    source = source_of(jnp.matmul, (6, 6), (6, 6))
    assert "CEEDTAP_LANES" not in source


def test_arrays_that_do_not_fit_the_cache():
    n = 100
    source = source_of(lambda a, b: constants(3, n * n) @ jnp.tanh(jnp.outer(a, b).ravel()), (n,), (n,))
    assert n * n > codegen_lanes.MAX_NUMBERS
    assert "CEEDTAP_LANES" not in source
